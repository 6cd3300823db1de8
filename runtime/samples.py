"""From ops as they ran to the figures of a profile. No torch: tests feed it made-up records."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.timing import order_graph

if TYPE_CHECKING:
    from runtime.result import OpRecord

#: A copy that ends later than this share of its time behind its pace is late.
LATE_SHARE = 0.1
#: A wait below this many ms is none: the host looked, and went on.
WAITED_MS = 0.1
_BACKWARD = (Kind.B, Kind.BW)


class Sample(NamedTuple):
    """One op as it ran; times in ms on a clock that all ranks of a machine share."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float
    cpu_ms: float
    late_ms: float
    memory_wait_ms: float = 0.0
    message_wait_ms: float = 0.0
    bytes: int = 0

    @classmethod
    def of(cls, op: OpRecord, origin_ms: float = 0.0) -> Sample:
        """An op as the executor tells of it; ``origin_ms``: where its clock begins on that of the others."""
        return cls(
            op.kind,
            op.stage,
            op.microbatch,
            origin_ms + op.start,
            origin_ms + op.end,
            op.cpu_ms,
            op.late_ms,
            op.memory_wait_ms,
            op.message_wait_ms,
            op.bytes,
        )


class Trace(NamedTuple):
    """One step over all devices."""

    ops: tuple[Sample, ...]
    step_ms: float


def durations(
    traces: Iterable[Trace], stage_devices: Sequence[int], *, with_host: bool
) -> dict[tuple[int, Kind], list[float]]:
    """Samples in ms by stage and kind.

    Parameters
    ----------
    traces
        Steps as they ran.
    stage_devices
        The device of each stage.
    with_host
        To a compute op that waited for nothing belongs what the host did for it since the one before: on a CPU device
        the host's work stands between the ops. Not on CUDA, where it is hidden.
    """
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for trace in traces:
        free: dict[int, float] = {}
        for op in sorted(trace.ops, key=lambda op: op.start):
            start = op.start
            if op.kind < Kind.O:
                device = stage_devices[op.stage]
                if with_host and op.memory_wait_ms + op.message_wait_ms < WAITED_MS:
                    start = free.get(device, start)
                free[device] = op.end
            found[op.stage, op.kind].append(op.end - start)
    return dict(found)


def loads(traces: Iterable[Trace], stage_devices: Sequence[int]) -> list[float | None]:
    """Wall over CPU time of compute, by device; None where no CPU time was taken (CUDA)."""
    wall, cpu = [0.0] * (max(stage_devices) + 1), [0.0] * (max(stage_devices) + 1)
    for trace in traces:
        for op in trace.ops:
            if op.kind < Kind.O:
                wall[stage_devices[op.stage]] += op.end - op.start
                cpu[stage_devices[op.stage]] += op.cpu_ms
    return [w / c if c > 0 else None for w, c in zip(wall, cpu, strict=True)]


def waits(traces: Sequence[Trace], devices: int, stage_devices: Sequence[int]) -> tuple[list[float], list[float]]:
    """What each device's compute stood still in a step, ms (mean): for transfers (the memory rule, reloads), and for
    messages."""
    memory, message = [0.0] * devices, [0.0] * devices
    for trace in traces:
        for op in trace.ops:
            if op.kind < Kind.O:
                memory[stage_devices[op.stage]] += op.memory_wait_ms / len(traces)
                message[stage_devices[op.stage]] += op.message_wait_ms / len(traces)
    return memory, message


def late_share(traces: Iterable[Trace]) -> float:
    """The share of paced copies that missed their pace by more than ``LATE_SHARE`` of their time."""
    copies = [op for trace in traces for op in trace.ops if op.kind >= Kind.O]
    late = sum(op.late_ms > LATE_SHARE * (op.end - op.start) for op in copies)
    return late / len(copies) if copies else 0.0


def message_lags(traces: Iterable[Trace], stage_devices: Sequence[int]) -> dict[int, list[float]]:
    """What lies between the end of an op and the start of the op in the next stage that waited for its message, ms.

    By boundary (s: between stages s and s+1), both directions together; only between devices, and only where the
    receiving device had nothing else to do or to wait for when the message was made.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trace in traces:
        ended = {(op.kind in _BACKWARD, op.stage, op.microbatch): op.end for op in trace.ops if _makes_message(op)}
        last_end: dict[int, float] = {}
        for op in sorted((op for op in trace.ops if op.kind < Kind.O), key=lambda op: op.start):
            device = stage_devices[op.stage]
            free = last_end.get(device, float("-inf"))
            last_end[device] = op.end
            source = op.stage + 1 if op.kind in _BACKWARD else op.stage - 1
            made = ended.get((op.kind in _BACKWARD, source, op.microbatch)) if _makes_message(op) else None
            if made is not None and stage_devices[source] != device and free + op.memory_wait_ms < made < op.start:
                found[min(op.stage, source)].append(op.start - made)
    return dict(found)


def _makes_message(op: Sample) -> bool:
    return op.kind == Kind.F or op.kind in _BACKWARD


def predicted_ms(plan: Plan, times: dict[tuple[int, Kind], list[float]], lags: Sequence[float]) -> float:
    """The makespan of a plan's order under measured medians: what a plan made from the profile would promise.

    Parameters
    ----------
    plan
        Whose order.
    times
        Samples in ms by stage and kind.
    lags
        ms between stages s and s+1; S - 1 entries.
    """
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    took = np.array([medians[op.stage, op.kind] for op in plan.ops])
    problem = plan.problem.changed(comm_ms=tuple(lags))
    starts = order_graph(problem, plan.ops).starts(took)
    return float((starts + took).max())
