"""Back end: PuLP, to write the program to files and to solve it with any solver that PuLP finds.

Rows that would be added lazily (see ``lazy``) are left out: there are no rounds on the relaxation here, and no integer
solution needs them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pulp

from optpipe.errors import InputError
from optpipe.ops import Floats
from solver.milp.formulation import Formulation
from solver.milp.highs import MilpResult, Settings
from solver.milp.sparse import INF

#: PuLP's class for HiGHS takes no start and calls a run that the clock stopped optimal, so it is driven by its parts.
_HIGHS = "HiGHS"


def solvers() -> list[str]:
    """Names of the solvers that PuLP finds on this machine."""
    return [str(name) for name in pulp.listSolvers(onlyAvailable=True)]


def check_there(name: str, key: str = "backend") -> None:
    """Refuse a solver that PuLP does not find here.

    Raises
    ------
    InputError
        It names ``key`` and the solvers that there are.
    """
    if name not in (found := solvers()):
        raise InputError("", key, f"'{name}' is not found by PuLP, expected highs or one of {', '.join(found)}")


def to_pulp(formulation: Formulation) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The program as PuLP's model, with the names of the formulation; its variables in the order of the columns."""
    matrix = formulation.matrix
    model = pulp.LpProblem("pipeline_schedule", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            name,
            None if low == -INF else low,
            None if high == INF else high,
            pulp.LpInteger if integer else pulp.LpContinuous,
        )
        for name, low, high, integer in zip(
            formulation.column_names,
            matrix.lower.tolist(),
            matrix.upper.tolist(),
            matrix.integer.tolist(),
            strict=True,
        )
    ]
    model.addVariables(variables)
    costs = [(variables[c], matrix.cost[c]) for c in np.flatnonzero(matrix.cost).tolist()]
    model.setObjective(pulp.LpAffineExpression(costs))
    first, column, value = matrix.first.tolist(), matrix.column.tolist(), matrix.value.tolist()
    sides = zip(formulation.row_names, matrix.row_lower.tolist(), matrix.row_upper.tolist(), strict=True)
    for row, (name, low, high) in enumerate(sides):
        entries = range(first[row], first[row + 1])
        expression = pulp.LpAffineExpression([(variables[column[e]], value[e]) for e in entries])
        for suffix, sense, side in _sides(low, high):
            model.addConstraint(pulp.LpConstraint(expression, sense, name + suffix, side))
    return model, variables


def _sides(low: float, high: float) -> list[tuple[str, int, float]]:
    if low == high:
        return [("", pulp.LpConstraintEQ, low)]
    found = []
    both = low > -INF and high < INF
    if low > -INF:
        found.append(("_from" if both else "", pulp.LpConstraintGE, low))
    if high < INF:
        found.append(("_to" if both else "", pulp.LpConstraintLE, high))
    return found


def write(formulation: Formulation, path: str | Path) -> None:
    """Write the program as a .lp or .mps file, by the path's ending.

    Raises
    ------
    InputError
        The path ends otherwise.
    """
    target = Path(path)
    model, _ = to_pulp(formulation)
    if target.suffix == ".lp":
        model.writeLP(str(target), max_length=255)
    elif target.suffix == ".mps":
        model.writeMPS(str(target))
    else:
        raise InputError(target, "", "expected a name that ends in .lp or .mps")


def solve(
    formulation: Formulation, name: str, settings: Settings | None = None, start: Floats | None = None
) -> MilpResult:
    """Solve a program with a solver of PuLP's.

    Parameters
    ----------
    name
        As PuLP calls it, such as ``PULP_CBC_CMD``.
    start
        float64 (columns,): a vector to start from, given to solvers whose PuLP class takes one.

    Returns
    -------
    MilpResult
        ``optimal`` only where the solver says so; what the clock stopped is a ``time limit``. The bound is the
        objective of an optimal solution found with no gap allowed, else nothing is known.

    Raises
    ------
    InputError
        PuLP does not find the solver here.
    """
    settings = settings or Settings()
    check_there(name)
    began = time.monotonic()
    model, variables = to_pulp(formulation)
    if start is not None:
        for variable, value in zip(variables, start.tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    run = _run_highs if name == _HIGHS else _run
    status, message = run(model, variables, name, settings, start)
    values = [variable.varValue for variable in variables]
    x = None if any(v is None for v in values) or status == "infeasible" else np.array(values, np.float64)
    if x is not None and formulation.matrix.violation(x) > 1e-4:
        x = None  # what is left in the variables is the start, or nothing of use
    objective = INF if x is None else float(formulation.matrix.cost @ x)
    bound = -INF
    if status == "optimal" and settings.gap == 0:
        bound = objective
    elif status == "infeasible":
        bound = INF
    matrix = formulation.matrix
    return MilpResult(
        status=status,
        objective=objective,
        bound=bound,
        solution=x,
        seconds=time.monotonic() - began,
        nodes=0,
        rows=matrix.num_rows,
        columns=matrix.num_columns,
        binaries=matrix.num_binaries,
        message=message,
    )


def _run(
    model: pulp.LpProblem, variables: list[pulp.LpVariable], name: str, settings: Settings, start: Floats | None
) -> tuple[str, str]:
    """(status, message) of any solver class of PuLP's."""
    options: dict[str, Any] = {"msg": False, "timeLimit": max(1.0, settings.time_limit)}
    for key, value in (("gapRel", settings.gap), ("threads", settings.threads), ("warmStart", start is not None)):
        try:
            pulp.getSolver(name, **options, **{key: value})
        except TypeError:
            continue  # this class does not know the option
        options[key] = value
    try:
        model.solve(pulp.getSolver(name, **options))
    except pulp.PulpSolverError as error:
        return "failed", str(error).splitlines()[0]
    if model.status == pulp.LpStatusInfeasible:
        return "infeasible", ""
    if model.sol_status == pulp.LpSolutionOptimal:
        return "optimal", ""
    if model.sol_status == pulp.LpSolutionIntegerFeasible or model.status == pulp.LpStatusNotSolved:
        return "time limit", ""
    return "failed", pulp.LpStatus[model.status]


def _run_highs(
    model: pulp.LpProblem, variables: list[pulp.LpVariable], name: str, settings: Settings, start: Floats | None
) -> tuple[str, str]:
    """HiGHS by the parts of PuLP's class: a start in between, and the status from HiGHS itself."""
    import highspy

    solver = pulp.getSolver(
        name, msg=False, timeLimit=settings.time_limit, gapRel=settings.gap, threads=settings.threads
    )
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    if start is not None:
        solution = highspy.HighsSolution()
        at = [0.0] * len(variables)
        for variable, value in zip(variables, start.tolist(), strict=True):
            at[variable.index] = value
        solution.col_value = at
        model.solverModel.setSolution(solution)
    solver.callSolver(model)
    solver.findSolutionValues(model)
    from solver.milp.highs import status_of

    return status_of(model.solverModel.getModelStatus()), ""
