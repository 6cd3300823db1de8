"""Every known schedule of a problem and the solver's, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from optpipe import metrics, report, semantics
from optpipe.errors import Infeasible
from optpipe.metrics import Metrics
from optpipe.ops import Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.incumbent import Progress
from solver.options import Objective, SolveOptions
from solver.schedules import SCHEDULES, DoesNotApply, generate
from solver.solve import solve

#: The row of the solver's own plan.
OWN = "optpipe"


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes
    ----------
    name
        Of the schedule.
    measured
        Its figures; None where the schedule is not defined for the problem.
    why_not
        Why it cannot be used: it does not apply, or its memory does not fit. Empty: it can.
    """

    name: str
    measured: Metrics | None
    why_not: str

    def to_json(self) -> dict[str, Any]:
        figures = {} if self.measured is None else self.measured.to_json()
        return {"schedule": self.name, "feasible": not self.why_not, "why_not": self.why_not, **figures}


def known(problem: Problem, objective: Objective = "makespan") -> list[Row]:
    """All known schedules in the order of the registry.

    A schedule that breaks the memory is measured all the same, so that one sees what it would need.
    """
    rows = []
    for name in ("ada-offload", *SCHEDULES):
        try:
            ops = (
                ada_offload(problem, objective=objective)
                if name == "ada-offload"
                else generate(name, problem, objective)
            )
        except DoesNotApply as reason:
            rows.append(Row(name, None, f"it {reason}"))
            continue
        rows.append(Row(name, metrics.measure(problem, ops), _too_much(problem, ops)))
    return rows


class Comparison(list[Row]):
    """Schedules of one problem. Prints itself as a table, in a terminal with rich and in Jupyter."""

    def __init__(self, problem: Problem, rows: Iterable[Row]) -> None:
        super().__init__(rows)
        self.problem = problem

    @property
    def cells(self) -> list[tuple[str, Metrics | None, str]]:
        """Name, figures, and why it cannot be used, of each schedule."""
        return [(row.name, row.measured, row.why_not) for row in self]

    def __rich__(self) -> Table:
        return report.comparison_table(self.problem, self.cells)

    def _repr_html_(self) -> str:
        return report.comparison_html(self.problem, self.cells)


def compare(
    problem: Problem,
    options: SolveOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **changes: Any,
) -> Comparison:
    """All known schedules, and the solver's plan last.

    ``changes`` are single options, such as ``time_limit=30``; they go before ``options``.
    """
    options = replace(options or SolveOptions(), **changes)
    rows = Comparison(problem, known(problem, options.objective))
    try:
        plan = solve(problem, options, on_progress)
        rows.append(Row(OWN, metrics.measure(problem, plan.ops), ""))
    except Infeasible as error:
        rows.append(Row(OWN, None, str(error)))
    return rows


def _too_much(problem: Problem, ops: Ops) -> str:
    """Which device needs more than it has; empty where the schedule is valid."""
    peaks = metrics.measure(problem, ops).peak_bytes
    for number, (peak, device) in enumerate(zip(peaks, problem.devices, strict=True)):
        if device.memory_bytes is not None and peak > device.memory_bytes:
            texts = [report.size_text(size) for size in (peak, device.memory_bytes)]
            if texts[0] == texts[1]:
                texts = [f"{size:,} bytes" for size in (peak, device.memory_bytes)]
            return f"device {number} needs {texts[0]}, its budget is {texts[1]}"
    violations = verify(problem, ops)
    assert not violations, f"a schedule of {semantics.makespan(ops)} ms breaks a rule: {violations[0]}"
    return ""
