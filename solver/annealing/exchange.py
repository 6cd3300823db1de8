"""Two microbatches change places: one on the host lets others overtake it (compiled where numba is there)."""

from __future__ import annotations

from typing import Any

from solver.annealing.clock import Walk
from solver.annealing.places import FORWARD, MOST_SHIFTS, bring_near, set_moved, swap
from solver.compiled import compiled


@compiled
def alike(walk: Walk, u: int, far: int, step: int) -> int:
    """The op of ``u``'s kind and stage that is so many of these on (``step`` 1) or back (-1) in the sequence, or -1."""
    items, order = walk.items, walk.order
    group = walk.groups[items[u].group]
    p = items[u].place + step
    found = -1
    while far > 0 and group.first <= p < group.end:
        if items[order[p]].key == items[u].key:
            found = order[p]
            far -= 1
        p += step
    return found


@compiled
def _exchange_forwards(walk: Walk, undo: Any, u: int, v: int, along: bool, lag: int) -> bool:
    """Two forwards of a stage change places; whether what goes of them is to be exchanged, too.

    With ``along`` their offloads do as well, so that what a place frees stays as it is.
    """
    items, order = walk.items, walk.order
    swap(items, order, undo, u, v)
    a, b = items[u].out, items[v].out
    if not along or a < 0 or items[a].active + items[b].active == 0:
        return False
    swap(items, order, undo, a, b)
    if items[a].active == 0:
        bring_near(walk, undo, items[a].back, lag)
    if items[b].active == 0:
        bring_near(walk, undo, items[b].back, lag)
    return True


@compiled
def _exchange_backwards(walk: Walk, undo: Any, u: int, v: int, along: bool, lag: int) -> bool:
    """Two backwards of a stage change places, with their W's and reloads; whether what goes of them is to be exchanged.

    With ``along`` their offloads do as well, so that only the forwards stay where they are.
    """
    items, order = walk.items, walk.order
    swap(items, order, undo, u, v)
    if items[u].weight >= 0 and items[v].weight >= 0:
        swap(items, order, undo, items[u].weight, items[v].weight)
    a, b = items[u].out, items[v].out
    if a < 0 or items[a].active + items[b].active == 0:
        return False
    if along or items[a].active + items[b].active == 2:
        swap(items, order, undo, items[a].back, items[b].back)
    elif items[a].active:
        bring_near(walk, undo, items[a].back, lag)
    else:
        bring_near(walk, undo, items[b].back, lag)
    if along:
        swap(items, order, undo, a, b)
    return along


@compiled
def exchange_microbatches(
    walk: Walk, undo: Any, changed: Any, before: Any, pairs: int, u: int, v: int, along: bool, alone: bool, lag: int
) -> int:
    """The microbatches of two forwards or two backwards of a stage change places there and (unless ``alone``) on all
    stages before it. Pairs of transfers that now move other bytes are noted in ``changed``, ``before`` after the first
    ``pairs``; how many there are now."""
    items = walk.items
    while u >= 0 and v >= 0 and undo[0] < MOST_SHIFTS:
        if items[u].role == FORWARD:
            bytes_too = _exchange_forwards(walk, undo, u, v, along, lag)
        else:
            bytes_too = _exchange_backwards(walk, undo, u, v, along, lag)
        if bytes_too:
            a, b = items[u].out, items[v].out
            changed[pairs], before[pairs] = a, items[a].free
            changed[pairs + 1], before[pairs + 1] = b, items[b].free
            set_moved(items, a, before[pairs + 1])
            set_moved(items, b, before[pairs])
            pairs += 2
        if alone:
            break
        u, v = items[u].upstream, items[v].upstream
    return pairs
