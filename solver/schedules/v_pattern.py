"""V-Half and V-Min (arXiv:2405.15362): schedules from a building block on a V placement, for half or a third of the
activations that 1F1B holds.

A building block is the times, in units of one op, at which a microbatch passes the devices; the next microbatch follows
six units later, the time of its F, B and W on both chunks of a device. Going down the V a hop from device to device
takes 2 units for V-Half and 1 for V-Min, going up always 1: the sum of a device's lifespans, and with it its memory, is
the same on all devices and in proportion to the sum of the hops. The turns at both ends of the V are the smallest that
let no two ops of a device fall on the same of the six units.

Only the order of the block matters. V-Half may hold D + 2 chunks on a device, V-Min 2 (D + 4) / 3, or what the budget
says where that is less; within it each op runs as early as it can, ops that have arrived overtake others that have not,
and W's fill gaps. Blocks with other hops are tried too: where times are unequal they can be better at the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, islice, product

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotFit
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import v_positions
from solver.schedules.weights import with_weights
from solver.tables import NO_LIMIT

_PERIOD = 6
#: Largest sum of the turns of a block; longer ones only add to the lifespans.
_MOST_TURN = 10
#: Blocks tried at most of the schedule's own hops, and of each of the others.
_OWN_BLOCKS, _OTHER_BLOCKS = 18, 6
#: Ops placed at most, over all variants; one is built in any case.
_WORK = 300_000
#: How W's wait and how ops overtake (see ``with_weights``): variants in the order in which they are tried.
_VARIANTS = (
    (None, True),
    (0.5, True),
    (0.0, True),
    (0.5, False),
    (0.0, False),
    (1.0, True),
    (0.25, True),
    (1.0, False),
)
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
    D, work = v_positions(problem), _WORK
    limits = _limits(problem, chunks)
    found = [
        _unrolled(problem, block)
        for number, row in enumerate(hops)
        for block in islice(blocks(D, row[: D - 1]), _OTHER_BLOCKS if number else _OWN_BLOCKS)
    ]
    candidates: list[Ops] = []
    for (overtake, lazy), orders in product(_VARIANTS, found):
        if candidates and work <= 0:
            break
        work -= 3 * problem.num_stages * problem.num_microbatches
        bare = [[step for step in order if step.kind != Kind.W] for order in orders]
        try:
            candidates.append(in_order(problem, with_weights(problem, bare, limits, lazy=lazy, overtake=overtake)))
        except DoesNotFit:
            continue
    value = metrics.span if objective == "span" else lambda _, ops: semantics.makespan(ops)
    if candidates:
        return min(candidates, key=lambda ops: value(problem, ops))
    return min(
        (in_order(problem, orders) for orders in found),
        key=lambda ops: (max(memory.peaks(problem, ops)), value(problem, ops)),
    )


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
