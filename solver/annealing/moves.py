"""Simulated annealing of sequences of compute ops and transfers (compiled where numba is there).

A move takes an op of a critical path a few places forwards or back in its lane, a transfer in its group's sequence, has
a microbatch stay or go, or changes how much of it goes. Where only one microbatch fits whole, hardly any op can pass
another one alone: there also a block (F and its O; R, its B and W) passes the next one. Now and then those that follow
do the same. Or two microbatches change places, on all stages up to one: one on the host can let others overtake it.
Each move is timed as a whole (``clock``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from solver.annealing.clock import INFINITE, Item, Walk, earliest_times
from solver.annealing.exchange import alike, exchange_microbatches
from solver.annealing.kernel import random_number
from solver.annealing.places import (
    BACKWARD,
    FORWARD,
    MOST_SHIFTS,
    OUT,
    WEIGHT,
    bring_near,
    set_moved,
    shift,
    take_back,
)
from solver.compiled import compiled

#: Slots of ``state`` after the random number generator's: the present value, the best one, the last makespan, that of
#: the best one.
PRESENT, BEST, LENGTH, SHORTEST, SLOTS = 1, 2, 3, 4, 5
#: What goes changes by multiples of one part in so many.
_PARTS = 16
#: Relative: a difference that counts. What the mean end of the devices weighs beside the last one.
_SMALL, _ENDS = 1e-9, 1e-3
#: Chances: of an op of a critical path; of a change of what goes nearby, or of a critical transfer, instead of a place.
_CRITICAL, _MOVES, _SHARES = 0.9, 0.1, 0.3
#: Chances of a block's move where only one microbatch fits whole (with more room it has not been seen to help), and
#: that a backward may overtake another one of its stage then. Ops in a block, at most.
_BLOCKS, _OVERTAKES, BLOCK = 0.1, 0.5, 3
#: Chances, where two microbatches change places: that what goes does with them; that they do so on one stage alone;
#: that one does so with its neighbours in turn, instead of with one that is farther away.
_ALONG, _ALONE, _IN_TURN = 0.5, 0.2, 0.5
#: Chances of a move forwards, or of the op before being put off, instead of a move back; about how far.
_EARLIER, _PUT_OFF, _FAR = 0.5, 0.85, 2.5
#: Places around an op in which another microbatch to stay or go is looked for.
_NEAR = 24
#: Chance that the microbatches that follow do the same, and about how many of them do.
_REPEATED, _REPEATS = 0.25, 4.0


@compiled
def value_of(walk: Walk, limit: float, state: Any) -> float:
    """The makespan, and a little for devices that end late (ms); infinite where the sequences contradict themselves or
    it exceeds ``limit``. ``state`` takes down the makespan."""
    latest = earliest_times(walk, limit)
    if latest >= INFINITE:
        return INFINITE
    state[LENGTH] = latest
    ends = 0.0
    for d in range(len(walk.yards)):
        if walk.last[d] >= 0:
            ends += walk.items[walk.last[d]].end
    return latest + _ENDS * ends / len(walk.yards)


@compiled
def _may_pass(items: Sequence[Item], order: Any, source: int, target: int, overtake: bool) -> bool:
    """Whether the op at ``source`` may pass all ops up to ``target``; with ``overtake`` also those of its key."""
    x = order[source]
    step = 1 if target > source else -1
    p = source
    while p != target:
        p += step
        v = order[p]
        if items[v].active == 0:
            continue
        if items[v].key == items[x].key and not overtake:
            return False
        first = x if step > 0 else v
        second = items[v] if step > 0 else items[x]
        if second.wait0 == first or second.wait1 == first or second.wait2 == first:
            return False
    return True


@compiled
def _critical(walk: Walk, found: Any) -> int:
    """The ops of a critical path, last first, into ``found``; how many."""
    items = walk.items
    u = -1
    for k in range(len(walk.last)):
        v = walk.last[k]
        if v >= 0 and (u < 0 or items[v].end > items[u].end):
            u = v
    count = 0
    while u >= 0:
        found[count] = u
        count += 1
        u = items[u].cause
    return count


@compiled
def _hop(walk: Walk, source: int, far: int, step: int) -> int:
    """The place of the compute op ``far`` before or after the one at ``source`` on its device; fewer where there are no
    more."""
    items, order = walk.items, walk.order
    item = items[order[source]]
    group = walk.groups[item.group]
    found = source
    p = source + step
    while far > 0 and group.first <= p < group.end:
        if items[order[p]].is_compute and items[order[p]].device == item.device:
            found = p
            far -= 1
        p += step
    return found


@compiled
def _other_moved(item: Item, parts: bool, state: Any) -> int:
    """Other bytes to go: none or all; with ``parts`` also a little less or more."""
    moved = item.free
    if not parts or random_number(state) < 0.5:
        return 0 if moved > 0 else item.whole
    if moved == 0:
        moved = item.whole
    step = (1 + int(random_number(state) * 4)) * max(1, item.whole // _PARTS)
    if random_number(state) < 0.5:
        step = -step
    return min(item.whole, max(1, moved + step))


@compiled
def _have_go(walk: Walk, undo: Any, out: int, moved: int, lag: int) -> None:
    """Have a microbatch move so many bytes. One that did not go before leaves right after its F and is back ``lag``
    places before its backward."""
    items, order = walk.items, walk.order
    there = items[out]
    before = there.free
    set_moved(items, out, moved)
    if before == 0 and moved > 0:
        p = items[there.own].place
        shift(items, order, undo, there.place, p + 1 if there.place > p else p)
        bring_near(walk, undo, there.back, lag)


@compiled
def _move_transfer(walk: Walk, undo: Any, u: int, far: int) -> bool:
    """A transfer so many places on (back, if below 0) in its group's sequence; whether that could be done."""
    items, order = walk.items, walk.order
    item = items[u]
    group = walk.groups[item.group]
    source = item.place
    target = min(group.end - 1, max(group.first, source + far))
    if item.active == 0 or source == target or not _may_pass(items, order, source, target, False):
        return False
    shift(items, order, undo, source, target)
    return True


