"""W's put where they cost least, for given orders of forwards and backwards.

A device goes through its F's and B's in their order. While the next one has not arrived it runs pending W's that end
before it does; one that does not only where waiting would make this device the idlest of all. Before an F it runs as
many as memory asks for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from optpipe.ops import Kind
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotFit
from solver.schedules.orders import Step, duration


def with_weights(
    problem: Problem,
    orders: Sequence[Sequence[Step]],
    budgets: Sequence[int],
    *,
    lazy: bool,
    most_pending: int | None = None,
) -> list[list[Step]]:
    """Per device its order with W's in it.

    Parameters
    ----------
    problem
        The problem; every backward is split.
    orders
        Per device the order of its F's and B's.
    budgets
        Per device, bytes that must not be exceeded.
    lazy
        Wait rather than run a W that does not fit, as long as no device becomes the idlest by it.
    most_pending
        Run a W at once where more than so many wait; None: only for the reasons above.

    Raises
    ------
    DoesNotFit
        The order needs more memory even if every W runs at once.
    """
    filling = _Filling(problem, orders, budgets, lazy, most_pending)
    heap = [(0.0, d) for d in range(len(orders))]
    while heap:
        now, d = heapq.heappop(heap)
        if filling.clock[d] <= now + 1e-9 and not filling.finished(d):
            for at, other in filling.decide(d, now):
                heapq.heappush(heap, (at, other))
    for d in range(len(orders)):
        if not filling.finished(d):
            raise DoesNotFit(f"needs more memory on device {d} than {budgets[d]} bytes")
    return filling.steps


class _Filling:
    def __init__(
        self,
        problem: Problem,
        orders: Sequence[Sequence[Step]],
        budgets: Sequence[int],
        lazy: bool,
        most_pending: int | None,
    ) -> None:
        self.problem, self.orders, self.budgets, self.lazy = problem, orders, budgets, lazy
        self.most_pending = most_pending
        D = len(orders)
        self.at, self.clock, self.idle, self.held = [0] * D, [0.0] * D, [0.0] * D, [0] * D
        self.idlest = 0.0
        self.steps: list[list[Step]] = [[] for _ in range(D)]
        self.pending: list[deque[Step]] = [deque() for _ in range(D)]
        self.end: dict[Step, float] = {}
        self.asleep: dict[Step, int] = {}

    def finished(self, d: int) -> bool:
        return self.at[d] == len(self.orders[d]) and not self.pending[d]

    def decide(self, d: int, now: float) -> list[tuple[float, int]]:
        """Start the next op of device d or let it sleep; whom to ask when."""
        if self.most_pending is not None and len(self.pending[d]) > self.most_pending:
            return self._run(d, self.pending[d][0], now)
        step = self.orders[d][self.at[d]] if self.at[d] < len(self.orders[d]) else None
        arrival = float("inf") if step is None else self._arrival(step)
        if step is not None and arrival == float("inf"):
            self.asleep[self._missing(step)] = d
        fits = step is None or step.kind != Kind.F or self._fits(d, step)
        if step is not None and arrival <= now + 1e-9 and fits:
            return self._run(d, step, now)
        if self.pending[d] and ((not fits and arrival <= now + 1e-9) or self._is_due(d, arrival - now)):
            return self._run(d, self.pending[d][0], now)
        return [(arrival, d)] if now < arrival < float("inf") else []

    def _is_due(self, d: int, gap: float) -> bool:
        length = duration(self.problem, Kind.W, self.pending[d][0].stage)
        return length <= gap + 1e-9 or not self.lazy or gap > self.idlest - self.idle[d]

    def _fits(self, d: int, step: Step) -> bool:
        return self.held[d] + self.problem.stages[step.stage].activation_bytes <= self.budgets[d]

    def _inputs(self, step: Step) -> list[tuple[Step, float]]:
        kind, s, j = step
        comm = self.problem.comm_ms
        if kind == Kind.F:
            return [(Step(Kind.F, s - 1, j), comm[s - 1])] if s else []
        above = [(Step(Kind.B, s + 1, j), comm[s])] if s + 1 < self.problem.num_stages else []
        return [(Step(Kind.F, s, j), 0.0), *above]

    def _arrival(self, step: Step) -> float:
        return max((self.end.get(need, float("inf")) + lag for need, lag in self._inputs(step)), default=0.0)

    def _missing(self, step: Step) -> Step:
        return next(need for need, _ in self._inputs(step) if need not in self.end)

    def _run(self, d: int, step: Step, now: float) -> list[tuple[float, int]]:
        stage = self.problem.stages[step.stage]
        if self.steps[d]:
            self.idle[d] += max(0.0, now - self.clock[d])
            self.idlest = max(self.idlest, self.idle[d])
        self.clock[d] = self.end[step] = now + duration(self.problem, step.kind, step.stage)
        self.steps[d].append(step)
        if step.kind == Kind.W:
            self.pending[d].popleft()
            self.held[d] -= stage.weight_context_bytes
        else:
            self.at[d] += 1
            if step.kind == Kind.F:
                self.held[d] += stage.activation_bytes
            else:
                self.held[d] -= stage.activation_bytes - stage.weight_context_bytes
                self.pending[d].append(Step(Kind.W, step.stage, step.microbatch))
        wake = [(self.clock[d], d)]
        if (other := self.asleep.pop(step, None)) is not None:
            wake.append((now, other))  # from now on it knows when its input arrives
        return wake
