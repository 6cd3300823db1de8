"""What a step gave: the loss, the peaks of memory, and when each op ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from optpipe.ops import Kind
from runtime.channel import Transfer
from runtime.events import Clock
from runtime.memory_manager import Relief
from runtime.memory_watch import Sample
from runtime.program import Compute, Move


@dataclass(frozen=True)
class OpRecord:
    """One op as it ran. Times in ms since ``StepResult.origin``.

    Attributes
    ----------
    kind, stage, microbatch
        Which op.
    start, end
        When it ran, waits not included.
    cpu_ms
        CPU time of the thread that ran it; 0 on CUDA.
    memory_wait_ms
        How long the op waited for transfers before ``start``: the memory rule, its reload. Of a transfer: how long its
        lane was free and waited.
    message_wait_ms
        How long it waited for its input or gradient after that. On CUDA it is the stream that waits, once it gets
        there; a transfer's wait is not seen, and 0.
    bytes
        That a transfer moved; 0 of compute.
    late_ms
        Of a transfer in a paced lane: how far behind its pace it ended.
    """

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float
    cpu_ms: float = 0.0
    memory_wait_ms: float = 0.0
    message_wait_ms: float = 0.0
    bytes: int = 0
    late_ms: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What one step gave on this rank.

    Attributes
    ----------
    loss
        Mean over microbatches, on the rank that holds the last stage; None elsewhere.
    peak_bytes
        Peak of activation bytes, counted as the plan counts them: at most ``Executor.planned_peak_bytes``. Where
        nothing limits the device's memory the first run counts, and the others have its figure.
    message_peak_bytes
        Peak of bytes in messages under way (received ahead, or not yet sent), which the plan does not count: at most
        ``Executor.message_bytes``.
    host_peak_bytes
        Peak of offloaded bytes on the host.
    ops
        The ops of this device, by start.
    origin
        ``time.perf_counter()`` at the start of the step, s. Processes of one machine share this clock.
    step_ms
        From the start of the step until its last op, transfer and send has ended; what syncs do with gradients after
        that is not in it.
    reliefs
        What the memory manager had to do, in order; nothing where the plan's sizes are the model's.
    memory
        What was held as ops began and ended, where the executor was told to watch it.
    """

    loss: float | None
    peak_bytes: int
    message_peak_bytes: int
    host_peak_bytes: int
    ops: tuple[OpRecord, ...]
    origin: float
    step_ms: float
    reliefs: tuple[Relief, ...] = ()
    memory: tuple[Sample, ...] = ()


def together(results: Sequence[StepResult]) -> StepResult:
    """Several runs of a plan as one step: losses and times add up, peaks are the largest, ops follow one another on the
    clock of the first; the samples of memory are those of the first."""
    first = results[0]
    if len(results) == 1:
        return first
    losses = [result.loss for result in results if result.loss is not None]
    ops = [
        replace(op, start=op.start + later, end=op.end + later)
        for result in results
        for later in [(result.origin - first.origin) * 1e3]
        for op in result.ops
    ]
    return StepResult(
        sum(losses) if losses else None,
        max(result.peak_bytes for result in results),
        max(result.message_peak_bytes for result in results),
        max(result.host_peak_bytes for result in results),
        tuple(ops),
        first.origin,
        sum(result.step_ms for result in results),
        tuple(relief for result in results for relief in result.reliefs),
        first.memory,
    )


class Mark(NamedTuple):
    """A compute op as the host saw it: marks of the step's clock, and CPU time in ms.

    ``begin``: its lane is at it; ``ready``: transfers need not be waited for any more; ``here``: nor does its message.
    """

    item: Compute
    begin: Any
    ready: Any
    here: Any
    start: Any
    end: Any
    cpu_ms: float


def of_compute(marks: Sequence[Mark], clock: Clock, origin: float) -> list[OpRecord]:
    """The records of compute ops; ``origin``: the start of the step, s."""
    records = []
    for mark in marks:
        begin, ready, here, start, end = (
            (clock.seconds(at) - origin) * 1e3 for at in (mark.begin, mark.ready, mark.here, mark.start, mark.end)
        )
        item = mark.item
        records.append(
            OpRecord(item.kind, item.stage, item.microbatch, start, end, mark.cpu_ms, ready - begin, here - ready)
        )
    return records


def of_transfers(log: Sequence[Transfer], moves: Mapping[str, Move], origin: float) -> list[OpRecord]:
    """The records of one lane's transfers, which it does in the order in which it was given them."""
    records, free = [], origin
    for transfer in log:
        item = moves[transfer.label]
        records.append(
            OpRecord(
                item.kind,
                item.stage,
                item.microbatch,
                (transfer.start - origin) * 1e3,
                (transfer.end - origin) * 1e3,
                cpu_ms=transfer.cpu_s * 1e3,
                memory_wait_ms=max(transfer.ready - max(free, transfer.submitted), 0.0) * 1e3,
                bytes=transfer.nbytes,
                late_ms=transfer.late_s * 1e3,
            )
        )
        free = transfer.end
    return records
