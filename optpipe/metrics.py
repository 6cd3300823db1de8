"""What a schedule is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from optpipe import memory, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem


@dataclass(frozen=True)
class Metrics:
    """Figures of one schedule.

    Attributes
    ----------
    makespan_ms
        First start to last end.
    span_ms
        The largest, over devices, of last compute end minus first compute start: the time of a step when steps
        follow back to back without a barrier.
    bubble_ratio
        1 - (all compute time) / (devices x makespan).
    peak_bytes, offloaded_bytes
        Per device.
    """

    makespan_ms: float
    span_ms: float
    bubble_ratio: float
    peak_bytes: list[int]
    offloaded_bytes: list[int]

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def span(problem: Problem, ops: Ops) -> float:
    """The largest, over devices, of last compute end minus first compute start, ms."""
    lanes = semantics.compute_lanes(problem, ops)
    return max(
        (float(ops.end[lane.ops].max() - ops.start[lane.ops].min()) for lane in lanes if len(lane.ops)), default=0.0
    )


def measure(problem: Problem, ops: Ops) -> Metrics:
    """The figures of a schedule."""
    makespan = semantics.makespan(ops)
    compute = ops.is_compute
    work = float((ops.end[compute] - ops.start[compute]).sum())
    offloaded = np.zeros(problem.num_devices, np.int64)
    out = ops.kind == Kind.O
    np.add.at(offloaded, semantics.device_of(problem, ops)[out], semantics.moved_bytes(problem, ops)[out])
    return Metrics(
        makespan_ms=makespan,
        span_ms=span(problem, ops),
        bubble_ratio=1.0 - work / (problem.num_devices * makespan) if makespan else 0.0,
        peak_bytes=memory.peaks(problem, ops),
        offloaded_bytes=[int(value) for value in offloaded],
    )
