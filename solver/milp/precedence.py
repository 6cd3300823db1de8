"""Which op of a device surely comes before which, and the window of time in which each op can start.

Both feed each other: an op that cannot end before another one must start comes after it, and what surely comes
before an op pushes its earliest start. The tighter the windows, the fewer order bits and the smaller every big M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind
from optpipe.problem import Problem
from solver.milp.table import OpTable

#: Of the upper bound: slack within which windows do not decide anything.
SLACK = 1e-7
#: Words of 64 bits that a product of boolean matrices works on at a time.
_WORDS = 1 << 20


class Contradiction(Exception):
    """No schedule is as short as the upper bound asks."""


class Arcs(NamedTuple):
    """``after`` starts at least ``lag`` ms after the start of ``before``. Arrays of equal length."""

    before: Ints
    after: Ints
    lag: Floats


class DevicePrecedence:
    """What is known of the order on one device.

    Attributes
    ----------
    ops
        int64 (n,): the device's compute ops.
    sure
        bool (n, n): ``sure[x, y]``: op x (its place in ``ops``) comes before op y. Transitive after ``add``.
    """

    def __init__(self, ops: Ints, sure: Bools) -> None:
        self.ops, self.sure = ops, sure
        self._reduced: Bools | None = None

    @property
    def open(self) -> Bools:
        """bool (n, n): pairs whose order is not known."""
        return ~(self.sure | self.sure.T | np.eye(len(self.ops), dtype=np.bool_))

    def add(self, more: Bools) -> None:
        """Add pairs to ``sure``, and what follows by transitivity.

        Raises
        ------
        Contradiction
            An op would come before itself.
        """
        self.sure = self.sure | more
        self._reduced = None
        while True:
            closed = self.sure | boolean_product(self.sure, self.sure)
            if (closed == self.sure).all():
                break
            self.sure = closed
        if self.sure.diagonal().any():
            raise Contradiction

    def reduced(self) -> Bools:
        """bool (n, n): the pairs of ``sure`` that do not follow from others."""
        if self._reduced is None:
            self._reduced = self.sure & ~boolean_product(self.sure, self.sure)
        return self._reduced


def boolean_product(a: Bools, b: Bools) -> Bools:
    """bool (n, k): whether some i has ``a[x, i]`` and ``b[i, y]``. (By words of bits: BLAS would wake its threads.)"""
    width = b.shape[1]
    bytes_ = np.packbits(b, axis=1)
    words = np.zeros((len(b), -(-bytes_.shape[1] // 8) * 8), np.uint8)
    words[:, : bytes_.shape[1]] = bytes_
    packed = words.view(np.uint64)
    out = np.zeros((len(a), packed.shape[1]), np.uint64)
    step = max(1, _WORDS // max(1, packed.shape[1] * a.shape[1]))
    for first in range(0, len(a), step):
        x, i = np.nonzero(a[first : first + step])
        if len(x):
            heads = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]))
            out[first + x[heads]] = np.bitwise_or.reduceat(packed[i], heads, axis=0)
    return np.unpackbits(out.view(np.uint8), axis=1, count=width).astype(np.bool_)


def by_structure(problem: Problem, table: OpTable, leaky: Sequence[bool]) -> list[DevicePrecedence]:
    """What the data dependencies, the ascending microbatches and the memory of a device order, one a device.

    ``leaky``: devices where activations may leave memory otherwise than by backwards.
    """
    m = table.microbatches
    upto = np.triu(np.ones((m, m), np.bool_))
    found = []
    for device in range(problem.num_devices):
        sequences = table.compute_sequences(device)
        kind, stage = table.kind[sequences], table.stage[sequences]
        ahead = _sequence_before(kind[:, None], stage[:, None], kind[None, :], stage[None, :])
        blocks = ahead[:, None, :, None] & upto[None, :, None, :]
        same = np.eye(len(sequences), dtype=np.bool_)
        blocks |= same[:, None, :, None] & (upto & ~np.eye(m, dtype=np.bool_))[None, :, None, :]
        n = len(sequences) * m
        ops = (sequences[:, None] * m + np.arange(m)).ravel()
        precedence = DevicePrecedence(ops, blocks.reshape(n, n))
        precedence.add(_memory_order(problem, table, device, ops, leaky[device]))
        found.append(precedence)
    return found


def _sequence_before(kind: Ints, stage: Ints, other_kind: Ints, other_stage: Ints) -> Bools:
    """Whether, for one microbatch, the op of one sequence comes before that of another by its data."""
    up = stage < other_stage
    forward, backward, weight = kind == Kind.F, kind == Kind.B, other_kind == Kind.W
    return np.asarray(
        (forward & ((other_kind != Kind.F) | up))
        | (backward & (other_kind == Kind.B) & (stage > other_stage))
        | (backward & weight & (stage >= other_stage))
    )


def _memory_order(problem: Problem, table: OpTable, device: int, ops: Ints, leaky: bool) -> Bools:
    """Where nothing can leave but by backwards: F(s, j) needs B(s, j - k) done, k microbatches being all that fit.

    When F(s, j) starts, j + 1 microbatches of every stage t <= s of the device have started, and those whose B(s) has
    not ended hold all activations of these stages, since B(t) comes after B(s).
    """
    more = np.zeros((len(ops), len(ops)), np.bool_)
    budget = problem.devices[device].memory_bytes
    if budget is None or leaky:
        return more
    m = table.microbatches
    place = np.full(table.num_ops, -1, np.int64)
    place[ops] = np.arange(len(ops))
    together = 0
    for s in problem.stages_of[device]:
        together += problem.stages[s].activation_bytes
        room = min(m, budget // together) if together else m
        forward, backward = place[table.ops(Kind.F, s)], place[table.ops(Kind.B, s)]
        more[backward[: m - room], forward[room:]] = True
    return more


def data_arcs(problem: Problem, table: OpTable) -> Arcs:
    """The data dependencies between stages and of transfers, with the least lags. The ascending order within a
    sequence and the order within a device are not among them."""
    before: list[Ints] = []
    after: list[Ints] = []
    lag: list[Floats] = []

    def link(first: Ints, second: Ints, extra: float = 0.0) -> None:
        before.append(first)
        after.append(second)
        lag.append(table.shortest[first] + extra)

    last = problem.num_stages - 1
    for s in range(last):
        link(table.ops(Kind.F, s), table.ops(Kind.F, s + 1), problem.comm_ms[s])
        link(table.ops(Kind.B, s + 1), table.ops(Kind.B, s), problem.comm_ms[s])
    for s in range(problem.num_stages):
        link(table.ops(Kind.F, s), table.ops(Kind.B, s))
        link(table.ops(Kind.B, s), table.ops(Kind.W, s))
    for s in table.offloaded:
        offload, reload_ = table.ops(Kind.O, s), table.ops(Kind.R, s)
        link(table.ops(Kind.F, s), offload)
        link(offload, reload_)
        link(reload_, table.ops(Kind.B, s))
        link(offload[:-1], offload[1:])
        link(reload_[:-1], reload_[1:])
    return Arcs(np.concatenate(before), np.concatenate(after), np.concatenate(lag))


def order_arcs(table: OpTable, precedence: DevicePrecedence) -> Arcs:
    """The order that is sure on a device, without what follows by transitivity."""
    x, y = np.nonzero(precedence.reduced())
    first = precedence.ops[x]
    return Arcs(first, precedence.ops[y], table.shortest[first])


@dataclass(frozen=True)
class Windows:
    """When each op can start, in any schedule as short as the upper bound.

    Attributes
    ----------
    earliest, latest
        float64 (ops,), ms: from 0 for the makespan; for the span from the start of the device's first op.
    lower
        A lower bound of the objective that follows.
    """

    earliest: Floats
    latest: Floats
    lower: float


def windows(
    table: OpTable, devices: Sequence[DevicePrecedence], data: Arcs, upper: float, *, by_device: bool
) -> Windows:
    """The windows that follow from what is sure.

    Parameters
    ----------
    upper
        Upper bound of the objective, ms.
    by_device
        Times count from the first op of the op's own device, and the upper bound holds from there to its last end
        (the span); otherwise from 0 to the end of everything.

    Raises
    ------
    Contradiction
        An op has no time left.
    """
    arcs = [data] + [order_arcs(table, precedence) for precedence in devices]
    joined = Arcs(*(np.concatenate(part) for part in zip(*arcs, strict=True)))
    n = table.num_ops
    head, tail = np.zeros(n), np.zeros(n)
    if by_device:
        for number, precedence in enumerate(devices):
            own = np.repeat(table.device == number, table.microbatches)
            start, rest = np.full(n, -np.inf), np.full(n, -np.inf)
            start[precedence.ops[0]] = 0.0
            rest[precedence.ops] = table.shortest[precedence.ops]
            head[own] = _heads(table, [precedence], joined, start)[own]
            tail[own] = _tails(table, [precedence], joined, rest)[own]
    else:
        head = _heads(table, devices, joined, np.zeros(n))
        tail = _tails(table, devices, joined, table.shortest.copy())
    lower = float((head + tail).max())
    for precedence in devices:
        everything = np.ones((len(precedence.ops), 1), np.bool_)
        lower = max(lower, float(_loads(head[precedence.ops], table.work[precedence.ops], everything)[0]))
    latest = upper - tail
    if (head > latest + SLACK * upper).any():
        raise Contradiction
    return Windows(head, np.maximum(latest, head), lower)


def _heads(table: OpTable, devices: Sequence[DevicePrecedence], arcs: Arcs, start: Floats) -> Floats:
    """Earliest starts: longest paths, and on every device the work that surely comes before."""
    while True:
        start = _longest(start, arcs.before, arcs.after, arcs.lag)
        pushed = start.copy()
        for device in devices:
            loads = _loads(start[device.ops], table.work[device.ops], device.sure)
            pushed[device.ops] = np.maximum(pushed[device.ops], loads)
        if (pushed <= start + 1e-9).all():
            return start
        start = pushed


def _tails(table: OpTable, devices: Sequence[DevicePrecedence], arcs: Arcs, rest: Floats) -> Floats:
    """Least times from an op's start to the end of everything: the same, backwards."""
    behind = [_works_after(table, device) for device in devices]
    while True:
        rest = _longest(rest, arcs.after, arcs.before, arcs.lag)
        pushed = rest.copy()
        for device, after in zip(devices, behind, strict=True):
            took = table.shortest[device.ops]
            loads = _loads(rest[device.ops] - took, table.work[device.ops], after)
            pushed[device.ops] = np.maximum(pushed[device.ops], took + loads)
        if (pushed <= rest + 1e-9).all():
            return rest
        rest = pushed


