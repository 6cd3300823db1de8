"""V-Half and V-Min (arXiv:2405.15362): schedules from a building block on a V placement, for half or a third of the
activations that 1F1B holds.

A building block is the times, in units of one op, at which a microbatch passes the devices; the next microbatch follows
six units later, the time of its F, B and W on both chunks of a device. Going down the V a hop from device to device
takes 2 units for V-Half and 1 for V-Min, going up always 1: the sum of a device's lifespans, and with it its memory, is
the same on all devices and in proportion to the sum of the hops. The turns at both ends of the V are the smallest that
let no two ops of a device fall on the same of the six units.

Only the order of the block matters. V-Half may hold D + 2 chunks on a device, V-Min 2 (D + 4) / 3, or what the budget
says where that is less; within it each op runs as early as it can, ops that have arrived overtake others that have not,
and W's fill gaps (:mod:`solver.schedules.weights`). Where times are unequal, other orders of the same memory can be
better: blocks with other hops, and blocks reordered (:mod:`solver.schedules.v_reorder`). All are tried on few
microbatches, since what differs is mostly the ends; the best of them on all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import accumulate, chain, islice, product
from operator import itemgetter

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import v_positions
from solver.schedules.v_reorder import HOWS, Reorder
from solver.schedules.weights import Filling, Numbers, Policy
from solver.tables import NO_LIMIT

_PERIOD = 6
#: Largest sum of the turns of a block; longer ones only add to the lifespans.
_MOST_TURN = 10
#: Blocks tried at most of the schedule's own hops, and of each of the others.
_OWN_BLOCKS, _OTHER_BLOCKS = 18, 6
#: Ops placed at most, over all variants; one is built in any case.
_WORK = 400_000
#: How W's wait and how ops overtake: tried on all orders, and on those that are best with these.
_FIRST = (Policy(True), Policy(True, overtake=0.5), Policy(True, overtake=0.7))
_MORE = (
    *(Policy(True, overtake=part) for part in (0.0, 0.25, 1.0, 0.6, 0.4, 0.85)),
    *(Policy(False, overtake=part) for part in (0.5, 0.0, 1.0)),
)
#: Orders that are tried with all of these; pairs of an order and a policy that are tried on all microbatches.
_KEPT, _FINAL = 12, 6
#: Microbatches that are enough to compare orders, or twice as many as devices.
_FEW = 24
#: Orders that are so much longer than the best, relative, are not finished.
_WORTH = 0.03
Times = tuple[int, int, int, int]


def v_half(problem: Problem, *, objective: str = "makespan") -> Ops:
    """V-Half: about half of 1F1B's activations on every device.

    Raises
    ------
    DoesNotApply
        No V placement.
    """
    D = v_positions(problem)
    return _best(problem, [[2] * (D - 1), [3] + [1] * (D - 2), [3, 3] + [1] * (D - 3), [3] * (D - 1)], D + 2, objective)


def v_min(problem: Problem, *, objective: str = "makespan") -> Ops:
    """V-Min: about a third of 1F1B's activations on every device.

    Raises
    ------
    DoesNotApply
        No V placement.
    """
    D = v_positions(problem)
    hops = [[1] * (D - 1), [3] + [1] * (D - 2), [3, 3] + [1] * (D - 3), [2] * (D - 1)]
    return _best(problem, hops, 2 * (D + 4) // 3, objective)


def _best(problem: Problem, hops: list[list[int]], chunks: int, objective: str) -> Ops:
    """The best schedule of the blocks with so many chunks' activations a device; if none fits, that of least memory."""
    D = v_positions(problem)
    found = [
        block
        for number, row in enumerate(hops)
        for block in islice(blocks(D, row[: D - 1]), _OTHER_BLOCKS if number else _OWN_BLOCKS)
    ]
    limits = _limits(problem, chunks)
    short = problem.changed(num_microbatches=min(problem.num_microbatches, max(2 * D, _FEW)))
    search = _Search(short, found, limits, objective)
    search.try_all()
    if search.best is not None and short.num_microbatches < problem.num_microbatches:
        tried = search.tried
        search = _Search(problem, found, limits, objective)
        for _, number, how, policy in heapq.nsmallest(_FINAL, tried, key=itemgetter(0, 1, 2)):
            search.attempt(number, how, policy)
    if search.best is not None:
        return in_order(problem, search.best.steps())
    value = metrics.span if objective == "span" else lambda _, ops: semantics.makespan(ops)
    return min(
        (in_order(problem, _unrolled(problem, block)) for block in found),
        key=lambda ops: (max(memory.peaks(problem, ops)), value(problem, ops)),
    )


