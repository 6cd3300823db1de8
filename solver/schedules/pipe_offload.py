"""PipeOffload (arXiv:2503.01328): offloads whole chunks by a fixed rule, those that wait longest for their backward.

The order is that of an interleaved schedule in groups. The activations of the first chunk live longest, those of the
last one hardest: of the first ``n`` chunks every microbatch leaves for the host right after its forward and comes back
just before its backward, of the others none does. The best group size and the fewest chunks that fit are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from optpipe import metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.list_scheduler import KEEP, OFFLOAD, UNBOUNDED, Rule, run, to_ops
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.interleaved_zero_bubble import variants
from solver.schedules.placement import looped_chunks
from solver.tables import NO_LIMIT, Tables, tables

#: Ops placed at most in interleaved schedules, and such schedules tried with offloads.
_WORK, _BASES = 150_000, 8


def pipe_offload(problem: Problem, *, objective: str = "makespan") -> Ops:
    """The shortest of the variants that fit.

    Raises
    ------
    DoesNotApply
        Stages do not go round the devices several times in one order, or nothing can be offloaded.
    DoesNotFit
        A device cannot hold one microbatch's activations of all its stages.
    """
    chunks = looped_chunks(problem)
    if chunks < 2:
        raise DoesNotApply("needs several stages a device")
    tab = tables(problem)
    if not any(tab.movable):
        raise DoesNotApply("needs something to offload, and a link to the host")
    found = list(_offloading(problem, tab, chunks))
    if not found:
        raise DoesNotFit("needs room for one microbatch's activations of all stages of a device")
    if objective == "span":
        return min(found, key=lambda ops: metrics.span(problem, ops))
    return min(found, key=semantics.makespan)


def _offloading(problem: Problem, tab: Tables, chunks: int) -> Iterator[Ops]:
    for base in islice(variants(problem, [NO_LIMIT] * tab.D, _WORK), _BASES):
        for offloaded in range(1, chunks + 1):
            rule = _rule(tab, base, [s < offloaded * tab.D and tab.movable[s] > 0 for s in range(tab.S)])
            state = run(tab, rule)
            if state is not None:
                yield to_ops(tab, rule, state)


def _rule(tab: Tables, base: Ops, offloaded: list[bool]) -> Rule:
    """List-schedule in the order of ``base``, with the activations of some stages leaving."""
    start = np.zeros((len(Kind), tab.S, tab.m))
    start[base.kind, base.stage, base.microbatch] = base.start
    back = start[Kind.B] - np.array(tab.reload)[:, None]
    return Rule(
        forward_key=start[Kind.F].ravel().tolist(),
        backward_key=start[Kind.B].ravel().tolist(),
        weight_key=start[Kind.W].ravel().tolist(),
        reload_key=back.ravel().tolist(),
        treatment=[OFFLOAD if offloaded[s] else KEEP for s in range(tab.S) for _ in range(tab.m)],
        fused=[0] * (tab.S * tab.m),
        threshold=[UNBOUNDED] * tab.S,
        prefetch=[2] * tab.S,
        limit=[UNBOUNDED] * tab.S,
        reserve=[1] * tab.S,
        reserve_all=False,
        patience=0.5,
        reload_lead=2 * max(tab.reload),
    )
