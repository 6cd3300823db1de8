"""Annealing of device orders: improves a schedule without transfers, whatever its placement.

Without transfers a schedule is its orders: memory depends on the order of a device's ops alone, and the earliest times
follow from all orders together. So the search walks over orders (``kernel``) and leaves the clock to the longest path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from optpipe import semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.annealing.graph import OrderProblem, order_problem
from solver.annealing.kernel import BEST, PRESENT, anneal_some, time_heads
from solver.compiled import column

__all__ = ["anneal"]


class _Cooling(NamedTuple):
    """Temperatures in mean durations of an op at the start and the end of the first round, less in each later one; and
    proposals per op of the first round (each later one is twice as long)."""

    hot: float
    cold: float
    proposals: int


#: Ops of the largest schedule in which there is time to come back from far off; how its later rounds cool down; and how
#: a first round does, and every one of larger schedules.
_SMALL, _HOT, _COLD = 3_000, _Cooling(0.3, 0.005, 200), _Cooling(0.003, 0.0003, 100)
#: Proposals between two looks at the clock.
_CHUNK = 2000


class _Walk:
    """The present and the best orders of one search."""

    def __init__(self, graph: OrderProblem, seed: int) -> None:
        n = len(graph.ops)
        self.graph = graph
        self.order = column(graph.order, int)
        self.best = column(graph.order, int)
        self.place = column(np.argsort(np.asarray(graph.order)), int)
        self.head, self.tail = column(np.zeros(n), float), column(np.zeros(n), float)
        self.level = column(np.zeros(n), int)
        self.ints = tuple(column(np.zeros(n), int) for _ in range(4))
        self.floats = tuple(column(np.zeros(n), float) for _ in range(2))
        self.state = column([float(seed % 2**32), 0.0, 0.0], float)
        self.state[PRESENT] = self.state[BEST] = self._time()

    def _time(self) -> float:
        """Heads and levels of the present order; its makespan."""
        g = self.graph
        g_order = np.asarray(self.order)
        held = np.asarray(g.take)[g_order] - np.asarray(g.free)[g_order]
        first = np.asarray(g.order_first)
        total = np.cumsum(held)
        base = np.concatenate([[0], total])[first[:-1]]
        self.level[:] = column(total - np.repeat(base, np.diff(first)), int)
        waiting, sweep = self.ints[0], self.ints[1]
        return float(
            time_heads(
                g.duration, g.device, g.before_first, g.before, g.before_lag, g.after_first, g.after, g.order_first,
                self.order, self.place, self.head, waiting, sweep,
            )
        )  # fmt: skip

    def back_to_best(self) -> None:
        self.order[:] = self.best[:]
        self.place[:] = column(np.argsort(np.asarray(self.order)), int)
        self.state[PRESENT] = self._time()

    def go(self, proposals: int, hot: float, cold: float, goal: float) -> None:
        g = self.graph
        anneal_some(
            g.duration, g.device, g.take, g.free, g.sequence, g.before_first, g.before, g.before_lag, g.after_first,
            g.after, g.after_lag, g.order_first, self.order, g.budget, self.place, self.head, self.tail, self.level,
            self.best, self.ints, self.floats, self.state, proposals, hot, cold, goal,
        )  # fmt: skip

    def schedule(self) -> Ops:
        """The best orders as ops at their earliest times."""
        self.back_to_best()
        start = np.asarray(self.head, np.float64)
        return self.graph.ops.at(start, start + np.asarray(self.graph.duration))


def anneal(
    problem: Problem,
    ops: Ops,
    *,
    seconds: float,
    goal: float = 0.0,
    seed: int = 0,
    rounds: int = 30,
    on_improvement: Callable[[Ops], None] | None = None,
) -> Ops:
    """A schedule at least as short as ``ops``, with the same ops in other orders.

    Parameters
    ----------
    problem, ops
        A valid schedule without transfers.
    seconds
        Time limit.
    goal
        A proven lower bound of the makespan, ms: reaching it ends the search.
    seed
        Of the random moves: the same seed gives the same schedule, as long as the time limit does not cut in.
    rounds
        Rounds of cooling down, each twice as long as the one before.
    on_improvement
        Called with each better schedule (at most once between two looks at the clock).

    Raises
    ------
    ValueError
        The schedule has transfers.
    """
    graph = order_problem(problem, ops)
    walk = _Walk(graph, seed)
    limit = time.monotonic() + seconds
    mean = float(np.mean(np.asarray(graph.duration)))
    goal *= 1 + 1e-9
    told = walk.state[BEST]
    for number in range(rounds):
        # What is near is looked at first.
        cooling = _HOT if number and len(ops) <= _SMALL else _COLD
        hot, cold = mean * cooling.hot / (1 + number % 3), mean * cooling.cold
        total = cooling.proposals * len(ops) * 2**number
        chunks = math.ceil(total / _CHUNK)
        ratio = (cold / hot) ** (1 / chunks)
        for chunk in range(chunks):
            walk.go(_CHUNK, hot * ratio**chunk, hot * ratio ** (chunk + 1), goal)
            if on_improvement is not None and walk.state[BEST] < told * (1 - 1e-9):
                told = walk.state[BEST]
                present, place = column(walk.order, int), column(walk.place, int)
                on_improvement(walk.schedule())
                walk.order[:], walk.place[:] = present[:], place[:]
                walk.state[PRESENT] = walk._time()
            if walk.state[BEST] <= goal or time.monotonic() > limit:
                break
        if walk.state[BEST] <= goal or time.monotonic() > limit:
            break
        walk.back_to_best()
    found = walk.schedule()
    return found if semantics.makespan(found) <= semantics.makespan(ops) else ops
