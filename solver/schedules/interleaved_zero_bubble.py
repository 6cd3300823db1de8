"""Interleaved zero bubble: 1F1B on stages that go round the devices, backwards split, W's in the gaps.

Microbatches go in groups; a group runs on one chunk after the other. Device d runs

    (chunks - 1) * group + D - d        forwards before its first backward,

then a backward and a forward in turn. Groups of as many as there are devices leave no bubble but fill and drain; of
half as many they hold a quarter less (the building block of PipeOffload, arXiv:2503.01328, with W's apart).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from optpipe import metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import looped_chunks
from solver.schedules.weights import with_weights
from solver.tables import tables

#: Ops placed at most, over all variants; one is built in any case.
_WORK = 300_000
#: Forwards more ahead that are tried.
_EXTRA = 3


def interleaved_zero_bubble(problem: Problem, *, objective: str = "makespan") -> Ops:
    """The best of the variants that fit the memory: group sizes, a few more forwards ahead, how eager W's are.

    Raises
    ------
    DoesNotApply
        Stages do not go round the devices several times in one order.
    DoesNotFit
        No variant fits the memory.
    """
    found = list(variants(problem, list(tables(problem).budget), _WORK))
    if not found:
        raise DoesNotFit("needs more memory even in the smallest groups")
    if objective == "span":
        return min(found, key=lambda ops: metrics.span(problem, ops))
    return min(found, key=semantics.makespan)


def variants(problem: Problem, budgets: list[int], work: int) -> Iterator[Ops]:
    """The schedules that fit the budgets, large groups first; about ``work`` ops are placed."""
    chunks, D = looped_chunks(problem), problem.num_devices
    if chunks < 2:
        raise DoesNotApply("needs several stages a device")
    cost = 6 * problem.num_stages * problem.num_microbatches
    some = False
    for group in group_sizes(D):
        for extra in range(_EXTRA + 1):
            bare = orders_of(problem, chunks, group, extra)
            for overtake, lazy in product((None, 0.0, 0.5), (True, False)):
                if some and work <= 0:
                    return
                work -= cost
                try:
                    orders = with_weights(problem, bare, budgets, lazy=lazy, overtake=overtake)
                except DoesNotFit:
                    break
                some = True
                yield in_order(problem, orders)


def group_sizes(D: int) -> list[int]:
    """As many as there are devices, half of that, and so on."""
    sizes = [D]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


def orders_of(problem: Problem, chunks: int, group: int, extra: int) -> list[list[Step]]:
    """Per device the order of its F's and B's."""
    D, m = problem.num_devices, problem.num_microbatches
    groups = [range(j, min(j + group, m)) for j in range(0, m, group)]
    orders: list[list[Step]] = [[] for _ in range(D)]
    for d in range(D):
        forwards = [Step(Kind.F, c * D + d, j) for row in groups for c in range(chunks) for j in row]
        backwards = [Step(Kind.B, c * D + d, j) for row in groups for c in reversed(range(chunks)) for j in row]
        ahead = min(len(forwards), (chunks - 1) * group + D - d + extra)
        steps = forwards[:ahead]
        for k, backward in enumerate(backwards):
            steps.append(backward)
            steps += forwards[ahead + k : ahead + k + 1]
        orders[problem.stages[d].device] = steps
    return orders
