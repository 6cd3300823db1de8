"""Runs a plan: one training step on this rank's device.

INTERFACE SKETCH: names and signatures are settled, the body follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optpipe.ops import Kind
from optpipe.plan import Plan

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of what a stage hands to the next one, per microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class OpRecord:
    """One op as it ran. Times in ms since ``StepResult.origin``.

    ``wait_ms``: what the op's lane stood still for it before ``start`` (message, memory rule, reload).
    ``cpu_ms``: CPU time of the thread that ran it (0 on CUDA).
    """

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float
    cpu_ms: float
    message_wait_ms: float
    memory_wait_ms: float
    bytes: int


@dataclass(frozen=True)
class StepResult:
    """What one step gave on this rank.

    Attributes
    ----------
    loss
        Mean over microbatches, on the rank that holds the last stage; None elsewhere.
    peak_bytes
        Peak of activation bytes, counted as the plan counts them: at most the plan's peak, whatever the timing.
    message_peak_bytes
        Peak of bytes in messages under way (received ahead, or not yet sent), which the plan does not count; at most
        ``Executor.message_bytes``.
    host_peak_bytes
        Peak of offloaded bytes on the host.
    ops
        The ops of this device, by start.
    origin
        ``time.perf_counter()`` at the start of the step, s.
    step_ms
        Start of the step to the end of its last op and transfer, ms.
    """

    loss: float | None
    peak_bytes: int
    message_peak_bytes: int
    host_peak_bytes: int
    ops: tuple[OpRecord, ...]
    origin: float
    step_ms: float


class Executor:
    """Runs a plan's steps on one device. One executor lives for many steps; close it at the end.

    Parameters
    ----------
    plan
        Device d of the plan is run by rank d of the default process group (no group is needed for one device).
    stages
        This rank's stages by number: modules that take one tensor and give one. Linear and Embedding layers in them
        are converted in place to defer their weight gradients where the plan has separate B and W.
    boundaries
        ``boundaries[s]``: what stage s hands to s+1; S - 1 entries.
    loss_fn
        ``loss_fn(output, target)``: the scalar loss of one microbatch; the step's is the mean over microbatches.
    rank
        Default: the rank in the default group, 0 without one.
    device
        Where the stages live.
    bandwidth
        CPU only: bytes per second of the offload and of the reload lane, to emulate a link; None: as fast as it goes.
    seed
        Of dropout: each (step, stage, microbatch) has a seed of its own, so any order gives the same numbers.
    timeout_s
        A wait for another rank that takes longer ends the run.
    before_op
        Called as ``before_op(kind, stage, microbatch)`` in the op's lane before it starts: for tests and emulation.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        boundaries: Sequence[TensorSpec],
        loss_fn: LossFn,
        *,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        bandwidth: tuple[float | None, float | None] = (None, None),
        seed: int = 0,
        timeout_s: float = 300.0,
        before_op: Callable[[Kind, int, int], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def planned_peak_bytes(self) -> int:
        """The plan's peak of activation bytes on this device."""
        raise NotImplementedError

    @property
    def message_bytes(self) -> int:
        """The most that messages under way can take on this device: to be kept free besides the plan's budget."""
        raise NotImplementedError

    def step(self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None, *, number: int = 0) -> StepResult:
        """One step: gradients are added to ``.grad`` of the stages' parameters; no optimiser runs.

        Parameters
        ----------
        inputs
            One tensor a microbatch, on the rank that holds stage 0; None elsewhere.
        targets
            One tensor a microbatch, on the rank that holds the last stage; None elsewhere.
        number
            The step's number, for the dropout seeds.

        Raises
        ------
        RunFailed
            Something failed here, or another rank is gone; the first cause on top. The executor is of no use then.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the lanes and threads; gives pinned memory back."""
        raise NotImplementedError
