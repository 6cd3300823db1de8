"""The runtime's benchmark runs what it says: its emulated plans are valid, its orders are torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import drifted, emulated, runtime, torch_schedules
from optpipe import memory, metrics
from optpipe.ops import Kind
from optpipe.semantics import device_orders
from optpipe.verify import verify_plan
from solver import feasibility


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("emulated_plan", emulated.PLANS, ids=lambda plan: plan.name)
def test_emulated_plans_are_valid_and_move_what_they_say(emulated_plan: emulated.Emulated, devices: int) -> None:
    plan = emulated.plan_of(emulated_plan, devices, 0.3)
    assert not verify_plan(plan)
    moved = metrics.measure(plan.problem, plan.ops).offloaded_bytes
    if emulated_plan.bytes_per_s is None:
        assert not any(moved)
    else:
        stage = plan.problem.stages[0]
        assert moved == [6 * stage.offloadable_bytes] * devices
        # Four of eight microbatches; the outputs' places of all of them stay.
        places = emulated.MICROBATCHES * (stage.activation_bytes - stage.offloadable_bytes)
        assert max(memory.peaks(plan.problem, plan.ops)) <= 4 * stage.offloadable_bytes + places


@pytest.mark.parametrize("rows", [torch_schedules.ONE_F_ONE_B, torch_schedules.ZB_H1])
def test_torchs_orders_become_plans(rows: tuple[str, ...]) -> None:
    plan = torch_schedules._plan(torch_schedules._actions(rows), (0, 1))
    assert not verify_plan(plan)
    letters = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
    for row, order in zip(rows, device_orders(plan.problem, plan.ops), strict=True):
        ops = [plan.ops[i] for i in order.compute]
        assert ",".join(f"{op.stage}{letters[op.kind]}{op.microbatch}" for op in ops) == row


def test_a_round_that_other_work_held_up_is_disturbed_whichever_side_it_was() -> None:
    def step(wall: float, held_up: float) -> dict[str, float]:
        return {"wall": wall, "cpu": wall, "faults": 0.0, "held_up": held_up}

    calm, late = step(100.0, 4.0), step(130.0, 34.0)
    assert not torch_schedules.disturbed({"torch": [calm, calm], "ours": [calm, calm]})
    assert torch_schedules.disturbed({"torch": [calm, late], "ours": [calm, calm]})
    assert torch_schedules.disturbed({"torch": [calm, calm], "ours": [late, calm]})


def test_a_row_counts_rounds_that_nothing_disturbed() -> None:
    def measured(torch: float, ours: float, held_up: float = 0.0) -> torch_schedules.Round:
        def steps(*walls: float) -> list[dict[str, float]]:
            return [{"wall": wall, "cpu": wall, "faults": 2.0, "held_up": held_up} for wall in walls]

        return {"torch": steps(torch, torch + 3), "ours": steps(ours + 1, ours + 2)}

    rounds = [measured(10.0, 10.0), measured(100.0, 10.0, held_up=50.0), measured(20.0, 20.0)]
    row = dict(
        zip(
            torch_schedules.HEADER,
            torch_schedules._row({"size": "", "name": "", "rounds": rounds, "difference": 0.0}),
            strict=True,
        )
    )
    assert row["rounds"] == "2 of 3"
    assert row["ours / torch"] == row["CPU, ours / torch"] == "1.000"  # what grows evenly over a round cancels out
    assert row["torch ms"] == row["ours ms"] == 16.5 and row["faults, ours"] == 2


@pytest.mark.parametrize(("size", "name", "special"), torch_schedules.CASES)
def test_stages_share_all_layers(size: torch_schedules.Size, name: str, special: str) -> None:
    layers = torch_schedules._layers(size, name)
    assert sum(layers) == size.model.num_layers and min(layers) >= 1
    assert len(layers) == len(torch_schedules.SCHEDULES[name][1])


def test_tables_that_were_measured_again_take_the_place_of_those_kept(tmp_path: Path) -> None:
    path = tmp_path / "runtime.md"
    runtime.keep(path, {"One": "## One\n\nfirst\n", "Two": "## Two\n\nsecond\n"})
    runtime.keep(path, {"One": "## One\n\nagain\n"})
    text = path.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# The runtime", "## One", "## Two"]
    assert "again" in text and "second" in text and "first" not in text
    runtime.keep(path, {})
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("devices", [2, 4])
def test_machines_differ_from_their_profile_in_time_only(devices: int) -> None:
    for name, profile, machine in drifted.DRIFTS:
        planned, real = drifted.problem_of(devices, profile), drifted.problem_of(devices, machine)
        assert (planned == real) == (name == "as in the profile")
        for one, other in zip(planned.stages, real.stages, strict=True):
            assert one.activation_bytes == other.activation_bytes and one.offloadable_bytes == other.offloadable_bytes
        assert planned.devices == real.devices
        feasibility.check(real)
