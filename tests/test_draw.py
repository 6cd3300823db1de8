"""The Gantt chart: what stands where, at every scale."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from optpipe import draw, memory
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from tests.conftest import plan_in_order


def lines(plan: Plan, width: int = 80, **options) -> list[str]:
    return draw.gantt(plan, width, **options).plain.splitlines()


def row(chart: list[str], label: str, device: int = 0) -> str:
    """The lane of a device, without its label."""
    start = next(i for i, line in enumerate(chart) if line.startswith(f"dev {device}"))
    found = next(line for line in chart[start + 1 :] if line.startswith(f" {label} "))
    return found.split("|", 1)[1]


def gpipe(problem: Problem) -> Plan:
    """All forwards, then all backwards: memory aside, an order for any linear problem."""
    stages, microbatches = problem.num_stages, problem.num_microbatches
    rows = [(Kind.F, s, j, j + s) for s in range(stages) for j in range(microbatches)]
    first = stages + microbatches
    for s in range(stages):
        for j in range(microbatches):
            rows += [(Kind.B, s, j, first + stages - s + 2 * j), (Kind.W, s, j, first + stages - s + 2 * j + 1)]
    kind, stage, microbatch, start = zip(*rows, strict=True)
    times = np.array(start, float)
    return Plan(problem, earliest(problem, Ops.columns(kind, stage, microbatch, times, times + 0.9)))


def scaled(problem: Problem, devices: int, microbatches: int) -> Problem:
    stage = problem.to_json()["stages"][0]
    return Problem.model_validate(
        {
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * devices,
            "stages": [{**stage, "device": d} for d in range(devices)],
            "comm_ms": [0.0] * (devices - 1),
        }
    )


def without_length(problem: Problem) -> Plan:
    """A valid plan in which nothing takes any time."""
    value = problem.to_json()
    for stage in value["stages"]:
        stage.update({key: 0.0 for key in stage if key.endswith("_ms")})
    return gpipe(Problem.model_validate({**value, "comm_ms": [0.0] * len(value["comm_ms"])}))


def test_every_op_is_named_where_it_runs(tiny_plan):
    chart = lines(tiny_plan, 8 + 142)  # ten columns a millisecond
    compute, out, back = row(chart, "s0"), row(chart, "d2h"), row(chart, "h2d")
    for op in tiny_plan.ops:
        if op.stage == 0:
            lane = {Kind.O: out, Kind.R: back}.get(op.kind, compute)
            at = round(op.start * 10)
            assert lane[at:].startswith(f"{op.kind.name}{op.microbatch}─")
            assert len(lane[at : round(op.end * 10)].strip("─")) == 2


def test_idle_time_is_blank(tiny_plan):
    compute = row(lines(tiny_plan, 8 + 142), "s1")
    assert compute.startswith(" " * 11 + "F0")


def test_memory_row_shows_the_level_against_the_budget(tiny_plan):
    levels = row(lines(tiny_plan, 8 + 142), "mem")
    assert levels[:10] == "▄" * 10  # one microbatch of the two that fit
    assert levels[10] == "█"
    assert max(levels) == "█"


def test_over_budget_is_marked_and_explained(tiny_plan):
    tiny_plan.problem = tiny_plan.problem.with_budgets([1500, None])
    chart = lines(tiny_plan)
    assert "!" in row(chart, "mem")
    assert "! over the budget" in " ".join(chart)
    assert "!" not in row(chart, "mem", device=1)


def test_headline_counts(tiny_plan):
    assert "dev 0   stage 0 · peak 2 kB, budget 2 kB · busy 85% · 1 offload" in lines(tiny_plan)


def test_several_stages_of_a_device_have_a_row_each(tiny_problem):
    value = tiny_problem.to_json()
    first, second = value["stages"]
    vee = Problem.model_validate(
        {
            **value,
            "num_microbatches": 1,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [first, second, second, first],
            "comm_ms": [0.0] * 3,
        }
    )
    order = " ".join(["F(0,0) F(1,0) F(2,0) F(3,0)"] + [f"B({s},0) W({s},0)" for s in (3, 2, 1, 0)])
    chart = lines(plan_in_order(vee, order), 8 + 60)
    assert row(chart, "s0").startswith("F0")
    assert row(chart, "s3").strip().startswith("F0")
    assert "stages 0, 3" in "\n".join(chart)
    # Its own row says where the device idles: there both rows are blank, and nowhere else.
    idle = row(chart, "idle").ljust(60)
    for above in zip(row(chart, "s0").ljust(60), row(chart, "s3").ljust(60), idle, strict=True):
        assert (above[2] == "░") == (above[:2] == (" ", " "))
    assert "░ the device idles" in "\n".join(chart)


def test_fused_backward_and_recompute_have_letters_of_their_own(tiny_problem):
    stages = [{**stage, "checkpoint_bytes": 10} for stage in tiny_problem.to_json()["stages"]]
    problem = tiny_problem.changed(num_microbatches=1, stages=stages)
    chart = lines(plan_in_order(problem, "F(0,0) F(1,0) C(1,0) BW(1,0) BW(0,0)"))
    assert "C0" in row(chart, "s1", 1) and "X0" in row(chart, "s1", 1)
    assert "X backward with weights" in "\n".join(chart)


def test_narrow_ops_show_the_last_digit_below_the_letter(tiny_problem):
    chart = lines(gpipe(scaled(tiny_problem, 2, 16)), 8 + 75)
    start = next(i for i, line in enumerate(chart) if line.startswith(" s0"))
    letters, digits = (line.split("|", 1)[1] for line in chart[start : start + 2])
    assert letters.startswith("FFFF")
    assert "".join(digits.split()).startswith("0123456789012345")


def test_crowded_columns_show_the_majority(tiny_problem):
    chart = lines(gpipe(scaled(tiny_problem, 2, 400)), 60)
    lane = row(chart, "s0")
    assert set(lane) <= set("FBWfbw*: ")
    # Forwards first, by themselves; then backwards and weight gradients by turns, neither of which stands for both.
    assert lane.startswith("FFFF") and lane.rstrip()[-10:-1] == 9 * "*"
    assert "* if kinds alternate" in " ".join(" ".join(chart).split())


@pytest.mark.parametrize("width", [30, 80])
def test_the_legend_is_whole_on_any_width(tiny_plan, width):
    text = " ".join(" ".join(lines(tiny_plan, width)).split())
    assert "blank: idle; mem: bytes held of the budget" in text


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (4, 8), (16, 256)])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_line_is_wider_than_asked(tiny_problem, devices, microbatches, width):
    chart = lines(gpipe(scaled(tiny_problem, devices, microbatches)), width)
    assert max(map(len, chart)) <= width


def test_parts(tiny_plan):
    text = "\n".join(lines(tiny_plan, devices=[1]))
    assert "dev 1" in text and "dev 0" not in text
    text = "\n".join(lines(tiny_plan, stages=[0]))
    assert "s0" in text and "s1" not in text
    late = lines(tiny_plan, start=8.0, end=10.0)
    assert late[0].split()[0] == "8"
    assert "F0" not in row(late, "s0")
    assert "F3" in row(late, "s0")
    with pytest.raises(ValueError, match="nothing between 5 and 5 ms"):
        draw.gantt(tiny_plan, start=5.0, end=5.0)


def test_ascii_only(tiny_plan):
    chart = draw.gantt(tiny_plan, 100, ascii_only=True).plain.replace(" · ", "")
    assert chart.isascii()


def test_without_a_terminal_there_are_no_escapes(tiny_plan):
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=100).print(draw.gantt(tiny_plan, 100))
    Console(file=coloured, width=100, force_terminal=True, color_system="standard").print(draw.gantt(tiny_plan, 100))
    assert "\x1b[" not in plain.getvalue()
    assert "\x1b[" in coloured.getvalue()


def test_a_plan_without_ops_or_time_is_drawn(tiny_problem):
    nothing = Ops.of([])
    for plan in (Plan(tiny_problem, nothing), without_length(tiny_problem)):
        assert lines(plan) == ["No chart: nothing takes any time."]
        with pytest.raises(ValueError, match="nothing between"):
            draw.gantt(plan, start=0.0)
    assert "peak 0 B" in "\n".join(lines(Plan(tiny_problem, nothing), start=0.0, end=1.0))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6)), max_size=30),
    st.integers(1, 40),
)
def test_highest_within_is_the_highest_of_any_instant(steps, slices):
    steps = sorted(steps, key=lambda step: step[0])
    times, levels = np.array([t for t, _ in steps]), np.array([v for _, v in steps], np.int64)
    edges = np.linspace(0, 100, slices + 1)
    highest = draw.highest_within(times, levels, edges)
    for c in range(slices):
        before = levels[times <= edges[c]]
        inside = levels[(times > edges[c]) & (times <= edges[c + 1])]
        expected = max([*(before[-1:].tolist()), *inside.tolist()], default=0)
        assert highest[c] == expected


def test_the_chart_agrees_with_the_memory_curve(tiny_plan):
    times, levels = memory.curve(tiny_plan.problem, tiny_plan.ops, 0)
    highest = draw.highest_within(times, levels, np.linspace(0, tiny_plan.makespan_ms, 50))
    assert highest.max() == memory.peaks(tiny_plan.problem, tiny_plan.ops)[0]
