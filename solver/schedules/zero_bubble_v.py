"""ZB-V (arXiv:2401.10241): zero bubble on a V placement, where device i holds stages i and 2 D - 1 - i.

The gradient of the last stage is born on the first device, so all devices start their backwards early and hold as many
activations. In the steady phase each device runs a backward and a forward in turn: of the chunk that is further on its
way (for a forward the later one, for a backward the earlier one) as soon as its input is known, else of the other. W's
fill gaps, and run early only where waiting would make a device the idlest of all (see
:mod:`solver.schedules.event_rule`); memory forces them too.

    device 0  F0 F0 F0 F0 .. F1 B1 F0 ..
    device 1     F0 F0 F1 F1 ..  B1 ..        (digits: chunks)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotFit
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import v_positions
from solver.schedules.weights import with_weights
from solver.tables import NO_LIMIT, Tables, tables


def zero_bubble_v(problem: Problem, *, objective: str = "makespan") -> Ops:
    """The best of the variants: whether W's may delay a forward, or a backward of the later chunk.

    Raises
    ------
    DoesNotApply
        No V placement.
    DoesNotFit
        A budget below what the fill of a V holds.
    """
    D = v_positions(problem)
    found: list[tuple[float, int, Ops]] = []
    left = _WORK
    for number, (before_f, before_b) in enumerate(product((True, False), repeat=2)):
        allowed, most_idle = [-1.0] * D, float("inf")
        for _ in range(_PASSES):
            if found and left <= 0:
                break
            left -= 3 * problem.num_stages * problem.num_microbatches
            build = _Build(problem, _Variant(before_f, before_b, tuple(allowed)))
            if not build.run():
                break
            ops = in_order(problem, build.orders())
            value = metrics.span(problem, ops) if objective == "span" else semantics.makespan(ops)
            found.append((value, number, ops))
            if build.idlest >= most_idle:
                break
            # The next pass lets each device idle up to what the idlest one did more than it in this one.
            most_idle = build.idlest
            allowed = [most_idle - idle for idle in build.idle]
    if not found:
        raise DoesNotFit("needs more memory for the fill of a V")
    best = min(found, key=lambda entry: entry[:2])[2]
    for ops in (best, in_order(problem, hand_made(problem))):
        for other in _with_other_weights(problem, ops):
            if left <= 0:
                break
            left -= 3 * problem.num_stages * problem.num_microbatches
            value = metrics.span(problem, other) if objective == "span" else semantics.makespan(other)
            found.append((value, len(found) + 4, other))
    return min(found, key=lambda entry: entry[:2])[2]


def hand_made(problem: Problem) -> list[list[Step]]:
    """Per device the order of its F's, B's and W's that has no bubble where all ops take as long.

    Position i runs 2 (D - i) - 1 F's of the earlier chunk, i pairs of F's of both, D - i of F and B of the later chunk,
    then F and B of the earlier and F and B of the later chunk in turn, each W right after its B, and at last i pairs of
    B's and D - i of B and W of the earlier chunk, and the W's that are left. With fewer than 2 D - 1 microbatches it is
    that of so many, with those left out that are not there.
    """
    D, m = v_positions(problem), max(2 * problem.num_devices - 1, problem.num_microbatches)
    orders: list[list[Step]] = [[] for _ in range(D)]
    for i in range(D):
        f0, f1 = (Kind.F, i), (Kind.F, 2 * D - 1 - i)
        b0, b1 = (Kind.B, i), (Kind.B, 2 * D - 1 - i)
        w0, w1 = (Kind.W, i), (Kind.W, 2 * D - 1 - i)
        kinds = [f0] * (2 * (D - i) - 1) + [f1, f0] * i + [f1, b1, w1] * (D - i)
        # Of the earlier chunk 2 D - 1 - i F's have run by now.
        kinds += [f0, b0, w0, f1, b1, w1] * (m - (2 * D - 1 - i)) + [b0, w0, f1, b1, w1] * (D - 1 - i)
        kinds += [b0, b1] * i + [b0, w0] * (D - i) + [w1] * m + [w0] * m
        count = dict.fromkeys((f0, f1, b0, b1, w0, w1), 0)
        for kind in kinds:
            if count[kind] < problem.num_microbatches:
                orders[problem.stages[i].device].append(Step(*kind, count[kind]))
            count[kind] += 1
    return orders


def _with_other_weights(problem: Problem, ops: Ops) -> Iterator[Ops]:
    """Those that fit of the schedule and of others with its W's elsewhere, also where ops overtake each other."""
    budgets = [NO_LIMIT if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
    if all(peak <= budget for peak, budget in zip(memory.peaks(problem, ops), budgets, strict=True)):
        yield ops
    orders: list[list[Step]] = [[] for _ in range(problem.num_devices)]
    for op in ops.take(semantics.rank(ops)):
        if op.kind != Kind.W:
            orders[problem.stages[op.stage].device].append(Step(*op[:3]))
    for overtake, lazy in product((None, 0.0, 0.5, 1.0), (True, False)):
        try:
            yield in_order(problem, with_weights(problem, orders, budgets, lazy=lazy, overtake=overtake))
        except DoesNotFit:
            continue


#: Ops placed at most, over all variants; one is built in any case.
_WORK = 150_000
#: Passes of a variant at most, as long as the idlest device idles less in each.
_PASSES = 3


@dataclass(frozen=True)
class _Variant:
    """Whether a W that does not fit may run before a forward, or a backward of the later chunk; and per device the
    idle time up to which it rather waits."""

    before_forward: bool
    before_backward: bool
    allowed: tuple[float, ...]


class _Stuck(Exception):
    """Memory does not let the schedule go on."""


class _Build:
    """A schedule in the making. Positions i count devices along the V; ``stage(i, chunk)`` is what they hold."""

    def __init__(self, problem: Problem, variant: _Variant) -> None:
        self.tab: Tables = tables(problem)
        self.variant = variant
        D = self.D = self.tab.D
        self.m = self.tab.m
        self.end: dict[Step, float] = {}
        self.clock, self.idle, self.held = [0.0] * D, [0.0] * D, [0] * D
        self.idlest = 0.0
        self.steps: list[list[Step]] = [[] for _ in range(D)]
        self.count = {kind: [[0] * D, [0] * D] for kind in (Kind.F, Kind.B)}
        self.pending: list[deque[Step]] = [deque() for _ in range(D)]

    def run(self) -> bool:
        """Build it; False where memory does not let it go on."""
        try:
            self._fill_down()
            self._fill_level()
            for _ in range(2 * self.m):
                self._backwards()
                self._forwards()
        except _Stuck:
            return False
        for i in range(self.D):
            while self.pending[i]:
                self._weight(i)
        return True

    def orders(self) -> list[list[Step]]:
        """Per device its order."""
        orders: list[list[Step]] = [[] for _ in range(self.D)]
        for i, steps in enumerate(self.steps):
            orders[self.tab.device[i]] = steps
        return orders

    def stage(self, i: int, chunk: int) -> int:
        return 2 * self.D - 1 - i if chunk else i

    def _fill_down(self) -> None:
        """Microbatch 0 goes down the V and up again; meanwhile others follow on the earlier chunk."""
        for i in range(self.D):
            self._put(Kind.F, i, 0)
        for i in reversed(range(self.D)):
            if i < self.D - 1:
                size, length = self.tab.activation[i], self.tab.forward[i]
                while (
                    self._arrival(Kind.F, i, 1) >= self.clock[i] + length
                    and self.held[i] + size * (2 + 2 * i) <= self._budget(i)
                    and self.count[Kind.F][0][i] < self.m
                ):
                    for upper in range(i + 1):
                        self._put(Kind.F, upper, 0)
            self._put(Kind.F, i, 1)

    def _fill_level(self) -> None:
        """Later devices catch up with what earlier ones have forwarded, chunks in turn."""
        first, second = self.count[Kind.F]
        chunk = 0
        for i in range(1, self.D):
            while first[i] + second[i] < first[i - 1] + second[i - 1] or second[i] <= second[i - 1] < self.m:
                for lower in reversed(range(i, self.D)):
                    if self.count[Kind.F][chunk][lower] < self.m:
                        self._put(Kind.F, lower, chunk)
                chunk = 1 - chunk

    def _backwards(self) -> None:
        """One backward on each device: of the earlier chunk where its gradient is known to come, else of the later."""
        chunks = [self._backward_chunk(i) for i in range(self.D)]
        earlier = [i for i in reversed(range(self.D)) if chunks[i] == 0]
        for i in [*earlier, *(i for i in range(self.D) if chunks[i] == 1)]:
            self._fill_gap(i, self._arrival(Kind.B, i, chunks[i]), chunks[i] == 0 or self.variant.before_backward)
            self._put(Kind.B, i, chunks[i])

    def _backward_chunk(self, i: int) -> int:
        earlier, later = (self.count[Kind.B][chunk][i] for chunk in (0, 1))
        if earlier >= later:
            return 1
        return 0 if later >= self.m or self._arrival(Kind.B, i, 0) < NO_LIMIT else 1

    def _forwards(self) -> None:
        """One forward on each device: of the later chunk where its input is known to come."""
        first, second = self.count[Kind.F]
        for i in range(self.D):
            if second[i] >= self.m:
                continue
            known = second[i] < first[i] and self._arrival(Kind.F, i, 1) < NO_LIMIT
            if known:
                chunk = 1
            elif first[i] < self.m:
                chunk = 0
            else:
                continue
            self._make_room(i, self.tab.activation[self.stage(i, chunk)])
            self._fill_gap(i, self._arrival(Kind.F, i, chunk), self.variant.before_forward)
            self._put(Kind.F, i, chunk)

    def _fill_gap(self, i: int, arrival: float, may_delay: bool) -> None:
        """W's that fit before the arrival; one more if this device would else become the idlest of all."""
        while self.pending[i] and arrival >= self.clock[i] + self._length(self.pending[i][0]) - 1e-9:
            self._weight(i)
        most = max(self.idlest, self.variant.allowed[i])
        if self.pending[i] and may_delay and arrival - self.clock[i] > most - self.idle[i]:
            self._weight(i)

    def _make_room(self, i: int, size: int) -> None:
        while self.held[i] + size > self._budget(i):
            if not self.pending[i]:
                raise _Stuck
            self._weight(i)

    def _budget(self, i: int) -> int:
        return self.tab.budget[self.tab.device[i]]

    def _length(self, step: Step) -> float:
        times = {Kind.F: self.tab.forward, Kind.B: self.tab.backward, Kind.W: self.tab.weight}
        return times[step.kind][step.stage]

    def _arrival(self, kind: Kind, i: int, chunk: int) -> float:
        """When the next F or B of a chunk can start as far as its input goes; without limit where nobody knows."""
        s, j = self.stage(i, chunk), self.count[kind][chunk][i]
        needs = []
        if kind == Kind.F:
            if s > 0:
                needs.append((Step(Kind.F, s - 1, j), self.tab.comm[s - 1]))
        else:
            needs.append((Step(Kind.F, s, j), 0.0))
            if s + 1 < self.tab.S:
                needs.append((Step(Kind.B, s + 1, j), self.tab.comm[s]))
        return max((self.end[need] + lag if need in self.end else float(NO_LIMIT) for need, lag in needs), default=0.0)

    def _put(self, kind: Kind, i: int, chunk: int) -> None:
        s, j = self.stage(i, chunk), self.count[kind][chunk][i]
        arrival = self._arrival(kind, i, chunk)
        if kind == Kind.F:
            self._make_room(i, self.tab.activation[s])
        if arrival >= NO_LIMIT:
            raise _Stuck
        self._run(i, Step(kind, s, j), arrival)
        self.count[kind][chunk][i] += 1
        if kind == Kind.F:
            self.held[i] += self.tab.activation[s]
        else:
            self.held[i] -= self.tab.activation[s] - self.tab.context[s]
            self.pending[i].append(Step(Kind.W, s, j))

    def _weight(self, i: int) -> None:
        step = self.pending[i].popleft()
        self._run(i, step, 0.0)
        self.held[i] -= self.tab.context[step.stage]

    def _run(self, i: int, step: Step, arrival: float) -> None:
        start = max(self.clock[i], arrival)
        if self.steps[i]:
            self.idle[i] += start - self.clock[i]
            self.idlest = max(self.idlest, self.idle[i])
        self.clock[i] = self.end[step] = start + self._length(step)
        self.steps[i].append(step)
