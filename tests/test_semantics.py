"""Times, memory and waits: the semantics, on random schedules of random problems."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import memory, metrics, semantics, timing
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from tests.random_schedules import fitted, random_problem, random_schedule, schedules


def two_stages(**stage: object) -> Problem:
    base = {"forward_ms": 1.0, "backward_ms": 2.0, "weight_ms": 1.0, "activation_bytes": 10, "weight_context_bytes": 4}
    return Problem.model_validate(
        {
            "num_microbatches": 1,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": 0, **base, **stage}, {"device": 1, **base}],
            "comm_ms": [0.5],
            "channels": [
                {"name": "d2h:0", "transfers": [{"device": 0, "direction": "d2h"}]},
                {"name": "h2d:0", "transfers": [{"device": 0, "direction": "h2d"}]},
            ],
        }
    )


def chain(*ops: tuple[Kind, int]) -> Ops:
    """Ops of microbatch 0 in the given order; the times tell only the order."""
    return Ops.of([Op(kind, stage, 0, float(n), n + 0.9) for n, (kind, stage) in enumerate(ops)])


def test_earliest_times_follow_data_and_comm() -> None:
    problem = two_stages()
    ops = timing.earliest(problem, chain((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0), (Kind.W, 1), (Kind.W, 0)))
    assert ops.start.tolist() == [0.0, 1.5, 2.5, 5.0, 4.5, 7.0]
    assert metrics.measure(problem, ops).makespan_ms == 8.0
    assert metrics.measure(problem, ops).span_ms == 8.0
    assert metrics.measure(problem, ops).bubble_ratio == pytest.approx(1 - 8.0 / 16.0)


def test_memory_of_each_kind_of_op() -> None:
    problem = two_stages(offloadable_bytes=9, offload_ms=0.5, reload_ms=0.5)
    order = [(Kind.F, 0), (Kind.O, 0), (Kind.F, 1), (Kind.R, 0), (Kind.BW, 1), (Kind.B, 0), (Kind.W, 0)]
    ops = timing.earliest(problem, chain(*order))
    assert verify(problem, ops) == []
    assert memory.curve(problem, ops, 0)[1].tolist() == [10, 1, 10, 4, 0]
    assert memory.curve(problem, ops, 1)[1].tolist() == [10, 0]
    assert metrics.measure(problem, ops).offloaded_bytes == [9, 0]


def test_recomputation_keeps_the_checkpoint_only() -> None:
    problem = two_stages(checkpoint_bytes=3)
    order = [(Kind.F, 0), (Kind.F, 1), (Kind.C, 0), (Kind.BW, 1), (Kind.B, 0), (Kind.W, 0)]
    ops = timing.earliest(problem, chain(*order))
    assert verify(problem, ops) == []
    assert memory.curve(problem, ops, 0)[1].tolist() == [10, 3, 10, 4, 0]


def test_partial_transfer_takes_time_in_proportion() -> None:
    problem = two_stages(offloadable_bytes=8, offload_ms=2.0, reload_ms=4.0)
    ops = Ops.of([Op(Kind.O, 0, 0, 0, 1, 4), Op(Kind.R, 0, 0, 1, 2, 2), Op(Kind.F, 0, 0, 0, 1)])
    assert semantics.durations(problem, ops).tolist() == [1.0, 1.0, 1.0]


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_random_schedules_are_valid_and_earliest_times_keep_them_so(case: tuple[Problem, Ops]) -> None:
    problem, ops = case
    assert verify(problem, ops) == []
    tight = timing.earliest(problem, ops)
    assert verify(problem, tight) == []
    assert semantics.makespan(tight) <= semantics.makespan(ops) * (1 + 1e-9)
    again = timing.earliest(problem, tight)
    assert verify(problem, again) == []
    if (semantics.durations(problem, tight) > 0).all():
        assert np.allclose(again.start, tight.start)
    else:  # transfers without a duration that meet at one instant lose their order, which costs nothing
        assert (again.start <= tight.start + semantics.tolerance(tight)).all()


def test_transfers_without_duration_that_meet_lose_their_order_but_no_time() -> None:
    """On the channel O(0,2) comes before O(0,0), which a later op of the same instant then hides."""
    rng = random.Random(1709)
    problem = random_problem(rng)
    problem = fitted(problem, ops := random_schedule(problem, rng))
    tight = timing.earliest(problem, ops)
    again = timing.earliest(problem, tight)
    moved = np.flatnonzero(~np.isclose(again.start, tight.start))
    assert [tight[int(op)].label for op in moved] == ["O(0,0)"]
    assert (again.start <= tight.start + semantics.tolerance(tight)).all()
    assert verify(problem, tight) == verify(problem, again) == []


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_levels_equal_a_plain_count(case: tuple[Problem, Ops]) -> None:
    """The vectorised sweep against the op table of the design, written out op by op."""
    problem, ops = case
    recomputed = {(op.stage, op.microbatch) for op in ops if op.kind == Kind.C}
    slack = semantics.tolerance(ops)

    def held(device: int, now: float) -> int:
        """Bytes just after instant ``now``: everything freed by then, everything taken by then."""
        total = 0
        for op in ops:
            stage = problem.stages[op.stage]
            if stage.device != device:
                continue
            begun, ended = op.start <= now + slack, op.end <= now + slack
            a, w = stage.activation_bytes, stage.weight_context_bytes
            moved = stage.offloadable_bytes if op.bytes is None else op.bytes
            saved = a - (stage.checkpoint_bytes or 0)
            if op.kind == Kind.F:
                total += a * begun - saved * (ended and (op.stage, op.microbatch) in recomputed)
            elif op.kind == Kind.C:
                total += saved * begun
            elif op.kind == Kind.B:
                total -= (a - w) * ended
            elif op.kind == Kind.W:
                total -= w * ended
            elif op.kind == Kind.BW:
                total -= a * ended
            elif op.kind == Kind.O:
                total -= moved * ended
            else:
                total += moved * begun
        return total

    peaks = memory.peaks(problem, ops)
    for device in range(problem.num_devices):
        instants = sorted({op.start for op in ops if problem.stages[op.stage].device == device})
        assert peaks[device] == max(held(device, now) for now in instants)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_device_orders_hold_every_op_once_and_wait_only_backwards(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    problem = fitted(problem, ops)
    found = []
    slack = semantics.tolerance(ops)
    for order in semantics.device_orders(problem, ops):
        for lane in (order.compute, order.offloads, order.reloads):
            starts = ops.start[lane]
            assert (np.diff(starts) >= -slack).all()
            found += lane
        for taker, freers in order.waits.items():
            assert all(ops.end[freer] <= ops.start[taker] + slack for freer in freers)
    assert sorted(found) == list(range(len(ops)))


def test_an_order_against_the_data_is_refused() -> None:
    problem = two_stages()
    backwards = chain((Kind.B, 0), (Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.W, 1), (Kind.W, 0))
    with pytest.raises(ValueError, match=r"B\(0,0\) must follow F\(0,0\)"):
        timing.earliest(problem, backwards)
