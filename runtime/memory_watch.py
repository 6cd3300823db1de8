"""What a device holds while a plan runs: samples as ops begin and end, on the clock that the ops are timed by.

On a CPU device a lane looks when it is at the op, and the clock is the host's. On CUDA the host runs ahead: it looks as
it hands an op to the compute stream, and leaves a mark there. That is when the level is true, since memory is taken and
given back in the order of that stream: what the host holds now is what there is when the stream gets here.

        host     look, F, look, look, B, look ...
        stream        . . . . mark F mark . . mark B mark      levels stand at the marks
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.accounting import Ledger
from runtime.channel import CopyJob
from runtime.events import Clock


class Sample(NamedTuple):
    """Bytes of a device at an instant.

    ``time``: ms since the step began. ``held``: activation bytes, as the ledger counts them; ``most``: the most since
    the sample before. ``allocated``: whatever torch holds on the device, weights and workspaces too; None on a CPU.
    """

    time: float
    held: int
    most: int
    allocated: int | None


class MemoryWatch:
    """Takes samples; safe to use from several threads.

    Parameters
    ----------
    ledger
        What is held. Its peak starts anew at each sample; ``peak`` is that of the whole step.
    device
        Whose allocator is asked, on CUDA.

    Attributes
    ----------
    peak
        The most activation bytes since ``begin``, up to the last sample.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger, self._lock = ledger, threading.Lock()
        self._allocated: Callable[[], int] | None = None
        if device.type == "cuda":
            self._allocated = lambda: torch.cuda.memory_allocated(device)
        self._clock: Clock
        self._looks: list[tuple[Any, int, int, int | None]] = []
        self.peak = 0

    def begin(self, clock: Clock) -> None:
        """Before a run of the plan, whose ops are timed by ``clock``."""
        self._clock, self._looks, self.peak = clock, [], 0

    def look(self) -> None:
        """Note what is held now, in the lane that this is."""
        with self._lock:
            held, most = self._ledger.take_peak()
            allocated = None if self._allocated is None else self._allocated()
            self._looks.append((self._clock.mark(), held, most, allocated))
            self.peak = max(self.peak, most)

    def samples(self, origin: float) -> tuple[Sample, ...]:
        """Those since ``begin``, once all ops have ended. ``origin``: when the step began, s."""
        return tuple(
            Sample((self._clock.seconds(mark) - origin) * 1e3, held, most, allocated)
            for mark, held, most, allocated in self._looks
        )


@dataclass(frozen=True)
class WatchedJob:
    """A job of a copy lane, with a sample before it takes memory and one after it gave some back."""

    job: CopyJob
    watch: MemoryWatch

    def start(self) -> list[tuple[Tensor, Tensor]]:
        self.watch.look()
        return self.job.start()

    def finish(self) -> None:
        self.job.finish()
        self.watch.look()
