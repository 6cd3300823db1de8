"""Sends and receives that cannot deadlock, and the hand-over between stages of one rank.

Nothing that computes ever waits for a send, except that a B waits for the gradients before the last few to be gone; and
a gradient always has a place to go to: when an input has been sent, the place of that output becomes the buffer that
its gradient is received into, long before the gradient is made.

    stage s    F ==y==> sent; its place waits for the gradient ......................... ==g==> B
    stage s+1              ==x==> F ............................................. B ==g==> sent

Receives of inputs are posted in the sender's order, a bounded number ahead (``program``). So no cycle of waits exists,
whatever the plan. On gloo each message has a tag of its own. NCCL knows no tags and does the operations of one
communicator in order: there each direction of a pair of ranks has a communicator for inputs and one for gradients, and
both ends use it in the sender's order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.accounting import Hold, Ledger
from runtime.boundary import Boundary, TensorSpec, spec_of
from runtime.events import CpuEvent, Event, Failure, PeerLost
from runtime.program import UNSENT, Link, Message, Program

_JOIN_S = 10.0  # for a link's thread to end
_JOIN_BROKEN_S = 1.0  # where it may be inside a send that no one will end
_ABORT_TAG = (1 << 30) + 1  # that nothing is ever sent with


class Parcel(NamedTuple):
    """A tensor that goes from one stage to another, and the hold on its storage."""

    tensor: Tensor
    hold: Hold


class LocalTransport:
    """Hands tensors from stage to stage within a rank, without a copy."""

    def __init__(self) -> None:
        self._here: dict[Message, Parcel] = {}

    def post(self, messages: Sequence[Message]) -> None:
        """Post the receives of inputs."""
        assert not messages, "within a rank nothing is received"

    def give(self, message: Message, parcel: Parcel) -> None:
        """Hand a message over. The hold goes with it."""
        self._here[message] = parcel

    def take(self, message: Message) -> Parcel:
        """The message; waits until it is here."""
        return self._here.pop(message)

    def arrived(self, message: Message) -> bool:
        """Whether ``take`` would not wait."""
        return message in self._here

    def before_giving(self, message: Message) -> None:
        """Wait until few enough messages are unsent for one more: gradients, and outputs without a backward."""

    def drain(self) -> None:
        """Wait until everything is sent, at the end of a step."""

    def abort(self) -> None:
        """After a failure: end the waits, here and on the other ranks, that nothing will come of."""

    def close(self) -> None:
        """End the threads."""


class RankTransport(LocalTransport):
    """Between ranks: what gloo and NCCL have in common.

    Parameters
    ----------
    program
        What is received and when.
    device_of_stage
        The device of the plan that runs each stage.
    boundaries
        What stage s hands to s+1; S - 1 entries.
    device
        Where this rank's tensors live.
    ledger
        Counts the buffers.
    failure
        The first thing that went wrong on this rank.
    """

    def __init__(
        self,
        program: Program,
        device_of_stage: Sequence[int],
        boundaries: Sequence[Boundary],
        device: torch.device,
        ledger: Ledger,
        failure: Failure,
    ) -> None:
        super().__init__()
        self._program, self._specs = program, boundaries
        self._device, self._ledger, self._failure = device, ledger, failure
        self._ways = {gradient: _ways(device_of_stage, gradient) for gradient in (False, True)}
        self._lock = threading.RLock()
        self._arrivals: dict[Message, Event] = {}
        # Per link of gradients to this rank: how many of them, in the sender's order, have a buffer that waits.
        self._posted = dict.fromkeys(program.gradients_from, 0)
        # Then an output that was sent has no gradient to make place for.
        self._forward_only = not any(link.gradient for link in program.links)
        self._places: dict[Message, tuple[Parcel, Event]] = {}  # sent outputs, and the end of their sending
        self._unsent: dict[Link, deque[Event]] = {}
        self._sends: list[Event] = []

    def _link(self, message: Message) -> Link | None:
        """How the message travels; None: it stays here."""
        return self._ways[message.gradient][message.stage]

    def _spec(self, message: Message) -> TensorSpec:
        return spec_of(self._specs[message.stage if message.gradient else message.stage - 1], message.microbatch)

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            spec = self._spec(message)
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            parcel = Parcel(buffer, self._ledger.hold(buffer, message=True))
            self._expect(message, parcel)
            self._receive(message, parcel.tensor, None)

    def give(self, message: Message, parcel: Parcel) -> None:
        link = self._link(message)
        if link is None:
            super().give(message, parcel)
        elif message.gradient or self._forward_only:
            parcel.hold.as_message()
            sent = self._send(message, parcel.tensor)
            self._when_sent(sent, parcel.hold.release)
            self._unsent.setdefault(link, deque()).append(sent)
            self._sends.append(sent)
        else:
            answer = Message(True, message.stage - 1, message.microbatch)
            back = Link(link.receiver, link.sender, True)
            self._announce(answer)
            sent = self._send(message, parcel.tensor)
            with self._lock:
                self._places[answer] = (parcel, sent)
            self._sends.append(sent)
            self._then(sent, lambda: self._post_gradients(back))

    def take(self, message: Message) -> Parcel:
        if self._link(message) is None:
            return super().take(message)
        self._arrivals[message].wait()
        with self._lock:
            del self._arrivals[message]
            return self._here.pop(message)

    def arrived(self, message: Message) -> bool:
        if self._link(message) is None:
            return super().arrived(message)
        event = self._arrivals.get(message)
        return event is not None and event.done

    def before_giving(self, message: Message) -> None:
        link = self._link(message)
        unsent = self._unsent.get(link) if link is not None else None
        while unsent and len(unsent) >= UNSENT:
            unsent.popleft().wait()

    def drain(self) -> None:
        for sent in self._sends:
            sent.wait()
        self._sends.clear()
        self._unsent.clear()
        self._posted = dict.fromkeys(self._posted, 0)

    def _expect(self, message: Message, parcel: Parcel) -> None:
        with self._lock:
            self._here[message] = parcel

    def _post_gradients(self, link: Link) -> None:
        """Post the receives of gradients for which there is a place, in the sender's order."""
        with self._lock:
            messages = self._program.gradients_from[link]
            while self._posted[link] < len(messages):
                message = messages[self._posted[link]]
                place = self._places.get(message)
                if place is None or not self._may_post(place[1]):
                    return
                del self._places[message]
                self._posted[link] += 1
                parcel = self._buffer(message, *place)
                self._expect(message, parcel)
                self._receive(message, parcel.tensor, place[1])

    def _buffer(self, message: Message, output: Parcel, sent: Event) -> Parcel:
        """The place of an output that was sent, for its gradient: the same memory where no one else holds it."""
        storage, spec = output.tensor.untyped_storage(), self._spec(message)
        fits = storage.nbytes() == spec.nbytes and output.tensor.is_contiguous()
        if fits and self._ledger.holders(storage) == 1 and not _shared(storage):
            return output
        self._let_go(message, output.hold, sent)
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return Parcel(buffer, self._ledger.hold(buffer))

    # What differs between gloo and NCCL.

    def _announce(self, message: Message) -> None:
        """A gradient that will be received: it may be waited for from now on."""
        raise NotImplementedError

    def _send(self, message: Message, tensor: Tensor) -> Event:
        raise NotImplementedError

    def _receive(self, message: Message, buffer: Tensor, after: Event | None) -> None:
        """Receive into ``buffer``, once ``after`` has happened; ``_arrivals`` gets the event of the arrival."""
        raise NotImplementedError

    def _then(self, event: Event, work: Callable[[], None]) -> None:
        """Run ``work`` as soon as what follows may be put after ``event``."""
        raise NotImplementedError

    def _when_sent(self, event: Event, work: Callable[[], None]) -> None:
        """Run ``work`` once the memory that was sent may be used again."""
        raise NotImplementedError

    def _may_post(self, sent: Event) -> bool:
        """Whether a receive into memory that was sent can be posted now."""
        raise NotImplementedError

    def _let_go(self, message: Message, hold: Hold, sent: Event) -> None:
        """Release an output whose place is not that of its gradient; ``_may_post`` was true of its sending."""
        hold.release()


