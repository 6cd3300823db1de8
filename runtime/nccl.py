"""The transport on NCCL: a communicator and a stream a link, both ends in the sender's order.

Everything here is enqueued and nothing waits on the host. Per link:

    compute stream  --F(s,j)--+                                        +-- F(s+1,j) -->
                              | wait_stream             event.wait()   |
    link stream               +-- isend y -- | sent     -- irecv x -- -+

A receive of a gradient is enqueued on its link right after the output whose place it takes has been handed to its own
link, behind the end of that sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.events import CudaEvent, Event
from runtime.program import Link, Message
from runtime.transport import RankTransport

# Communicators cost memory and time: a later executor with another plan uses them again.
_groups: dict[tuple[int, int, bool], dist.ProcessGroup] = {}


class NcclTransport(RankTransport):
    """On NCCL. ``ranks[d]`` is the global rank that runs device d; all of them construct it together."""

    def __init__(self, *args: Any, ranks: Sequence[int]) -> None:
        super().__init__(*args)
        self._ranks = ranks
        self._streams: dict[Link, torch.cuda.Stream] = {}
        # One order of links on all ranks: the first use of a communicator is a rendezvous of the hosts.
        for link in self._program.links:
            if self._program.device in (link.sender, link.receiver):
                self._streams[link] = torch.cuda.Stream(self._device)
                self._connect(link)

    def _connect(self, link: Link) -> None:
        sender, receiver = self._ranks[link.sender], self._ranks[link.receiver]
        key = (sender, receiver, link.gradient)
        if key in _groups:
            return
        _groups[key] = dist.new_group([sender, receiver], backend="nccl", use_local_synchronization=True)
        one = torch.zeros(1, device=self._device)
        if link.sender == self._program.device:
            dist.send(one, receiver, group=_groups[key])
        else:
            dist.recv(one, sender, group=_groups[key])
        torch.cuda.synchronize(self._device)

    def _group(self, link: Link) -> dist.ProcessGroup:
        return _groups[self._ranks[link.sender], self._ranks[link.receiver], link.gradient]

    def _enqueue(self, link: Link, after: Event | None, start: Callable[[dist.ProcessGroup], Any]) -> CudaEvent:
        stream = self._streams[link]
        # The memory comes from the compute stream's pool: what that stream did with it has to be over.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if isinstance(after, CudaEvent):
            stream.wait_event(after.raw)
        with torch.cuda.stream(stream):
            start(self._group(link)).wait()  # the link's stream waits for NCCL's own
            return CudaEvent(stream)

    def _announce(self, message: Message) -> None:
        pass

    def _send(self, message: Message, tensor: Tensor) -> CudaEvent:
        link = self._link(message)
        assert link is not None
        return self._enqueue(link, None, lambda group: dist.isend(tensor, self._ranks[link.receiver], group=group))

    def _receive(self, message: Message, buffer: Tensor, after: Event | None) -> None:
        link = self._link(message)
        assert link is not None
        self._arrivals[message] = self._enqueue(
            link, after, lambda group: dist.irecv(buffer, self._ranks[link.sender], group=group)
        )

    def _then(self, event: Event, work: Callable[[], None]) -> None:
        work()

    def _when_sent(self, event: Event, work: Callable[[], None]) -> None:
        assert isinstance(event, CudaEvent)
        event.on_wait = work

    def _may_post(self, sent: Event) -> bool:
        return True
