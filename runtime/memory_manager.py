"""Keeps a device within its budget when reality is above the plan, before the allocator fails.

A plan is memory-safe for the sizes that it was made with. Should the model take more (another shape, another version of
a kernel, a profile of another machine), its ops do not fit any more. So before an op that takes memory the manager
looks at what is really held, and where the op would not fit it does, in this order,

    earlier     run the next op of the plan that frees memory, if all that it needs is here: the forward is put off
    waited      wait for an offload that is under way
    offloaded   move one more microbatch to the host, the one whose backward is furthest away; it is brought back before

until there is room, and goes on without where nothing is left to do (``went on``). Nothing of this changes a number:
ops that add to gradients keep their order. Where the plan holds, nothing of it happens. Every deed is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from optpipe.ops import Kind
from optpipe.problem import Problem
from runtime.accounting import Ledger
from runtime.events import Event
from runtime.program import Compute, Message, Move, Program
from runtime.saved import Offload, Reload

Action = Literal["earlier", "waited", "offloaded", "went on"]
ACTIONS: tuple[Action, ...] = ("earlier", "waited", "offloaded", "went on")

#: Compute ops before its backward that a microbatch which was moved out of the plan is brought back.
BACK_AHEAD = 2
#: What is to stay free of a GPU's memory, bytes: for what the op that runs takes besides activations.
ALLOCATOR_RESERVE = 256 << 20

_FREES = (Kind.B, Kind.BW, Kind.W)
_BACKWARD = (Kind.B, Kind.BW)
_Pair = tuple[int, int]


@dataclass(frozen=True)
class Relief:
    """One deed of the manager.

    Attributes
    ----------
    action
        What it did, as above.
    subject
        The op or transfer that it ran, waited for or made; that which went on.
    needed_by
        The op that needed room.
    short_bytes
        How much room was missing.
    """

    action: Action
    subject: str
    needed_by: str
    short_bytes: int


class Hands(Protocol):
    """What the manager has an executor do."""

    def compute(self, item: Compute) -> None:
        """Run a compute op of the program now."""

    def transfer(self, item: Move) -> Event:
        """Hand a transfer to its lane."""

    def arrived(self, message: Message) -> bool:
        """Whether a message can be taken without a wait."""

    def saved_bytes(self, stage: int, microbatch: int) -> int:
        """What is saved of a microbatch, on the device."""


@dataclass
class _Flight:
    """An offload under way."""

    op: int
    label: str
    event: Event
    nbytes: int


@dataclass
class _Coming:
    """A reload in its lane, which starts once the transfers ``after`` have ended."""

    job: Reload
    event: Event
    nbytes: int
    after: frozenset[int]


class MemoryManager:
    """Watches one device.

    Parameters
    ----------
    problem, program
        The plan's problem, and the device's program.
    ledger
        What is held.
    headroom
        Bytes that the allocator can still give; None: only the budget counts.
    may_reorder
        Whether ops may run earlier than planned. Not where stages talk to other ranks while they compute, as tensor
        parallel layers do: those ranks must come to the same op at the same time, and each decides on its own here.
    """

    def __init__(
        self,
        problem: Problem,
        program: Program,
        ledger: Ledger,
        headroom: Callable[[], int] | None = None,
        *,
        may_reorder: bool = True,
    ) -> None:
        self._may_reorder = may_reorder
        self._budget = problem.devices[program.device].memory_bytes
        self._problem, self._items, self._ledger = problem, program.items, ledger
        self._headroom = headroom
        self._place = {(i.kind, i.stage, i.microbatch): n for n, i in enumerate(program.items)}
        moved = {(i.stage, i.microbatch) for i in program.items if isinstance(i, Move)}
        # What the plan itself moves or recomputes is left to it.
        pairs = {(i.stage, i.microbatch) for i in program.items}
        self._movable = pairs - moved - program.recomputed
        self._saved: dict[int, int] = {}  # per stage, the most that was seen to be saved of a microbatch
        self._hands: Hands
        self.reliefs: list[Relief] = []

    def begin(self, hands: Hands) -> None:
        """Before a run of the plan; ``hands`` do its ops."""
        self._hands = hands
        self.reliefs = []
        self._position = -1
        self._done: set[int] = set()
        self._flights: list[_Flight] = []
        self._coming: list[_Coming] = []
        self._out: dict[_Pair, int] = {}  # bytes that the offload of a microbatch moved
        self._away: dict[_Pair, Event] = {}  # offloaded out of the plan
        self._back: dict[_Pair, Event] = {}  # and on the way back

    @property
    def watches(self) -> bool:
        """Whether there is a limit at all."""
        return self._budget is not None or self._headroom is not None

    def reach(self, position: int) -> bool:
        """The host gets to an item of the program. False: it has been done already."""
        if position in self._done:
            return False
        self._position = position
        self._done.add(position)
        if self._away:
            self._bring_back_ahead()
        return True

    def before(self, item: Compute) -> None:
        """A compute op is about to run: room for it, and its activations here."""
        pair = item.stage, item.microbatch
        if item.kind in _BACKWARD and pair in self._away | self._back:
            self._bring_back(pair, _label(item))
        elif item.kind in (Kind.F, Kind.C) and self.watches:
            self._make_room(_label(item), self._needed(item))

    def after(self, item: Compute) -> None:
        """A compute op has run: what it really saved is known."""
        if item.kind == Kind.F and self.watches:
            saved = self._hands.saved_bytes(item.stage, item.microbatch)
            self._saved[item.stage] = max(self._saved.get(item.stage, 0), saved)

    def before_transfer(self, item: Move) -> None:
        """A transfer of the plan is about to be handed to its lane."""
        if item.kind == Kind.R and self.watches:
            self._make_room(_label(item), self._moved(item), frozenset(item.after))

    def handed_over(self, item: Move, event: Event, job: Offload | Reload, nbytes: int) -> None:
        """A transfer is in its lane; ``nbytes``: what an offload moves."""
        if not self.watches:
            return
        if isinstance(job, Reload):
            self._coming.append(_Coming(job, event, self._moved(item), frozenset(item.after)))
        else:
            self._out[item.stage, item.microbatch] = nbytes
            self._flights.append(_Flight(item.op, _label(item), event, nbytes))

    def _moved(self, item: Move) -> int:
        """What a reload brings back: as much as went out."""
        return self._out[item.stage, item.microbatch]

    def _offloadable(self, stage: int) -> int:
        return max(self._problem.stages[stage].offloadable_bytes, self._saved.get(stage, 0))

    def _needed(self, item: Compute) -> int:
        """What F or C takes: as planned, and what was seen to be saved beyond that."""
        stage = self._problem.stages[item.stage]
        seen = self._saved.get(item.stage, 0)
        if stage.offloadable_bytes:
            needed = stage.activation_bytes + max(0, seen - stage.offloadable_bytes)
        else:
            needed = max(stage.activation_bytes, seen)
        return needed - (stage.checkpoint_bytes or 0) if item.kind == Kind.C else needed

    def _short(self, needed: int, surely_ended: frozenset[int]) -> int:
        """How many bytes are missing, with what reloads in their lane will take; what the given offloads still hold,
        and those that these reloads wait for, will be free by then."""
        self._coming = [one for one in self._coming if one.job.taken < one.nbytes and not one.event.done]
        needed += sum(one.nbytes - one.job.taken for one in self._coming)
        surely_ended = surely_ended.union(*(one.after for one in self._coming))
        for flight in [flight for flight in self._flights if flight.event.done]:
            flight.event.wait()  # no wait on a CPU device; on a GPU what it frees is free now
            self._flights.remove(flight)
        last = max((n for n, flight in enumerate(self._flights) if flight.op in surely_ended), default=-1)
        leaving = sum(flight.nbytes for flight in self._flights[: last + 1])
        short = 0
        if self._budget is not None:
            short = self._ledger.activation_bytes - leaving + needed - self._budget
        if self._headroom is not None:
            short = max(short, needed - leaving - self._headroom())
        return short

    def _make_room(self, label: str, needed: int, surely_ended: frozenset[int] = frozenset()) -> None:
        while (short := self._short(needed, surely_ended)) > 0:
            deeds: tuple[tuple[Action, Callable[[], str | None]], ...] = (
                ("earlier", self._run_earlier),
                ("waited", lambda: self._wait(surely_ended)),
                ("offloaded", self._offload),
            )
            for action, deed in deeds:
                if (subject := deed()) is not None:
                    self.reliefs.append(Relief(action, subject, label, short))
                    break
            else:
                self.reliefs.append(Relief("went on", label, label, short))
                return

    def _run_earlier(self) -> str | None:
        """The next op that frees memory, if nothing that it needs is still to be done."""
        if not self._may_reorder:
            return None
        for position in range(self._position + 1, len(self._items)):
            item = self._items[position]
            if position in self._done or not isinstance(item, Compute) or item.kind not in _FREES:
                continue
            if not self._ready(item, position):
                return None
            self._done.add(position)
            self._hands.compute(item)
            return _label(item)
        return None

    def _ready(self, item: Compute, position: int) -> bool:
        pair = item.stage, item.microbatch
        if pair in self._away or pair in self._back or item.post or item.post_ahead:
            return False
        own = (n for n in range(self._position, position) if n not in self._done or n == self._position)
        if any((self._items[n].stage, self._items[n].microbatch) == pair for n in own):
            return False
        return item.takes is None or self._hands.arrived(item.takes)

    def _wait(self, surely_ended: frozenset[int]) -> str | None:
        for flight in self._flights:
            if flight.op not in surely_ended:
                flight.event.wait()
                self._flights.remove(flight)
                return flight.label
        return None

    def _offload(self) -> str | None:
        """One more microbatch to the host: the one that is needed last."""
        pairs = [pair for pair in self._movable - self._away.keys() - self._back.keys() if self._rests(pair)]
        if not pairs:
            return None
        pair = max(pairs, key=self._backward)
        item = Move(-1, Kind.O, *pair, None, ())
        event = self._away[pair] = self._hands.transfer(item)
        event.wait()
        return _label(item)

    def _rests(self, pair: _Pair) -> bool:
        """Its forward is done, and its backward not near."""
        forward, backward = self._place[(Kind.F, *pair)], self._backward(pair)
        done = forward in self._done and forward != self._position
        return done and backward not in self._done and backward > self._position + BACK_AHEAD

    def _backward(self, pair: _Pair) -> int:
        return next(self._place[(kind, *pair)] for kind in _BACKWARD if (kind, *pair) in self._place)

    def _bring_back_ahead(self) -> None:
        """Hand over the reloads of what is needed soon, if there is room."""
        soon = self._position + BACK_AHEAD
        for pair in sorted((pair for pair in self._away if self._backward(pair) <= soon), key=self._backward):
            if self._short(self._offloadable(pair[0]), frozenset()) <= 0:
                self._reload(pair)

    def _bring_back(self, pair: _Pair, label: str) -> None:
        if pair in self._away:
            self._make_room(label, self._offloadable(pair[0]))
            self._reload(pair)
        self._back.pop(pair).wait()

    def _reload(self, pair: _Pair) -> None:
        self._away.pop(pair)
        self._back[pair] = self._hands.transfer(Move(-1, Kind.R, *pair, None, ()))


def _label(item: Compute | Move) -> str:
    return f"{item.kind.name}({item.stage},{item.microbatch})"


def cuda_headroom(device: torch.device, reserve: int = ALLOCATOR_RESERVE) -> Callable[[], int]:
    """What the caching allocator can still give on a GPU: free memory, and what it holds and does not use."""

    def headroom() -> int:
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused - reserve)

    return headroom


def counts(reliefs: Iterable[Relief]) -> dict[str, int]:
    """How often each thing was done."""
    found = Counter(relief.action for relief in reliefs)
    return {action: found[action] for action in ACTIONS}
