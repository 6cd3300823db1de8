"""Events between lanes, and the first failure of a run.

A lane is something that does one op at a time: compute, the copies out, the copies in, a direction of a link to another
rank. On a CPU each is a thread and an event is a flag that another thread waits for. On CUDA each is a stream, and to
wait for an event means that the *current stream* waits; the host goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from optpipe.errors import OptPipeError, RunFailed

_SLICE_S = 0.05  # how often a waiting thread looks whether something else has failed


class PeerLost(RunFailed):
    """Another rank is gone or silent: a consequence, and what happened there is the cause."""


class Failure:
    """The first thing that went wrong in this process, whichever thread it happened in.

    Attributes
    ----------
    wake
        Ends waits that nothing else would end; called in the thread that failed first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: BaseException | None = None
        self.wake: Callable[[], None] | None = None

    def report(self, error: BaseException, where: str = "") -> None:
        """Keep ``error`` if it is the first; ``where`` says in which op or message it happened."""
        with self._lock:
            if self._first is not None:
                return
            self._first = error if isinstance(error, OptPipeError) else _described(error, where)
        if self.wake is not None:
            self.wake()

    @property
    def first(self) -> BaseException | None:
        return self._first

    def check(self) -> None:
        """Raise the first failure, if there is one.

        Raises
        ------
        RunFailed
            Something failed.
        """
        if self._first is not None:
            raise self._first


def _described(error: BaseException, where: str) -> RunFailed:
    text = str(error).strip().splitlines()
    failed = RunFailed(": ".join(part for part in (where, type(error).__name__, text[0] if text else "") if part))
    failed.__cause__ = error
    return failed


class Event(Protocol):
    """Something that will have happened."""

    def wait(self) -> None:
        """Let what comes next in this lane come after the event."""

    @property
    def done(self) -> bool:
        """Whether it has happened."""


class CpuEvent:
    """A flag that a thread sets and others wait for.

    Parameters
    ----------
    failure
        Looked at while waiting: what was waited for may never come.
    label
        What is waited for, as messages say it.
    timeout_s
        The longest wait, for what comes from another rank.
    wakes_last
        Those who wait are woken after the callbacks, so that they find done what these do; otherwise before them, and
        sooner.
    """

    __slots__ = ("_callbacks", "_failure", "_gate", "_lock", "_timeout_s", "_wakes_last", "done", "label")

    def __init__(
        self, failure: Failure, label: object = "", timeout_s: float = float("inf"), *, wakes_last: bool = False
    ) -> None:
        self._failure, self.label, self._timeout_s, self._wakes_last = failure, label, timeout_s, wakes_last
        # Held until the event is set. Half the way of a ``threading.Event`` from the one thread to the other.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.done = False

    def set(self) -> None:
        """It has happened: wake those who wait, run the callbacks. Once only."""
        with self._lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        if not self._wakes_last:
            self._gate.release()
        try:
            for callback in callbacks:
                callback()
        finally:
            if self._wakes_last:
                self._gate.release()

    def then(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` in the thread that sets the event, or at once where it is set."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        if self.done and not self._wakes_last:
            return
        deadline = time.perf_counter() + self._timeout_s
        while not self._gate.acquire(timeout=_SLICE_S):
            self._failure.check()
            if time.perf_counter() > deadline:
                raise PeerLost(f"waited {self._timeout_s:g} s for {self.label}")
        self._gate.release()  # for the next one who waits


class CudaEvent:
    """A point in a CUDA stream: the end of what was given to the stream so far.

    ``on_wait`` is called when a stream has been made to wait for it: memory that it guards may go then.
    """

    __slots__ = ("_device", "_event", "on_wait")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)
        self.on_wait: Callable[[], None] | None = None

    @property
    def raw(self) -> torch.cuda.Event:
        return self._event

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        # The current stream is asked for now, never kept: under recomputation or FSDP it changes. That of the event's
        # device, which need not be the current one.
        torch.cuda.current_stream(self._device).wait_event(self._event)
        if self.on_wait is not None:
            self.on_wait()


class CpuClock:
    """Instants on a CPU device, where the host computes."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """A mark on ``time.perf_counter``'s clock, s."""
        return float(mark)


class CudaClock:
    """Instants in a device's streams, tied to the host's clock once: make a new one every step, before any work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(torch.cuda.current_stream(device))
        self._anchor.synchronize()
        self._origin = time.perf_counter()

    def mark(self) -> CudaEvent:
        """The end of what the current stream has got so far."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def seconds(self, mark: Any) -> float:
        """A mark on ``time.perf_counter``'s clock, s; its stream must have passed it."""
        return self._origin + float(self._anchor.elapsed_time(mark.raw)) / 1e3


Clock = CpuClock | CudaClock


def clock(device: torch.device) -> Clock:
    """A clock of the device's kind."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
