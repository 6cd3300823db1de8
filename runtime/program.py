"""A plan as one program a device: what its host does, in one order.

The compute ops come in the plan's order. A transfer is handed to its lane as soon as every compute op that it comes
after has run; what else it waits for are transfers, whose events it gets along. Receives are posted at set places, in
the sender's order, so how many are open at any time is known beforehand:

    compute   F(1,0)   F(1,1)       B(1,0)   ...
    before    post x0  take x1      R(1,0).wait
    after     post x1  O(1,1)       send g0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optpipe import semantics
from optpipe.errors import InputError
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.semantics import DeviceOrder

#: Inputs that are received before their F starts, from each rank, where the order of use is the order of sending.
RECEIVE_AHEAD = 1
#: Gradients that a rank may have made and not yet sent to another; a B waits for the one before these. So do outputs
#: where there is no backward, and no place for them.
UNSENT = 2

_BACKWARD = (Kind.B, Kind.BW)


class Message(NamedTuple):
    """What one stage gives to its neighbour: an input to stage s from s-1, or a gradient to stage s from s+1."""

    gradient: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "gradient for B" if self.gradient else "input of F"
        return f"the {what}({self.stage},{self.microbatch})"


class Link(NamedTuple):
    """From device to device; inputs and gradients go on links of their own."""

    sender: int
    receiver: int
    gradient: bool


@dataclass(frozen=True)
class Compute:
    """A compute op.

    Attributes
    ----------
    takes, gives
        The message that it needs, and the one that it makes.
    waits
        Transfers (op indices) that must have ended: its reload, and the offloads that the memory rule names.
    post
        Receives to post before it waits for its message.
    post_ahead
        Receives to post once it has its message.
    """

    op: int
    kind: Kind
    stage: int
    microbatch: int
    takes: Message | None
    gives: Message | None
    waits: tuple[int, ...]
    post: tuple[Message, ...]
    post_ahead: tuple[Message, ...]


@dataclass(frozen=True)
class Move:
    """A transfer. ``nbytes`` None: all there is. ``after``: transfers (op indices) that must have ended."""

    op: int
    kind: Kind
    stage: int
    microbatch: int
    nbytes: int | None
    after: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """What one device does in a step.

    Attributes
    ----------
    items
        In the order in which the host goes through them.
    split
        The (stage, microbatch) pairs whose backward comes in two ops.
    recomputed
        The (stage, microbatch) pairs whose forward is run again.
    gradients_from
        Per link of gradients to this device: its messages in the sender's order.
    links
        All links between devices that the plan uses, in one order that is the same on every rank.
    half_duplex
        Offloads and reloads share one channel.
    receive_bytes
        The most that inputs received ahead of their F can take at a time.
    message_bytes
        That, and the gradients that can wait to be sent: what messages can take on this device under any timing.
    """

    device: int
    items: tuple[Compute | Move, ...]
    split: frozenset[tuple[int, int]]
    recomputed: frozenset[tuple[int, int]]
    gradients_from: dict[Link, tuple[Message, ...]]
    links: tuple[Link, ...]
    half_duplex: bool
    receive_bytes: int
    message_bytes: int


def build(plan: Plan, device: int, boundary_bytes: Sequence[int]) -> Program:
    """The program of one device of a plan.

    Parameters
    ----------
    plan
        A valid plan (see ``optpipe.verify``).
    device
        Which of its devices.
    boundary_bytes
        Bytes of what stage s hands to s+1; S - 1 entries.

    Raises
    ------
    InputError
        The order of the ops cannot be replayed, so the plan is not valid.
    """
    problem, ops = plan.problem, plan.ops
    orders = semantics.device_orders(problem, ops)
    order = orders[device]
    traffic = {link: tuple(messages) for link, messages in _traffic(problem, ops, orders).items()}
    receives = Receives(problem, device, traffic, boundary_bytes)
    half_duplex = _half_duplex(problem, device)
    reload_of = {(int(ops.stage[i]), int(ops.microbatch[i])): i for i in order.reloads}
    computes = [_compute(problem, ops, order, index, reload_of, receives) for index in order.compute]
    return Program(
        device,
        tuple(_merged(ops, order, computes, half_duplex=half_duplex)),
        _with_op(ops, order, Kind.B),
        _with_op(ops, order, Kind.C),
        {link: messages for link, messages in traffic.items() if link.gradient and link.receiver == device},
        tuple(sorted(traffic)),
        half_duplex,
        receives.most_bytes,
        receives.most_bytes + unsent_bytes(device, traffic, boundary_bytes),
    )


def _with_op(ops: Ops, order: DeviceOrder, kind: Kind) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs of a device that have an op of this kind."""
    return frozenset((int(ops.stage[i]), int(ops.microbatch[i])) for i in order.compute if ops.kind[i] == kind)


def _message_of(problem: Problem, kind: Kind, stage: int, microbatch: int) -> Message | None:
    """What the op makes for a neighbouring stage."""
    if kind == Kind.F and stage + 1 < problem.num_stages:
        return Message(False, stage + 1, microbatch)
    if kind in _BACKWARD and stage > 0:
        return Message(True, stage - 1, microbatch)
    return None


def _traffic(problem: Problem, ops: Ops, orders: Sequence[DeviceOrder]) -> dict[Link, list[Message]]:
    """Per link the messages in the order in which the sender's plan makes them."""
    found: defaultdict[Link, list[Message]] = defaultdict(list)
    for sender, order in enumerate(orders):
        for index in order.compute:
            message = _message_of(problem, *ops[index][:3])
            if message is not None:
                receiver = problem.stages[message.stage].device
                if receiver != sender:
                    found[Link(sender, receiver, message.gradient)].append(message)
    return found


