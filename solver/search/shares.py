"""How much each transfer should move: a linear program, exact for given orders.

With the orders of a schedule given, and with that what precedes what in memory, starts and moved bytes are all that is
left, and everything about them is linear: a transfer takes time in proportion to what it moves, and what is away when
an op takes memory must make room for it. Often less than all of the activations has to leave.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optpipe import semantics
from optpipe.ops import Bools, Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from optpipe.timing import earliest, order_graph
from solver.milp import highs
from solver.milp.sparse import INF, Matrix

#: Of the makespan: what moving everything weighs, so that of two shortest schedules the one that moves less is found.
_TIDY = 1e-4
#: Linear programs at most: with other times, other ops may precede what takes memory.
_TURNS = 4
#: Relative: a difference that counts, and one that does not.
_SMALL, _SAME = 1e-6, 1e-9


def with_best_shares(problem: Problem, ops: Ops, *, seconds: float) -> Ops:
    """The schedule with as little moved as makes it as short as its orders allow; ``ops`` where that is no shorter.

    Parameters
    ----------
    problem, ops
        A valid schedule with transfers.
    seconds
        Time limit of each linear program.
    """
    best, length = ops, semantics.makespan(ops)
    for _ in range(_TURNS):
        shares = _Program(problem, best).shares(seconds)
        if shares is None:
            break
        moved = _moving(problem, best, shares)
        if semantics.makespan(moved) >= length * (1 - _SMALL):
            break
        best, length = moved, semantics.makespan(moved)
    return best


def with_fitting_shares(problem: Problem, ops: Ops, *, seconds: float) -> Ops | None:
    """The orders with as much moved as makes them fit the memory, as short as they then are; None where nothing does.

    Parameters
    ----------
    problem, ops
        Orders that may need more memory than there is, but break no other rule.
    seconds
        Time limit.
    """
    shares = _Program(problem, ops).shares(seconds)
    return None if shares is None else _moving(problem, ops, shares)


def with_least_moved(problem: Problem, ops: Ops, *, seconds: float) -> Ops:
    """The schedule as long as it is, moving as little as its orders allow; ``ops`` where nothing less was found.

    Parameters
    ----------
    problem, ops
        A valid schedule with transfers.
    seconds
        Time limit.
    """
    length = semantics.makespan(ops)
    shares = _Program(problem, earliest(problem, ops), longest=length * (1 + _SAME)).shares(seconds)
    if shares is None:
        return ops
    found = _moving(problem, ops, shares)
    moved, before = (int(semantics.moved_bytes(problem, each).sum()) for each in (found, ops))
    return found if moved < before and semantics.makespan(found) <= length * (1 + _SAME) else ops


def _moving(problem: Problem, ops: Ops, shares: Floats) -> Ops:
    """The same orders with these shares (n,) of the offloadable bytes moved; what moves nothing is left out."""
    whole = np.array([stage.offloadable_bytes for stage in problem.stages], np.int64)[ops.stage]
    amount = np.minimum(whole, np.ceil(shares * whole - 1e-6)).astype(np.int64)
    stay = ops.is_compute | (amount > 0)
    part = np.where(ops.is_compute | (amount == whole), -1, amount)
    kept = Ops(ops.kind[stay], ops.stage[stay], ops.microbatch[stay], ops.start[stay], ops.end[stay], part[stay], {})
    return earliest(problem, kept)


class _Program:
    """Starts, a share of each pair of transfers, and the makespan, as columns in this order.

    The makespan is to be short or, where ``longest`` (ms) is given, no longer than that while as little as possible is
    moved.
    """

    def __init__(self, problem: Problem, ops: Ops, longest: float | None = None) -> None:
        self.problem, self.ops, self.longest = problem, ops, longest
        n, out = len(ops), np.flatnonzero(ops.kind == Kind.O)
        self.pair = np.full(n, -1, np.int64)
        pair_of = np.full((problem.num_stages, problem.num_microbatches), -1, np.int64)
        pair_of[ops.stage[out], ops.microbatch[out]] = np.arange(len(out))
        transfers = ~ops.is_compute
        self.pair[transfers] = pair_of[ops.stage[transfers], ops.microbatch[transfers]]
        self.pairs = len(out)
        #: ms: how long an op takes, or would take if it moved everything.
        self.full = semantics.durations(problem, replace(ops, bytes=np.full(n, -1, np.int64)))
        self.rows: list[tuple[Ints, Ints, Floats, Floats, Floats]] = []  # row, column, value of entries; sides of rows

    def shares(self, seconds: float) -> Floats | None:
        """float64 (n,): of each transfer the share of the offloadable bytes that it moves; None: no solution."""
        n, pairs = len(self.ops), self.pairs
        self._add_waits()
        self._add_end()
        self._add_memory()
        cost = np.zeros(n + pairs + 1)
        upper = np.concatenate([np.full(n, INF), np.ones(pairs), [INF]])
        if self.longest is None:
            cost[n : n + pairs] = _TIDY * semantics.makespan(self.ops) / max(1, pairs)
            cost[-1] = 1.0
        else:
            whole = np.array([stage.offloadable_bytes for stage in self.problem.stages], np.float64)
            cost[n : n + pairs] = whole[self.ops.stage[self.ops.kind == Kind.O]] / max(1.0, whole.max())
            upper[-1] = self.longest
        matrix = _matrix(cost, upper, self.rows)
        result = highs.solve(matrix, highs.Settings(time_limit=seconds))
        if result.status != "optimal" or result.solution is None:
            return None
        share = np.append(result.solution[n : n + pairs], 0.0)
        return np.clip(share[self.pair], 0.0, 1.0)

    def _add_waits(self) -> None:
        """start(b) - start(a) - duration(a) >= lag."""
        graph = order_graph(self.problem, self.ops)
        after = np.repeat(graph.order, np.diff(graph.first))
        self._add_rows(graph.before, after, graph.lag)

    def _add_end(self) -> None:
        """makespan - start(a) - duration(a) >= 0 for the last compute op of every device."""
        last = np.array([lane.ops[-1] for lane in semantics.compute_lanes(self.problem, self.ops) if len(lane.ops)])
        self._add_rows(last, np.full(len(last), len(self.ops) + self.pairs), np.zeros(len(last)))

    def _add_rows(self, before: Ints, after: Ints, lag: Floats) -> None:
        """x[after] - start(before) - duration(before) >= lag."""
        rows = np.arange(len(before))
        moves = self.pair[before] >= 0
        took = np.where(moves, 0.0, self.full[before])
        row = np.concatenate([rows, rows, rows[moves]])
        column = np.concatenate([after, before, len(self.ops) + self.pair[before[moves]]])
        value = np.concatenate([np.ones(len(rows)), -np.ones(len(rows)), -self.full[before[moves]]])
        self.rows.append((row, column, value, lag + took, np.full(len(rows), INF)))

    def _add_memory(self) -> None:
        """What a device holds when an op takes memory, less what is away then, fits."""
        problem, ops = self.problem, self.ops
        whole = replace(ops, bytes=np.full(len(ops), -1, np.int64))
        events = semantics.memory_events(problem, whole)
        slack = semantics.tolerance(ops)
        for number, device in enumerate(problem.devices):
            if device.memory_bytes is None:
                continue
            own = events.device == number
            index, time, delta = events.op[own], events.time[own], events.delta[own]
            self._add_device(index, time, delta, float(device.memory_bytes), slack)

    def _add_device(self, index: Ints, time: Floats, delta: Ints, budget: float, slack: float) -> None:
        takers = np.flatnonzero(delta > 0)
        moves = self.pair[index] >= 0
        # (taker, event): whether it counts: takes that start by then, frees that have ended by then.
        there = time[None, :] <= time[takers][:, None] + slack
        fixed = (there & ~moves[None, :]) @ np.where(moves, 0, delta).astype(np.float64)
        away = _away(there[:, moves], self.pair[index[moves]], np.sign(delta[moves]), self.pairs)
        size = np.zeros(self.pairs)
        size[self.pair[index[moves]]] = np.abs(delta[moves])
        needed = fixed > budget
        row, pair = np.nonzero(away[needed])
        side = np.asarray((budget - fixed[needed]) / budget, np.float64)
        value = -size[pair] / budget
        self.rows.append((row, len(self.ops) + pair, value, np.full(len(side), -INF), side))


def _away(there: Bools, pair: Ints, sign: Ints, pairs: int) -> Bools:
    """bool (takers, pairs): the pairs whose offload has ended and whose reload has not started."""
    out, back = np.zeros((len(there), pairs), np.bool_), np.zeros((len(there), pairs), np.bool_)
    out[:, pair[sign < 0]] = there[:, sign < 0]
    back[:, pair[sign > 0]] = there[:, sign > 0]
    return np.asarray(out & ~back)


def _matrix(cost: Floats, upper: Floats, parts: list[tuple[Ints, Ints, Floats, Floats, Floats]]) -> Matrix:
    offsets = np.cumsum([0, *(len(part[3]) for part in parts)])
    row = np.concatenate([part[0] + offset for part, offset in zip(parts, offsets[:-1], strict=True)])
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(math.floor(offsets[-1]) + 1))
    return Matrix(
        cost=cost,
        lower=np.zeros(len(cost)),
        upper=upper,
        integer=np.zeros(len(cost), np.bool_),
        first=first,
        column=np.concatenate([part[1] for part in parts])[order],
        value=np.concatenate([part[2] for part in parts])[order],
        row_lower=np.concatenate([part[3] for part in parts]),
        row_upper=np.concatenate([part[4] for part in parts]),
    )
