"""A schedule in the terms of a formulation: starts of its ops, what it moves and fuses, every order bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe import semantics
from optpipe.ops import Bools, Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from solver.microbatches import shares
from solver.milp.model import Meaning
from solver.milp.table import OpTable


@dataclass(frozen=True)
class Incumbent:
    """A schedule on an op table.

    Attributes
    ----------
    start, end
        float64 (ops,), ms. A pair O, R that does not take place has starts too: as early as its sequence allows.
    place
        int64 (ops,): place of each op in the schedule's order.
    chosen
        bool (ops,): O and R that take place; B and W that are fused.
    part
        float64 (ops,): of a transfer that takes place, the part of all that can be offloaded; 1 for all others.
    parts
        Whether other parts than all are known.
    slack
        ms: instants that are closer count as one.
    objective
        Per objective its value, ms.
    """

    table: OpTable
    start: Floats
    end: Floats
    place: Ints
    chosen: Bools
    part: Floats
    parts: bool
    slack: float
    objective: dict[str, float]

    def value(self, meaning: Meaning, a: Ints, b: Ints) -> Bools:
        """What the bits of ops a and b are in this schedule."""
        if meaning in (Meaning.MOVED, Meaning.FUSED):
            return self.chosen[a]
        if meaning is Meaning.ORDER:
            return self.place[a] < self.place[b]
        if meaning is Meaning.STARTED:
            return self.start[a] <= self.start[b] + self.slack
        if meaning is Meaning.AHEAD:
            took = self.end[a] - self.start[a] if self.parts else self.table.longest[a]
            return self.start[a] + took <= self.start[b] + self.slack
        ended = self.end[a] <= self.start[b] + self.slack
        if meaning is Meaning.FREED:
            return ended
        if meaning is Meaning.GIVES_BACK:
            return ended & self.chosen[a] & ~self._weight_done(a, b)
        back = self.reload_of(a)
        later = self.start[back] >= self.start[b] - self.slack
        # Of two reloads at one instant the one with the higher number counts as the later one.
        tie = np.abs(self.start[back] - self.start[b]) <= self.slack
        reload_ = np.repeat(self.table.kind == Kind.R, self.table.microbatches)[b]
        return ended & (self.chosen[a] | self.parts) & later & (~reload_ | ~tie | (back > b))

    def number(self, meaning: Meaning, a: Ints, b: Ints) -> Floats:
        """The same as numbers, and what the columns are that are real."""
        if meaning is Meaning.AMOUNT:
            return self.value(Meaning.AWAY, a, b) * self.chosen[a] * self.part[a]
        found = self.value(meaning, a, b).astype(np.float64)
        return found * self.part[a] if meaning is Meaning.MOVED else found

    def _weight_done(self, backward: Ints, b: Ints) -> Bools:
        """Whether the W of each B counts as ended when b starts: by the order at an F, by time at an R."""
        m = self.table.microbatches
        stage = np.repeat(self.table.stage, m)[backward]
        first = np.array([self.table.sequence[Kind.W, int(s)] for s in stage], np.int64)
        weight = first * m + backward % m
        by_time = self.end[weight] <= self.start[b] + self.slack
        return np.where(self.table.compute[b], self.place[weight] < self.place[b], by_time)

    def reload_of(self, offload: Ints) -> Ints:
        """The R of each O."""
        return offload + self.table.microbatches * len(self.table.offloaded)


def incumbent(problem: Problem, table: OpTable, ops: Ops, *, parts: bool = False) -> Incumbent | None:
    """A schedule on the table; None where it does what the table does not know (recomputes, moves a part unless
    ``parts``, fuses or offloads where the table does not) or where its microbatches cannot be renumbered to ascend
    everywhere."""
    renumbered = ascending(problem, ops)
    if renumbered is None or (renumbered.kind == Kind.C).any() or (not parts and (renumbered.bytes >= 0).any()):
        return None
    placed = _placed(table, renumbered)
    if placed is None:
        return None
    index, chosen = placed
    m = table.microbatches
    there = index >= 0
    start = np.where(there, renumbered.start[index], np.nan)
    part = np.where(there, shares(problem, renumbered)[index], 1.0)
    took = table.per_op(table.base) + table.per_op(table.scale) * chosen * part
    _place_fused_weights(table, start, took)
    _place_idle_transfers(table, start, took)
    if np.isnan(start).any():
        return None
    start -= start[: problem.num_stages * m].min()
    return Incumbent(
        table=table,
        start=start,
        end=start + took,
        place=_places(table, start, took),
        chosen=chosen,
        part=part,
        parts=parts,
        slack=semantics.tolerance(renumbered),
        objective=_objectives(problem, table, start, start + took),
    )


def _placed(table: OpTable, ops: Ops) -> tuple[Ints, Bools] | None:
    """For each op of the table the op of the schedule (-1: none), and what is chosen."""
    index, chosen = np.full(table.num_ops, -1, np.int64), np.zeros(table.num_ops, np.bool_)
    kind = np.where(ops.kind == Kind.BW, Kind.B, ops.kind)
    first = np.full((len(Kind), int(ops.stage.max()) + 1), -1, np.int64)
    for (of, s), q in table.sequence.items():
        first[of, s] = q * table.microbatches
    base = first[kind, ops.stage]
    if (base < 0).any():
        return None
    at = base + ops.microbatch
    index[at] = np.arange(len(ops))
    chosen[at[~ops.is_compute]] = True
    for s in table.fused:
        mask = (ops.kind == Kind.BW) & (ops.stage == s)
        chosen[table.ops(Kind.B, s)[ops.microbatch[mask]]] = True
        chosen[table.ops(Kind.W, s)[ops.microbatch[mask]]] = True
    return index, chosen


def _place_fused_weights(table: OpTable, start: Floats, took: Floats) -> None:
    """Starts for W's without a duration: right after their B or the W before, whichever is later."""
    for s in table.fused:
        free = -np.inf
        for op, before in zip(table.ops(Kind.W, s).tolist(), table.ops(Kind.B, s).tolist(), strict=True):
            if np.isnan(start[op]):
                start[op] = max(free, start[before] + took[before])
            free = max(free, start[op] + took[op])


