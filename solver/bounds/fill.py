"""How much a device can do before its first backward: the idle time that the fill of the pipeline forces on it.

Nothing that a backward frees is free before the first B can start, ``turnaround`` after the first F of the device. So
until then only forwards run, and memory (with what the channel has moved away by then) limits them. What is left of
the window is idle:  idle >= turnaround - forwards' work in it.

Recomputation does not weaken this: a forward beyond those that fit needs another one to have been dropped, and that one
costs its forward's time once more later on, which is work beyond ``view.work``. So count only those that fit whole.

An F may straddle the end of the window, so it is work inside the window that counts, not whole F's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from solver.bounds.knapsack import Item, most_value
from solver.bounds.view import View


class Fill(NamedTuple):
    """Idle time in the window, ms; and whether the device's last F certainly starts only after the window."""

    idle: float
    last_forward_is_later: bool


def fill(view: View) -> Fill:
    """What the window before the first B of a device forces."""
    work, count = _one_stage(view) if len(view.stages) == 1 else _several_stages(view)
    later = count < view.m * len(view.stages) and not any(view.dropped)
    return Fill(max(0.0, view.turnaround - work), later)


def _one_stage(view: View) -> tuple[float, int]:
    """Most F work inside the window, and most F's that start in it.

    The n-th F (from 0) starts at least n F's after the first; and when n + 1 activations less what has left fit, which
    takes the channel the time of those bytes after the first F (a part of an activation may be moved).
    """
    f, a, g = view.forward[0], view.activation[0], view.movable[0]
    window, start, work, n = view.turnaround, -f, 0.0, 0
    while n < view.m:
        start += f
        if view.budget is not None and (over := (n + 1) * a - view.budget) > 0:
            if over > n * g:
                break
            start = max(start, f + over / g * view.out_ms[0])
        if start >= window:
            break
        work += min(f, window - start)
        n += 1
    return work, n


def _several_stages(view: View) -> tuple[float, int]:
    """The same for several stages, by a fractional knapsack; F's of a stage run from its offset on."""
    window = view.turnaround
    starts, rows = 0.0, []
    room = math.inf if view.budget is None else view.budget + moved_by(view, window)
    for k, f in enumerate(view.forward):
        time = max(0.0, window - view.offset[k])
        most = min(float(view.m), time / f if f > 0 else math.inf)
        rows.append(Item(f, view.activation[k], most))
        starts += min(view.m, math.ceil(most)) if time > 0 else 0
    work = min(window, most_value(rows, room))
    if room < math.inf and min(view.activation) > 0:
        fitting = room // min(view.activation)
        starts = min(starts, fitting)
        work = min(work, fitting * max(view.forward))
    return work, int(starts)


def moved_by(view: View, time: float) -> float:
    """Most bytes that can have left the device ``time`` ms after its first F's start."""
    total = sum(view.m * g for g in view.movable)
    if total == 0 or (room := time - min(view.forward)) <= 0:
        return 0.0
    return min(float(total), room * rate(view.movable, view.out_ms))


def rate(sizes: tuple[int, ...], times: tuple[float, ...]) -> float:
    """Fastest transfer over the stages, bytes a ms."""
    found = [size / time if time > 0 else math.inf for size, time in zip(sizes, times, strict=True) if size > 0]
    return max(found, default=0.0)
