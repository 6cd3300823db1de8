"""Memory rows at the starts of R's. They hold where the pair takes place.

The bits 'before x' of a reload x need to hold in one direction only: an F may be left out only if it starts at or
after x; a B or W, or an O, may be counted only if it has ended. Two takes at one instant could each leave out the
other, so one of the two bits has to say that it does not (the ``tie`` rows). Three takes at one instant can still leave
each other out in a circle if two of them are reloads that take no time; ``extract`` then finds no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind
from solver.milp.memory import Away, Before, DeviceMemory, add_fused_credit, add_moved_rows, first_of, last_of
from solver.milp.model import DeviceOrder, Meaning, Model
from solver.milp.sparse import INF


@dataclass(frozen=True)
class _Counted:
    """'The compute op at place q counts at the reload of pair k': ``const[q, k] + x[column[q, k]]``."""

    column: Ints
    const: Floats


def add_reload_rows(model: Model, device: DeviceOrder, memory: DeviceMemory, away: Away) -> None:
    """Rows at the starts of R's that could be too much."""
    if not len(memory.pairs):
        return
    before, after = _surely(device, memory)
    forwards = (memory.kind == Kind.F)[:, None]
    opens = ~before & ~after & (memory.weight != 0)[:, None]
    most = memory.weight @ before + np.where(opens & forwards, memory.weight[:, None], 0.0).sum(axis=0)
    crowded = most > memory.budget + 1e-9
    counted = _counted_bits(model, device, memory, before, opens & crowded)
    events = np.flatnonzero(crowded)
    elsewhere = _away_at_reloads(model, device, memory, counted, crowded)
    level = memory.weight @ counted.const - memory.moved @ elsewhere.amount_const
    # Rows of pairs that do not take place say nothing. With parts they hold too, which costs nothing.
    relief = np.zeros(len(events)) if model.parts else (most - memory.budget)[events]
    terms = [(model.decision[memory.pairs[events]], relief)]
    rows = np.full(len(memory.pairs), -1, np.int64)
    side = memory.budget - level[events] + relief
    rows[events] = model.builder.rows("memory_{}", (memory.reloads[events],), -INF, side, terms)
    q, k = np.nonzero(counted.column >= 0)
    model.builder.entries(rows[k], counted.column[q, k], memory.weight[q])
    i, k = np.nonzero(elsewhere.amount >= 0)
    model.builder.entries(rows[k], elsewhere.amount[i, k], -memory.moved[i])
    sign = np.where(counted.column >= 0, 1.0, 0.0)
    before_reloads = Before(counted.const[:, events], sign[:, events], counted.column[:, events])
    add_fused_credit(model, device, memory, rows[events], memory.reloads[events], before_reloads)
    _link_to_order(model, device, memory, counted)
    _tie_to_forwards(model, device, memory, counted, away)


def _surely(device: DeviceOrder, memory: DeviceMemory) -> tuple[Bools, Bools]:
    """bool (n, k) each: the op surely ends before the reload of pair k (it comes before its F); it surely starts after
    (it comes after its B)."""
    sure = device.precedence.sure
    everyone = np.arange(len(device.ops))[:, None]
    before = sure[:, memory.forward] | (everyone == memory.forward)
    after = sure[memory.backward].T | (everyone == memory.backward)
    return before, after


def _counted_bits(model: Model, device: DeviceOrder, memory: DeviceMemory, before: Bools, opens: Bools) -> _Counted:
    """Bits of compute ops at reloads, and the rows that hold them to the times."""
    ops, reloads, sure = device.ops, memory.reloads, device.precedence.sure
    counted = _Counted(np.full(before.shape, -1, np.int64), before.astype(np.float64))
    forwards = (memory.kind == Kind.F)[:, None]
    q, k = np.nonzero(opens & forwards)
    column, const = model.indicator("{}_started_at_{}", Meaning.STARTED, ops[q], reloads[k])
    counted.column[q, k], counted.const[q, k] = column, const
    model.after_start("unstarted_{}_{}", reloads[k], ops[q], bit=column, when=0)
    decided = np.zeros(before.shape, np.bool_)
    decided[q, k] = (column < 0) & (const == 0)
    x, y = np.nonzero(first_of(decided, sure))
    model.after_start("unstarted_{}_{}", reloads[y], ops[x])

    q, k = np.nonzero(opens & ~forwards)
    column, const = model.indicator("{}_freed_at_{}", Meaning.FREED, ops[q], reloads[k])
    counted.column[q, k], counted.const[q, k] = column, const
    model.after("freed_{}_{}", ops[q], reloads[k], bit=column, when=1)
    decided = np.zeros(before.shape, np.bool_)
    decided[q, k] = const > 0
    x, y = np.nonzero(last_of(decided, sure))
    model.after("freed_{}_{}", ops[x], reloads[y])
    return counted


