"""What a step gave: the loss, the peaks of memory, and when each op ran."""

from __future__ import annotations

from dataclasses import dataclass

from optpipe.ops import Kind


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
        How long it waited for its input or gradient after that. Both are 0 on CUDA, where streams wait.
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
        Peak of activation bytes, counted as the plan counts them: at most ``Executor.planned_peak_bytes``.
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
        From the start of the step until its last op, transfer and send has ended.
    """

    loss: float | None
    peak_bytes: int
    message_peak_bytes: int
    host_peak_bytes: int
    ops: tuple[OpRecord, ...]
    origin: float
    step_ms: float
