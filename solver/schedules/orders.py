"""From the order of each device's ops to a clock: every op as early as its inputs and its device allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem


class Step(NamedTuple):
    """One compute op of an order."""

    kind: Kind
    stage: int
    microbatch: int


def in_order(problem: Problem, orders: Sequence[Sequence[Step]], release: Mapping[Step, float] | None = None) -> Ops:
    """The schedule in which every device runs its compute ops in the given order, each as early as possible.

    Parameters
    ----------
    problem
        The problem.
    orders
        Per device its compute ops (F, B, W, BW, C) in order.
    release
        Instants in ms before which an op must not start; those that are not in it may start at any time.

    Returns
    -------
    Ops
        By device and start; times in ms.

    Raises
    ------
    ValueError
        The orders of the devices contradict each other or lack an op that another one needs.
    """
    release = release or {}
    end: dict[Step, float] = {}
    backward: dict[tuple[int, int], Kind] = {
        step[1:]: step.kind for order in orders for step in order if step.kind in (Kind.B, Kind.BW)
    }
    recomputed = {step[1:] for order in orders for step in order if step.kind == Kind.C}
    done: list[list[Op]] = [[] for _ in orders]
    clock = [0.0] * len(orders)
    blocked: dict[Step, int] = {}
    ready = deque(range(len(orders)))
    while ready:
        d = ready.popleft()
        while len(done[d]) < len(orders[d]):
            step = orders[d][len(done[d])]
            start = max(clock[d], release.get(step, 0.0))
            for need, lag in _inputs(problem, step, backward, recomputed):
                if need not in end:
                    blocked[need] = d
                    break
                start = max(start, end[need] + lag)
            else:
                end[step] = clock[d] = start + duration(problem, step.kind, step.stage)
                done[d].append(Op(*step, start, clock[d]))
                if (waiting := blocked.pop(step, None)) is not None:
                    ready.append(waiting)
                continue
            break
    for d, order in enumerate(orders):
        if len(done[d]) < len(order):
            raise ValueError(f"the order of device {d} never gets to {Op(*order[len(done[d])]).label}")
    return Ops.of(op for ops in done for op in ops)


def duration(problem: Problem, kind: Kind, stage: int) -> float:
    """Time of a compute op in ms."""
    times = problem.stages[stage]
    if kind == Kind.B:
        return times.backward_ms
    if kind == Kind.W:
        return times.weight_ms
    return times.bw_ms if kind == Kind.BW else times.forward_ms


def _inputs(
    problem: Problem, step: Step, backward: dict[tuple[int, int], Kind], recomputed: set[tuple[int, int]]
) -> Iterator[tuple[Step, float]]:
    """The compute ops that a step comes after, with the ms in between."""
    kind, s, j = step
    if kind == Kind.F:
        if s > 0:
            yield Step(Kind.F, s - 1, j), problem.comm_ms[s - 1]
    elif kind == Kind.W:
        yield Step(Kind.B, s, j), 0.0
    elif kind == Kind.C:
        yield Step(Kind.F, s, j), 0.0
    else:
        yield Step(Kind.C if (s, j) in recomputed else Kind.F, s, j), 0.0
        if s + 1 < problem.num_stages:
            yield Step(backward.get((s + 1, j), Kind.B), s + 1, j), problem.comm_ms[s]
