"""The program of a problem as an MPS or LP file, so that other solvers can be tried on it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from optpipe import metrics, semantics
from optpipe.errors import InputError
from optpipe.files import read_text
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.milp import pulp_backend
from solver.milp.formulation import Options, estimated_bits, excluded, formulate
from solver.milp.model import Objective
from solver.milp.precedence import Contradiction

FORMS = ("mps", "lp")
#: Order bits beyond which a file would be of no use to any solver, and take gigabytes.
_MOST_BITS = 1_000_000


class Program(NamedTuple):
    """The text of the file; its binary columns; what schedules it leaves out (empty: none that could be better)."""

    text: str
    binaries: int
    leaves_out: str


def program_of(
    problem: Problem, ops: Ops, form: str, *, objective: Objective = "makespan", lower_bound: float = 0.0
) -> Program:
    """The mixed-integer program whose optimum is the best schedule of a problem.

    Parameters
    ----------
    ops
        A valid schedule: the program looks for nothing longer, which makes it smaller.
    form
        ``mps`` or ``lp``.
    lower_bound
        A proven bound of the objective, ms.

    Raises
    ------
    InputError
        The problem is too large to be written as one program, or the program could not have the schedule's makespan.
    """
    if (bits := estimated_bits(problem)) > _MOST_BITS:
        raise InputError("", "", f"as one program has about {bits:,} order bits, expected at most {_MOST_BITS:,}")
    options = Options(objective=objective)
    known = metrics.span(problem, ops) if objective == "span" else semantics.makespan(ops)
    try:
        program = formulate(problem, options, upper=known, lower=min(lower_bound, known))
    except Contradiction:
        left_out = excluded(problem, options) or "what this schedule does"
        raise InputError("", "", f"as one program has no solution as short as this: it leaves out {left_out}") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"program.{form}"
        pulp_backend.write(program, path)
        text = read_text(path)
    return Program(text, program.matrix.num_binaries, excluded(problem, options))