class Receives:
    """Where the receives of inputs are posted, and what they take at most.

    Per link the receives are posted in the sender's order: up to the message that an op is about to use, and, once it
    has it, ``RECEIVE_AHEAD`` more. Where messages are used in another order than they are sent, those in between have
    to be received too. All of it is fixed by the plan.

    Gradients are not posted here: the place of the output that was sent receives them.
    """

    def __init__(
        self, problem: Problem, device: int, traffic: dict[Link, tuple[Message, ...]], boundary_bytes: Sequence[int]
    ) -> None:
        self._links = [link for link in traffic if link.receiver == device and not link.gradient]
        self._messages = {link: traffic[link] for link in self._links}
        self._place = {message: (link, i) for link in self._links for i, message in enumerate(traffic[link])}
        self._posted = dict.fromkeys(self._links, 0)
        self._used = dict.fromkeys(self._links, 0)
        self._bytes = boundary_bytes
        self._open_bytes = self.most_bytes = 0
        self._begun = False

    def around(self, message: Message | None) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What to post before the next compute op, which uses ``message``, and once it has it."""
        before: list[Message] = []
        if not self._begun:
            self._begun = True
            for link in self._links:
                before += self._post(link, RECEIVE_AHEAD)
        if message not in self._place:
            return tuple(before), ()
        link, place = self._place[message]
        before += self._post(link, place + 1 - self._posted[link])
        self._used[link] += 1
        self._open_bytes -= self._size(message)
        return tuple(before), tuple(self._post(link, RECEIVE_AHEAD - (self._posted[link] - self._used[link])))

    def _post(self, link: Link, count: int) -> Iterator[Message]:
        first = self._posted[link]
        messages = self._messages[link][first : first + max(count, 0)]
        self._posted[link] += len(messages)
        self._open_bytes += sum(self._size(message) for message in messages)
        self.most_bytes = max(self.most_bytes, self._open_bytes)
        return iter(messages)

    def _size(self, message: Message) -> int:
        return self._bytes[message.stage - 1]


def unsent_bytes(
    device: int, traffic: dict[Link, tuple[Message, ...]], boundary_bytes: Sequence[int], *, gradients: bool = True
) -> int:
    """What gradients (else inputs) that wait to be sent can take."""
    return sum(
        min(UNSENT, len(messages)) * max(boundary_bytes[message.stage - (not gradients)] for message in messages)
        for link, messages in traffic.items()
        if link.gradient == gradients and link.sender == device
    )


def _half_duplex(problem: Problem, device: int) -> bool:
    out, back = (set(problem.channels_of[device, direction]) for direction in ("d2h", "h2d"))
    return bool(out & back)


def _compute(
    problem: Problem,
    ops: Ops,
    order: DeviceOrder,
    index: int,
    reload_of: dict[tuple[int, int], int],
    receives: Receives,
) -> Compute:
    kind, stage, microbatch = ops[index][:3]
    takes = None
    if kind == Kind.F and stage > 0:
        takes = Message(False, stage, microbatch)
    elif kind in _BACKWARD and stage + 1 < problem.num_stages:
        takes = Message(True, stage, microbatch)
    waits = set(order.waits.get(index, ()))
    if kind in _BACKWARD and (stage, microbatch) in reload_of:
        waits.add(reload_of[stage, microbatch])
    post, post_ahead = receives.around(takes)
    gives = _message_of(problem, kind, stage, microbatch)
    return Compute(index, kind, stage, microbatch, takes, gives, tuple(sorted(waits)), post, post_ahead)


def _merged(
    ops: Ops, order: DeviceOrder, computes: Sequence[Compute], *, half_duplex: bool
) -> Iterator[Compute | Move]:
    """Compute ops and transfers in one order: each transfer right after the last compute op that it waits for."""
    place = {item.op: n for n, item in enumerate(computes)}
    rank = {int(op): n for n, op in enumerate(semantics.rank(ops))}
    lanes = [order.offloads, order.reloads]
    if half_duplex:
        lanes = [sorted((*order.offloads, *order.reloads), key=rank.__getitem__)]
    before = {(Kind(int(ops.kind[i])), int(ops.stage[i]), int(ops.microbatch[i])): i for i in order.compute}
    offload_of = {(int(ops.stage[i]), int(ops.microbatch[i])): i for i in order.offloads}
    slot: dict[int, int] = {}
    moves: dict[int, Move] = {}
    # In the plan's order, so that what a transfer waits for has its place already.
    latest = [-1] * len(lanes)
    lane_of = {op: n for n, lane in enumerate(lanes) for op in lane}
    for index in sorted(lane_of, key=rank.__getitem__):
        kind, stage, microbatch, _, _, nbytes = ops[index]
        needs = set(order.waits.get(index, ()))
        needs.add(offload_of[stage, microbatch] if kind == Kind.R else before[Kind.F, stage, microbatch])
        if any(i not in place and i not in slot for i in needs):
            raise InputError(
                "", "ops", f"{ops[index].label} waits for an op that comes after it, expected a valid plan"
            )
        lane = lane_of[index]
        slot[index] = latest[lane] = max(latest[lane], *(place.get(i, slot.get(i, -1)) for i in needs))
        after = tuple(sorted(i for i in needs if i in slot and i != index))
        moves[index] = Move(index, kind, stage, microbatch, nbytes, after)
    following: defaultdict[int, list[Move]] = defaultdict(list)
    for index, move in moves.items():
        following[slot[index]].append(move)
    given: set[int] = set()
    for n, item in enumerate(computes):
        if not given.issuperset(item.waits):
            raise InputError(
                "", "ops", f"{ops[item.op].label} waits for an op that comes after it, expected a valid plan"
            )
        yield item
        for move in following[n]:
            yield move
            given.add(move.op)
