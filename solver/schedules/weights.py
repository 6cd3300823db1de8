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

#: Ops of a device's order that are looked at, per device of the pipeline, for one that can run earlier.
_FAR = 6


def with_weights(
    problem: Problem,
    orders: Sequence[Sequence[Step]],
    budgets: Sequence[int],
    *,
    lazy: bool,
    most_pending: int | None = None,
    overtake: float | None = None,
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
    overtake
        While the next F or B has not arrived, run a later one that has and delays it by at most so much of its own
        time; an F only where the memory up to its old place allows. None: keep the order.

    Raises
    ------
    DoesNotFit
        The order needs more memory even if every W runs at once.
    """
    filling = _Filling(problem, orders, budgets, lazy, most_pending, overtake)
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
        overtake: float | None,
    ) -> None:
        self.problem, self.budgets, self.lazy = problem, budgets, lazy
        self.most_pending, self.overtake = most_pending, overtake
        self.orders = [list(order) for order in orders]
        D = len(orders)
        self.at, self.clock, self.idle, self.held = [0] * D, [0.0] * D, [0.0] * D, [0] * D
        self.idlest = 0.0
        self.steps: list[list[Step]] = [[] for _ in range(D)]
        self.pending: list[deque[Step]] = [deque() for _ in range(D)]
        self.end: dict[Step, float] = {}

    def finished(self, d: int) -> bool:
        return self.at[d] == len(self.orders[d]) and not self.pending[d]

    def decide(self, d: int, now: float) -> list[tuple[float, int]]:
        """Start the next op of device d or let it sleep; whom to ask when."""
        if self.most_pending is not None and len(self.pending[d]) > self.most_pending:
            return self._run(d, self.pending[d][0], now)
        step = self.orders[d][self.at[d]] if self.at[d] < len(self.orders[d]) else None
        arrival = float("inf") if step is None else self._arrival(step)
        fits = step is None or step.kind != Kind.F or self._fits(d, step)
        arrived = arrival <= now + 1e-9
        if step is not None and arrived and fits:
            return self._run(d, step, now)
        if self.overtake is not None and step is not None and not arrived and self._bring_forward(d, now, arrival):
            return self._run(d, self.orders[d][self.at[d]], now)
        if self.pending[d] and ((not fits and arrived) or self._is_due(d, arrival - now)):
            return self._run(d, self.pending[d][0], now)
        return []

    def _bring_forward(self, d: int, now: float, arrival: float) -> bool:
        """Put the first later op that has arrived in front of the next one, if there is one that may overtake it.

        An op must not overtake one of its own kind and stage.
        """
        assert self.overtake is not None
        order, at = self.orders[d], self.at[d]
        seen = {order[at][:2]}
        # As if all pending W's were done: before an F they can be.
        level = self.held[d] - sum(self.problem.stages[w.stage].weight_context_bytes for w in self.pending[d])
        highest = level + self._taken(order[at])
        level = highest
        for k in range(at + 1, min(len(order), at + _FAR * len(self.orders))):
            step = order[k]
            if step[:2] not in seen and self._arrival(step) <= now + 1e-9:
                in_time = now + (1 - self.overtake) * duration(self.problem, step.kind, step.stage) <= arrival + 1e-9
                safe = step.kind != Kind.F or (highest + self._taken(step) <= self.budgets[d] and self._fits(d, step))
                if safe and in_time:
                    order.insert(at, order.pop(k))
                    return True
            seen.add(step[:2])
            level += self._taken(step)
            highest = max(highest, level)
        return False

    def _taken(self, step: Step) -> int:
        """Bytes more after an op, once the W that it may leave is done."""
        size = self.problem.stages[step.stage].activation_bytes
        return size if step.kind == Kind.F else -size

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
        if step.kind == Kind.W:
            return [(self.clock[d], d)]
        return [(self.clock[d], d), *self._woken(step, now)]

    def _woken(self, step: Step, now: float) -> list[tuple[float, int]]:
        """Whom to ask when: the device of the next stage knows from now on when its input arrives."""
        other, lag = (step.stage + 1, step.stage) if step.kind == Kind.F else (step.stage - 1, step.stage - 1)
        if not 0 <= other < self.problem.num_stages:
            return []
        device = self.problem.stages[other].device
        return [(now, device), (self.end[step] + self.problem.comm_ms[lag], device)]