def _ways(owners: Sequence[int], gradient: bool) -> dict[int, Link | None]:
    """By the stage that a message goes to: how it travels, None where it stays on a device."""
    ends = [(to, to + 1 if gradient else to - 1) for to in range(len(owners))]
    return {
        to: None if owners[by] == owners[to] else Link(owners[by], owners[to], gradient)
        for to, by in ends
        if 0 <= by < len(owners)
    }


class GlooTransport(RankTransport):
    """On gloo: a tag a message, and threads that send and that wait for the works.

    gloo's works complete only for someone who waits for them, so each link has a thread that does, in the order of
    posting. That a send waits for the one before it costs nothing: both ends go by the sender's order. What computes
    waits for its messages itself, which saves a hop from thread to thread, unless someone is to know beforehand
    whether they are here (``asks``). ``ranks[d]`` is the global rank that runs device d; ``timeout_s`` the longest wait
    for a message.
    """

    def __init__(
        self, *args: Any, ranks: Sequence[int], timeout_s: float, num_microbatches: int, asks: bool = True
    ) -> None:
        super().__init__(*args)
        self._ranks, self._timeout_s, self._num_microbatches = ranks, timeout_s, num_microbatches
        self._asks = asks
        if not asks:
            # A wait for a message ends only with it or with the connection: what fails in another thread breaks that.
            self._failure.wake = self.abort
        self._waiters: dict[tuple[Link, str], _Waiter] = {}
        self._broken = False
        here, links = self._program.device, self._program.links
        ends = {link.receiver if link.sender == here else link.sender for link in links if here in link[:2]}
        self._peers = sorted(ranks[end] for end in ends)

    def _tag(self, message: Message) -> int:
        return 2 * (message.stage * self._num_microbatches + message.microbatch) + message.gradient

    def _waiter(self, link: Link, doing: str, peer: int) -> _Waiter:
        key = (link, doing)
        if key not in self._waiters:
            # A receive that is posted early may wait as long as it takes. A send that is under way when its connection
            # breaks is forgotten by gloo (it wakes those not begun, and receives), and ends only by its time: beyond
            # that of what computes, which is to say first what it waits for.
            longest = 2 * self._timeout_s if doing == "sending" else None
            self._waiters[key] = _Waiter(self._ranks[peer], self._failure, longest)
        return self._waiters[key]

    def _announce(self, message: Message) -> None:
        link = self._link(message)
        assert link is not None
        label = _Label(message, "from rank", self._ranks[link.sender])
        kind = CpuEvent if self._asks else _Receipt
        self._arrivals[message] = kind(self._failure, label, self._timeout_s)

    def _send(self, message: Message, tensor: Tensor) -> CpuEvent:
        link = self._link(message)
        assert link is not None
        # Who waits for a place among the unsent messages finds the memory of this one booked out.
        peer, tag = self._ranks[link.receiver], self._tag(message)
        event = CpuEvent(self._failure, _Label(message, "to reach rank", peer), self._timeout_s, wakes_last=True)

        def start() -> Any:
            self._failure.check()
            return _world().send([_real(tensor)], peer, tag)

        # Started by the link's thread: gloo copies into the socket at once, and what computes shall not wait for that.
        self._waiter(link, "sending", link.receiver).put(start, tensor, event)
        return event

    def _receive(self, message: Message, buffer: Tensor, after: Event | None) -> None:
        link = self._link(message)
        assert link is not None
        if message not in self._arrivals:
            self._announce(message)
        event = self._arrivals[message]
        assert isinstance(event, CpuEvent | _Receipt)
        peer = self._ranks[link.sender]
        try:
            work = _world().recv([_real(buffer)], peer, self._tag(message))
        except RuntimeError as error:
            raise _lost(peer, event.label, error) from None
        if isinstance(event, _Receipt):
            event.post(work, buffer, peer)
        else:
            self._waiter(link, "receiving", link.sender).put(lambda: work, buffer, event)

    def _then(self, event: Event, work: Callable[[], None]) -> None:
        assert isinstance(event, CpuEvent)
        event.then(work)

    _when_sent = _then

    def _may_post(self, sent: Event) -> bool:
        return sent.done

    def abort(self) -> None:
        self._broken = True
        # gloo's own abort wakes no one. A wait that times out does: it breaks the connections to all ranks.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, tag=_ABORT_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        for waiter in self._waiters.values():
            waiter.close(_JOIN_BROKEN_S if self._broken else _JOIN_S)
        self._waiters.clear()


