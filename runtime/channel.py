"""Copy lanes: what carries transfers between device and host, one at a time, in the order given.

The same calls on both kinds of device:

    event = lane.submit(job, after=[...])        job.start() takes memory and says what to copy
    event.wait()                                 what comes next here comes after; job.finish() has freed the memory

On a CPU device a lane is a thread that really copies, at full speed or paced to a set bandwidth. On CUDA it is a
stream:

    compute   --F--+------- event.wait() of a later taker: finish() frees the source -->
                   | wait_stream
    d2h            +--copy--copy--+ event

Memory is always taken from and given back to the compute stream's pool: the copy stream waits for the compute stream's
work so far before it touches new memory, and memory is freed only once the compute stream comes after the copy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.events import Clock, CpuEvent, CudaEvent, Event, Failure

_CHUNK_BYTES = 1 << 20  # of a paced copy: small enough to keep its deadlines
_JOIN_S = 10.0  # for a lane's thread to end


class CopyJob(Protocol):
    """What a lane carries; ``saved.Offload`` and ``saved.Reload`` are jobs."""

    def start(self) -> list[tuple[Tensor, Tensor]]:
        """Take the memory; (destination, source) pairs of flat uint8 tensors to copy."""

    def finish(self) -> None:
        """The copies are done: free what is not needed any more."""


@dataclass(frozen=True)
class Transfer:
    """One job as it went. Times in s on ``time.perf_counter``'s clock.

    ``submitted``: when the lane got it; ``ready``: everything it waited for has happened. ``late_s``: how long after
    its paced end the copy ended (0 where nothing is paced); a lane that cannot keep its pace is of no use for
    predictions.
    """

    label: str
    submitted: float
    ready: float
    start: float
    end: float
    nbytes: int
    late_s: float
    cpu_s: float


class CopyLane(Protocol):
    """Carries one job at a time, first in first out."""

    def submit(
        self, job: CopyJob, after: Sequence[Event] = (), label: str = "", before: Callable[[], None] | None = None
    ) -> Event:
        """Queue a job that waits for the events in ``after``; the event of its end.

        ``before``: called in the lane before the job starts (CPU lanes only).
        """

    def settle(self) -> None:
        """Wait on the host for all jobs, and finish them."""

    def take_log(self, clock: Clock) -> list[Transfer]:
        """The jobs since the last call, in order; call it after ``settle``, with the step's clock."""

    def close(self) -> None:
        """End the lane, and wait until it has. Once the run has failed, jobs that have not started never will."""


class CpuLane:
    """A thread that copies.

    Parameters
    ----------
    name
        In messages.
    failure
        Where an error in a job goes, and what ends the lane.
    bytes_per_s
        Paces the copies to emulate a link, by absolute deadlines, so that lateness does not add up; None: full speed.
    """

    def __init__(self, name: str, failure: Failure, bytes_per_s: float | None = None) -> None:
        self.name, self._failure, self._bytes_per_s = name, failure, bytes_per_s
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._last: CpuEvent | None = None
        self._log: list[Transfer] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, job: CopyJob, after: Sequence[Event] = (), label: str = "", before: Callable[[], None] | None = None
    ) -> CpuEvent:
        self._last = event = CpuEvent(self._failure, label or self.name)
        self._queue.put(_Queued(job, tuple(after), event, label, before, time.perf_counter()))
        return event

    def settle(self) -> None:
        if self._last is not None:
            self._last.wait()

    def take_log(self, clock: Clock) -> list[Transfer]:
        log, self._log = self._log, []
        return log

    def close(self) -> None:
        self._queue.put(None)
        # A thread that is inside torch when the interpreter ends would abort the process.
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_num_threads(1)  # thread-local: a copy must not fan out over the cores that compute
        while (queued := self._queue.get()) is not None:
            try:
                self._carry(queued)
            except BaseException as error:
                self._failure.report(error, queued.label)
                return
            del queued  # else this thread keeps the job until the next one comes

    def _carry(self, queued: _Queued) -> None:
        for event in queued.after:
            event.wait()
        self._failure.check()
        ready = time.perf_counter()
        cpu = time.thread_time()
        if queued.before is not None:
            queued.before()
        start = time.perf_counter()
        pairs = queued.job.start()
        nbytes, deadline = 0, start
        while pairs:
            target, source = pairs.pop()
            nbytes += source.numel()
            deadline = self._copy(target, source, deadline)
            del target, source
        queued.job.finish()
        end = time.perf_counter()
        late = end - deadline if self._bytes_per_s else 0.0
        self._log.append(
            Transfer(queued.label, queued.submitted, ready, start, end, nbytes, late, time.thread_time() - cpu)
        )
        queued.event.set()

    def _copy(self, target: Tensor, source: Tensor, deadline: float) -> float:
        """Copy, paced; when the copy is due to end, s."""
        if self._bytes_per_s is None:
            target.copy_(source)
            return deadline
        for first in range(0, source.numel(), _CHUNK_BYTES):
            last = min(first + _CHUNK_BYTES, source.numel())
            target[first:last].copy_(source[first:last])
            deadline += (last - first) / self._bytes_per_s
            if (ahead := deadline - time.perf_counter()) > 0:
                time.sleep(ahead)
                self._failure.check()  # a slow copy must not outlive the run
        return deadline


@dataclass
class _Queued:
    job: CopyJob
    after: tuple[Event, ...]
    event: CpuEvent
    label: str
    before: Callable[[], None] | None
    submitted: float


class CudaLane:
    """A stream of copies; all calls come from the thread that feeds the compute stream.

    Parameters
    ----------
    name
        In messages.
    device
        A CUDA device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device)
        self._pending: deque[tuple[CudaEvent, CopyJob]] = deque()
        self._spans: list[tuple[str, CudaEvent, CudaEvent, int]] = []

    def submit(
        self, job: CopyJob, after: Sequence[Event] = (), label: str = "", before: Callable[[], None] | None = None
    ) -> CudaEvent:
        self.reap()
        # The compute stream waits too: only so can the memory that these events free be taken below.
        for event in after:
            event.wait()
        pairs = job.start()
        # Not kept from the construction: the compute stream is whatever is current now.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            begin = CudaEvent(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        end = CudaEvent(self._stream)
        end.on_wait = lambda: self._finish_until(end)
        self._pending.append((end, job))
        self._spans.append((label, begin, end, sum(source.numel() for _, source in pairs)))
        return end

    def reap(self) -> None:
        """Finish the jobs whose copies have ended."""
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()[1].finish()

    def settle(self) -> None:
        self._stream.synchronize()
        self.reap()

    def take_log(self, clock: Clock) -> list[Transfer]:
        spans, self._spans = self._spans, []
        return [
            Transfer(label, start, start, start, clock.seconds(end), nbytes, 0.0, 0.0)
            for label, begin, end, nbytes in spans
            for start in [clock.seconds(begin)]
        ]

    def close(self) -> None:
        self._pending.clear()

    def _finish_until(self, event: CudaEvent) -> None:
        """Finish the jobs up to the one with this end: whoever waits for it waits for those before it."""
        if any(end is event for end, _ in self._pending):
            while self._pending:
                end, job = self._pending.popleft()
                job.finish()
                end.on_wait = None
                if end is event:
                    return


def copy_lane(
    name: str, device: torch.device, failure: Failure, bytes_per_s: float | None = None
) -> CpuLane | CudaLane:
    """A lane of the device's kind. ``bytes_per_s`` paces a CPU lane; a CUDA link has its own speed."""
    return CudaLane(name, device) if device.type == "cuda" else CpuLane(name, failure, bytes_per_s)
