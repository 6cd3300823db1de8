"""Stages that sleep in place of computing, and hold and move real bytes: what a plan's clock is tested with."""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.ops import Kind
from runtime.split_backward import defer

#: Sleeps from which it is learnt how late this machine wakes a sleeper: how many, how long, and what counts at most.
_SLEEPS, _SLEEP_S, _MOST_LATE_S = 8, 0.02, 0.5e-3


_began = 0.0


def begin(kind: Kind, stage: int, microbatch: int) -> None:
    """For an executor's ``before_op``: an op lasts from here on, so that what the host does before the stage's own code
    runs belongs to its time, as in a profile."""
    global _began
    if kind < Kind.O:
        _began = time.perf_counter()


def _beginning() -> float:
    """When the op began; it is taken once, and without ``begin`` that is now."""
    global _began
    began, _began = _began, 0.0
    return began or time.perf_counter()


class SleepStage(nn.Module):
    """A stage of given durations and bytes.

    Parameters
    ----------
    forward_ms, backward_ms, weight_ms
        How long F, B and W sleep; BW sleeps as long as B and W.
    shape
        Of its output.
    saved_bytes
        Saved by F for the backward, and kept until W.
    saved_tensors
        In how many tensors: whole ones move.
    """

    def __init__(
        self,
        forward_ms: float,
        backward_ms: float,
        weight_ms: float,
        shape: tuple[int, ...],
        saved_bytes: int = 0,
        saved_tensors: int = 1,
    ) -> None:
        super().__init__()
        self.durations = forward_ms / 1e3, backward_ms / 1e3, weight_ms / 1e3
        self.shape = shape
        self.sizes = [(saved_bytes + i) // saved_tensors for i in range(saved_tensors)]
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        began = _beginning()
        out: Tensor = _Sleep.apply(x, self.weight, self)
        # What autograd notes about the Function is part of the op; and the last node is torch's own, as in most stages.
        out = out.view_as(out)
        _sleep_until(began + self.durations[0])
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepStage) -> Tensor:
        ctx.save_for_backward(*(torch.ones(nbytes, dtype=torch.uint8, device=x.device) for nbytes in stage.sizes))
        ctx.stage, ctx.like = stage, (x.shape, x.dtype, x.device)
        return torch.zeros(stage.shape, device=x.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        began = _beginning()
        saved = [tensor.detach() for tensor in ctx.saved_tensors]
        _, backward_s, weight_s = ctx.stage.durations
        shape, dtype, device = ctx.like
        gx = torch.zeros(shape, dtype=dtype, device=device) if ctx.needs_input_grad[0] else None
        if not defer(lambda *_: _sleep_until(_beginning() + weight_s), *saved):
            backward_s += weight_s
        _sleep_until(began + backward_s)
        return gx, None, None


@cache
def _late_s() -> float:
    """How late this machine wakes a sleeper, at the upper quartile: a kernel would not be, so the last part of an op is
    spent awake."""
    late = []
    for _ in range(_SLEEPS):
        began = time.perf_counter()
        time.sleep(_SLEEP_S)
        late.append(time.perf_counter() - began - _SLEEP_S)
    return min(statistics.quantiles(late)[-1], _MOST_LATE_S)


def _sleep_until(instant: float) -> None:
    left = instant - time.perf_counter() - _late_s()
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < instant:
        pass
