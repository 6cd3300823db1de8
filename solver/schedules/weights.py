"""W's put where they cost least, for given orders of forwards and backwards.

A device goes through its F's and B's in their order. While the next one has not arrived it runs pending W's that end
before it does; one that does not only where waiting would make this device the idlest of all. Before an F it runs as
many as memory asks for.

Generators try many orders on one problem, so the ops are numbers here: op ``(kind * S + stage) * m + microbatch``, in
flat lists that are made once a problem (:class:`Numbers`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from optpipe.ops import Kind
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotFit
from solver.schedules.orders import Step, duration

#: Ops of a device's order that are looked at, per device of the pipeline, for one that can run earlier.
_FAR = 6
#: Instants in ms that are closer count as one.
_EPS = 1e-9
_KINDS = (Kind.F, Kind.B, Kind.W)
_T = TypeVar("_T", int, float)


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
    lazy, most_pending, overtake
        See :class:`Policy`.

    Raises
    ------
    DoesNotFit
        The order needs more memory even if every W runs at once.
    """
    numbers = Numbers(problem)
    filling = Filling(numbers, [numbers.of(order) for order in orders], budgets, Policy(lazy, most_pending, overtake))
    filling.run()
    for d in range(len(orders)):
        if not filling.finished(d):
            raise DoesNotFit(f"needs more memory on device {d} than {budgets[d]} bytes")
    return filling.steps()


class Policy(NamedTuple):
    """When W's run, and what may overtake.

    Attributes
    ----------
    lazy
        Wait rather than run a W that does not fit, as long as no device becomes the idlest by it.
    most_pending
        Run a W at once where more than so many wait; None: only for the reasons above.
    overtake
        While the next F or B has not arrived, run a later one that has and delays it by at most so much of its own
        time; an F only where the memory up to its old place allows. None: keep the order.
    """

    lazy: bool
    most_pending: int | None = None
    overtake: float | None = None


