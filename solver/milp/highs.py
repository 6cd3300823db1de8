"""Back end: HiGHS through highspy's arrays, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import highspy
import numpy as np

from optpipe.ops import Floats
from solver.milp.lazy import cut
from solver.milp.orders import Rows
from solver.milp.sparse import INF, Matrix

#: Called with (objective, bound, seconds, vector) for every better solution.
OnImprovement = Callable[[float, float, float, Floats], None]
#: Asked now and then with the bound so far; True: stop.
Stop = Callable[[float], bool]
#: Of the time: what the relaxation may take before branch and bound, where rows are added lazily.
_ROOT_PART = 0.1

_STATUS = {
    highspy.HighsModelStatus.kOptimal: "optimal",
    highspy.HighsModelStatus.kInfeasible: "infeasible",
    highspy.HighsModelStatus.kTimeLimit: "time limit",
    highspy.HighsModelStatus.kInterrupt: "stopped",
    highspy.HighsModelStatus.kSolutionLimit: "node limit",
    highspy.HighsModelStatus.kObjectiveTarget: "target",
}


def status_of(status: highspy.HighsModelStatus) -> str:
    """HiGHS's status as ``MilpResult.status``."""
    return _STATUS.get(status, "failed")


@dataclass(frozen=True)
class Settings:
    """How HiGHS runs.

    Attributes
    ----------
    time_limit
        Seconds.
    gap
        Relative gap of objective and bound at which it stops.
    threads, seed
        As HiGHS takes them. One process keeps the number of threads of its first run.
    nodes
        Nodes at which it stops; None: no limit.
    options
        More options of HiGHS, by name.
    """

    time_limit: float = 300.0
    gap: float = 0.0
    threads: int = 1
    seed: int = 0
    nodes: int | None = None
    options: dict[str, str | bool | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class MilpResult:
    """What a solver made of a program.

    Attributes
    ----------
    status
        ``optimal`` (within the gap), ``infeasible``, ``time limit``, ``node limit``, ``stopped`` or ``failed``.
    objective
        Of the solution; infinite without one.
    bound
        Proven lower bound of the program; ``inf`` if it is infeasible, ``-inf`` where nothing is known.
    solution
        float64 (columns,), or None.
    seconds, nodes
        What it took.
    rows, columns, binaries
        Size of the program.
    message
        What went wrong, where something did.
    iterations
        Of the simplex method, where it ran in this process.
    lazy_rows
        Rows that were added because a solution of the relaxation broke them; ``rows`` counts them too.
    """

    status: str
    objective: float
    bound: float
    solution: Floats | None
    seconds: float
    nodes: int
    rows: int
    columns: int
    binaries: int
    message: str = ""
    iterations: int = 0
    lazy_rows: int = 0

    def facts(self) -> dict[str, Any]:
        """What there is to report of it."""
        facts: dict[str, Any] = {
            "status": self.status,
            "nodes": self.nodes,
            "rows": self.rows,
            "columns": self.columns,
            "binaries": self.binaries,
            "seconds": round(self.seconds, 3),
        }
        facts |= {"lazy_rows": self.lazy_rows} if self.lazy_rows else {}
        return facts | ({"message": self.message} if self.message else {})


class _Quiet(highspy.Highs):
    """HiGHS without its banner, which the first call would print to standard output."""

    def enableCallbacks(self) -> None:  # noqa: N802 (highspy calls it so)
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def solve(
    matrix: Matrix,
    settings: Settings | None = None,
    *,
    start: Floats | None = None,
    on_improvement: OnImprovement | None = None,
    stop: Stop | None = None,
) -> MilpResult:
    """Solve a program in this process. HiGHS looks at its time limit now and then only: see ``child`` for a limit that
    holds.

    Where the program has orders whose triangle rows may be added, part of the time first goes to rounds that add those
    that the relaxation breaks (see ``lazy``).

    Parameters
    ----------
    start
        A vector to start from; one that breaks rows is mended if HiGHS can.
    on_improvement, stop
        Called while it runs, in this thread.

    Raises
    ------
    ValueError
        An option that HiGHS does not know, or a value that it does not take.
    """
    settings = settings or Settings()
    began = time.monotonic()
    if not len(matrix.orders.column):
        return _branch(matrix, settings, start, on_improvement, stop)
    root = _Root(matrix, settings, stop)
    found = cut(root, matrix.orders, matrix.num_rows, began + _ROOT_PART * settings.time_limit, stop)
    whole = matrix.with_rows(found.rows)
    if stop is not None and stop(found.bound):
        result = _stopped(whole, start)
    else:
        left = replace(settings, time_limit=max(0.0, settings.time_limit - (time.monotonic() - began)))
        result = _branch(whole, left, start, on_improvement, stop)
    return replace(
        result,
        bound=max(result.bound, min(found.bound, result.objective)),
        seconds=time.monotonic() - began,
        iterations=result.iterations + root.iterations,
        lazy_rows=len(found.rows.upper),
    )


def _stopped(matrix: Matrix, start: Floats | None) -> MilpResult:
    """What is known before branch and bound."""
    holds = start is not None and matrix.violation(start) <= 1e-6
    return MilpResult(
        status="stopped",
        objective=float(matrix.cost @ start) if start is not None and holds else INF,
        bound=-INF,
        solution=start if holds else None,
        seconds=0.0,
        nodes=0,
        rows=matrix.num_rows,
        columns=matrix.num_columns,
        binaries=matrix.num_binaries,
    )


def _branch(
    matrix: Matrix,
    settings: Settings,
    start: Floats | None,
    on_improvement: OnImprovement | None,
    stop: Stop | None,
) -> MilpResult:
    """Branch and bound, or the simplex method where nothing is integer."""
    began = time.monotonic()
    solver = _Quiet()
    _configure(solver, settings)
    _check(solver.passModel(highs_lp(matrix)), "the model")
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start.tolist()
        _check(solver.setSolution(solution), "the start")
    if on_improvement is not None:
        improved = on_improvement

        def report(event: highspy.highs.HighsCallbackEvent) -> None:
            out = event.data_out
            x = np.array(out.mip_solution)
            improved(out.objective_function_value, out.mip_dual_bound, time.monotonic() - began, x)

        solver.cbMipImprovingSolution.subscribe(report)
    if stop is not None:
        wanted = stop

        def ask(event: highspy.highs.HighsCallbackEvent) -> None:
            if event.data_in is not None and wanted(event.data_out.mip_dual_bound):
                event.data_in.user_interrupt = True

        solver.cbMipInterrupt.subscribe(ask)
    solver.run()
    return _result(solver, matrix, time.monotonic() - began)


class _Root:
    """The relaxation of a program (see ``lazy.Relaxation``). ``iterations``: of the simplex method so far."""

    def __init__(self, matrix: Matrix, settings: Settings, stop: Stop | None) -> None:
        self.iterations = 0
        self._solver = _Quiet()
        _configure(self._solver, settings)
        free = matrix._replace(integer=np.zeros_like(matrix.integer))
        _check(self._solver.passModel(highs_lp(free)), "the relaxation")
        if stop is not None:
            wanted = stop

            def ask(event: highspy.highs.HighsCallbackEvent) -> None:
                if event.data_in is not None and wanted(-INF):
                    event.data_in.user_interrupt = True

            self._solver.cbSimplexInterrupt.subscribe(ask)

    def solve(self, seconds: float) -> tuple[float, Floats] | None:
        """Its optimum and a solution; None where there is none, or none in so many seconds."""
        solver = self._solver
        if seconds <= 0:
            return None
        # The limit counts from the first run of this solver on.
        solver.setOptionValue("time_limit", solver.getRunTime() + seconds)
        solver.run()
        info = solver.getInfo()
        self.iterations += max(0, int(info.simplex_iteration_count))
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return info.objective_function_value, np.array(solver.getSolution().col_value)

    def add(self, rows: Rows) -> None:
        """Add rows; the next run goes on from where this one ended."""
        count = len(rows.upper)
        first, column = 3 * np.arange(count, dtype=np.int32), rows.column.ravel().astype(np.int32)
        sides = np.full(count, -INF), rows.upper
        _check(self._solver.addRows(count, *sides, len(column), first, column, rows.value.ravel()), "more rows")


def _configure(solver: highspy.Highs, settings: Settings) -> None:
    options: dict[str, str | bool | int | float] = {
        "threads": settings.threads,
        "time_limit": float(max(settings.time_limit, 0.0)),
        "mip_rel_gap": float(settings.gap),
        "random_seed": settings.seed,
    }
    if settings.threads == 1:
        options["parallel"] = "off"
    if settings.nodes is not None:
        options["mip_max_nodes"] = settings.nodes
    for name, value in {**options, **settings.options}.items():
        if solver.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise ValueError(f"HiGHS does not take option {name} = {value!r}")


def _check(status: highspy.HighsStatus, what: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise RuntimeError(f"HiGHS refuses {what}")


def highs_lp(matrix: Matrix) -> highspy.HighsLp:
    """The program as HiGHS takes it."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = matrix.num_columns, matrix.num_rows
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = matrix.cost, matrix.lower, matrix.upper
    lp.row_lower_, lp.row_upper_ = matrix.row_lower, matrix.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = matrix.first.astype(np.int32)
    lp.a_matrix_.index_ = matrix.column.astype(np.int32)
    lp.a_matrix_.value_ = matrix.value
    if matrix.integer.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[flag] for flag in matrix.integer.tolist()]
    return lp


def _result(solver: highspy.Highs, matrix: Matrix, seconds: float) -> MilpResult:
    info = solver.getInfo()
    status = status_of(solver.getModelStatus())
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    objective = info.objective_function_value if found else INF
    bound = info.mip_dual_bound
    if status == "infeasible":
        bound = INF
    elif not matrix.integer.any():
        bound = objective if status == "optimal" else -INF
    return MilpResult(
        status=status,
        objective=objective,
        bound=max(bound, -INF),
        solution=np.array(solver.getSolution().col_value) if found else None,
        seconds=seconds,
        nodes=max(0, int(info.mip_node_count)),
        rows=matrix.num_rows,
        columns=matrix.num_columns,
        binaries=matrix.num_binaries,
        message="" if status != "failed" else solver.modelStatusToString(solver.getModelStatus()),
        iterations=max(0, int(info.simplex_iteration_count)),
    )