class _Search:
    """Orders of building blocks on one problem, and what became of them.

    Attributes
    ----------
    best
        The shortest schedule so far.
    tried
        Those within ``_WORTH`` of it when they were made: value in ms, number of the block, how it is reordered (a
        number, see ``reorderings``), policy.
    """

    def __init__(self, problem: Problem, found: list[list[Times]], limits: list[int], objective: str) -> None:
        self.blocks, self.limits, self.by_span = found, limits, objective == "span"
        self.numbers, self.reorder = Numbers(problem), Reorder(problem, limits)
        self.best: Filling | None = None
        self.tried: list[tuple[float, int, int, Policy]] = []
        self.work = _WORK
        self._orders: dict[tuple[int, int], list[list[int]] | None] = {}

    def try_all(self) -> None:
        """All orders with a few policies; those that are best by them with all."""
        for number in self._different():
            for how, policy in product(range(HOWS), _FIRST):
                if self.work > 0:
                    self.attempt(number, how, policy)
        if self.best is None:
            return
        by_value: dict[tuple[float, Policy], tuple[int, int]] = {}
        for value, number, how, policy in sorted(self.tried, key=itemgetter(0)):
            by_value.setdefault((round(value / self.best.value, 9), policy), (number, how))
        kept = list(dict.fromkeys(by_value.values()))[:_KEPT]
        for policy, (number, how) in product(_MORE, kept):
            if self.work > 0:
                self.attempt(number, how, policy)

    def _different(self) -> list[int]:
        """Blocks that fit the memory; of those that are as long, which mostly are the same schedule, the first."""
        values: dict[float, int] = {}
        for number in range(len(self.blocks)):
            if values and self.work <= 0:
                break
            filling = Filling(
                self.numbers, self._ordered(number, 0) or [], self.limits, _FIRST[0], by_span=self.by_span
            )
            if filling.run() and filling.complete:
                values.setdefault(round(filling.value, 9), number)
                if self.best is None or filling.value < self.best.value:
                    self.best = filling
            self.work -= filling.started
        return [number for _, number in sorted(values.items())]

    def attempt(self, number: int, how: int, policy: Policy) -> None:
        """Make the schedule of one order, unless it gets too long."""
        orders = self._ordered(number, how)
        if orders is None:
            return
        cut = math.inf if self.best is None else self.best.value * (1 + _WORTH)
        filling = Filling(self.numbers, orders, self.limits, policy, cut, by_span=self.by_span)
        self.work -= len(filling.orders)
        if filling.run() and filling.complete:
            self.tried.append((filling.value, number, how, policy))
            if self.best is None or filling.value < self.best.value:
                self.best = filling
        self.work -= filling.started

    def _ordered(self, number: int, how: int) -> list[list[int]] | None:
        if (number, how) not in self._orders:
            orders = _forwards_and_backwards(self.numbers, self.blocks[number])
            self._orders[number, how] = self.reorder.by(how, orders)
        return self._orders[number, how]


def _limits(problem: Problem, chunks: int) -> list[int]:
    """Per device the bytes of so many chunks' activations, where both chunks take turns, and not above its budget."""
    limits = []
    for device, held in zip(problem.devices, problem.stages_of, strict=True):
        sizes = sorted((problem.stages[s].activation_bytes for s in held), reverse=True)
        rule = sum(size * ((chunks + 1 - k) // 2) for k, size in enumerate(sizes))
        limits.append(min(rule, NO_LIMIT if device.memory_bytes is None else device.memory_bytes))
    return limits


def blocks(D: int, down: list[int]) -> Iterator[list[Times]]:
    """Building blocks, shortest turns first: per device of the V the times of F, of F and B of the later chunk, of B.

    No two of a device fall on the same unit of the period. ``down``: D - 1 units from device to device down the V.
    """
    turns = sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda t: (sum(t), t))
    seen = set()
    for turn in turns:
        if sum(turn) > _MOST_TURN:
            return
        times = _block_times(D, down, turn)
        order = tuple(tuple(sorted(range(4), key=row.__getitem__)) for row in times)
        units = tuple(tuple(t % _PERIOD for t in row) for row in times)
        if all(len(set(row)) == 4 for row in units) and (units, order) not in seen:
            seen.add((units, order))
            yield times


def _block_times(D: int, down: list[int], turns: tuple[int, ...]) -> list[Times]:
    at = list(accumulate(chain([0], down)))
    up = range(D - 1, -1, -1)
    rows = []
    for i in range(D):
        f1 = at[-1] + turns[0] + up[i]
        b1 = at[-1] + turns[0] + (D - 1) + turns[1] + at[i]
        b0 = 2 * at[-1] + turns[0] + (D - 1) + turns[1] + turns[2] + up[i]
        rows.append((at[i], f1, b1, b0))
    return rows


def _forwards_and_backwards(numbers: Numbers, block: list[Times]) -> list[list[int]]:
    """Per device the order of the block's F's and B's, repeated for every microbatch."""
    D, m = len(block), numbers.m
    orders: list[list[int]] = [[] for _ in range(D)]
    for i, times in enumerate(block):
        first, second = i, 2 * D - 1 - i
        rows = (first, second, 2 * D + second, 2 * D + first)
        timed = [(time + _PERIOD * j, row * m + j) for time, row in zip(times, rows, strict=True) for j in range(m)]
        orders[numbers.problem.stages[i].device] = [op for _, op in sorted(timed)]
    return orders


def _unrolled(problem: Problem, block: list[Times]) -> list[list[Step]]:
    """Per device the order of the block, repeated for every microbatch; W's on the first free units after their B's."""
    D = len(block)
    orders: list[list[Step]] = [[] for _ in range(D)]
    for i, (f0, f1, b1, b0) in enumerate(block):
        first, second = i, 2 * D - 1 - i
        free = [t for t in range(_PERIOD) if t not in {x % _PERIOD for x in (f0, f1, b1, b0)}]
        w1 = min(t for t in range(b1 + 1, b1 + 1 + _PERIOD) if t % _PERIOD in free)
        free.remove(w1 % _PERIOD)
        w0 = min(t for t in range(b0 + 1, b0 + 1 + _PERIOD) if t % _PERIOD in free)
        timed = [
            (time + _PERIOD * j, Step(kind, s, j))
            for j in range(problem.num_microbatches)
            for time, kind, s in (
                (f0, Kind.F, first),
                (f1, Kind.F, second),
                (b1, Kind.B, second),
                (w1, Kind.W, second),
                (b0, Kind.B, first),
                (w0, Kind.W, first),
            )
        ]
        orders[problem.stages[i].device] = [step for _, step in sorted(timed)]
    return orders