def _place_idle_transfers(table: OpTable, start: Floats, took: Floats) -> None:
    """Starts for the pairs that do not take place: O right after its F or the O before, whichever is later; R as late
    as its B or the R after it allow."""
    for s in table.offloaded:
        forward, offload = table.ops(Kind.F, s), table.ops(Kind.O, s)
        reload_, backward = table.ops(Kind.R, s), table.ops(Kind.B, s)
        free, due = -np.inf, np.inf
        for op, before in zip(offload.tolist(), forward.tolist(), strict=True):
            if np.isnan(start[op]):
                start[op] = max(free, start[before] + took[before])
            free = max(free, start[op] + took[op])
        for op, after in zip(reload_[::-1].tolist(), backward[::-1].tolist(), strict=True):
            if np.isnan(start[op]):
                start[op] = min(due, start[after])
            due = min(due, start[op])


def _places(table: OpTable, start: Floats, took: Floats) -> Ints:
    """Places by start, then end; ops without a duration at one instant as a microbatch passes them."""
    grid = semantics.tolerance_of(start, start + took) or 1.0
    kind = np.repeat(table.kind, table.microbatches)
    stage = np.repeat(table.stage, table.microbatches)
    microbatch = np.tile(np.arange(table.microbatches), len(table.kind))
    phase = np.array([0, 3, 4, 3, 2, 1, 2])[kind]
    rank = np.lexsort(
        (
            microbatch,
            np.where(kind == Kind.F, stage, -stage),
            phase,
            np.round((start + took) / grid),
            np.round(start / grid),
        )
    )
    place = np.empty(len(rank), np.int64)
    place[rank] = np.arange(len(rank))
    return place


def _objectives(problem: Problem, table: OpTable, start: Floats, end: Floats) -> dict[str, float]:
    device = np.where(table.compute, np.repeat(table.device, table.microbatches), -1)
    spans = [float(end[device == d].max() - start[device == d].min()) for d in range(problem.num_devices)]
    compute = table.compute
    return {"makespan": float(end[compute].max() - start[compute].min()), "span": max(spans)}


def ascending(problem: Problem, ops: Ops) -> Ops | None:
    """The same schedule with the microbatches of every stage and kind renumbered to ascend; None where an offload
    leaves no such numbering.

    Without offloads it always exists: if every x(j) + d <= y(j), the sorted ones keep that, and memory depends only
    on how many ops of a stage have run. A pair O, R needs a microbatch whose F has ended before the O, and whose B
    starts after the R; sorted, the pairs take the first ones that are left.
    """
    microbatch = ops.microbatch.copy()
    kind = np.where(ops.kind == Kind.BW, Kind.B, ops.kind)
    fused = ops.kind == Kind.BW
    for s in range(problem.num_stages):
        own = ops.stage == s
        for of in (Kind.F, Kind.B):
            index = np.flatnonzero(own & (kind == of))
            microbatch[index[np.argsort(ops.start[index], kind="stable")]] = np.arange(len(index))
        rest = np.setdiff1d(np.arange(problem.num_microbatches), microbatch[own & fused])
        index = np.flatnonzero(own & (kind == Kind.W))
        microbatch[index[np.argsort(ops.start[index], kind="stable")]] = rest[: len(index)]
        if not _renumber_pairs(ops, own, kind, microbatch, semantics.tolerance(ops)):
            return None
        again = np.flatnonzero(own & (kind == Kind.C))
        if len(again) and (microbatch[own & (kind == Kind.F)] != ops.microbatch[own & (kind == Kind.F)]).any():
            return None
    return Ops(ops.kind, ops.stage, microbatch, ops.start, ops.end, ops.bytes, ops.extra)


def _renumber_pairs(ops: Ops, own: Bools, kind: Ints, microbatch: Ints, slack: float) -> bool:
    """Give each pair O, R of a stage a microbatch that is there for it; whether that is possible."""
    out, back = (np.flatnonzero(own & (kind == of)) for of in (Kind.O, Kind.R))
    if len(out) != len(back):
        return False
    out, back = (index[np.argsort(ops.start[index], kind="stable")] for index in (out, back))
    forward, backward = (np.sort(t) for t in (ops.end[own & (kind == Kind.F)], ops.start[own & (kind == Kind.B)]))
    done = np.searchsorted(forward, ops.start[out] + slack, side="right")
    begun = np.searchsorted(backward, ops.end[back] - slack, side="left")
    least = 0
    for k in range(len(out)):
        number = max(least, int(begun[k]))
        if number >= done[k]:
            return False
        microbatch[out[k]] = microbatch[back[k]] = number
        least = number + 1
    return True
