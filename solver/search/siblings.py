"""The same problem with fewer microbatches, and what its schedules are worth for the problem itself.

A sibling is quicker to search, and often solved to its bound where the problem is not. What it has in its steady middle
is done as often as the problem needs: a schedule whose middle loses nothing stays as good.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np

from optpipe import semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from solver.adapt import repaired
from solver.microbatches import Outline, with_microbatches
from solver.search.shares import with_fitting_shares
from solver.tables import tables

#: Where the middle is cut, as parts of the makespan, and how many microbatches at a time are done once more.
_CUTS, _BLOCKS = np.linspace(0.2, 0.8, 25), (1, 2, 4, 8)
#: Orders that are made to fit the memory by other shares, and by the list scheduler: the shortest ones.
_FITTED, _REPAIRED = 12, 4
#: How many microbatches a sibling may have, in devices.
_SIZES = (1.5, 2.0, 2.0, 2.5)


def sibling(problem: Problem, rng: random.Random) -> Problem | None:
    """The problem with fewer microbatches, how many is drawn; None where it has few itself."""
    sizes = [max(2, round(size * problem.num_devices)) for size in _SIZES]
    sizes = [size for size in sizes if size < problem.num_microbatches]
    return problem.model_copy(update={"num_microbatches": rng.choice(sizes)}) if sizes else None


def stretched(problem: Problem, other: Problem, ops: Ops, *, below: float, seconds: float) -> Iterator[Ops]:
    """Schedules of the problem with the pattern of its sibling's schedule, all valid.

    Parameters
    ----------
    problem
        The problem.
    other, ops
        Its sibling and a schedule of that.
    below
        Orders that take longer, ms, are passed over.
    seconds
        Time limit.
    """
    end = time.monotonic() + seconds
    tab = tables(problem)
    orders = [order for order in _orders(problem, other, ops, end) if order[0] < below]
    orders.sort(key=lambda order: order[0])
    for length, order in orders[:_FITTED]:
        seconds = end - time.monotonic()
        if length >= below or seconds <= 0:
            return
        found = order if not verify(problem, order) else with_fitting_shares(problem, order, seconds=seconds)
        if found is not None and not verify(problem, found):
            below = min(below, semantics.makespan(found))
            yield found
    for length, order in orders[:_REPAIRED]:
        if length < below and time.monotonic() < end:
            yield from (ops for ops in repaired(problem, tab, order, 2) if not verify(problem, ops))


def _orders(problem: Problem, other: Problem, ops: Ops, end: float) -> Iterator[tuple[float, Ops]]:
    """What comes of each cut, with its makespan (ms), until the clock says ``end``; it may need more memory than there
    is."""
    outline = Outline.of(other, ops)
    missing = problem.num_microbatches - other.num_microbatches
    for block in _BLOCKS:
        if block > missing or block >= other.num_microbatches:
            return
        for found in with_microbatches(outline, problem.num_microbatches, cuts=_CUTS.tolist(), block=block):
            if time.monotonic() > end:
                return
            try:
                order = earliest(problem, found.ops(problem))
            except ValueError:  # the order contradicts itself
                continue
            yield semantics.makespan(order), order
