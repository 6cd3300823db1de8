"""Memory times time, and the channel time that it takes to save some of it.

Within T, a device has ``budget (T - head)`` bytes x ms to give, less what it cannot use at either end. One microbatch
of a stage takes at least

    a turn + min(a B + context W, a BW)

if it stays on the device. Moving n of its g movable bytes away saves at most ``n (turn - F - n (O + R) / g)``: they are
there while F runs, while they leave (in time in proportion), and from the start of their way back on. By concavity N
bytes moved in all save most if every microbatch moves N / m. Each byte takes its channels O / g and R / g ms, between
the first F's end and the last B's start. Recomputation saves ``dropped (turn - 2 F)`` for F ms of compute, and a device
has only ``T - head - work`` of that to spare.

So for a T one knows how many bytes each device must move, and whether its channels (with all the devices that share
them) can carry them. The bound is the least T at which they can, by bisection. The ends: i F's after the first start
at most i + 1 activations are there; after the last B only contexts whose W's fit into the rest of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from optpipe.problem import Problem
from solver.bounds.view import View

_BISECTIONS = 50


class Demand(NamedTuple):
    """What a device must move away within a step: bytes, and the instants between which its transfers run."""

    bytes: float
    first_out: float
    last_back: float


def area(problem: Problem, views: Sequence[View]) -> float:
    """The least T (ms) at which memory, channels and spare compute time suffice on every device.

    Parameters
    ----------
    problem
        Its channels.
    views
        Every device seen from the whole step.
    """
    low = max((v.head + v.work for v in views), default=0.0)
    if _enough(problem, views, low):
        return 0.0
    high = 2.0 * low
    while not _enough(problem, views, high):
        low, high = high, 2.0 * high
        if not math.isfinite(high):
            return 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _enough(problem, views, middle) else (middle, high)
    return low


def _enough(problem: Problem, views: Sequence[View], T: float) -> bool:
    demands = []
    for view in views:
        demand = _demand(view, T)
        if demand is None:
            return False
        demands.append(demand)
    for channel in problem.channels:
        busy, opens, closes = 0.0, math.inf, -math.inf
        for transfer in channel.transfers:
            view, demand = views[transfer.device], demands[transfer.device]
            if demand.bytes <= 0:
                continue
            out = transfer.direction == "d2h"
            times = view.out_ms if out else view.back_ms
            pace = min(t / g for t, g in zip(times, view.movable, strict=True) if g > 0)
            busy += demand.bytes * pace
            opens, closes = min(opens, demand.first_out), max(closes, demand.last_back)
        if busy > closes - opens + 1e-9 * T and busy > 0:
            return False
    return True


def _demand(view: View, T: float) -> Demand | None:
    """The least that must leave the device if the step takes T; None where no amount would do."""
    first_out = view.head + min(view.forward)
    last_back = T - min(view.after)
    if view.budget is None:
        return Demand(0.0, first_out, last_back)
    missing = _needed(view) - _given(view, T)
    spare = T - view.head - view.work
    if missing > 0:
        missing -= _saved_by_recomputing(view, spare)
    if missing <= 1e-9 * view.budget * T:
        return Demand(0.0, first_out, last_back)
    bytes_moved = _least_bytes(view, missing)
    return None if bytes_moved is None else Demand(bytes_moved, first_out, last_back)


def _needed(view: View) -> float:
    """Bytes x ms of all microbatches that stay on the device."""
    total = 0.0
    for k, a in enumerate(view.activation):
        split = a * view.split[k] + view.context[k] * view.weight[k]
        total += a * view.turn[k] + min(split, a * view.fused[k])
    return view.m * total


def _given(view: View, T: float) -> float:
    """Bytes x ms that the device can use at most."""
    assert view.budget is not None
    given = view.budget * max(0.0, T - view.head)
    if len(view.stages) > 1:
        return given
    # What follows grows with T no faster than budget * T does, so more time never allows less.
    a, f, b, c, w = view.activation[0], view.forward[0], view.input[0], view.context[0], view.weight[0]
    tail = view.tail[0]
    before = T - view.head - tail
    steps = min(view.m, view.budget // a if a else 0)
    ramp_up = sum((view.budget - i * a) * min(f, max(0.0, before - (i - 1) * f)) for i in range(1, steps + 1))
    pending = c / w if w > 0 else (math.inf if c else 0.0)
    after = _loss(view.budget, c, pending, tail)
    ramp_down = _loss(view.budget, a + c + pending * tail, (a / b if b > 0 else math.inf) + pending, before)
    return given - max(ramp_up, ramp_down, 0.0) - after


def _loss(budget: float, start: float, slope: float, length: float) -> float:
    """The integral of ``max(0, budget - start - slope u)`` for u from 0 to ``length``."""
    if length <= 0 or start >= budget or math.isinf(slope):
        return 0.0
    end = min(length, (budget - start) / slope) if slope > 0 else length
    return (budget - start) * end - slope * end * end / 2


def _saved_by_recomputing(view: View, spare: float) -> float:
    best = 0.0
    total = 0.0
    for k, dropped in enumerate(view.dropped):
        saving = dropped * max(0.0, view.turn[k] - 2 * view.forward[k])
        total += view.m * saving
        if saving > 0:
            best = max(best, saving / view.forward[k] if view.forward[k] > 0 else math.inf)
    return min(total, best * max(0.0, spare)) if best > 0 else 0.0


def _least_bytes(view: View, missing: float) -> float | None:
    """The fewest bytes that must leave to save ``missing`` bytes x ms; None where it cannot be saved."""
    if len(view.stages) > 1:
        gains = [t - f for t, f, g in zip(view.turn, view.forward, view.movable, strict=True) if g > 0]
        if not gains or max(gains) <= 0:
            return None
        moved = missing / max(gains)
        return moved if moved <= view.m * sum(view.movable) * (1 + 1e-9) else None
    g, gain = view.movable[0], view.turn[0] - view.forward[0]
    if g <= 0 or gain <= 0:
        return None
    # n gain - n^2 slow = missing / m, the smaller root
    slow, each = (view.out_ms[0] + view.back_ms[0]) / g, missing / view.m
    inside = gain * gain - 4 * slow * each
    if inside < 0:
        return None
    moved = 2 * each / (gain + math.sqrt(inside))
    return view.m * moved if moved <= g * (1 + 1e-9) else None
