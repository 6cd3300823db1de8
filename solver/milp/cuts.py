"""Valid rows that no integer solution needs, and that make the relaxation worth something.

**Load rows.** Let op a surely run before op b of the same device. Every op that runs from a on and before b fits
between their starts:

    start(b) - start(a) >= sum over ops q of p(q) * (before(q, b) - before(q, a)),

where ``before(q, b) - before(q, a)`` is 1 for just these. (Less, where B and W may be fused: see ``_relieve``.)
Likewise to the end of everything: ``end - start(x) >= sum of p(q) * (1 - before(q, x))``. The relaxation of big-M rows
alone sees the critical path only.

**Staircase rows.** Where y surely runs before z, ``before(x, y) <= before(x, z)``.

**Triangle rows.** Of three ops, ``before(x, y) + before(y, z) - before(x, z) <= 1``: there are no cycles.
There are O(n^3) of them, so they can also be added lazily (see ``lazy``).
"""

from __future__ import annotations

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind
from solver.milp.model import DeviceOrder, Model
from solver.milp.orders import open_triples, triangle_rows
from solver.milp.sparse import INF


def add_load_rows(model: Model, device: DeviceOrder) -> None:
    """Load rows: from the device's first op and first backward to each op, from each op to the last backward and to
    the end. Where only a part is free, from the last op before it and to the first op after it instead, so that
    nothing else is drawn into it."""
    told = np.flatnonzero((device.column >= 0).any(axis=0))
    if not len(told):
        return
    first, last = _anchors(model, device) if model.known is None else _neighbours(device, told)
    everyone = np.arange(len(device.ops))
    pairs = [(np.full(len(everyone), x), everyone) for x in first] + [
        (everyone, np.full(len(everyone), x)) for x in last
    ]
    if pairs:
        a, b = (np.concatenate(part) for part in zip(*pairs, strict=True))
        sure = device.precedence.sure[a, b]
        _between(model, device, a[sure], b[sure])
    _to_the_end(model, device, told)


def _anchors(model: Model, device: DeviceOrder) -> tuple[list[int], list[int]]:
    """The device's first op and first backward; its last backward. (The first backward is that of its last stage.)"""
    kind = model.table.per_op(model.table.kind)[device.ops]
    backwards = np.flatnonzero(kind == Kind.B)
    m = model.table.microbatches
    return [0, int(backwards[-m])], [int(backwards[m - 1])]


def _neighbours(device: DeviceOrder, told: Ints) -> tuple[list[int], list[int]]:
    """Of the ops that surely come before all ``told`` ones the last, of those after them the first."""
    sure = device.precedence.sure
    before, after = np.asarray(sure[:, told].all(axis=1)), np.asarray(sure[told].all(axis=0))
    ahead, behind = np.where(before, sure.sum(axis=0), -1), np.where(after, sure.sum(axis=1), -1)
    first, last = int(ahead.argmax()), int(behind.argmax())
    return [first] if before[first] else [], [last] if after[last] else []


def _between(model: Model, device: DeviceOrder, a: Ints, b: Ints) -> None:
    ops = device.ops
    # A pair whose order bits are all decided, or that are the same on both sides, says nothing new.
    told = ((device.column[:, a] >= 0) | (device.column[:, b] >= 0)).any(axis=0)
    a, b = a[told], b[told]
    known = _full_work(model, device) @ (device.const[:, b] - device.const[:, a])
    terms = [(model.start[ops[b]], 1.0), (model.start[ops[a]], -1.0)]
    rows = model.builder.rows("load_{}_{}", (ops[a], ops[b]), known, INF, terms)
    _spread(model, device, rows, b, -1.0)
    _spread(model, device, rows, a, 1.0)
    for s in _fused_stages(model, device):
        weight = device.place[model.table.ops(Kind.W, s)]
        decided = (device.column[np.ix_(weight, a)] < 0) & (device.column[np.ix_(weight, b)] < 0)
        _relieve(
            model, device, rows, a, s, ~decided | (device.const[np.ix_(weight, b)] > device.const[np.ix_(weight, a)])
        )