def _works_after(table: OpTable, device: DevicePrecedence) -> Bools:
    """bool (n, n): the work of op y surely comes after op x. What a W of a fused stage may be part of, its B, has to
    come after x too."""
    after = device.sure.T.copy()
    place = np.full(table.num_ops, -1, np.int64)
    place[device.ops] = np.arange(len(device.ops))
    for s in table.fused:
        backward, weight = place[table.ops(Kind.B, s)], place[table.ops(Kind.W, s)]
        if backward[0] >= 0:
            after[weight] &= after[backward]
    return after


def _longest(value: Floats, first: Ints, second: Ints, lag: Floats) -> Floats:
    """``value[second] >= value[first] + lag``, by relaxation until nothing moves (the arcs have no cycle)."""
    value = value.copy()
    while True:
        moved = value.copy()
        np.maximum.at(moved, second, value[first] + lag)
        if (moved <= value + 1e-9).all():
            return value
        value = moved


def _loads(head: Floats, took: Floats, sure: Bools) -> Floats:
    """For each op y the largest over r of: r plus the work of the ops x that cannot start before r and of which
    ``sure[x, y]``."""
    order = np.argsort(-head, kind="stable")
    ahead = sure[order].T
    work = np.cumsum(ahead * took[order], axis=1)
    return np.asarray(np.where(ahead, head[order] + work, -np.inf).max(axis=1, initial=-np.inf))


def decide_by_windows(table: OpTable, devices: Sequence[DevicePrecedence], found: Windows, upper: float) -> bool:
    """Order the open pairs of which one op cannot come first; whether there were any.

    Raises
    ------
    Contradiction
        Neither op of a pair can come first.
    """
    news = False
    for precedence in devices:
        ops = precedence.ops
        ends = found.earliest[ops] + table.shortest[ops]
        late = ends[None, :] > found.latest[ops][:, None] + SLACK * upper
        more = late & precedence.open
        if (more & more.T).any():
            raise Contradiction
        if more.any():
            precedence.add(more)
            news = True
    return news


def decide_by_order(devices: Sequence[DevicePrecedence], place: Ints, free: Bools) -> None:
    """Order the pairs of which not both ops are free as a given schedule orders them.

    Parameters
    ----------
    place
        int64 (ops,): place of each op in the schedule's order.
    free
        bool (ops,): ops that may move against each other.
    """
    for precedence in devices:
        ops = precedence.ops
        ahead = place[ops][:, None] < place[ops][None, :]
        loose = free[ops]
        precedence.add(ahead & ~(loose[:, None] & loose[None, :]))
