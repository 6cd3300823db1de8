"""The event rule: zero-bubble schedules decided as time goes on, for one stage a device and no offload.

A device is asked when its own op ends and when a neighbour's op *starts*, since from then on the arrival is known. It
runs a backward that has arrived; else a forward that has arrived, fits and is below the limit in flight; else a
pending W if that ends before the next known arrival, or if waiting would make this device the idlest of all; else it
waits. Backwards before forwards keep activations few, W's fill gaps that would be idle anyhow.

With room for one pipeline of activations and W no longer than F and B, one pass was optimal on every random problem
tried. For others the policy bits below are worth a small search (``zero_bubble``).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from optpipe.ops import Kind
from solver.schedules.orders import Step
from solver.tables import Tables

_INFINITY = float("inf")
_F, _B, _W = 0, 1, 2


Preference = Literal["backward", "forward", "alternate"]


@dataclass(frozen=True)
class EventPolicy:
    """The choices that the event rule leaves open.

    Attributes
    ----------
    limit
        Per stage, most microbatches between F and B.
    prefer
        Where both could start: the backward; the forward; or the forward until one below the limit.
    threshold
        A W that does not fit is run only in a gap of at least this fraction of its time.
    lazy
        Do not run it either while some other device has been idle for longer.
    drain_first
        Stage 0 runs a pending W before each backward once its forwards are done.
    fused
        Run BW in place of B and W on all stages where that is shorter.
    """

    limit: tuple[int, ...]
    prefer: Preference = "backward"
    threshold: float = 0.0
    lazy: bool = True
    drain_first: bool = False
    fused: bool = False


class Outcome(NamedTuple):
    """A schedule by the event rule: makespan and span in ms, and each device's order."""

    makespan: float
    span: float
    orders: list[list[Step]]


def simulate(tab: Tables, policy: EventPolicy) -> Outcome | None:
    """One pass of the event rule; None where it got stuck (a budget below one activation)."""
    run = _Run(tab, policy)
    while run.heap:
        now, s = heapq.heappop(run.heap)
        if run.free[s] <= now + run.eps:  # a busy stage is asked again at its end
            run.decide(s, now)
    if run.left:
        return None
    firsts = [starts[0] for starts in run.starts[_F]]
    orders: list[list[Step]] = [[] for _ in range(tab.D)]
    for s, steps in enumerate(run.steps):
        orders[tab.device[s]] = steps
    return Outcome(max(run.free), max(end - first for end, first in zip(run.free, firsts, strict=True)), orders)


class _Run:
    """State of one pass, per stage: start times by kind, when it is free, bytes held, idle time since its first op."""

    def __init__(self, tab: Tables, policy: EventPolicy) -> None:
        S = tab.S
        self.tab, self.policy = tab, policy
        self.fused = [policy.fused and tab.fused[s] < tab.backward[s] + tab.weight[s] for s in range(S)]
        backward = [tab.fused[s] if self.fused[s] else tab.backward[s] for s in range(S)]
        self.length = (tab.forward, backward, tab.weight)
        self.budget = [tab.budget[tab.device[s]] for s in range(S)]
        self.starts: tuple[list[list[float]], ...] = tuple([[] for _ in range(S)] for _ in range(3))
        self.steps: list[list[Step]] = [[] for _ in range(S)]
        self.free, self.idle, self.held = [0.0] * S, [0.0] * S, [0] * S
        self.idlest = 0.0
        self.heap: list[tuple[float, int]] = [(0.0, 0)]
        self.left = tab.m * sum(2 if fused else 3 for fused in self.fused)
        self.eps = 1e-9 * max(max(lengths) for lengths in self.length)

    def decide(self, s: int, now: float) -> None:
        """Start what stage ``s`` should do now, or sleep until the next known arrival."""
        tab, policy, soon = self.tab, self.policy, now + self.eps
        forwards, backwards = len(self.starts[_F][s]), len(self.starts[_B][s])
        pending = not self.fused[s] and len(self.starts[_W][s]) < backwards
        b_at, f_at = self._backward_arrival(s, backwards, forwards), self._forward_arrival(s, forwards)
        below = forwards - backwards < policy.limit[s]
        fits = self.held[s] + tab.activation[s] <= self.budget[s]
        backward_ready, forward_ready = b_at <= soon, below and fits and f_at <= soon
        if backward_ready and forward_ready:
            at_limit = forwards - backwards >= policy.limit[s] - 1
            forward_ready = policy.prefer == "forward" or (policy.prefer == "alternate" and not at_limit)
            backward_ready = not forward_ready
        if backward_ready:
            first_drain = policy.drain_first and s == 0 and forwards == tab.m and pending
            self._put(s, _W if first_drain else _B, now)
        elif forward_ready:
            self._put(s, _F, now)
        else:
            arrival = min(b_at, f_at if below and fits else _INFINITY)
            blocked = below and not fits and f_at <= soon  # a W makes room for a forward
            if pending and (blocked or self._w_is_due(s, arrival, now)):
                self._put(s, _W, now)
            elif arrival < _INFINITY:
                heapq.heappush(self.heap, (arrival, s))

    def _w_is_due(self, s: int, arrival: float, now: float) -> bool:
        length, gap = self.length[_W][s], arrival - now
        if length <= gap + self.eps:
            return True
        if gap > self.idlest - self.idle[s]:
            return gap >= self.policy.threshold * length
        return not self.policy.lazy and gap >= self.policy.threshold * length

    def _backward_arrival(self, s: int, j: int, forwards: int) -> float:
        if j >= forwards:
            return _INFINITY
        if s + 1 == self.tab.S:
            return self.starts[_F][s][j] + self.length[_F][s]
        above = self.starts[_B][s + 1]
        return above[j] + self.length[_B][s + 1] + self.tab.comm[s] if j < len(above) else _INFINITY

    def _forward_arrival(self, s: int, j: int) -> float:
        if j >= self.tab.m:
            return _INFINITY
        if s == 0:
            return 0.0
        below = self.starts[_F][s - 1]
        return below[j] + self.length[_F][s - 1] + self.tab.comm[s - 1] if j < len(below) else _INFINITY

    def _put(self, s: int, what: int, now: float) -> None:
        tab, starts = self.tab, self.starts[what][s]
        if self.steps[s]:
            self.idle[s] += max(0.0, now - self.free[s])
            self.idlest = max(self.idlest, self.idle[s])
        if what == _F:
            kind, taken, neighbour = Kind.F, tab.activation[s], s + 1
        elif what == _B:
            kind = Kind.BW if self.fused[s] else Kind.B
            taken, neighbour = (0 if self.fused[s] else tab.context[s]) - tab.activation[s], s - 1
        else:
            kind, taken, neighbour = Kind.W, -tab.context[s], -1
        # Memory of B and W is booked at the start: nothing else of this stage starts before the end.
        self.held[s] += taken
        self.steps[s].append(Step(kind, s, len(starts)))
        starts.append(now)
        self.free[s] = now + self.length[what][s]
        self.left -= 1
        heapq.heappush(self.heap, (self.free[s], s))
        if 0 <= neighbour < tab.S:
            heapq.heappush(self.heap, (now, neighbour))