@compiled
def _move_compute(walk: Walk, undo: Any, u: int, far: int) -> bool:
    """A compute op so many places on (back, if below 0) in its lane; whether that could be done.

    A microbatch's transfers keep beside the ops that they belong to.
    """
    items, order = walk.items, walk.order
    item = items[u]
    source = item.place
    step = 1 if far > 0 else -1
    target = _hop(walk, source, abs(far), step)
    if source == target:
        return False
    mate = -1
    if item.role == FORWARD:
        mate = item.out
    elif item.role == BACKWARD:
        mate = item.back
    if mate >= 0 and items[mate].active == 0:
        mate = -1
    if mate >= 0:
        p = items[mate].place
        if item.role == FORWARD and source < p <= target:
            shift(items, order, undo, p, target)
            target -= 1
        elif item.role == BACKWARD and target <= p < source:
            shift(items, order, undo, p, target)
            target += 1
    if not _may_pass(items, order, source, target, False):
        return False
    shift(items, order, undo, source, target)
    if mate >= 0 and item.role == FORWARD and step < 0:
        shift(items, order, undo, items[mate].place, target + 1)
    return True


@compiled
def _block_of(items: Sequence[Item], u: int, block: Any) -> int:
    """What moves together with ``u``, in its order, into ``block``: F and its O, or R, its B and W; how many ops."""
    item = items[u]
    first, second, third = item.own if item.role == OUT else u, item.out, -1
    if item.role != FORWARD and item.role != OUT:
        second = u if item.role == BACKWARD else item.own
        first, third = items[second].back, items[second].weight
    count = 0
    for v in (first, second, third):
        if v >= 0 and items[v].active:
            block[count] = v
            count += 1
    return count


@compiled
def _beyond(items: Sequence[Item], order: Any, place: int, step: int) -> int:
    """Where the block of the compute op at ``place`` ends (``step`` 1) or, from there on back, begins (-1)."""
    v = order[place]
    if step < 0 and items[v].role == WEIGHT:
        v = items[v].own
    mate = -1
    if step < 0 and items[v].role == BACKWARD:
        mate = items[v].back
    elif step > 0 and items[v].role == FORWARD:
        mate = items[v].out
    elif step > 0 and items[v].role == BACKWARD:
        mate = items[v].weight
    if mate >= 0 and items[mate].active and (items[mate].place - items[v].place) * step > 0:
        v = mate
    return items[v].place


@compiled
def _move_block(walk: Walk, undo: Any, u: int, step: int, overtake: bool, block: Any) -> bool:
    """The block of ``u`` past the next one (``step`` 1) or the one before it (-1) of its device; whether that could be
    done. The block is closed up."""
    items, order = walk.items, walk.order
    count = _block_of(items, u, block)
    place = items[block[count - 1 if step > 0 else 0]].place
    target = _hop(walk, place, 1, step)
    if target == place:
        return False
    target = _beyond(items, order, target, step)
    overtake = overtake and items[u].role != FORWARD and items[u].role != OUT
    for k in range(count):
        x = block[count - 1 - k if step > 0 else k]
        source = items[x].place
        if (target - source) * step <= 0:
            break
        if not _may_pass(items, order, source, target, overtake):
            return False
        shift(items, order, undo, source, target)
        target -= step
    return True


