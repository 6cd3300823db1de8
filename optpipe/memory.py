"""Memory levels of the devices over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe import semantics
from optpipe.ops import Floats, Ints, Ops
from optpipe.problem import Problem


class Levels(NamedTuple):
    """Memory after every event, sorted by device and time.

    ``device`` int64, ``time`` float64 (ms), ``level`` int64 (bytes held after the event), ``op`` int64: the op that
    caused it. All of equal length.
    """

    device: Ints
    time: Floats
    level: Ints
    op: Ints


def levels(problem: Problem, ops: Ops) -> Levels:
    """The level after each take and free; at one instant frees come before takes."""
    events = semantics.memory_events(problem, ops)
    free = events.delta < 0
    # A free counts from one tolerance earlier: so it precedes every take at the same instant.
    when = events.time - np.where(free, semantics.tolerance(ops), 0.0)
    order = np.lexsort((~free, when, events.device))
    device, delta = events.device[order], events.delta[order]
    total = np.concatenate([[0], np.cumsum(delta)])
    before = total[np.searchsorted(device, np.arange(problem.num_devices))]
    return Levels(device, events.time[order], total[1:] - before[device], events.op[order])


def peaks(problem: Problem, ops: Ops) -> list[int]:
    """Per device, the most bytes held at any time."""
    found = levels(problem, ops)
    peak = np.zeros(problem.num_devices, np.int64)
    np.maximum.at(peak, found.device, found.level)
    return [int(value) for value in peak]


def curve(problem: Problem, ops: Ops, device: int) -> tuple[Floats, Ints]:
    """The steps of one device's level: times (ms), ascending, and the bytes held from each on."""
    found = levels(problem, ops)
    mine = found.device == device
    # At one instant a free that is a little later than a take, within the tolerance, still comes first.
    return np.maximum.accumulate(found.time[mine]), found.level[mine]
