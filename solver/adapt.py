"""A stored order for a new problem: re-timed, or repaired where it does not fit as it is."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from optpipe import timing
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.keys import keys_of, rule_of
from solver.list_scheduler import KEEP, ON_DEMAND, RECOMPUTE, Rule, run, to_ops
from solver.tables import Tables


def retimed(problem: Problem, ops: Ops) -> Ops | None:
    """The same orders with every op as early as the new problem allows; None where the orders contradict each other.

    The result may need more memory than there is: verify it.
    """
    try:
        return timing.earliest(problem, ops)
    except ValueError:
        return None


def repaired(problem: Problem, tab: Tables, ops: Ops, variants: int) -> Iterator[Ops]:
    """Schedules that the list scheduler makes with the starts of ``ops`` (ms) as keys.

    They fit the memory whatever the order needed. The first variants stay close to the order, the later ones offload
    on demand.

    Parameters
    ----------
    problem, tab
        The problem, and its tables.
    ops
        A complete schedule of the problem's ops, valid or not.
    variants
        How many to make at most.
    """
    for rule in _rules(problem, tab, ops)[:variants]:
        if (state := run(tab, rule)) is not None:
            yield to_ops(tab, rule, state)


def _rules(problem: Problem, tab: Tables, ops: Ops) -> list[Rule]:
    keys = keys_of(problem, tab, ops)
    near = rule_of(tab, keys)
    if not any(tab.movable):
        return [near, near.but(patience=1.0), near.but(patience=0.5)]
    # Reloads as soon as they fit, but one microbatch ahead only.
    eager = near.but(prefetch=[1] * tab.S, reserve=[0] * tab.S, reload_lead=inf)
    leaves = np.array([[ON_DEMAND if size > 0 else KEEP] for size in tab.movable])
    treatment = np.where(keys.treatment == RECOMPUTE, RECOMPUTE, leaves)
    slots = [max(1, min(tab.m, tab.budget[d] // max(1, tab.whole[d]))) for d in tab.device]
    demand = eager.but(treatment=treatment.ravel().tolist(), threshold=[max(1, n - 1) for n in slots])
    return [near, eager, demand, demand.but(reserve=[1] * tab.S)]