def _to_the_end(model: Model, device: DeviceOrder, told: Ints) -> None:
    ops = device.ops
    work = _full_work(model, device)
    known = work.sum() - work @ device.const[:, told]
    terms = [(np.full(len(told), model.end_of_all), model.per_unit), (model.start[ops[told]], -1.0)]
    if model.objective == "span":
        terms.append((np.full(len(told), model.start[ops[0]]), 1.0))
    rows = model.builder.rows("rest_{}", (ops[told],), known, INF, terms)
    _spread(model, device, rows, told, 1.0)
    for s in _fused_stages(model, device):
        weight = device.place[model.table.ops(Kind.W, s)]
        _relieve(model, device, rows, told, s, ~device.precedence.sure[np.ix_(weight, told)])


def _full_work(model: Model, device: DeviceOrder) -> Floats:
    """Durations; of stages that may be fused those of B (or BW if that is shorter) and of W."""
    return model.base[device.ops] + np.where(
        model.table.per_op(model.table.kind)[device.ops] == Kind.B, np.minimum(model.scale[device.ops], 0.0), 0.0
    )


def _fused_stages(model: Model, device: DeviceOrder) -> list[int]:
    return [s for s in model.table.fused if device.place[model.table.ops(Kind.B, s)[0]] >= 0]


def _relieve(model: Model, device: DeviceOrder, rows: Ints, a: Ints, stage: int, counted: Bools) -> None:
    """Where B(stage, j) and W(stage, j) are fused, W(stage, j) has no duration. Where B surely comes after ``a`` too,
    it has grown by what BW takes longer.

    ``counted``: bool (m, rows): the row may count W(stage, j).
    """
    backward, weight = (model.table.ops(kind, stage) for kind in (Kind.B, Kind.W))
    place = device.place[backward]
    after = device.precedence.sure[np.ix_(a, place)].T | (place[:, None] == a)
    grown = np.maximum(model.scale[backward], 0.0)[:, None]
    relief = model.base[weight][:, None] - np.where(after, grown, 0.0)
    j, k = np.nonzero(counted)
    model.builder.entries(rows[k], model.decision[backward[j]], relief[j, k])


def _spread(model: Model, device: DeviceOrder, rows: Ints, of: Ints, factor: float) -> None:
    """Add ``factor * p(q) * before(q, x)`` to the row of each x in ``of``, for every q whose order to x is open."""
    took = _full_work(model, device)
    q, k = np.nonzero(device.column[:, of] >= 0)
    x = of[k]
    model.builder.entries(rows[k], device.column[q, x], factor * took[q] * device.sign[q, x])


def add_staircase_rows(model: Model, device: DeviceOrder) -> None:
    """``before(x, y) <= before(x, z)`` for y right before z and x open to both."""
    y, z = np.nonzero(device.precedence.reduced())
    for first in range(0, len(y), 512):
        a, b = y[first : first + 512], z[first : first + 512]
        x, k = np.nonzero((device.column[:, a] >= 0) & (device.column[:, b] >= 0))
        _ordered(model, device, x, a[k], b[k])


def _ordered(model: Model, device: DeviceOrder, x: Ints, y: Ints, z: Ints) -> None:
    ops = device.ops
    terms = [(device.column[x, z], device.sign[x, z]), (device.column[x, y], -device.sign[x, y])]
    side = device.const[x, y] - device.const[x, z]
    model.builder.rows("stair_{}_{}_{}", (ops[x], ops[y], ops[z]), side, INF, terms)


def add_triangle_rows(model: Model, device: DeviceOrder) -> None:
    """Both triangle rows of every three ops whose orders are all open."""
    x, y, z = open_triples(device)
    ops = device.ops
    for a, b, c in ((x, y, z), (z, y, x)):
        rows = triangle_rows(device, a, b, c)
        terms = list(zip(rows.column.T, rows.value.T, strict=True))
        model.builder.rows("triangle_{}_{}_{}", (ops[a], ops[b], ops[c]), -INF, rows.upper, terms)
