"""Where each offload of a plan goes in host memory: places that nothing else uses meanwhile, whatever the timing.

An offload holds host memory from the start of O to the end of R. Real timing is not the plan's, so what may be on the
host together follows from order alone. O(k) comes after the F of every offload up to it in its lane; a microbatch whose
backward stands before one of these F in the device's order is back by then, for its backward waited for its R:

    compute   F(0) F(1) BW(0) F(2)          O(2) comes after F(2), so after BW(0), so after R(0):
    d2h          O(0) O(1)    O(2)          O(2) may take the place of microbatch 0
    h2d              R(0)

The places are settled by first fit over these intervals; where all offloads are of one size that is the best there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optpipe import semantics
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.semantics import DeviceOrder

#: Places begin at multiples of so many bytes: a cache line, and what copies like.
ALIGNMENT = 64

#: (stage, microbatch)
Pair = tuple[int, int]


class Interval(NamedTuple):
    """An offload, by its place in the order of its lane: it is on the host until the one numbered ``until`` begins."""

    pair: Pair
    nbytes: int
    until: int


class Place(NamedTuple):
    """Bytes ``offset`` to ``offset + nbytes`` of one block."""

    offset: int
    nbytes: int


class Layout(NamedTuple):
    """The places of all offloads in a block of ``nbytes``; ``most_bytes``: of them, the most in use at a time."""

    places: dict[Pair, Place]
    nbytes: int
    most_bytes: int


def aligned(nbytes: int) -> int:
    """Rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def intervals(plan: Plan, device: int) -> list[Interval]:
    """The offloads of one device of a plan, in the order of its lane, with the bytes that the plan says."""
    problem, ops = plan.problem, plan.ops
    order = semantics.device_orders(problem, ops)[device]
    moved = semantics.moved_bytes(problem, ops)
    forward, backward = _positions(plan, order)
    pairs = [_pair(plan, index) for index in order.offloads]
    reached, after = [], -1
    for pair in pairs:
        after = max(after, forward[pair])
        reached.append(after)
    found = []
    for n, (pair, index) in enumerate(zip(pairs, order.offloads, strict=True)):
        found.append(Interval(pair, int(moved[index]), max(n + 1, bisect_right(reached, backward[pair]))))
    return found


def _pair(plan: Plan, index: int) -> Pair:
    return int(plan.ops.stage[index]), int(plan.ops.microbatch[index])


def _positions(plan: Plan, order: DeviceOrder) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Where F, and B or BW, of each pair stand in what the device computes."""
    forward, backward = {}, {}
    for position, index in enumerate(order.compute):
        kind = plan.ops.kind[index]
        if kind == Kind.F:
            forward[_pair(plan, index)] = position
        elif kind in (Kind.B, Kind.BW):
            backward[_pair(plan, index)] = position
    return forward, backward


def lay_out(offloads: Sequence[Interval], sizes: Mapping[Pair, int] | None = None) -> Layout:
    """Places for these offloads, each the lowest that is free.

    Parameters
    ----------
    offloads
        In the order of their lane.
    sizes
        Bytes that an offload really takes, where that is known to be another number than the plan's.
    """
    known = sizes or {}
    places: dict[Pair, Place] = {}
    alive: list[tuple[int, Place]] = []  # until, place; by offset
    end = most = in_use = 0
    for n, interval in enumerate(offloads):
        nbytes = aligned(known.get(interval.pair, interval.nbytes))
        in_use += nbytes - sum(place.nbytes for until, place in alive if until <= n)
        alive = [entry for entry in alive if entry[0] > n]
        offset = 0
        for _, place in alive:
            if offset + nbytes <= place.offset:
                break
            offset = max(offset, place.offset + place.nbytes)
        place = places[interval.pair] = Place(offset, nbytes)
        alive.append((interval.until, place))
        alive.sort(key=lambda entry: entry[1].offset)
        end = max(end, offset + nbytes)
        most = max(most, in_use)
    return Layout(places, end, most)
