"""The MILP from a known schedule: formulate, solve, keep what is valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optpipe import metrics, semantics
from optpipe.ops import Floats, Ops
from optpipe.problem import Problem
from solver.milp import child, highs, pulp_backend
from solver.milp.extract import schedule
from solver.milp.formulation import Options, formulate
from solver.milp.highs import MilpResult, Settings
from solver.milp.precedence import Contradiction


def solve_milp(
    problem: Problem,
    start: Ops | None,
    *,
    objective: str = "makespan",
    time_limit: float = 300.0,
    gap: float = 0.05,
    threads: int = 1,
    seed: int = 0,
    lower_bound: float = 0.0,
    on_improvement: Callable[[Ops], None] | None = None,
    backend: str = "highs",
) -> tuple[Ops | None, float | None, dict[str, Any]]:
    """Solve the program of a problem from a known schedule.

    Parameters
    ----------
    start
        A valid schedule: it bounds the times, and the solver starts from it. None: none is known.
    time_limit, gap, threads, seed
        Of the solver.
    lower_bound
        A proven bound of the objective, ms.
    on_improvement
        Called with each better schedule while the solver runs.
    backend
        ``highs``: HiGHS in a process of its own, so that the limit holds; ``highs-here``: in this one, for small
        programs; else the name of a solver that PuLP finds.

    Returns
    -------
    schedule, bound, facts
        The best valid schedule that the solver found (or None), a proven bound of the problem's objective in ms (None:
        nothing was proven), and what there is to report.

    Raises
    ------
    InputError
        The backend is unknown.
    """
    value = None
    if start is not None:
        value = metrics.span(problem, start) if objective == "span" else semantics.makespan(start)
    options = Options(objective="span" if objective == "span" else "makespan")
    try:
        program = formulate(problem, options, upper=value, lower=lower_bound)
    except Contradiction:
        # Nothing that the program knows is as short as the start; what it leaves out may be, so nothing is proven.
        return None, None, {"status": "nothing shorter"}

    def improved(_: float, __: float, ___: float, x: Floats) -> None:
        if on_improvement is not None and (ops := schedule(program, x)) is not None:
            on_improvement(ops)

    settings = Settings(time_limit=time_limit, gap=gap, threads=threads, seed=seed)
    vector = None if start is None else program.vector_of(start)
    result: MilpResult
    if backend == "highs":
        result = child.solve(program.matrix, settings, start=vector, on_improvement=improved)
    elif backend == "highs-here":
        result = highs.solve(program.matrix, settings, start=vector, on_improvement=improved)
    else:
        result = pulp_backend.solve(program, backend, settings, vector)
    facts = {
        "status": result.status,
        "nodes": result.nodes,
        "rows": result.rows,
        "columns": result.columns,
        "binaries": result.binaries,
        "seconds": round(result.seconds, 3),
    }
    bound = result.bound if program.bound_holds and result.bound > 0 else None
    if bound is not None and value is not None:
        bound = min(bound, value)
    return (None if result.solution is None else schedule(program, result.solution)), bound, facts
