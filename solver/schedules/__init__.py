"""Known schedules: one generator a module, each takes a problem and gives ops, or says why it does not apply.

Most do not ask whether their schedule fits the memory: comparing says by how much it does not. Those that adapt to the
memory (zero bubble, PipeOffload) say so where there is not enough for any of their variants.
"""

from __future__ import annotations

from collections.abc import Callable

from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.schedules.dual_pipe_v import dual_pipe_v
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.gpipe import gpipe, gpipe_recompute
from solver.schedules.interleaved import interleaved
from solver.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from solver.schedules.one_f_one_b import one_f_one_b
from solver.schedules.pipe_offload import pipe_offload
from solver.schedules.sequential import sequential
from solver.schedules.v_pattern import v_half, v_min
from solver.schedules.zero_bubble import zb_h1, zb_h2, zero_bubble
from solver.schedules.zero_bubble_v import zero_bubble_v

__all__ = ["SCHEDULES", "DoesNotApply", "DoesNotFit", "Generator", "generate"]

Generator = Callable[[Problem], Ops]

#: Name -> generator; a generator raises ``DoesNotApply`` where it is not defined.
SCHEDULES: dict[str, Generator] = {
    "gpipe": gpipe,
    "gpipe-recompute": gpipe_recompute,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-interleaved": interleaved_zero_bubble,
    "pipe-offload": pipe_offload,
    "zero-bubble": zero_bubble,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zero_bubble_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dual_pipe_v,
    "sequential": sequential,
}

#: Generators that choose among variants, and so care for the objective.
_CHOOSING = {interleaved_zero_bubble, pipe_offload, zero_bubble, zb_h1, zb_h2, zero_bubble_v, v_half, v_min}


def generate(name: str, problem: Problem, objective: str = "makespan") -> Ops:
    """The known schedule ``name`` for a problem; of its variants, if it has any, the best by ``objective``.

    Raises
    ------
    DoesNotApply
        It is not defined for this problem.
    DoesNotFit
        It adapts to the memory, but there is not enough.
    """
    generator = SCHEDULES[name]
    return generator(problem, objective=objective) if generator in _CHOOSING else generator(problem)
