"""GPipe (arXiv:1811.06965): all forwards, then all backwards.

    device 0  F0 F1 F2 F3          B3 B2 B1 B0
    device 1     F0 F1 F2 F3    B3 B2 B1 B0
    device 2        F0 F1 F2 F3 B3 B2 B1 B0

With recomputation only the inputs are kept: each backward but the first of a stage, whose activations are still
there, runs its forward again.
"""

from __future__ import annotations

from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply
from solver.schedules.orders import Step, in_order


def gpipe(problem: Problem) -> Ops:
    """All forwards, stage by stage of a device, then all backwards (BW), the last microbatch first."""
    return _gpipe(problem, recompute=False)


def gpipe_recompute(problem: Problem) -> Ops:
    """GPipe with recomputation (C) wherever a stage has a checkpoint size.

    Raises
    ------
    DoesNotApply
        No stage can be recomputed.
    """
    if all(stage.checkpoint_bytes is None for stage in problem.stages):
        raise DoesNotApply("needs checkpoint_bytes of a stage, without which nothing can be recomputed")
    return _gpipe(problem, recompute=True)


def _gpipe(problem: Problem, *, recompute: bool) -> Ops:
    microbatches = range(problem.num_microbatches)
    orders = []
    for held in problem.stages_of:
        steps = [Step(Kind.F, s, j) for s in held for j in microbatches]
        for s in reversed(held):
            for j in reversed(microbatches):
                still_there = s == held[-1] and j == microbatches[-1]
                if recompute and problem.stages[s].checkpoint_bytes is not None and not still_there:
                    steps.append(Step(Kind.C, s, j))
                steps.append(Step(Kind.BW, s, j))
        orders.append(steps)
    return in_order(problem, orders)