def _world() -> dist.ProcessGroup:
    """All ranks. Asked itself it does what ``isend`` and ``irecv`` do, in a fraction of their time in Python."""
    group = dist.group.WORLD
    assert group is not None
    return group


def _shared(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has tensors besides the one that was sent: what autograd saved without telling the ledger, or
    what a module kept for itself."""
    # One owner is that tensor, and one the Python object.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def _real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: gloo knows no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Label(NamedTuple):
    """What is waited for, in words once someone asks."""

    message: Message
    way: str
    rank: int

    def __str__(self) -> str:
        return f"{self.message} {self.way} {self.rank}"


class _Receipt:
    """The arrival of a message as an event that no thread sets: who waits for it waits for gloo's work.

    Parameters
    ----------
    failure, label, timeout_s
        As of a ``CpuEvent``.
    """

    __slots__ = ("_failure", "_lock", "_posted", "_receive", "_timeout_s", "done", "label")

    def __init__(self, failure: Failure, label: object, timeout_s: float) -> None:
        self._failure, self.label, self._timeout_s = failure, label, timeout_s
        self._lock = threading.Lock()
        self._posted: CpuEvent | None = None  # where someone waits before there is a work
        self._receive: tuple[Any, Tensor, int] | None = None
        self.done = False

    def post(self, work: Any, buffer: Tensor, peer: int) -> None:
        """What there is to wait for, with the buffer, which has to live until then."""
        with self._lock:
            self._receive = work, buffer, peer
            if self._posted is not None:
                self._posted.set()

    def wait(self) -> None:
        """Wait until the message is here; by one thread, once."""
        with self._lock:
            if self._receive is None:
                self._posted = CpuEvent(self._failure, self.label, self._timeout_s)
        if self._posted is not None:
            self._posted.wait()
        assert self._receive is not None
        (work, _, peer), self._receive = self._receive, None
        begin = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if time.perf_counter() - begin < self._timeout_s:
                raise _lost(peer, self.label, error) from None
            raise PeerLost(f"waited {self._timeout_s:g} s for {self.label}") from None
        self.done = True


class _Waiter:
    """A thread that starts the sends of one link, or waits for its receives, in order, and sets their events.

    ``longest_s``: how long it waits for one of them; None: as long as the process group does.
    """

    def __init__(self, peer: int, failure: Failure, longest_s: float | None) -> None:
        self.peer, self._failure = peer, failure
        self._wait = () if longest_s is None else (timedelta(seconds=longest_s),)
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Tensor, CpuEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"link to rank {peer}", daemon=True)
        self._thread.start()

    def put(self, start: Callable[[], Any], tensor: Tensor, event: CpuEvent) -> None:
        """What gives a work to wait for, with its tensor, which has to live until then."""
        self._queue.put((start, tensor, event))

    def close(self, wait_s: float) -> None:
        """End the thread, once it has waited for what it was given; a wait that never ends has to be aborted first."""
        self._queue.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            start, tensor, event = item
            try:
                try:
                    work = start()
                    work.wait(*self._wait)
                except RuntimeError as error:
                    raise _lost(self.peer, event.label, error) from None
                del start, work, tensor, item  # before the callbacks: they look at who holds the memory
                event.set()
            except BaseException as error:
                self._failure.report(error, str(event.label))
                return
            del event


def _lost(peer: int, label: object, error: RuntimeError) -> PeerLost:
    """What an error of gloo's means: it raises only where a connection is broken."""
    reason = str(error).split("] ", 1)[-1].split(". ")[0].splitlines()[0]
    return PeerLost(f"lost rank {peer}, waited for {label}: {reason}")
