"""Orders of compute ops, one a device: what other tools know of a schedule. A plan gives its orders away, and orders
with a problem's times make a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe import memory, semantics
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.timing import earliest

#: Per device, its compute ops in order; their times mean nothing.
Orders = Sequence[Sequence[Op]]


class Stuck(ValueError):
    """Orders that wait for each other. ``place``: device and position of an op that can never start."""

    def __init__(self, place: tuple[int, int], message: str) -> None:
        self.place = place
        super().__init__(message)


def orders_of(problem: Problem, ops: Ops) -> list[list[Op]]:
    """The compute ops of each device, in the plan's order."""
    return [[ops[int(i)] for i in lane.ops] for lane in semantics.compute_lanes(problem, ops)]


def only_plain(problem: Problem, ops: Ops) -> Ops:
    """The schedule without offloads, reloads and recomputation: every op as early as its order allows.

    It may need more memory than the problem has.
    """
    plain = ops.take(np.isin(ops.kind, (Kind.F, Kind.B, Kind.W, Kind.BW)))
    return earliest(problem, plain)


def over_budget(problem: Problem, ops: Ops) -> list[tuple[int, int, int]]:
    """(device, peak, budget), in bytes, of every device that holds more than its budget."""
    found = []
    for device, peak in enumerate(memory.peaks(problem, ops)):
        budget = problem.devices[device].memory_bytes
        if budget is not None and peak > budget:
            found.append((device, peak, budget))
    return found


def timed(problem: Problem, orders: Orders) -> Ops:
    """Ops of these orders, each as early as its inputs and its device allow.

    Parameters
    ----------
    orders
        F, B, W and BW, every (stage, microbatch) complete, on the devices of the problem.

    Raises
    ------
    Stuck
        An op waits for one that comes after it, on its own device or across devices.
    """
    end: dict[tuple[Kind, int, int], float] = {}
    place = [0] * len(orders)
    free = [0.0] * len(orders)
    found: list[Op] = []
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while place[device] < len(order):
                op = order[place[device]]
                ready = _ready(problem, op, end)
                if ready is None:
                    break
                start = max(ready, free[device])
                stop = free[device] = start + _duration(problem, op)
                # A fused backward counts as B for the stage below.
                end[Kind.B if op.kind == Kind.BW else op.kind, op.stage, op.microbatch] = stop
                found.append(op._replace(start=start, end=stop))
                place[device] += 1
                moved = True
    for device, order in enumerate(orders):
        if place[device] < len(order):
            op = order[place[device]]
            waits = next(n for n in _needs(problem, op) if n not in end)
            raise Stuck(
                (device, place[device]),
                f"{op.label} waits for {waits[0].name}({waits[1]},{waits[2]}), which never comes before it",
            )
    return Ops.of(found)


def _needs(problem: Problem, op: Op) -> list[tuple[Kind, int, int]]:
    """What an op comes after by its data."""
    kind, stage, microbatch = op.kind, op.stage, op.microbatch
    if kind == Kind.F:
        return [(Kind.F, stage - 1, microbatch)] if stage else []
    if kind == Kind.W:
        return [(Kind.B, stage, microbatch)]
    above = [(Kind.B, stage + 1, microbatch)] if stage + 1 < problem.num_stages else []
    return [(Kind.F, stage, microbatch), *above]


def _ready(problem: Problem, op: Op, end: dict[tuple[Kind, int, int], float]) -> float | None:
    """When the inputs of an op are there, ms; None: not all of them have been made."""
    time = 0.0
    for need in _needs(problem, op):
        if need not in end:
            return None
        between = problem.comm_ms[min(need[1], op.stage)] if need[1] != op.stage else 0.0
        time = max(time, end[need] + between)
    return time


def _duration(problem: Problem, op: Op) -> float:
    stage = problem.stages[op.stage]
    times = {Kind.F: stage.forward_ms, Kind.B: stage.backward_ms, Kind.W: stage.weight_ms, Kind.BW: stage.bw_ms}
    return times[op.kind]
