"""A stored order for a new problem: re-timed, or repaired where it does not fit as it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optpipe import semantics, timing
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from solver.list_scheduler import KEEP, OFFLOAD, ON_DEMAND, RECOMPUTE, Rule, run, to_ops
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

    They fit the memory whatever the order needed. The first variants stay close to the order, the later ones take
    the reins off: more patience, offloads on demand.

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
    table = semantics.op_table(problem, ops)

    def starts(*kinds: Kind) -> Floats:
        """float64 (S, m): the start of the op of one of these kinds; 0 where there is none."""
        index = np.max([table[kind] for kind in kinds], axis=0)
        return np.where(index >= 0, ops.start[index], 0.0)

    forward, backward = starts(Kind.F), starts(Kind.B, Kind.BW)
    leaves = (table[Kind.O] >= 0) & (np.array(tab.movable) > 0)[:, None]
    again = (table[Kind.C] >= 0) & ~leaves
    treatment = np.where(leaves, OFFLOAD, np.where(again, RECOMPUTE, KEEP))
    slots = [max(1, min(tab.m, tab.budget[d] // max(1, tab.whole[d]))) for d in tab.device]
    near = Rule(
        forward_key=forward.ravel().tolist(),
        backward_key=backward.ravel().tolist(),
        weight_key=starts(Kind.W).ravel().tolist(),
        reload_key=starts(Kind.R).ravel().tolist(),
        treatment=treatment.ravel().tolist(),
        fused=(table[Kind.BW] >= 0).astype(int).ravel().tolist(),
        threshold=[max(1, n - 1) for n in slots],
        prefetch=[1] * tab.S,
        limit=_most_in_flight(forward, backward).tolist(),
        reserve=[0] * tab.S,
    )
    movable = np.array([[ON_DEMAND if size > 0 else KEEP] for size in tab.movable])
    demand = near.but(treatment=np.where(again, RECOMPUTE, np.broadcast_to(movable, again.shape)).ravel().tolist())
    return [near, near.but(patience=1.0), *([demand, demand.but(reserve=[1] * tab.S)] if any(tab.movable) else [])]


def _most_in_flight(forward: Floats, backward: Floats) -> Ints:
    """int64 (S,): the most microbatches between the starts of F and B at any time."""
    count = np.arange(1, forward.shape[1] + 1)
    ended = np.array(
        [np.searchsorted(np.sort(b), np.sort(f), side="right") for f, b in zip(forward, backward, strict=True)]
    )
    return np.maximum(1, (count[None, :] - ended).max(axis=1))