def _link_to_order(model: Model, device: DeviceOrder, memory: DeviceMemory, counted: _Counted) -> None:
    """Valid rows between these bits and order bits: an F that runs before the pair's F has started; what has ended
    runs before the pair's B; along a sequence, counting ends once; what counts at a reload counts at the next one."""
    ops, reloads = device.ops, memory.reloads
    q, k = np.nonzero(counted.column >= 0)
    forwards = memory.kind[q] == Kind.F
    for mask, anchor, factor in ((forwards, memory.forward, 1.0), (~forwards, memory.backward, -1.0)):
        x, y = q[mask], k[mask]
        at = anchor[y]
        told = device.column[x, at] >= 0
        x, y, at = x[told], y[told], at[told]
        terms = [(counted.column[x, y], factor), (device.column[x, at], -factor * device.sign[x, at])]
        model.builder.rows("link_{}_{}", (ops[x], reloads[y]), factor * device.const[x, at], INF, terms)
    x, y = np.nonzero((counted.column[:-1] >= 0) & (counted.column[1:] >= 0))
    same = ops[x] // model.table.microbatches == ops[x + 1] // model.table.microbatches
    x, y = x[same], y[same]
    terms = [(counted.column[x, y], 1.0), (counted.column[x + 1, y], -1.0)]
    model.builder.rows("steps_{}_{}", (ops[x], reloads[y]), 0.0, INF, terms)
    x, y = np.nonzero((counted.column[:, :-1] >= 0) & (counted.column[:, 1:] >= 0))
    same = reloads[y] // model.table.microbatches == reloads[y + 1] // model.table.microbatches
    x, y = x[same], y[same]
    terms = [(counted.column[x, y + 1], 1.0), (counted.column[x, y], -1.0)]
    model.builder.rows("stays_{}_{}", (ops[x], reloads[y]), 0.0, INF, terms)


def _tie_to_forwards(model: Model, device: DeviceOrder, memory: DeviceMemory, counted: _Counted, away: Away) -> None:
    """If the F at x leaves out pair k, then the reload of k counts that F. (A reload that can never be too much counts
    every F anyhow.)"""
    x, k = np.nonzero((away.column >= 0) & (counted.column >= 0))
    terms = [(counted.column[x, k], 1.0), (away.column[x, k], -1.0)]
    model.builder.rows("tie_{}_{}", (device.ops[x], memory.reloads[k]), 0.0, INF, terms)


def _away_at_reloads(
    model: Model, device: DeviceOrder, memory: DeviceMemory, counted: _Counted, crowded: Bools
) -> Away:
    """Bits 'pair i away at the reload of pair k' (i, k). Of one stage only later microbatches can be."""
    pairs, reloads, m = memory.pairs, memory.reloads, model.table.microbatches
    count = len(pairs)
    sure = device.precedence.sure
    stage, number = pairs // m, np.arange(count)
    same = stage[:, None] == stage[None, :]
    possible = crowded[None, :] & np.where(same, number[:, None] > number[None, :], True)
    possible &= ~sure[memory.backward][:, memory.forward] & ~sure[memory.backward][:, memory.forward].T
    possible &= model.soonest_end(pairs)[:, None] <= model.latest_moved(reloads)[None, :] + model.slack
    i, k = np.nonzero(possible)
    column, const = model.indicator("{}_away_at_{}", Meaning.AWAY, pairs[i], reloads[k])
    away = Away.nothing(count, count, parts=model.parts)
    away.column[i, k], away.const[i, k] = column, const
    add_moved_rows(model, away, (i, k), pairs[i], reloads[k])
    model.after("gone_{}_{}", pairs[i], reloads[k], bit=column, when=1, whole=True)
    other = ~same[i, k]
    model.after_start("still_{}_{}", reloads[k][other], reloads[i][other], bit=column[other], when=1)
    decided = away.const > 0
    # Of a stage the last one that is gone says it for those before.
    corner = decided.copy()
    corner[:-1] &= ~(decided[1:] & (stage[1:] == stage[:-1])[:, None])
    i, k = np.nonzero(corner)
    model.after("gone_{}_{}", pairs[i], reloads[k], whole=True)
    i, k = np.nonzero(decided & ~same)
    model.after_start("still_{}_{}", reloads[k], reloads[i])
    _once_at_reloads(model, memory, counted, away)
    _tie_reloads(model, memory, away)
    return away


def _once_at_reloads(model: Model, memory: DeviceMemory, counted: _Counted, away: Away) -> None:
    """A pair that is away has had its F, and not its B."""
    i, k = np.nonzero(away.column >= 0)
    f, b = memory.forward[i], memory.backward[i]
    terms = [(away.column[i, k], 1.0), (counted.column[b, k], 1.0), (counted.column[f, k], -1.0)]
    side = counted.const[f, k] - counted.const[b, k]
    model.builder.rows("once_{}_{}", (memory.pairs[i], memory.reloads[k]), -INF, side, terms)


def _tie_reloads(model: Model, memory: DeviceMemory, away: Away) -> None:
    """Of two reloads at one instant, at most one leaves out the other."""
    x, y = np.nonzero(np.triu((away.column >= 0) & (away.column.T >= 0)))
    terms = [(away.column[x, y], 1.0), (away.column[y, x], 1.0)]
    model.builder.rows("tie_{}_{}", (memory.reloads[x], memory.reloads[y]), -INF, 1.0, terms)
