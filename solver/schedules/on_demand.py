"""Offloads where memory asks for them: the times of compute ops stay, and an activation leaves only for one that needs
its place.

In the order of time, wherever an op takes memory that is not there, another activation leaves, of those that can be on
the host by then: the one that is needed last (as in Belady's rule for caches), or, where links are slow, the one that
could leave first. It leaves as soon after its forward as the link still allows and comes back as late before its
backward.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from solver.schedules.timeline import Timeline, earliest_gap, latest_gap
from solver.tables import NO_LIMIT

#: Instants in ms that are closer count as one.
_EPS = 1e-9
_FREES, _TAKES = 0, 1


def with_transfers_on_demand(
    problem: Problem, base: Ops, age: float = 0.0, disturbed: random.Random | None = None
) -> Ops | None:
    """The schedule with the offloads and reloads that make it fit; None: none were found.

    Parameters
    ----------
    problem
        The problem.
    base
        A schedule without transfers and recomputation.
    age
        How much the end of an activation's forward counts against the start of its backward: 0 lets the one leave that
        is needed last, a large number the oldest one.
    disturbed
        Adds random times to this, some forwards long.
    """
    demand = _Demand(problem, base, age, disturbed)
    return Ops.of([*base, *demand.transfers]) if demand.run() else None


class _Demand:
    """Where in time it is, and what each device holds."""

    def __init__(self, problem: Problem, base: Ops, age: float, disturbed: random.Random | None) -> None:
        self.problem = problem
        self.lanes = [Timeline() for _ in problem.channels]
        self.transfers: list[Op] = []
        D = problem.num_devices
        self.held = [0] * D
        self.budget = [NO_LIMIT if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
        self.forward_end: dict[tuple[int, int], float] = {}
        self.backward_start: dict[tuple[int, int], float] = {}
        #: Per device the activations that are there and may leave.
        self.there: list[set[tuple[int, int]]] = [set() for _ in range(D)]
        #: Instants at which memory is given back or taken: time, which of these, stage, microbatch, bytes.
        self.events = sorted(self._of_compute(base))
        spread = 0.0 if disturbed is None else disturbed.choice((1.0, 2.0, 4.0, 8.0))
        #: The smaller, the sooner it leaves.
        self.key = {
            cell: age * end
            - self.backward_start[cell]
            + (0.0 if disturbed is None else disturbed.gauss(0.0, spread * problem.stages[cell[0]].forward_ms))
            for cell, end in self.forward_end.items()
        }

    def _of_compute(self, base: Ops) -> Iterator[tuple[float, int, int, int, int]]:
        for op in base:
            stage = self.problem.stages[op.stage]
            cell = op.stage, op.microbatch
            if op.kind == Kind.F:
                self.forward_end[cell] = op.end
                yield op.start, _TAKES, *cell, stage.activation_bytes
                continue
            if op.kind in (Kind.B, Kind.BW):
                self.backward_start[cell] = op.start
            kept = stage.weight_context_bytes
            freed = {Kind.B: stage.activation_bytes - kept, Kind.W: kept}.get(op.kind, stage.activation_bytes)
            yield op.end, _FREES, *cell, -freed

    def run(self) -> bool:
        """Go through the schedule; False where nothing makes room."""
        heapq.heapify(self.events)
        while self.events:
            # Of all that happens at an instant, what is given back comes first.
            now, which, s, j, size = heapq.heappop(self.events)
            if which == _TAKES and self.events and self.events[0][1] == _FREES and self.events[0][0] <= now + _EPS:
                now, which, s, j, size = heapq.heapreplace(self.events, (now, which, s, j, size))
            d = self.problem.stages[s].device
            while which == _TAKES and self.held[d] + size > self.budget[d]:
                if not self._make_room(d, now):
                    return False
            self.held[d] += size
            if which == _FREES:
                self.there[d].discard((s, j))
            elif (s, j) in self.forward_end and self.problem.can_offload(s) and now < self.forward_end[s, j]:
                self.there[d].add((s, j))
        return True

    def _make_room(self, d: int, now: float) -> bool:
        """Let one activation leave a device before now and come back after it."""
        for s, j in sorted(self.there[d], key=lambda cell: (self.key[cell], cell)):
            stage = self.problem.stages[s]
            out_lanes = [self.lanes[c] for c in self.problem.channels_of[d, "d2h"]]
            back_lanes = [self.lanes[c] for c in self.problem.channels_of[d, "h2d"]]
            out = earliest_gap(out_lanes, self.forward_end[s, j], stage.offload_ms)
            if out + stage.offload_ms > now + _EPS:
                continue
            back = latest_gap(back_lanes, self.backward_start[s, j], stage.reload_ms)
            if back < now - _EPS:
                continue
            for lane in out_lanes:
                lane.take(out, out + stage.offload_ms)
            for lane in back_lanes:
                lane.take(back, back + stage.reload_ms)
            self.transfers.append(Op(Kind.O, s, j, out, out + stage.offload_ms))
            self.transfers.append(Op(Kind.R, s, j, back, back + stage.reload_ms))
            self.there[d].discard((s, j))
            self.held[d] -= stage.offloadable_bytes
            heapq.heappush(self.events, (back, _TAKES, s, j, stage.offloadable_bytes))
            return True
        return False
