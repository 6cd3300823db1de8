"""Earliest times for given orders: the clock that follows from a plan's order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe import semantics
from optpipe.ops import Floats, Ints, Ops
from optpipe.problem import Problem


@dataclass(frozen=True)
class OrderGraph:
    """Everything that an op waits for under a plan's order: data, its lane, its channels, memory.

    Attributes
    ----------
    order
        int64 (n,): op indices, each after everything it waits for.
    first
        int64 (n + 1,): edges ``first[k]`` to ``first[k + 1]`` lead to ``order[k]``.
    before, lag
        int64 and float64 (edges,): the op waited for and the ms after its end.
    """

    order: Ints
    first: Ints
    before: Ints
    lag: Floats

    def starts(self, durations: Floats, lag: Floats | None = None) -> Floats:
        """float64 (n,): the earliest starts, ms, the first op at 0.

        Parameters
        ----------
        durations
            float64 (n,), ms.
        lag
            float64 (edges,), ms; default the plan's.
        """
        took = durations.tolist()
        before, first = self.before.tolist(), self.first.tolist()
        lags = (self.lag if lag is None else lag).tolist()
        start = [0.0] * len(took)
        end = [0.0] * len(took)
        low = 0
        for k, op in enumerate(self.order.tolist()):
            high = first[k + 1]
            time = 0.0
            for e in range(low, high):
                ready = end[before[e]] + lags[e]
                if ready > time:
                    time = ready
            low = high
            start[op] = time
            end[op] = time + took[op]
        return np.array(start)


def order_graph(problem: Problem, ops: Ops, *, channels_across_devices: bool = True) -> OrderGraph:
    """The waits that follow from the orders of ``ops`` (its times serve only to tell the order).

    Parameters
    ----------
    channels_across_devices
        False: transfers of different devices on a shared channel do not wait for each other, as in a run.

    Raises
    ------
    ValueError
        The order contradicts itself or the data dependencies: such ops break the rules, see ``verify``.
    """
    order = semantics.rank(ops)
    lanes = semantics.compute_lanes(problem, ops, order)
    lanes += semantics.channel_lanes(problem, ops, order, across_devices=channels_across_devices)
    data = semantics.dependencies(problem, ops)
    waits = semantics.memory_waits(problem, ops, order)
    before = np.concatenate([data.before, waits.before, *(lane.ops[:-1] for lane in lanes)])
    after = np.concatenate([data.after, waits.after, *(lane.ops[1:] for lane in lanes)])
    lag = np.zeros(len(before))
    lag[: len(data.lag)] = data.lag
    position = np.empty(len(ops), np.int64)
    position[order] = np.arange(len(ops))
    backwards = np.flatnonzero(position[before] >= position[after])
    if len(backwards):
        first, second = ops[int(before[backwards[0]])], ops[int(after[backwards[0]])]
        raise ValueError(f"the order contradicts itself: {second.label} must follow {first.label}, but precedes it")
    by_target = np.argsort(position[after], kind="stable")
    first_edge = np.searchsorted(position[after][by_target], np.arange(len(ops) + 1))
    return OrderGraph(order, first_edge, before[by_target], lag[by_target])


def earliest(problem: Problem, ops: Ops, durations: Floats | None = None) -> Ops:
    """The same ops in the same orders, each as early as it can be; the first start is 0.

    Called again on what it returned it gives the same times, but for transfers that take no time: where two of them
    meet at one instant the times no longer tell which was first, and one of them may start earlier.

    Parameters
    ----------
    problem
        The problem.
    ops
        Ops whose times tell the orders of compute lanes and channels and what precedes what in memory.
    durations
        float64 (n,), ms; default those of the problem.

    Raises
    ------
    ValueError
        The order contradicts itself.
    """
    took = semantics.durations(problem, ops) if durations is None else durations
    start = order_graph(problem, ops).starts(took)
    return ops.at(start, start + took)
