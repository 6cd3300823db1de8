"""Simulated annealing of device orders along critical paths (compiled where numba is there).

A move takes one op out of its device's order and puts it in a few places earlier or later. Where it would lead is
first estimated from the heads and tails of the ops that it shifts (Taillard's estimate for job shops: exact for the
paths through these ops as long as nothing else shifts); only what passes is applied and timed.
"""

from __future__ import annotations

import math
from typing import Any

from solver.compiled import compiled

#: Slots of ``state``: the random number generator's, the present makespan, the best one.
RANDOM, PRESENT, BEST = range(3)
_INFINITE = 1e300
#: Of the makespan: a difference that counts.
_SMALL = 1e-9


@compiled
def random_number(state: Any) -> float:
    """A number in [0, 1): the same sequence with and without numba."""
    state[RANDOM] = (state[RANDOM] * 1664525.0 + 1013904223.0) % 4294967296.0
    # The low bits of such a generator are poor; a second step mixes them.
    high = state[RANDOM]
    state[RANDOM] = (state[RANDOM] * 1664525.0 + 1013904223.0) % 4294967296.0
    return ((high + state[RANDOM] / 4294967296.0) / 4294967296.0) % 1.0


@compiled
def time_heads(
    duration: Any,
    device: Any,
    before_first: Any,
    before: Any,
    before_lag: Any,
    after_first: Any,
    after: Any,
    order_first: Any,
    order: Any,
    place: Any,
    head: Any,
    waiting: Any,
    sweep: Any,
) -> float:
    """Earliest starts for given orders, into ``head``; ``sweep`` becomes an order that respects all waits.

    The makespan, or infinity where the orders contradict the data.
    """
    n = len(duration)
    count = 0
    for u in range(n):
        k = before_first[u + 1] - before_first[u]
        if place[u] > order_first[device[u]]:
            k += 1
        waiting[u] = k
        if k == 0:
            sweep[count] = u
            count += 1
    latest = 0.0
    k = 0
    while k < count:
        u = sweep[k]
        k += 1
        d = device[u]
        p = place[u]
        time = 0.0
        if p > order_first[d]:
            v = order[p - 1]
            time = head[v] + duration[v]
        for e in range(before_first[u], before_first[u + 1]):
            v = before[e]
            ready = head[v] + duration[v] + before_lag[e]
            if ready > time:
                time = ready
        head[u] = time
        if time + duration[u] > latest:
            latest = time + duration[u]
        for e in range(after_first[u], after_first[u + 1]):
            v = after[e]
            waiting[v] -= 1
            if waiting[v] == 0:
                sweep[count] = v
                count += 1
        if p + 1 < order_first[d + 1]:
            v = order[p + 1]
            waiting[v] -= 1
            if waiting[v] == 0:
                sweep[count] = v
                count += 1
    if count < n:
        return _INFINITE
    return latest


@compiled
def time_tails(
    duration: Any,
    device: Any,
    after_first: Any,
    after: Any,
    after_lag: Any,
    order_first: Any,
    order: Any,
    place: Any,
    sweep: Any,
    tail: Any,
) -> None:
    """The longest way from the end of each op to the end of all, into ``tail``."""
    for k in range(len(sweep) - 1, -1, -1):
        u = sweep[k]
        p = place[u]
        longest = 0.0
        if p + 1 < order_first[device[u] + 1]:
            v = order[p + 1]
            longest = duration[v] + tail[v]
        for e in range(after_first[u], after_first[u + 1]):
            v = after[e]
            way = after_lag[e] + duration[v] + tail[v]
            if way > longest:
                longest = way
        tail[u] = longest


@compiled
def _critical(duration: Any, head: Any, tail: Any, order_first: Any, order: Any, makespan: float, found: Any) -> int:
    """Ops on some longest path that start right when their device's op before them ends, into ``found``; how many."""
    count = 0
    slack = _SMALL * makespan
    for d in range(len(order_first) - 1):
        for p in range(order_first[d] + 1, order_first[d + 1]):
            u = order[p]
            if head[u] + duration[u] + tail[u] >= makespan - slack:
                v = order[p - 1]
                if head[v] + duration[v] >= head[u] - slack:
                    found[count] = u
                    count += 1
    return count


@compiled
def _allowed(sequence: Any, before_first: Any, before: Any, order: Any, source: int, target: int) -> bool:
    """Whether the op at ``source`` may pass all ops up to ``target``."""
    x = order[source]
    step = 1 if target > source else -1
    p = source
    while p != target:
        p += step
        v = order[p]
        if sequence[v] == sequence[x]:
            return False
        first, second = (x, v) if step > 0 else (v, x)
        for e in range(before_first[second], before_first[second + 1]):
            if before[e] == first:
                return False
    return True


@compiled
def _shift(order: Any, place: Any, source: int, target: int) -> None:
    """Move the op at ``source`` to ``target``; those in between give way."""
    x = order[source]
    step = 1 if target > source else -1
    p = source
    while p != target:
        v = order[p + step]
        order[p] = v
        place[v] = p
        p += step
    order[target] = x
    place[x] = target


