"""1F1B (PipeDream-Flush, Megatron-LM, arXiv:2104.04473): as many forwards as there are stages to come, then one
backward, one forward in turn. It holds at most S - s activations on stage s.

    device 0  F0 F1 F2       B0 F3 B1    B2    B3
    device 1     F0 F1    B0 F2 B1 F3 B2    B3
    device 2        F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply
from solver.schedules.orders import Step, in_order


def one_f_one_b(problem: Problem) -> Ops:
    """1F1B with fused backwards (BW).

    Raises
    ------
    DoesNotApply
        A device holds more than one stage.
    """
    if problem.num_stages != problem.num_devices:
        raise DoesNotApply("needs one stage a device (with several, interleaved 1F1B is what applies)")
    m, S = problem.num_microbatches, problem.num_stages
    orders = []
    for (s,) in problem.stages_of:
        ahead = min(m, S - s)
        steps = [Step(Kind.F, s, j) for j in range(ahead)]
        for j in range(m):
            steps.append(Step(Kind.BW, s, j))
            if j + ahead < m:
                steps.append(Step(Kind.F, s, j + ahead))
        orders.append(steps)
    return in_order(problem, orders)
