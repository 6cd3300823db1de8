"""From ops as they ran to figures."""

from __future__ import annotations

import pytest

from optpipe.ops import Kind
from runtime import samples
from runtime.samples import Sample, Trace
from runtime.trial import Trial


def op(kind: Kind, stage: int, microbatch: int, start: float, end: float, cpu_ms: float = 1.0, late_ms: float = 0.0):
    return Sample(kind, stage, microbatch, start, end, cpu_ms, late_ms)


def as_planned(trial: Trial, comm: float = 0.0, times: float = 1.0) -> Trace:
    """A trace that runs a trial to the letter."""
    plan = trial.plan()
    ops = [op(o.kind, o.stage, o.microbatch, o.start * times, o.end * times) for o in plan.ops]
    return Trace(tuple(ops), plan.makespan_ms * times)


def test_durations_are_by_stage_and_kind() -> None:
    trace = Trace((op(Kind.F, 0, 0, 1, 3), op(Kind.F, 0, 1, 3, 6), op(Kind.B, 1, 0, 6, 7)), 7)
    found = samples.durations([trace, trace], [0, 1], with_host=False)
    assert found == {(0, Kind.F): [2, 3, 2, 3], (1, Kind.B): [1, 1]}


def test_what_the_host_does_between_ops_counts_unless_it_waits() -> None:
    ops = (
        op(Kind.F, 0, 0, 1, 3),
        op(Kind.O, 0, 0, 3, 9),
        op(Kind.F, 0, 1, 3.5, 6),  # nothing to wait for: the half ms is its own
        Sample(Kind.B, 0, 0, 8, 9, 1.0, 0.0, message_wait_ms=1.5),
    )
    found = samples.durations([Trace(ops, 9)], [0], with_host=True)
    assert found == {(0, Kind.F): [2, 3], (0, Kind.O): [6], (0, Kind.B): [1]}


def test_load_is_wall_over_cpu_time_of_compute() -> None:
    ops = (
        op(Kind.F, 0, 0, 0, 2, 1.0),
        op(Kind.B, 0, 0, 2, 4, 1.0),
        op(Kind.O, 0, 0, 0, 9, 0.0),
        op(Kind.F, 1, 0, 2, 3),
    )
    assert samples.loads([Trace(ops, 9)], [0, 1]) == [2.0, 1.0]
    assert samples.loads([Trace((op(Kind.F, 0, 0, 0, 2, 0.0),), 2)], [0]) == [None]


def test_waits_are_of_compute_by_device_and_step() -> None:
    ops = (
        Sample(Kind.F, 0, 0, 0, 1, 1.0, 0.0, memory_wait_ms=2.0, message_wait_ms=1.0),
        Sample(Kind.B, 1, 0, 1, 2, 1.0, 0.0, memory_wait_ms=0.0, message_wait_ms=3.0),
        Sample(Kind.O, 0, 0, 1, 2, 0.1, 0.0, memory_wait_ms=9.0),
    )
    assert samples.waits([Trace(ops, 2), Trace((), 2)], 2, [0, 1]) == ([1.0, 0.0], [0.5, 1.5])


def test_copies_behind_their_pace_are_counted() -> None:
    ops = tuple(op(Kind.O, 0, j, 0, 10, late_ms=late) for j, late in enumerate([0.0, 0.9, 1.1, 5.0]))
    assert samples.late_share([Trace(ops, 10)]) == 0.5
    assert samples.late_share([Trace((op(Kind.F, 0, 0, 0, 1),), 1)]) == 0.0


def test_a_lag_counts_only_where_the_receiver_was_waiting() -> None:
    ops = (
        op(Kind.F, 0, 0, 0, 2),
        op(Kind.F, 1, 0, 2.5, 4),  # waited: 0.5 behind F(0,0)
        op(Kind.F, 0, 1, 2, 3),
        op(Kind.BW, 1, 0, 4, 6),
        op(Kind.BW, 0, 0, 6.25, 8),  # waited: 0.25 behind BW(1,0)
        op(Kind.F, 1, 1, 6, 7),  # F(0,1) was there long before
    )
    assert samples.message_lags([Trace(ops, 8)], [0, 1]) == {0: [0.5, 0.25]}
    # An op that still waited for a transfer when its message was made does not tell how long that took.
    late = (*ops[:-2], ops[-2]._replace(memory_wait_ms=3.1), ops[-1])
    assert samples.message_lags([Trace(late, 8)], [0, 1]) == {0: [0.5]}
    assert samples.message_lags([Trace(ops, 8)], [0, 0]) == {}, "within a device nothing is sent"


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_a_trace_that_runs_as_planned_is_predicted_exactly(devices: int, offload: bool) -> None:
    trial = Trial(range(devices), 6, offload=offload)
    trace = as_planned(trial, times=7.0)
    times = samples.durations([trace], range(devices), with_host=False)
    predicted = samples.predicted_ms(trial.plan(), times, [0.0] * (devices - 1))
    assert predicted == pytest.approx(trace.step_ms)


def test_lags_lengthen_the_prediction() -> None:
    trial = Trial(range(2), 4)
    times = samples.durations([as_planned(trial)], [0, 1], with_host=False)
    assert samples.predicted_ms(trial.plan(), times, [1.0]) > samples.predicted_ms(trial.plan(), times, [0.0])
