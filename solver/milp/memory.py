"""Memory rows: no device over its budget when an op takes memory (F and R at their starts).

With 'q before x' and 'pair k away at x' as numbers 0 or 1, what a device holds when x starts is

    sum over F of a (F before x) - sum over B of (a - c) (B before x) - sum over W of c (W before x)
        - sum over pairs of g (pair away at x),

plus what x takes. For x an F, 'before' are the order bits of the device; for x an R see ``reload_memory``. Frees come
before takes of the same instant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind
from solver.milp.model import Bits, DeviceOrder, Meaning, Model, joined
from solver.milp.precedence import boolean_product
from solver.milp.sparse import INF

#: Memory rows are scaled so that the budget is at most this much; what is lost is below the solver's tolerance.
_LARGEST_BUDGET = 1e5


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device, in a unit that makes coefficients small whole numbers where that is possible.

    Attributes
    ----------
    unit
        Bytes.
    budget
        What fits.
    kind
        int64 (n,): kinds of the device's compute ops.
    weight
        float64 (n,): what each of them adds to the level once it counts.
    pairs, reloads
        int64 (k,): O and R of the pairs that may take place.
    moved
        float64 (k,): what each pair takes away.
    forward, backward
        int64 (k,): places of the pairs' F and B in the device's list.
    """

    unit: float
    budget: float
    kind: Ints
    weight: Floats
    pairs: Ints
    reloads: Ints
    moved: Floats
    forward: Ints
    backward: Ints


