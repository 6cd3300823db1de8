"""Ops that change places in a sequence, bytes that go or stay, and the way back (compiled where numba is there)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from solver.annealing.clock import Item, Walk
from solver.compiled import compiled

#: Roles of ops: F, B or BW, W, O, R.
FORWARD, BACKWARD, WEIGHT, OUT, BACK = range(5)
#: Shifts and swaps after which a move does no more.
MOST_SHIFTS = 120
#: Slots of ``undo``: how many shifts and swaps, and for each from where to where (a swap: -1 - where).
UNDO = 2 * (MOST_SHIFTS + 8) + 1


@compiled
def shift(items: Sequence[Item], order: Any, undo: Any, source: int, target: int) -> None:
    """Move the op at ``source`` to ``target``; those in between give way. ``undo`` takes down the way back."""
    x = order[source]
    step = 1 if target > source else -1
    p = source
    while p != target:
        v = order[p + step]
        order[p] = v
        items[v].place = p
        p += step
    order[target] = x
    items[x].place = target
    if undo[0] >= 0:
        undo[1 + 2 * undo[0]] = target
        undo[2 + 2 * undo[0]] = source
        undo[0] += 1


@compiled
def swap(items: Sequence[Item], order: Any, undo: Any, u: int, v: int) -> None:
    """Two ops of one group change places. ``undo`` takes it down."""
    a, b = items[u].place, items[v].place
    order[a], order[b] = v, u
    items[u].place, items[v].place = b, a
    if undo[0] >= 0:
        undo[1 + 2 * undo[0]] = a
        undo[2 + 2 * undo[0]] = -1 - b
        undo[0] += 1


@compiled
def take_back(items: Sequence[Item], order: Any, undo: Any) -> None:
    """Take all shifts and swaps back, the last one first."""
    count = undo[0]
    undo[0] = -1
    for k in range(count - 1, -1, -1):
        if undo[2 + 2 * k] < 0:
            swap(items, order, undo, order[undo[1 + 2 * k]], order[-1 - undo[2 + 2 * k]])
        else:
            shift(items, order, undo, undo[1 + 2 * k], undo[2 + 2 * k])


@compiled
def set_moved(items: Sequence[Item], out: int, moved: int) -> None:
    """Have a pair of transfers move so many bytes; 0: none."""
    there, back = items[out], items[items[out].back]
    there.active = back.active = 1 if moved > 0 else 0
    there.free = back.take = moved
    there.duration = there.full * moved / there.whole
    back.duration = back.full * moved / back.whole


@compiled
def bring_near(walk: Walk, undo: Any, back: int, lag: int) -> None:
    """A reload to ``lag`` places before its backward."""
    items, order = walk.items, walk.order
    p = max(items[items[back].out].place + 1, items[items[back].own].place - lag)
    shift(items, order, undo, items[back].place, p if items[back].place > p else p - 1)
