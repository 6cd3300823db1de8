"""The runtime's benchmark runs what it says: its emulated plans are valid, its orders are torch's."""

from __future__ import annotations

import pytest

from benchmarks import emulated, torch_schedules
from optpipe import memory, metrics
from optpipe.ops import Kind
from optpipe.semantics import device_orders
from optpipe.verify import verify_plan


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


def test_a_round_is_two_steps_of_either() -> None:
    # What grows evenly over a round (A B B A) cancels out.
    assert torch_schedules.ratios([10.0, 13.0, 20.0, 23.0], [11.0, 12.0, 31.5, 33.0]) == [1.0, 1.5]


@pytest.mark.parametrize(("size", "name", "limited"), torch_schedules.CASES)
def test_stages_share_all_layers(size: torch_schedules.Size, name: str, limited: bool) -> None:
    layers = torch_schedules._layers(size, name)
    assert sum(layers) == size.model.num_layers and min(layers) >= 1
    assert len(layers) == len(torch_schedules.SCHEDULES[name][1])