def device_memory(model: Model, device: DeviceOrder, number: int, *, parts: bool = False) -> DeviceMemory:
    """The memory of a device with a budget; ``parts``: other amounts than whole transfers may leave it, so that a
    budget between two levels is worth more than the lower one."""
    problem, table = model.problem, model.table
    stages = problem.stages
    kind, stage = (np.repeat(part, table.microbatches)[device.ops] for part in (table.kind, table.stage))
    activation = np.array([x.activation_bytes for x in stages], np.int64)[stage]
    context = np.array([x.weight_context_bytes for x in stages], np.int64)[stage]
    weight = np.where(kind == Kind.F, activation, np.where(kind == Kind.B, context - activation, -context))
    pairs = joined([table.ops(Kind.O, s) for s in table.offloaded if stages[s].device == number])
    pairs = pairs[model.may_move(pairs)]
    of = table.per_op(table.stage)[pairs]
    moved = np.array([x.offloadable_bytes for x in stages], np.int64)[of]
    budget = problem.devices[number].memory_bytes
    assert budget is not None
    unit = math.gcd(*np.abs(weight).tolist(), *moved.tolist()) or 1
    fits = budget / unit if parts else float(budget // unit)
    scale = max(1.0, fits / _LARGEST_BUDGET)
    microbatch = pairs % table.microbatches

    def places(sequence: Kind) -> Ints:
        first = np.array([table.sequence.get((sequence, s), 0) for s in range(problem.num_stages)], np.int64)
        return device.place[first[of] * table.microbatches + microbatch]

    return DeviceMemory(
        unit=unit * scale,
        budget=fits / scale,
        kind=kind,
        weight=weight / unit / scale,
        pairs=pairs,
        reloads=pairs + table.microbatches * len(table.offloaded),
        moved=moved / unit / scale,
        forward=places(Kind.F),
        backward=places(Kind.B),
    )


@dataclass(frozen=True)
class Away:
    """'Pair k away at the op at place x': ``const[x, k] + x[column[x, k]]``, and how much of what it can move that is:
    ``amount_const[x, k] + x[amount[x, k]]``, which differs with parts only."""

    column: Ints
    const: Floats
    amount: Ints
    amount_const: Floats

    @classmethod
    def nothing(cls, events: int, pairs: int, *, parts: bool) -> Away:
        """No pair is ever away."""
        column, const = np.full((events, pairs), -1, np.int64), np.zeros((events, pairs))
        return cls(column, const, column.copy() if parts else column, const.copy() if parts else const)


def add_forward_rows(model: Model, device: DeviceOrder, memory: DeviceMemory) -> Away:
    """Rows at the starts of F's that could be too much."""
    ops, weight = device.ops, memory.weight
    forwards = np.flatnonzero(memory.kind == Kind.F)
    level = weight[forwards] + weight @ device.const[:, forwards]
    swing = weight[:, None] * device.sign[:, forwards]
    crowded = level + np.maximum(swing, 0.0).sum(axis=0) > memory.budget + 1e-9
    events, level = forwards[crowded], level[crowded]
    away = _away_at_forwards(model, device, memory, events)
    level = level - away.amount_const[events] @ memory.moved
    rows = model.builder.rows("memory_{}", (ops[events],), -INF, memory.budget - level, [])
    q, x = np.nonzero(device.column[:, events] >= 0)
    model.builder.entries(rows[x], device.column[q, events[x]], weight[q] * device.sign[q, events[x]])
    x, k = np.nonzero(away.amount[events] >= 0)
    model.builder.entries(rows[x], away.amount[events[x], k], -memory.moved[k])
    add_fused_credit(model, device, memory, rows, ops[events], before_events(device, events))
    return away


class Before(NamedTuple):
    """'The op at place q before event k' as ``const[q, k] + sign[q, k] * x[column[q, k]]``."""

    const: Floats
    sign: Floats
    column: Ints


def before_events(device: DeviceOrder, events: Ints) -> Before:
    """The order bits of compute ops to the compute ops at places ``events``."""
    return Before(device.const[:, events], device.sign[:, events], device.column[:, events])


def add_fused_credit(
    model: Model, device: DeviceOrder, memory: DeviceMemory, rows: Ints, events: Ints, before: Before
) -> None:
    """A fused backward frees everything at its end: where it has ended and the W, which it leaves without a duration,
    has not yet had its turn among the W's, a credit takes the place of that W.

    Parameters
    ----------
    rows, events
        The memory rows and the ops that they are about.
    before
        How compute ops count at these events.
    """
    table = model.table
    for s in table.fused:
        backward, weight = (device.place[table.ops(kind, s)] for kind in (Kind.B, Kind.W))
        if backward[0] < 0 or memory.weight[weight[0]] == 0.0:
            continue
        j, k = (part.ravel() for part in np.meshgrid(np.arange(len(weight)), np.arange(len(events)), indexing="ij"))
        ended = before.const[backward[j], k] + np.maximum(before.sign[backward[j], k], 0.0) > 0
        waits = before.const[weight[j], k] + np.minimum(before.sign[weight[j], k], 0.0) < 1
        told = ended & waits
        b, w, k = backward[j[told]], weight[j[told]], k[told]
        labels = (device.ops[b], events[k])
        credit = model.builder.columns("{}_gives_back_at_{}", labels, 0.0, 1.0)
        model.bits.append(Bits(Meaning.GIVES_BACK, credit, *labels))
        limits: tuple[tuple[str, Ints, Floats, Floats], ...] = (
            ("fused_{}_{}", model.decision[device.ops[b]], np.ones(len(b)), np.zeros(len(b))),
            ("ended_{}_{}", before.column[b, k], before.sign[b, k], before.const[b, k]),
            ("unless_{}_{}", before.column[w, k], -before.sign[w, k], 1.0 - before.const[w, k]),
        )
        for template, column, sign, const in limits:
            model.builder.rows(template, labels, -INF, const, [(credit, np.ones(len(b))), (column, -sign)])
        model.builder.entries(rows[k], credit, memory.weight[w])


def _away_at_forwards(model: Model, device: DeviceOrder, memory: DeviceMemory, events: Ints) -> Away:
    """Bits 'pair k away at the F at place x', and the rows that hold them to the times."""
    ops, pairs, reloads = device.ops, memory.pairs, memory.reloads
    away = Away.nothing(len(ops), len(pairs), parts=model.parts)
    if not len(pairs) or not len(events):
        return away
    sure, window = device.precedence.sure, model.windows
    x, k = (part.ravel() for part in np.meshgrid(events, np.arange(len(pairs)), indexing="ij"))
    possible = ~sure[x, memory.forward[k]] & (x != memory.forward[k]) & ~sure[memory.backward[k], x]
    possible &= model.soonest_end(pairs)[k] <= window.latest[ops[x]] + model.slack
    possible &= model.latest_moved(reloads)[k] >= window.earliest[ops[x]] - model.slack
    x, k = x[possible], k[possible]
    column, const = model.indicator("{}_away_at_{}", Meaning.AWAY, pairs[k], ops[x])
    away.column[x, k], away.const[x, k] = column, const
    model.after("gone_{}_{}", pairs[k], ops[x], bit=column, when=1, whole=True)
    model.after_start("still_{}_{}", ops[x], reloads[k], bit=column, when=1)
    add_moved_rows(model, away, (x, k), pairs[k], ops[x])
    _add_decided(model, device, memory, away.const > 0)
    # Away at x: F before x, B not before x. Else the same bytes would count as freed twice.
    f, b = memory.forward[k], memory.backward[k]
    terms = [(column, 1.0), (device.column[b, x], device.sign[b, x]), (device.column[f, x], -device.sign[f, x])]
    free = column >= 0
    picked = [(np.asarray(c)[free], np.broadcast_to(v, len(k))[free]) for c, v in terms]
    side = (device.const[f, x] - device.const[b, x])[free]
    model.builder.rows("once_{}_{}", (pairs[k][free], ops[x][free]), -INF, side, picked)
    return away


def add_moved_rows(model: Model, away: Away, at: tuple[Ints, Ints], pair: Ints, event: Ints) -> None:
    """A pair is away only if it takes place; with parts no more of it is away than moves.

    Parameters
    ----------
    at
        Where in ``away`` the pairs and events stand.
    """
    column, const = away.column[at], away.const[at]
    free = column >= 0
    if not model.parts:
        terms = [(column[free], 1.0), (model.decision[pair[free]], -1.0)]
        model.builder.rows("moved_{}_{}", (pair[free], event[free]), -INF, 0.0, terms)
        kept = np.unique(pair[const > 0])
        model.builder.rows("kept_{}", (kept,), 1.0, INF, [(model.decision[kept], 1.0)])
        return
    labels = (pair[free], event[free])
    amount = model.builder.columns("amount_{}_{}", labels, 0.0, 1.0)
    model.bits.append(Bits(Meaning.AMOUNT, amount, *labels))
    model.builder.rows("gone_{}_{}", labels, -INF, 0.0, [(amount, 1.0), (column[free], -1.0)])
    model.builder.rows("moved_{}_{}", labels, -INF, 0.0, [(amount, 1.0), (model.decision[pair[free]], -1.0)])
    whole = np.where(const > 0, model.decision[pair], -1)
    whole[free] = amount
    away.amount[at] = whole


def _add_decided(model: Model, device: DeviceOrder, memory: DeviceMemory, away: Bools) -> None:
    """Rows of the pairs that a known schedule decides to be away: gone before the first such F, back after the last."""
    sure = device.precedence.sure
    x, k = np.nonzero(first_of(away, sure))
    model.after("gone_{}_{}", memory.pairs[k], device.ops[x], whole=True)
    x, k = np.nonzero(last_of(away, sure))
    model.after_start("still_{}_{}", device.ops[x], memory.reloads[k])


def first_of(mask: Bools, sure: Bools) -> Bools:
    """Of the ops that each column of ``mask`` (n, k) marks, those that no other one surely precedes."""
    return mask & ~boolean_product(sure.T, mask) if mask.any() else mask


def last_of(mask: Bools, sure: Bools) -> Bools:
    """Of the ops that each column of ``mask`` (n, k) marks, those that surely precede no other one."""
    return mask & ~boolean_product(sure, mask) if mask.any() else mask
