"""Zero-bubble schedules (arXiv:2401.10241) on one stage a device: B and W apart, W where it fills a gap.

``zero_bubble`` is the best of a few policies of the event rule under the memory budget. With room for one pipeline of
activations it is at least as good as the paper's hand-made ZB-H1 and its automatic 1p schedule, with room for two as
ZB-H2 and 2p. ``zb_h1`` and ``zb_h2`` hold as many activations as their namesakes, whatever the budget says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.bounds import lower_bound
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.event_rule import EventPolicy, Outcome, Preference, simulate
from solver.schedules.orders import in_order
from solver.tables import Tables, least_work, paths, tables

_PREFERENCES: tuple[Preference, ...] = ("backward", "forward", "alternate")

#: Ops simulated at most, over all policies tried.
_WORK = 300_000


def zero_bubble(problem: Problem, *, objective: str = "makespan", work: int = _WORK) -> Ops:
    """The best schedule of the event rule over a small set of policies; stops at the proven bound.

    Parameters
    ----------
    problem
        One stage a device.
    objective
        ``makespan`` or ``span``.
    work
        Ops to simulate at most; one pass is made in any case.

    Raises
    ------
    DoesNotApply
        A device holds more than one stage.
    DoesNotFit
        Not one activation fits.
    """
    tab = _one_stage_tables(problem)
    if any(whole > budget for whole, budget in zip(tab.whole, tab.budget, strict=True)):
        raise DoesNotFit("needs room for one microbatch's activations on every device")
    bound = lower_bound(problem, objective=objective)
    best, best_value = None, math.inf
    for policy in policies(tab):
        if best is not None and work <= 0:
            break
        outcome = simulate(tab, policy)
        work -= 3 * tab.S * tab.m
        value = math.inf if outcome is None else _value(outcome, objective)
        if value < best_value:
            best, best_value = outcome, value
        if best_value <= bound * (1 + 1e-9):
            break
    if best is None:
        raise DoesNotFit("needs more memory than there is")
    return in_order(problem, best.orders)


def zb_h1(problem: Problem, *, objective: str = "makespan") -> Ops:
    """ZB-H1: at most S - s microbatches in flight on stage s, as in 1F1B.

    Raises
    ------
    DoesNotApply
        A device holds more than one stage.
    """
    return _limited(problem, [problem.num_stages - s for s in range(problem.num_stages)], objective)


def zb_h2(problem: Problem, *, objective: str = "makespan") -> Ops:
    """ZB-H2: at most 2 (S - s) - 1 microbatches in flight on stage s, enough for no bubble between first F and last W.

    Raises
    ------
    DoesNotApply
        A device holds more than one stage.
    """
    return _limited(problem, [2 * (problem.num_stages - s) - 1 for s in range(problem.num_stages)], objective)


def _limited(problem: Problem, limit: list[int], objective: str) -> Ops:
    """The event rule with so many in flight, W's delayed as far as the memory of the first stage's allows."""
    tab = _one_stage_tables(problem)
    budget = [0] * tab.D
    for s in range(tab.S):
        budget[tab.device[s]] = limit[0] * tab.activation[s]
    tab = tab._replace(budget=budget)
    tried = [EventPolicy(tuple(limit), prefer, fused=fused) for prefer in _PREFERENCES for fused in (False, True)]
    outcomes = [outcome for policy in tried if (outcome := simulate(tab, policy)) is not None]
    return in_order(problem, min(outcomes, key=lambda outcome: _value(outcome, objective)).orders)


def _one_stage_tables(problem: Problem) -> Tables:
    if problem.num_stages != problem.num_devices:
        raise DoesNotApply("needs one stage a device")
    return tables(problem)


def policies(tab: Tables) -> Iterator[EventPolicy]:
    """Policies, the most promising first."""
    shorter = any(f < b + w for f, b, w in zip(tab.fused, tab.backward, tab.weight, strict=True))
    for fused, threshold, (prefer, limit) in product(
        (False, True) if shorter else (False,),
        (0.0, 1.0, 0.5),
        product(_PREFERENCES, limits(tab)),
    ):
        for lazy, drain_first in product((True, False), (False, True)):
            yield EventPolicy(limit, prefer, threshold, lazy, drain_first, fused)


def limits(tab: Tables) -> list[tuple[int, ...]]:
    """In-flight limits per stage to try: the staircase S - s of 1F1B, what keeps the busiest device busy (and one or
    two more), and what memory allows. None is above what memory allows."""
    path, period = paths(tab), max(least_work(tab)) or 1.0
    most = [min(tab.m, tab.budget[tab.device[s]] // max(1, tab.activation[s])) for s in range(tab.S)]
    busy = [math.ceil((path.turn[s] + tab.backward[s]) / period - 1e-9) for s in range(tab.S)]
    fill = [1 + math.ceil((path.turn[s] - f) / f) if (f := tab.forward[s]) else tab.m for s in range(tab.S)]
    wanted = [
        [tab.S - s for s in range(tab.S)],
        most,
        busy,
        [b + 1 for b in busy],
        [b + 2 for b in busy],
        fill,
    ]
    found = [tuple(max(1, min(top, w)) for top, w in zip(most, row, strict=True)) for row in wanted]
    return list(dict.fromkeys(found))


def _value(outcome: Outcome, objective: str) -> float:
    return outcome.span if objective == "span" else outcome.makespan