@compiled
def anneal_some(
    walk: Walk,
    best: Any,
    scratch: Any,
    state: Any,
    proposals: int,
    hot: float,
    cold: float,
    goal: float,
    parts: bool,
    exchanges: float,
) -> None:
    """``proposals`` moves, the temperature (ms) going from ``hot`` to ``cold``; stops at makespan ``goal``.

    ``walk`` is the present schedule and changes; ``best`` (order, bytes that go) keeps the best one. Without ``parts``
    a microbatch goes as a whole or not at all. ``exchanges``: the chance that microbatches change places.
    """
    items, order = walk.items, walk.order
    critical, undo, changed, before, block = scratch
    n = len(order)
    value_of(walk, INFINITE, state)
    count = _critical(walk, critical)
    cooling = math.log(cold / hot) / proposals
    for k in range(proposals):
        if state[SHORTEST] <= goal:
            return
        u = int(random_number(state) * n)
        if random_number(state) < _CRITICAL:
            u = critical[int(random_number(state) * count)]
        item = items[u]
        limit = state[PRESENT] - hot * math.exp(cooling * k) * math.log(1.0 - random_number(state))
        choice, other = random_number(state), random_number(state)
        far = 1 + int(-_FAR * math.log(1.0 - random_number(state)))
        times = 1
        if random_number(state) < _REPEATED:
            times = 2 + int(-_REPEATS * math.log(1.0 - random_number(state)))
        moved = -1
        mate = -1
        turns = side = 0
        exchange = exchanges > 0.0 and random_number(state) < exchanges
        together = not exchange and choice > 1.0 - _BLOCKS and walk.yards[item.device].alone == 1
        overtake = False
        if exchange:
            if item.role >= WEIGHT:
                u = item.own
            turns = 1
            if random_number(state) < _IN_TURN:
                turns, far = far, 1
            side = 1 if other < 0.5 else -1
            mate = alike(walk, u, far, side)
            if mate < 0:
                continue
        elif together:
            far = -1 if other < _EARLIER else 1
            overtake = random_number(state) < _OVERTAKES
        elif choice < _MOVES:
            group = walk.groups[item.group]
            p = item.place + int((2.0 * other - 1.0) * _NEAR)
            u = items[order[min(group.end - 1, max(group.first, p))]].out
            if u < 0:
                continue
            moved = _other_moved(items[u], parts, state)
        elif item.role >= OUT and choice < _SHARES:
            u = item.out
            moved = _other_moved(items[u], parts, state)
        elif item.role >= OUT:
            far = far if other < 0.5 else -far
        elif other < _EARLIER:
            far = -far
        elif other < _PUT_OFF:
            u = order[_hop(walk, item.place, 1, -1)]
        undo[0] = 0
        pairs = 0
        done = 0
        if mate >= 0:
            along, alone = random_number(state) < _ALONG, random_number(state) < _ALONE
            while mate >= 0 and done < turns and undo[0] < MOST_SHIFTS:
                pairs = exchange_microbatches(walk, undo, changed, before, pairs, u, mate, along, alone, far)
                done += 1
                mate = alike(walk, u, 1, side)
            u = -1
        while u >= 0 and done < times and undo[0] < MOST_SHIFTS:
            if moved >= 0:
                changed[done] = u
                before[done] = items[u].free
                pairs += 1
                _have_go(walk, undo, u, moved, far - 1)
            elif together:
                if not _move_block(walk, undo, u, far, overtake, block):
                    break
            elif items[u].role >= OUT:
                if not _move_transfer(walk, undo, u, far):
                    break
            elif not _move_compute(walk, undo, u, far):
                break
            done += 1
            u = items[u].following
        value = INFINITE
        if done > 0:
            value = value_of(walk, limit, state)
        if value > limit:
            take_back(items, order, undo)
            for i in range(pairs - 1, -1, -1):
                set_moved(items, changed[i], before[i])
            continue
        state[PRESENT] = value
        count = _critical(walk, critical)
        if value < state[BEST] * (1.0 - _SMALL):
            state[BEST] = value
            state[SHORTEST] = state[LENGTH]
            for i in range(n):
                best[0][i] = order[i]
                best[1][i] = items[i].free
