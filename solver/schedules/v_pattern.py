"""V-Half and V-Min (arXiv:2405.15362): schedules from a building block on a V placement, for half or a third of the
activations that 1F1B holds.

A building block is the times, in units of one op, at which a microbatch passes the devices; the next microbatch follows
six units later, the time of its F, B and W on both chunks of a device. Hops from device to device of both chunks' F
and B are (2, 1, 2, 1) for V-Half, all 1 for V-Min: the sum of a device's lifespans, and with it its memory, is the same
on all devices and in proportion to the sum of the hops. The turns at both ends of the V are the smallest that let no
two ops of a device fall on the same of the six units. W's take the units that are left.

Only the order of the block matters: each op then runs as early as it can, whatever the times are. W's are then put into
the gaps that other times than equal ones leave, within the memory that the block needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotFit
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import v_positions
from solver.schedules.weights import with_weights

_PERIOD = 6
#: Largest sum of the turns of a block; longer ones only add to the lifespans.
_MOST_TURN = 10
#: Ops placed at most, over all blocks tried; one block is tried in any case.
_WORK = 300_000
Hops = tuple[int, int, int, int]
Times = tuple[int, int, int, int]


def v_half(problem: Problem, *, objective: str = "makespan") -> Ops:
    """V-Half: about half of 1F1B's activations on every device.

    Raises
    ------
    DoesNotApply
        No V placement.
    """
    return _best(problem, [(2, 1, 2, 1), (1, 2, 2, 1)], objective)


def v_min(problem: Problem, *, objective: str = "makespan") -> Ops:
    """V-Min: about a third of 1F1B's activations on every device.

    Raises
    ------
    DoesNotApply
        No V placement.
    """
    return _best(problem, [(1, 1, 1, 1)], objective)


def _best(problem: Problem, hops: list[Hops], objective: str) -> Ops:
    """The best of the blocks that need the least memory, with W's where the block has them or where they cost least."""
    D = v_positions(problem)
    most = max(1, _WORK // (18 * problem.num_stages * problem.num_microbatches))
    patterns = islice((block for row in hops for block in blocks(D, row)), most)
    found = [_unrolled(problem, block) for block in patterns]
    timed = [in_order(problem, orders) for orders in found]
    peaks = [max(memory.peaks(problem, ops)) for ops in timed]
    budgets = [min(peaks)] * D
    candidates = [ops for ops, peak in zip(timed, peaks, strict=True) if peak == min(peaks)]
    for orders in found:
        bare = [[step for step in order if step.kind != Kind.W] for order in orders]
        for lazy in (True, False):
            try:
                candidates.append(in_order(problem, with_weights(problem, bare, budgets, lazy=lazy)))
            except DoesNotFit:
                continue
    value = metrics.span if objective == "span" else lambda _, ops: semantics.makespan(ops)
    return min(candidates, key=lambda ops: value(problem, ops))


def blocks(D: int, hops: Hops) -> Iterator[list[Times]]:
    """Building blocks, shortest turns first: per device of the V the times of F, of F and B of the later chunk, of B.

    No two of a device fall on the same unit of the period.
    """
    turns = sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda t: (sum(t), t))
    seen = set()
    for turn in turns:
        if sum(turn) > _MOST_TURN:
            return
        times = [_device_times(D, i, hops, turn) for i in range(D)]
        order = tuple(tuple(sorted(range(4), key=row.__getitem__)) for row in times)
        units = tuple(tuple(t % _PERIOD for t in row) for row in times)
        if all(len(set(row)) == 4 for row in units) and (units, order) not in seen:
            seen.add((units, order))
            yield times


def _device_times(D: int, i: int, hops: Hops, turns: tuple[int, ...]) -> Times:
    down, up = i, D - 1 - i
    f0 = down * hops[0]
    f1 = (D - 1) * hops[0] + turns[0] + up * hops[1]
    b1 = (D - 1) * (hops[0] + hops[1]) + turns[0] + turns[1] + down * hops[2]
    b0 = (D - 1) * (hops[0] + hops[1] + hops[2]) + sum(turns) + up * hops[3]
    return f0, f1, b1, b0


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
