"""The clock of schedules with transfers: earliest times for one order a group of devices (compiled where numba is).

A group is the devices that share channels, mostly a single one. Its *sequence* is one order of all its ops, compute and
transfers. Each lane (a device's compute, a channel) does its ops in this order. What takes memory takes it in this
order: it waits for the earliest of the frees before it in the sequence that make room, and for those that the takes
before it needed. So at any time what has been taken is a part of the sequence up to some take, and all that this take
counted on is free: where there is a time for every op, memory suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from solver.compiled import compiled

INFINITE = 1e300
#: What an op waits for, and the lanes that it needs, at most.
WAITS, LANES = 3, 2


@dataclass(slots=True, eq=False)
class Item:
    """One op.

    Attributes
    ----------
    duration, start, end
        ms.
    take, free
        Bytes taken at its start and given back at its end.
    device, group, is_compute
        Where it runs.
    active
        0: a transfer of a microbatch that stays.
    stamp
        The number of the last run of the clock that gave it a time.
    wait0, wait1, wait2, lag0, lag1, lag2
        The ops that it comes after by its data (-1: none), and the ms in between.
    lane0, lane1
        What it keeps busy (-1: nothing).
    cause
        The op that it waited for last, or -1.
    waiting, waiting_stamp
        The group that waits for it, in the run with that number.
    place
        Where it is in ``order``.
    role
        See ``places``.
    key
        What ops that keep their order have in common.
    out, back
        The transfers of the same microbatch, or -1.
    own
        Of a transfer: the F or backward that it belongs to; of a W: its B.
    weight
        Of a B: its W, or -1.
    following
        The op of the same kind and stage of the next microbatch, or -1.
    upstream
        Of a F, B or BW: the same of the stage before, or -1.
    whole, full
        Of a transfer: the bytes that can go, and how long all of them take.
    """

    duration: float
    start: float
    end: float
    lag0: float
    lag1: float
    lag2: float
    take: int
    free: int
    device: int
    group: int
    is_compute: int
    active: int
    stamp: int
    wait0: int
    wait1: int
    wait2: int
    lane0: int
    lane1: int
    cause: int
    waiting: int
    waiting_stamp: int
    place: int
    role: int
    key: int
    out: int
    back: int
    own: int
    weight: int
    following: int
    upstream: int
    whole: int
    full: float


@dataclass(slots=True, eq=False)
class Yard:
    """One device.

    Attributes
    ----------
    budget, level
        Bytes that there are; bytes in use as the takes so far see it.
    alone
        1: only one microbatch of a stage fits whole.
    work, left
        ms of compute in all, and from here on.
    needed
        The last op whose free a take counted on, or -1.
    computes, computes_next, computes_end, transfers, transfers_next, transfers_end
        Where in ``freed`` its ops that have given memory back are: from where, those not counted on yet.
    """

    budget: int
    level: int
    alone: int
    work: float
    left: float
    needed: int
    computes: int
    computes_next: int
    computes_end: int
    transfers: int
    transfers_next: int
    transfers_end: int


@dataclass(slots=True, eq=False)
class Group:
    """Where in ``order`` the ops of a group are, and how far the clock is."""

    first: int
    end: int
    pointer: int


class Walk(NamedTuple):
    """Sequences, and what the clock needs.

    Attributes
    ----------
    items, yards, groups
        Records of ops, devices, groups.
    order
        The ops, group after group, each in its sequence.
    last, stack, freed
        Room to work in: a number a lane, a group, an op. ``stamps[0]`` counts the runs of the clock.
    """

    items: Sequence[Item]
    yards: Sequence[Yard]
    groups: Sequence[Group]
    order: Any
    last: Any
    stack: Any
    freed: Any
    stamps: Any


@compiled
def _make_room(items: Sequence[Item], yard: Yard, freed: Any) -> bool:
    """Count on the earliest frees until what is taken fits; whether there are enough."""
    while yard.level > yard.budget:
        if yard.computes_next < yard.computes_end:
            v = freed[yard.computes_next]
            if yard.transfers_next < yard.transfers_end and items[freed[yard.transfers_next]].end < items[v].end:
                v = freed[yard.transfers_next]
                yard.transfers_next += 1
            else:
                yard.computes_next += 1
        elif yard.transfers_next < yard.transfers_end:
            v = freed[yard.transfers_next]
            yard.transfers_next += 1
        else:
            return False
        yard.level -= items[v].free
        if yard.needed < 0 or items[v].end > items[yard.needed].end:
            yard.needed = v
    return True


@compiled
def _begin(walk: Walk) -> None:
    for g in range(len(walk.groups)):
        walk.groups[g].pointer = walk.groups[g].first
        walk.stack[g] = len(walk.groups) - 1 - g
    for d in range(len(walk.yards)):
        yard = walk.yards[d]
        yard.level = 0
        yard.left = yard.work
        yard.needed = -1
        yard.computes_next = yard.computes_end = yard.computes
        yard.transfers_next = yard.transfers_end = yard.transfers
    for k in range(len(walk.last)):
        walk.last[k] = -1
    walk.stamps[0] += 1


@compiled
def earliest_times(walk: Walk, limit: float) -> float:
    """Earliest starts; the makespan (ms), or infinity where the sequences contradict the data or the memory, or where
    it exceeds ``limit``."""
    items, yards, groups, order = walk.items, walk.yards, walk.groups, walk.order
    last, stack, freed = walk.last, walk.stack, walk.freed
    _begin(walk)
    now = walk.stamps[0]
    count = len(groups)
    done = 0
    latest = 0.0
    while count > 0:
        count -= 1
        g = stack[count]
        p = groups[g].pointer
        end = groups[g].end
        while p < end:
            u = order[p]
            item = items[u]
            if item.active == 0:
                p += 1
                continue
            time = 0.0
            why = -1
            blocked = -1
            v = item.wait0
            if v >= 0 and items[v].active:
                if items[v].stamp != now:
                    blocked = v
                elif items[v].end + item.lag0 > time:
                    time = items[v].end + item.lag0
                    why = v
            v = item.wait1
            if v >= 0 and items[v].active:
                if items[v].stamp != now:
                    blocked = v
                elif items[v].end + item.lag1 > time:
                    time = items[v].end + item.lag1
                    why = v
            v = item.wait2
            if v >= 0 and items[v].active:
                if items[v].stamp != now:
                    blocked = v
                elif items[v].end + item.lag2 > time:
                    time = items[v].end + item.lag2
                    why = v
            if blocked >= 0:
                items[blocked].waiting = g
                items[blocked].waiting_stamp = now
                break
            if item.lane0 >= 0:
                v = last[item.lane0]
                if v >= 0 and items[v].end >= time:
                    time = items[v].end
                    why = v
                last[item.lane0] = u
            if item.lane1 >= 0:
                v = last[item.lane1]
                if v >= 0 and items[v].end >= time:
                    time = items[v].end
                    why = v
                last[item.lane1] = u
            yard = yards[item.device]
            if item.take > 0:
                yard.level += item.take
                if yard.level > yard.budget and not _make_room(items, yard, freed):
                    return INFINITE
                v = yard.needed
                if v >= 0 and items[v].end > time:
                    time = items[v].end
                    why = v
            item.start = time
            item.cause = why
            if item.is_compute:
                if time + yard.left > limit:
                    return INFINITE
                yard.left -= item.duration
            time += item.duration
            item.end = time
            item.stamp = now
            if time > latest:
                latest = time
            if item.free > 0:
                if item.is_compute:
                    freed[yard.computes_end] = u
                    yard.computes_end += 1
                else:
                    freed[yard.transfers_end] = u
                    yard.transfers_end += 1
            if item.waiting_stamp == now:
                stack[count] = item.waiting
                count += 1
            p += 1
        groups[g].pointer = p
        if p == end:
            done += 1
    return latest if done == len(groups) else INFINITE
