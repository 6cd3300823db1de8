"""A schedule with a few microbatches more or less, cut in its steady middle.

In the steady phase a schedule repeats itself every period, one microbatch later. So all that starts after an instant
may be done once more, a period later and with the next microbatch, and the pattern goes on; or one period may be left
out. The instant is cut through all devices at once, and through each kind of op at another microbatch:

    device 0   F4 B2 W2 | F5 B3 W3   F6 B4 W4        F4 B2 W2 | F5 B3 W3   F6 B4 W4   F7 B5 W5
    device 1   F3 B3 W3 | F4 B4 W4   F5 B5 W5   ->   F3 B3 W3 | F4 B4 W4   F5 B5 W5   F6 B6 W6

The result is an order, to be timed and checked: near the cut it need not be what the data or the memory allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.ops import NUM_KINDS, Bools, Floats, Ints, Kind, Ops
from optpipe.problem import Problem

#: Where to cut, as parts of the makespan: each gives a schedule of its own.
CUTS = (0.5, 0.4, 0.6)


@dataclass(frozen=True)
class Outline:
    """A schedule apart from its problem: columns of equal length n, in any unit of time.

    ``share``: float64 (n,), the part of ``offloadable_bytes`` that a transfer moves; 1 for all others.
    """

    stages: int
    microbatches: int
    kind: Ints
    stage: Ints
    microbatch: Ints
    start: Floats
    end: Floats
    share: Floats

    @classmethod
    def of(cls, problem: Problem, ops: Ops) -> Outline:
        """Of a schedule, with times in ms."""
        size = problem.num_stages, problem.num_microbatches
        return cls(*size, ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, shares(problem, ops))

    def ops(self, problem: Problem, unit: float = 1.0) -> Ops:
        """The ops with times in ms (not yet those of ``problem``) and sizes for ``problem``."""
        whole = np.array([stage.offloadable_bytes for stage in problem.stages], np.int64)[self.stage]
        part = np.clip(np.rint(self.share * whole), 1, np.maximum(whole, 1)).astype(np.int64)
        moved = np.where(self.share < 1.0, part, -1)
        return Ops.columns(self.kind, self.stage, self.microbatch, self.start * unit, self.end * unit, moved)


def shares(problem: Problem, ops: Ops) -> Floats:
    """float64 (n,): the part of ``offloadable_bytes`` that each transfer moves; 1 for all others."""
    whole = np.array([stage.offloadable_bytes for stage in problem.stages], np.float64)[ops.stage]
    part = (ops.bytes >= 0) & ~ops.is_compute & (whole > 0)
    return np.divide(ops.bytes, whole, out=np.ones(len(ops)), where=part)


def with_microbatches(outline: Outline, m: int, *, cuts: Sequence[float] = CUTS, block: int = 1) -> Iterator[Outline]:
    """The schedule with m microbatches: itself where it has them, else one for each place to cut.

    Parameters
    ----------
    outline, m
        A schedule, and how many microbatches it is to have.
    cuts
        Where to cut, as parts of the makespan.
    block
        So many microbatches at a time are done once more: a steady phase may repeat itself every few of them only.
    """
    if outline.microbatches == m:
        yield outline
        return
    for part in cuts:
        grid = _grid(outline)
        if not _is_complete(grid):
            return
        while grid.microbatches < m:
            grid = _recut(grid, part, min(block, grid.microbatches, m - grid.microbatches))
        while grid.microbatches > m:
            grid = _recut(grid, part, -1)
        yield _outline(grid)


class _Grid(NamedTuple):
    """A schedule as tables.

    ``start``: float64 (kinds, S, m), NaN where there is no op. ``length``: float64 (kinds, S), of whole ops.
    ``share``: float64 (S, m), the part that the transfers move.
    """

    start: Floats
    length: Floats
    share: Floats

    @property
    def microbatches(self) -> int:
        return self.share.shape[1]

    @property
    def backward(self) -> Floats:
        """Starts (S, m) of B or BW."""
        return np.fmax(self.start[Kind.B], self.start[Kind.BW])


class _Shift(NamedTuple):
    """Per stage and new microbatch, (S, m): the old microbatch whose op it repeats, and how much later."""

    source: Ints
    later: Floats

    def of(self, table: Floats) -> Floats:
        return np.take_along_axis(table, self.source, axis=1) + self.later


def _grid(outline: Outline) -> _Grid:
    shape = (NUM_KINDS, outline.stages, outline.microbatches)
    start, length, share = np.full(shape, np.nan), np.zeros(shape[:2]), np.ones(shape[1:])
    start[outline.kind, outline.stage, outline.microbatch] = outline.start
    took = (outline.end - outline.start) / np.maximum(outline.share, 1e-9)
    np.maximum.at(length, (outline.kind, outline.stage), took)
    out = outline.kind == Kind.O
    share[outline.stage[out], outline.microbatch[out]] = outline.share[out]
    return _Grid(start, length, share)


def _is_complete(grid: _Grid) -> bool:
    return bool(np.isfinite(grid.start[Kind.F]).all() and np.isfinite(grid.backward).all())


def _outline(grid: _Grid) -> Outline:
    kind, stage, microbatch = np.nonzero(np.isfinite(grid.start))
    start = grid.start[kind, stage, microbatch]
    start -= start.min()
    moves = (kind == Kind.O) | (kind == Kind.R)
    share = np.where(moves, grid.share[stage, microbatch], 1.0)
    end = start + grid.length[kind, stage] * share
    return Outline(grid.share.shape[0], grid.microbatches, kind, stage, microbatch, start, end, share)


def _recut(grid: _Grid, part: float, step: int) -> _Grid:
    """The schedule with ``step`` microbatches more, or one less (-1)."""
    first, last = np.nanmin(grid.start), np.nanmax(grid.start)
    instant, period = first + part * (last - first), _period(grid)
    forward = _shift(grid.start[Kind.F], instant, period, step)
    backward = _shift(grid.backward, instant, period, step)
    weight = _shift(grid.start[Kind.W], instant, period, step)
    start = np.full((NUM_KINDS, *forward.source.shape), np.nan)
    start[Kind.F] = forward.of(grid.start[Kind.F])
    for kind in (Kind.B, Kind.BW, Kind.C, Kind.R):  # what becomes of a microbatch is decided by its backward
        start[kind] = backward.of(grid.start[kind])
    split = np.isfinite(start[Kind.B])
    weights = weight.of(grid.start[Kind.W])
    after = start[Kind.B] + grid.length[Kind.B][:, None]
    start[Kind.W] = np.where(split, np.where(np.isfinite(weights), weights, after), np.nan)
    delay = np.take_along_axis(grid.start[Kind.O] - grid.start[Kind.F], backward.source, axis=1)
    start[Kind.O] = start[Kind.F] + delay
    share = np.take_along_axis(grid.share, backward.source, axis=1)
    return _after_data(_Grid(start, grid.length, share))


def _period(grid: _Grid) -> float:
    """The time from one microbatch to the next in the middle of the schedule."""
    m, forward = grid.microbatches, grid.start[Kind.F]
    if m == 1:
        return float(np.nanmax(grid.start) - np.nanmin(grid.start))
    low = m // 4
    high = max(low + 1, 3 * m // 4)
    return float(np.median((forward[:, high] - forward[:, low]) / (high - low)))


def _shift(start: Floats, instant: float, period: float, step: int) -> _Shift:
    """Where to cut each row of (S, m) starts: at its first op from ``instant`` on (the last op, if there is none)."""
    stages, m = start.shape
    later: Bools = np.nan_to_num(start, nan=-np.inf) >= instant
    cut = np.where(later.any(axis=1), later.argmax(axis=1), m - 1)[:, None]
    cut = np.maximum(cut, step - 1)  # what is done once more is there
    new = np.broadcast_to(np.arange(m + step), (stages, m + step))
    moved = new > cut if step > 0 else new >= cut
    return _Shift(np.where(moved, new - step, new), np.where(moved, period * step, 0.0))


def _after_data(grid: _Grid) -> _Grid:
    """No op before what it needs: starts put off along the path of each microbatch."""
    start, length = grid.start, grid.length[:, :, None]
    stages = start.shape[1]

    def put_off(kind: Kind, s: int, ready: Floats) -> None:
        start[kind, s] = np.where(np.isfinite(start[kind, s]), np.fmax(start[kind, s], ready), np.nan)

    for s in range(stages):
        if s:
            put_off(Kind.F, s, start[Kind.F, s - 1] + length[Kind.F, s - 1])
        ended = start[Kind.F, s] + length[Kind.F, s]
        put_off(Kind.O, s, ended)
        put_off(Kind.C, s, ended)
        put_off(Kind.R, s, start[Kind.O, s] + length[Kind.O, s] * grid.share[s])
    for s in reversed(range(stages)):
        ready = start[Kind.F, s] + length[Kind.F, s]
        ready = np.fmax(ready, start[Kind.C, s] + length[Kind.C, s])
        ready = np.fmax(ready, start[Kind.R, s] + length[Kind.R, s] * grid.share[s])
        if s + 1 < stages:
            for above in (Kind.B, Kind.BW):
                ready = np.fmax(ready, start[above, s + 1] + length[above, s + 1])
        for kind in (Kind.B, Kind.BW):
            put_off(kind, s, ready)
        put_off(Kind.W, s, start[Kind.B, s] + length[Kind.B, s])
    return grid
