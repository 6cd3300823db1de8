"""From the ops of steps as they ran to the problem as it really is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from runtime.drift import Seen, problem_as_seen
from runtime.samples import Sample, Trace
from tests.random_schedules import schedules

TIMES = ("forward_ms", "backward_ms", "weight_ms", "fused_backward_ms", "offload_ms", "reload_ms")
KEYS = {Kind.F: "forward_ms", Kind.B: "backward_ms", Kind.W: "weight_ms", Kind.O: "offload_ms", Kind.R: "reload_ms"}


def slowed(problem: Problem, rng: random.Random) -> Problem:
    """The same with other times, each off by a factor of its own; what lies between stages stays."""
    value = problem.to_json()
    for stage in value["stages"]:
        for key in TIMES:
            if stage.get(key):
                stage[key] *= rng.uniform(0.5, 2.0)
    return Problem.model_validate(value)


def ran(problem: Problem, ops: Ops, device: int) -> Trace:
    """What a device did under an order, at a problem's times."""
    real = earliest(problem, ops)
    mine = [op for op in real if problem.stages[op.stage].device == device]
    moved = [problem.stages[op.stage].offloadable_bytes if op.bytes is None else op.bytes for op in mine]
    samples = [
        Sample(op.kind, op.stage, op.microbatch, op.start, op.end, 0.0, 0.0, bytes=nbytes if op.kind >= Kind.O else 0)
        for op, nbytes in zip(mine, moved, strict=True)
    ]
    return Trace(tuple(samples), semantics.makespan(real))


def seen_by_all(plan: Plan, real: Problem) -> Seen:
    """What all devices see, through JSON as between ranks."""
    devices = range(plan.problem.num_devices)
    rows = [Seen.of(plan, [ran(real, plan.ops, d)], with_host=False).to_json() for d in devices]
    return Seen.together([Seen.from_json(row) for row in rows], {})


@given(schedules(), st.integers(0, 2**32))
def test_the_times_of_ops_that_ran_are_found_again_and_with_them_the_length_of_the_step(given_, seed):
    problem, ops = given_
    real = slowed(problem, random.Random(seed))
    found = problem_as_seen(problem, seen_by_all(Plan(problem, ops), real))
    kinds = {(op.kind, op.stage) for op in ops}
    for kind, s in kinds:
        # Of an empty part nothing is seen; C lasts as long as F.
        moved = [op for op in ops if (op.kind, op.stage) == (kind, s) and op.bytes != 0]
        if kind in KEYS and moved:
            assert getattr(found.stages[s], KEYS[kind]) == pytest.approx(getattr(real.stages[s], KEYS[kind]))
        elif kind == Kind.BW:
            assert found.stages[s].bw_ms == pytest.approx(real.stages[s].bw_ms)
    again = earliest(found, ops)
    assert semantics.makespan(again) == pytest.approx(semantics.makespan(earliest(real, ops)))
    assert not verify(found, again)
    assert [d.memory_bytes for d in found.devices] == [d.memory_bytes for d in problem.devices]


def one_stage(**changes: float) -> Problem:
    stage = {"device": 0, "forward_ms": 1.0, "backward_ms": 2.0, "weight_ms": 1.0, "activation_bytes": 10}
    stage |= {"offloadable_bytes": 10, "offload_ms": 4.0, "reload_ms": 2.0}
    return Problem.model_validate(
        {
            "num_microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [{**stage, **changes}],
            "comm_ms": [],
            "channels": [{"name": way, "transfers": [{"device": 0, "direction": way}]} for way in ("d2h", "h2d")],
        }
    )


def test_what_a_plan_never_does_is_scaled_by_what_it_does_in_its_place():
    fused = problem_as_seen(one_stage(), Seen({(0, Kind.F): 1.5, (0, Kind.BW): 6.0}, {})).stages[0]
    assert (fused.forward_ms, fused.backward_ms, fused.weight_ms, fused.bw_ms) == (1.5, 4.0, 2.0, 6.0)
    split = problem_as_seen(
        one_stage(fused_backward_ms=2.5), Seen({(0, Kind.B): 1.0, (0, Kind.W): 0.5, (0, Kind.O): 8.0}, {})
    ).stages[0]
    assert (split.backward_ms, split.weight_ms, split.bw_ms) == (1.0, 0.5, 1.25)
    assert (split.forward_ms, split.offload_ms, split.reload_ms) == (1.0, 8.0, 4.0)
    other = one_stage().to_json()
    second = {**other["stages"][0], "device": 1}
    two = Problem.model_validate(
        {
            **other,
            "stages": [other["stages"][0], other["stages"][0], second],
            "channels": [
                {"name": way, "transfers": [{"device": d, "direction": way} for d in (0, 1)]} for way in ("d2h", "h2d")
            ],
            "devices": other["devices"] * 2,
            "comm_ms": [0.0] * 2,
        }
    )
    links = problem_as_seen(two, Seen({(0, Kind.O): 8.0, (0, Kind.R): 4.0}, {})).stages
    assert [(stage.offload_ms, stage.reload_ms) for stage in links] == [(8.0, 4.0), (8.0, 4.0), (4.0, 2.0)]
    found = Seen({(0, Kind.O): 8.0}, {}).with_times({(2, Kind.O): 1.0, (2, Kind.R): 1.5})
    links = problem_as_seen(two, found).stages
    assert [(stage.offload_ms, stage.reload_ms) for stage in links] == [(8.0, 4.0), (8.0, 4.0), (1.0, 1.5)]
    nothing = problem_as_seen(one_stage(), Seen({}, {}))
    assert nothing == one_stage()


def test_a_link_is_as_fast_as_what_really_moved_says_and_a_forward_that_runs_again_counts():
    problem = one_stage()
    plan = Plan(problem, Ops.of([]))
    ops = [
        Sample(Kind.F, 0, 0, 0.0, 1.0, 0.0, 0.0),
        Sample(Kind.F, 0, 1, 1.0, 2.0, 0.0, 0.0),
        Sample(Kind.O, 0, 0, 1.0, 5.0, 0.0, 0.0, bytes=5),  # the plan may have asked for less
        Sample(Kind.O, 0, 1, 5.0, 5.0, 0.0, 0.0, bytes=0),
        Sample(Kind.C, 0, 0, 5.0, 9.0, 0.0, 0.0),
    ]
    seen = Seen.of(plan, [Trace(tuple(ops), 9.0)], with_host=False)
    found = problem_as_seen(problem, seen).stages[0]
    assert found.offload_ms == pytest.approx(8.0) and found.forward_ms == pytest.approx((2 * 1.0 + 4.0) / 3)


def test_ranks_that_run_one_stage_wait_for_the_slowest():
    parts = [Seen({(0, Kind.F): 1.0, (0, Kind.W): 3.0}, {}), Seen({(0, Kind.F): 2.0, (0, Kind.W): 1.0}, {})]
    together = Seen.together(parts, {0: 0.5})
    assert together.times == {(0, Kind.F): 2.0, (0, Kind.W): 3.0} and together.lags == {0: 0.5}
