"""Why each op starts when it starts: what it waits for last, the critical path, and where devices idle."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from optpipe import semantics
from optpipe.ops import Floats, Ints, Ops
from optpipe.problem import Problem


class Why(IntEnum):
    """What kind of thing an op waits for."""

    NOTHING = 0
    DATA = 1  # an input, a gradient, a reload
    LANE = 2  # the op before it on its device or channel
    MEMORY = 3  # an op that frees memory


class Waits(NamedTuple):
    """Per op, the last thing that it waits for.

    ``before`` int64 (n,): the op, -1 where there is none. ``why`` int64 (n,): a ``Why``. ``ready`` float64 (n,), ms:
    when that is over; an op that starts later starts later than it has to.
    """

    before: Ints
    why: Ints
    ready: Floats


class Gap(NamedTuple):
    """A device idles from ``start`` to ``end``, ms, until the compute op ``until`` (-1: behind its last one)."""

    device: int
    start: float
    end: float
    until: int

    @property
    def length(self) -> float:
        return self.end - self.start


def waits(problem: Problem, ops: Ops) -> Waits:
    """The last thing that each op waits for. Where several end at once, data goes before the lane, and both before
    memory: what is named first could not be changed by another order."""
    order = semantics.rank(ops)
    data, memory = semantics.dependencies(problem, ops), semantics.memory_waits(problem, ops, order)
    lanes = semantics.compute_lanes(problem, ops, order) + semantics.channel_lanes(problem, ops, order)
    first, second = [lane.ops[:-1] for lane in lanes], [lane.ops[1:] for lane in lanes]
    before = np.concatenate([data.before, *first, memory.before])
    after = np.concatenate([data.after, *second, memory.after])
    lag = np.zeros(len(before))
    lag[: len(data.lag)] = data.lag
    why = np.repeat([Why.DATA, Why.LANE, Why.MEMORY], [len(data.lag), sum(map(len, first)), len(memory.before)])
    ready = ops.end[before] + lag
    # The grid makes instants that count as one equal, so that the kind of the wait decides.
    grid = semantics.tolerance(ops) or 1.0
    by_target = np.lexsort((-why, np.round(ready / grid), after))
    found = Waits(np.full(len(ops), -1, np.int64), np.zeros(len(ops), np.int64), np.zeros(len(ops)))
    # Of several with one target the last one assigned stays.
    found.before[after[by_target]] = before[by_target]
    found.why[after[by_target]] = why[by_target]
    found.ready[after[by_target]] = ready[by_target]
    return found


def critical_path(ops: Ops, found: Waits) -> list[int]:
    """The ops that decide the makespan, first to last: each is the last thing that the next one waits for.

    Where an op starts later than it has to, the path goes on to what it waited for last all the same.
    """
    if not len(ops):
        return []
    path, seen = [int(np.argmax(ops.end))], set()
    while (before := int(found.before[path[-1]])) >= 0 and before not in seen:
        seen.add(before)
        path.append(before)
    return path[::-1]


def gaps(problem: Problem, ops: Ops) -> list[Gap]:
    """Every time that a device does not compute between the first start and the last end of the schedule."""
    if not len(ops):
        return []
    first, last, slack = float(ops.start.min()), float(ops.end.max()), semantics.tolerance(ops)
    found = []
    for device, lane in enumerate(semantics.compute_lanes(problem, ops)):
        free = first
        for op in lane.ops.tolist():
            if ops.start[op] > free + slack:
                found.append(Gap(device, free, float(ops.start[op]), op))
            free = max(free, float(ops.end[op]))
        if last > free + slack:
            found.append(Gap(device, free, last, -1))
    return found
