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

from runtime import groups
from runtime.accounting import Hold
from runtime.events import CudaEvent, Event
from runtime.groups import Wanted
from runtime.program import Link, Message
from runtime.transport import Parcel, RankTransport


class NcclTransport(RankTransport):
    """On NCCL. ``ranks[d]`` is the global rank that runs device d; all ranks of the world construct theirs together."""

    def __init__(self, *args: Any, ranks: Sequence[int]) -> None:
        super().__init__(*args)
        self._ranks = ranks
        self._groups = connect_links(self._program.links, ranks, self._program.device, self._device, "nccl")
        self._streams = {link: torch.cuda.Stream(self._device) for link in self._groups}
        # By the gradient that is to come: outputs that are not its place, and the end of their sending.
        self._leaving: dict[Message, tuple[Event, Hold]] = {}

    def take(self, message: Message) -> Parcel:
        parcel = super().take(message)
        if message in self._leaving:
            # The gradient came behind the output's sending, and the compute stream behind the gradient.
            self._leaving.pop(message)[1].release()
        return parcel

    def _enqueue(self, link: Link, after: Event | None, start: Callable[[dist.ProcessGroup], Any]) -> CudaEvent:
        stream = self._streams[link]
        # The memory comes from the compute stream's pool: what that stream did with it has to be over.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if isinstance(after, CudaEvent):
            stream.wait_event(after.raw)
        with torch.cuda.stream(stream):
            start(self._groups[link]).wait()  # the link's stream waits for NCCL's own
            return CudaEvent(stream)

    def _announce(self, message: Message) -> None:
        pass

    def _send(self, message: Message, tensor: Tensor) -> CudaEvent:
        link = self._link(message)
        assert link is not None
        self._release_sent()
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

    def _let_go(self, message: Message, hold: Hold, sent: Event) -> None:
        # The link's stream may be yet to read it, of which the allocator does not know.
        self._leaving[message] = sent, hold

    def _release_sent(self) -> None:
        """Release the outputs that wait only for the end of their sending, where the host sees it."""
        for message in [message for message, (sent, _) in self._leaving.items() if sent.done]:
            self._leaving.pop(message)[1].release()


def connect_links(
    links: Sequence[Link], ranks: Sequence[int], number: int, device: torch.device, backend: str
) -> dict[Link, dist.ProcessGroup]:
    """A group for each link that device ``number`` is an end of, connected; all ranks of the world call it together.

    Parameters
    ----------
    links
        Of the whole pipeline, in one order on all of its ranks: the first use of a communicator is a rendezvous of the
        hosts.
    ranks
        The global rank of each device of the plan.
    number
        This rank's device of the plan.
    device, backend
        Where tensors live, and what carries them.
    """
    wanted = {link: _wanted(link, ranks) for link in links if number in (link.sender, link.receiver)}
    made = groups.make(wanted.values(), backend)
    found = {link: made[key] for link, key in wanted.items()}
    one = torch.zeros(1, device=device)
    for link, group in found.items():
        if link.sender == number:
            dist.send(one, ranks[link.receiver], group=group)
        else:
            dist.recv(one, ranks[link.sender], group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found


def _wanted(link: Link, ranks: Sequence[int]) -> Wanted:
    sender, receiver = ranks[link.sender], ranks[link.receiver]
    what = "gradients" if link.gradient else "inputs"
    return Wanted(f"{what} from rank {sender} to {receiver}", tuple(sorted((sender, receiver))))
