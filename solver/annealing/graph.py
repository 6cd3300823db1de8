"""A schedule without transfers as orders of devices: the flat columns that the annealing works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from optpipe import semantics
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from solver.compiled import column

UNLIMITED = 2**62


@dataclass(frozen=True)
class OrderProblem:
    """Ops on devices, with what they wait for. Columns as of ``compiled.column``; ragged ones with a pointer column.

    Attributes
    ----------
    device, duration, take, free
        Per op: where it runs, ms, bytes taken at its start and given back at its end.
    sequence
        Per op a number that ops of one stage and kind share: they keep their order.
    before_first, before, before_lag
        Per op what it waits for by its data, and the ms in between.
    after_first, after, after_lag
        The same the other way round.
    order_first, order
        Per device its ops in order.
    budget
        Per device bytes.
    """

    ops: Ops
    device: Any
    duration: Any
    take: Any
    free: Any
    sequence: Any
    before_first: Any
    before: Any
    before_lag: Any
    after_first: Any
    after: Any
    after_lag: Any
    order_first: Any
    order: Any
    budget: Any


def order_problem(problem: Problem, ops: Ops) -> OrderProblem:
    """The orders of a valid schedule without transfers.

    Raises
    ------
    ValueError
        The schedule has transfers.
    """
    if not ops.is_compute.all():
        raise ValueError("the schedule has transfers")
    n = len(ops)
    edges = semantics.dependencies(problem, ops)
    before_first, before, before_lag = _ragged(n, edges.after, edges.before, edges.lag)
    after_first, after, after_lag = _ragged(n, edges.before, edges.after, edges.lag)
    events = semantics.memory_events(problem, ops)
    take, free = np.zeros(n, np.int64), np.zeros(n, np.int64)
    takes = events.delta > 0
    np.add.at(take, events.op[takes], events.delta[takes])
    np.add.at(free, events.op[~takes], -events.delta[~takes])
    lanes = semantics.compute_lanes(problem, ops)
    budgets = [UNLIMITED if d.memory_bytes is None else d.memory_bytes for d in problem.devices]
    return OrderProblem(
        ops=ops,
        device=column(semantics.device_of(problem, ops), int),
        duration=column(semantics.durations(problem, ops), float),
        take=column(take, int),
        free=column(free, int),
        sequence=column(ops.stage * len(Kind) + ops.kind, int),
        before_first=before_first,
        before=before,
        before_lag=before_lag,
        after_first=after_first,
        after=after,
        after_lag=after_lag,
        order_first=column(np.cumsum([0, *(len(lane.ops) for lane in lanes)]), int),
        order=column(np.concatenate([lane.ops for lane in lanes]), int),
        budget=column(budgets, int),
    )


def _ragged(n: int, owner: Ints, item: Ints, lag: Floats) -> tuple[Any, Any, Any]:
    by_owner = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[by_owner], np.arange(n + 1))
    return column(first, int), column(item[by_owner], int), column(lag[by_owner], float)