class Numbers:
    """A problem whose ops are numbers.

    Attributes
    ----------
    length, row, device
        Per op its time in ms; its kind and stage as one number, ``kind * S + stage``; its device.
    grows, whole
        Per op the bytes that it takes (negative: gives back); for a B what it and its W give back together.
    follower, lag
        Per F and B the op that waits for it on its way (-1: none), and the ms in between.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        S, m = self.S, self.m = problem.num_stages, problem.num_microbatches
        stages = [problem.stages[row % S] for row in range(len(_KINDS) * S)]
        whole = [stage.activation_bytes for stage in stages]
        kept = [stage.weight_context_bytes for stage in stages]
        self.row = [row for row in range(len(_KINDS) * S) for _ in range(m)]
        self.device = _spread([stage.device for stage in stages], m)
        self.length = _spread([duration(problem, _KINDS[row // S], row % S) for row in range(len(_KINDS) * S)], m)
        self.grows = _spread(
            whole[:S] + [k - w for k, w in zip(kept[:S], whole[:S], strict=True)] + [-k for k in kept[:S]], m
        )
        self.whole = _spread(whole[:S] + [-w for w in whole[:S]], m)
        # An F hands on to the next stage, the last one to its own B, a B to the stage before.
        after = [*range(1, S), 2 * S - 1, -1, *range(S, 2 * S - 1)]
        self.follower = [-1 if row < 0 else row * m + j for row in after for j in range(m)]
        self.lag = _spread([*problem.comm_ms, 0.0, 0.0, *problem.comm_ms], m)

    def of(self, order: Sequence[Step]) -> list[int]:
        """Numbers of F's, B's and W's."""
        return [(_KINDS.index(kind) * self.S + s) * self.m + j for kind, s, j in order]

    def steps(self, order: Sequence[int]) -> list[Step]:
        """The ops of such numbers."""
        rows = [(_KINDS[row // self.S], row % self.S) for row in range(len(_KINDS) * self.S)]
        return [Step(*rows[op // self.m], op % self.m) for op in order]


def _spread(values: Sequence[_T], times: int) -> list[_T]:
    return [value for value in values for _ in range(times)]


class Filling:
    """One pass over the orders of all devices: whenever a device is free and something has come up, it decides.

    Parameters
    ----------
    numbers
        The problem.
    orders
        Per device the order of its F's and B's, as numbers.
    budgets
        Per device, bytes that must not be exceeded.
    policy
        When W's run.
    cut, by_span
        Give up once the schedule is known to take ``cut`` ms or more: from its start, or on one device.
    """

    def __init__(
        self,
        numbers: Numbers,
        orders: Sequence[Sequence[int]],
        budgets: Sequence[int],
        policy: Policy,
        cut: float = math.inf,
        *,
        by_span: bool = False,
    ) -> None:
        self.numbers, self.budgets, self.policy = numbers, budgets, policy
        self.cut, self.by_span = cut, by_span
        self.orders = [list(order) for order in orders]
        D, S, m = len(orders), numbers.S, numbers.m
        self.at, self.clock, self.first, self.idle, self.held = [0] * D, [0.0] * D, [math.inf] * D, [0.0] * D, [0] * D
        self.idlest = 0.0
        self.left = [sum(numbers.length[op] for op in order) for order in orders]
        for d, order in enumerate(orders):
            self.left[d] += sum(numbers.length[op + S * m] for op in order if op >= S * m)
        self.done: list[list[int]] = [[] for _ in range(D)]
        self.starts: list[list[float]] = [[] for _ in range(D)]
        self.pending: list[deque[int]] = [deque() for _ in range(D)]
        self.arrival = [0.0] * m + [math.inf] * (2 * S * m - m)
        #: Kinds and stages of a device's F's and B's.
        self.kinds = [len({numbers.row[op] for op in order}) for order in orders]
        #: Ops that have run, of all devices.
        self.started = 0

    def run(self) -> bool:
        """Go on until nothing can start any more; False: it was given up."""
        heap = [(0.0, d) for d in range(len(self.orders))]
        while heap:
            now, d = heapq.heappop(heap)
            if self.clock[d] <= now + _EPS and (op := self._decide(d, now)) >= 0 and not self._start(d, op, now, heap):
                return False
        return True

    def finished(self, d: int) -> bool:
        """Whether all ops of a device have run."""
        return self.at[d] == len(self.orders[d]) and not self.pending[d]

    @property
    def complete(self) -> bool:
        """Whether all ops have run."""
        return all(map(self.finished, range(len(self.orders))))

    @property
    def value(self) -> float:
        """From the start to the last end, or the longest that a device takes from its first op to its last, ms."""
        if self.by_span:
            return max((end - first for end, first in zip(self.clock, self.first, strict=True) if end), default=0.0)
        return max(self.clock)

    def steps(self) -> list[list[Step]]:
        """Per device its order."""
        return [self.numbers.steps(done) for done in self.done]

    def _decide(self, d: int, now: float) -> int:
        """The op that device d starts now; -1: it sleeps."""
        pending, order, at = self.pending[d], self.orders[d], self.at[d]
        if self.policy.most_pending is not None and len(pending) > self.policy.most_pending:
            return pending[0]
        if at == len(order):
            return pending[0] if pending else -1
        op = order[at]
        gap = self.arrival[op] - now
        if gap <= _EPS:
            if self.held[d] + self.numbers.grows[op] <= self.budgets[d] or op >= self.numbers.S * self.numbers.m:
                return op
            return pending[0] if pending else -1
        if self.policy.overtake is not None and (earlier := self._overtaking(d, now, now + gap)) >= 0:
            return earlier
        return pending[0] if pending and self._is_due(d, op) else -1

    def _overtaking(self, d: int, now: float, arrival: float) -> int:
        """The first later op that has arrived, put in front of the next one, if there is one that may overtake it.

        An op must not overtake one of its own kind and stage.
        """
        numbers, order, at, budget = self.numbers, self.orders[d], self.at[d], self.budgets[d]
        assert self.policy.overtake is not None
        part, forwards = 1 - self.policy.overtake, numbers.S * numbers.m
        row, whole, arrived = numbers.row, numbers.whole, self.arrival
        seen = {row[order[at]]}
        # As if all pending W's were done: before an F they can be.
        level = self.held[d] + sum(numbers.grows[w] for w in self.pending[d])
        highest = level = level + whole[order[at]]
        for k in range(at + 1, min(len(order), at + _FAR * len(self.orders))):
            op = order[k]
            if row[op] not in seen:
                if arrived[op] <= now + _EPS and now + part * numbers.length[op] <= arrival + _EPS:
                    size = whole[op]
                    if op >= forwards or (highest + size <= budget and self.held[d] + size <= budget):
                        order.insert(at, order.pop(k))
                        return op
                seen.add(row[op])
                if len(seen) == self.kinds[d]:
                    return -1
            level += whole[op]
            highest = max(highest, level)
        return -1

    def _is_due(self, d: int, op: int) -> bool:
        """Whether a W runs before the next F or B, which has not arrived."""
        gap = self.arrival[op] - self.clock[d]
        length = self.numbers.length[self.pending[d][0]]
        return length <= gap + _EPS or not self.policy.lazy or gap > self.idlest - self.idle[d]

    def _start(self, d: int, op: int, now: float, heap: list[tuple[float, int]]) -> bool:
        """Run an op; False: the schedule has become too long."""
        numbers = self.numbers
        backwards = numbers.S * numbers.m
        at = now
        if op >= 2 * backwards:
            at = self.clock[d]  # a W that was put off until now could as well have run at once
        elif self.done[d]:
            self.idle[d] += max(0.0, at - self.clock[d])
            self.idlest = max(self.idlest, self.idle[d])
        else:
            self.first[d] = now
        end = self.clock[d] = at + numbers.length[op]
        self.done[d].append(op)
        self.starts[d].append(at)
        self.held[d] += numbers.grows[op]
        self.left[d] -= numbers.length[op]
        if end + self.left[d] - (self.first[d] if self.by_span else 0.0) >= self.cut:
            return False
        self.started += 1
        heapq.heappush(heap, (max(end, now), d))
        if op >= 2 * backwards:
            self.pending[d].popleft()
            return True
        self.at[d] += 1
        if op >= backwards:
            self.pending[d].append(op + backwards)
        if (follower := numbers.follower[op]) >= 0:
            self.arrival[follower] = end + numbers.lag[op]
            if (op < backwards) == (follower < backwards):
                # Its device knows from now on when its input arrives.
                other = numbers.device[follower]
                heapq.heappush(heap, (now, other))
                heapq.heappush(heap, (self.arrival[follower], other))
        return True
