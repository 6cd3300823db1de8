"""Replay of a plan's order under random durations: does the promise 'memory-safe under any timing' hold?"""

from __future__ import annotations

import numpy as np

from optpipe import memory, semantics
from optpipe.ops import Floats, Ops
from optpipe.problem import Problem
from optpipe.timing import OrderGraph, order_graph

_SPREAD = 0.5
_STRAGGLERS = 0.03


def random_factors(generator: np.random.Generator, count: int) -> Floats:
    """float64 (count,): what real durations do to planned ones. Log-normal, a few of them ten times as long."""
    factors = generator.lognormal(0.0, _SPREAD, count)
    return np.asarray(np.where(generator.random(count) < _STRAGGLERS, 10.0 * factors, factors))


def replay(problem: Problem, ops: Ops, generator: np.random.Generator, graph: OrderGraph | None = None) -> Ops:
    """The ops as a run with random durations and latencies would execute them: the plan's order, not its clock.

    A channel that devices share is not locked across them, as in a run.
    """
    graph = order_graph(problem, ops, channels_across_devices=False) if graph is None else graph
    took = semantics.durations(problem, ops) * random_factors(generator, len(ops))
    start = graph.starts(took, graph.lag * random_factors(generator, len(graph.lag)))
    return ops.at(start, start + took)


def check_replays(problem: Problem, ops: Ops, count: int, seed: int = 0) -> list[str]:
    """What goes wrong in ``count`` replays of a valid plan, in words; empty: nothing.

    Parameters
    ----------
    problem, ops
        A schedule that ``verify`` accepts.
    count
        Number of replays.
    seed
        Of the random durations.
    """
    generator = np.random.default_rng(seed)
    try:
        graph = order_graph(problem, ops, channels_across_devices=False)
    except ValueError as error:
        return [f"the plan cannot be replayed: {error}"]
    planned = memory.peaks(problem, ops)
    found = []
    for number in range(count):
        peaks = memory.peaks(problem, replay(problem, ops, generator, graph))
        for device, (peak, most) in enumerate(zip(peaks, planned, strict=True)):
            if peak > most:
                found.append(f"replay {number}: device {device} held {peak} bytes, above the plan's {most}")
    return found
