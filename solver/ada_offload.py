"""AdaOffload: the fill phase runs as many forwards as memory and the channel to the host allow.

    compute   F0 F1 F2 F3 F4 ........ B0 F5 B1 ...
    d2h          O0 O1 O2                O5
    h2d                          R0      R1

PipeOffload offloads by a fixed rule, whatever the fill leaves room for. Here a forward starts whenever the memory that
offloads have freed holds it, so how many run before the first backward follows from the budget and the speed of the
link. Which microbatches then leave is one of a few policies of the list scheduler: offload what is in flight beyond
what fits, less none, one or two; reload one or two microbatches ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from optpipe import metrics, semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.list_scheduler import run, to_ops
from solver.policy import Policy
from solver.schedules.errors import DoesNotApply
from solver.tables import paths, tables

#: Ops that all policies tried may place, together; one policy is tried in any case.
_WORK = 200_000


def ada_offload(problem: Problem, *, objective: str = "makespan", work: int = _WORK) -> Ops:
    """The best schedule of AdaOffload's policies.

    Parameters
    ----------
    problem
        Any problem. Where nothing can be offloaded the same rules without offloads remain.
    objective
        ``makespan`` or ``span``.
    work
        Ops to place at most, over all policies; one is tried in any case.

    Raises
    ------
    DoesNotApply
        A device cannot hold one microbatch's activations of all its stages.
    """
    tab = tables(problem)
    path = paths(tab)
    best, best_value = None, math.inf
    for policy in policies(any(tab.movable)):
        if best is not None and work <= 0:
            break
        rule = policy.rule(tab, path)
        state = run(tab, rule)
        if state is None:
            raise DoesNotApply("needs room for one microbatch's activations of all stages of a device")
        work -= 5 * tab.S * tab.m
        ops = to_ops(tab, rule, state)
        value = metrics.span(problem, ops) if objective == "span" else semantics.makespan(ops)
        if value < best_value:
            best, best_value = ops, value
    assert best is not None
    return best


def policies(offload: bool) -> Iterator[Policy]:
    """The most promising first."""
    if not offload:
        for flight, extra in ((1.0, 0), (math.inf, 0), (1.0, 1), (1.0, 2)):
            for share_idle in (True, False):
                yield Policy(flight=flight, flight_extra=extra, share_idle=share_idle, kept=None)
        return
    for (flight, extra), kept, prefetch, newest in product(
        ((math.inf, 0), (1.0, 1), (1.5, 1)), (1, 0, 2), (1, 2), (True, False)
    ):
        yield Policy(flight=flight, flight_extra=extra, kept=kept, prefetch=prefetch, newest_first=newest)