@compiled
def _fits(take: Any, free: Any, level: Any, order: Any, source: int, target: int, first: int, budget: int) -> bool:
    """Whether memory allows the move; ``level[p]``: bytes held after the op at p."""
    low, high = (source, target) if source < target else (target, source)
    x = order[source]
    held = level[low - 1] if low > first else 0
    for p in range(low, high + 1):
        v = x
        if p != target:
            v = order[p - 1] if target == low else order[p + 1]
        held += take[v]
        if held > budget:
            return False
        held -= free[v]
    return True


@compiled
def _estimate(
    duration: Any,
    before_first: Any,
    before: Any,
    before_lag: Any,
    after_first: Any,
    after: Any,
    after_lag: Any,
    order: Any,
    head: Any,
    tail: Any,
    source: int,
    target: int,
    first: int,
    end: int,
    shifted: Any,
    fresh: Any,
) -> float:
    """The longest path through the ops that the move shifts, from the present heads and tails of all others."""
    low, high = (source, target) if source < target else (target, source)
    count = high - low + 1
    x = order[source]
    for k in range(count):
        p = low + k
        shifted[k] = x
        if p != target:
            shifted[k] = order[p - 1] if target == low else order[p + 1]
    time = 0.0
    if low > first:
        v = order[low - 1]
        time = head[v] + duration[v]
    for k in range(count):
        u = shifted[k]
        for e in range(before_first[u], before_first[u + 1]):
            v = before[e]
            ready = head[v] + duration[v] + before_lag[e]
            if ready > time:
                time = ready
        fresh[k] = time
        time += duration[u]
    longest = 0.0
    way = 0.0
    if high + 1 < end:
        v = order[high + 1]
        way = duration[v] + tail[v]
    for k in range(count - 1, -1, -1):
        u = shifted[k]
        for e in range(after_first[u], after_first[u + 1]):
            v = after[e]
            other = after_lag[e] + duration[v] + tail[v]
            if other > way:
                way = other
        way += duration[u]
        if fresh[k] + way > longest:
            longest = fresh[k] + way
    return longest


@compiled
def _levels(take: Any, free: Any, order: Any, level: Any, first: int, end: int) -> None:
    held = 0
    for p in range(first, end):
        held += take[order[p]] - free[order[p]]
        level[p] = held


@compiled
def anneal_some(
    duration: Any,
    device: Any,
    take: Any,
    free: Any,
    sequence: Any,
    before_first: Any,
    before: Any,
    before_lag: Any,
    after_first: Any,
    after: Any,
    after_lag: Any,
    order_first: Any,
    order: Any,
    budget: Any,
    place: Any,
    head: Any,
    tail: Any,
    level: Any,
    best: Any,
    scratch_ints: Any,
    scratch_floats: Any,
    state: Any,
    proposals: int,
    hot: float,
    cold: float,
    goal: float,
) -> None:
    """``proposals`` moves, the temperature (ms) going from ``hot`` to ``cold``; stops at makespan ``goal``.

    ``order``, ``place``, ``head``, ``tail``, ``level`` are the present schedule and change; ``best`` keeps the best
    order. ``scratch_ints`` (4 n) and ``scratch_floats`` (2 n) are room to work in.
    """
    n = len(duration)
    waiting, sweep, critical, shifted = scratch_ints
    trial, fresh = scratch_floats
    time_heads(
        duration, device, before_first, before, before_lag, after_first, after, order_first, order, place, head,
        waiting, sweep,
    )  # fmt: skip
    time_tails(duration, device, after_first, after, after_lag, order_first, order, place, sweep, tail)
    count = _critical(duration, head, tail, order_first, order, state[PRESENT], critical)
    cooling = math.log(cold / hot) / proposals
    for k in range(proposals):
        if state[BEST] <= goal:
            return
        u = int(random_number(state) * n)
        if count > 0 and random_number(state) < 0.9:
            u = critical[int(random_number(state) * count)]
        d = device[u]
        first, end = order_first[d], order_first[d + 1]
        source = place[u]
        far = 1 + int(-2.5 * math.log(1.0 - random_number(state)))
        choice = random_number(state)
        if choice < 0.5:
            target = max(first, source - far)
        elif choice < 0.85:
            source -= 1
            if source < first:
                continue
            target = min(end - 1, source + far)
        else:
            target = min(end - 1, source + far)
        limit = state[PRESENT] - hot * math.exp(cooling * k) * math.log(1.0 - random_number(state))
        if source == target or not _allowed(sequence, before_first, before, order, source, target):
            continue
        expected = _estimate(
            duration, before_first, before, before_lag, after_first, after, after_lag, order, head, tail, source,
            target, first, end, shifted, fresh,
        )  # fmt: skip
        if expected > limit:
            continue
        if not _fits(take, free, level, order, source, target, first, budget[d]):
            continue
        _shift(order, place, source, target)
        value = time_heads(
            duration, device, before_first, before, before_lag, after_first, after, order_first, order, place, trial,
            waiting, sweep,
        )  # fmt: skip
        if value > limit:
            _shift(order, place, target, source)
            continue
        state[PRESENT] = value
        for i in range(n):
            head[i] = trial[i]
        time_tails(duration, device, after_first, after, after_lag, order_first, order, place, sweep, tail)
        _levels(take, free, order, level, first, end)
        count = _critical(duration, head, tail, order_first, order, value, critical)
        if value < state[BEST] * (1.0 - _SMALL):
            state[BEST] = value
            for i in range(n):
                best[i] = order[i]
