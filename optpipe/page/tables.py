"""Tables of the page: two plans beside each other, and a plan beside a run of it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optpipe import metrics, semantics
from optpipe.ops import NUM_KINDS, Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.report import COMPARISON, figures, size_text, usable
from optpipe.trace import StepTrace


@dataclass(frozen=True)
class PageTable:
    """A table with a title, text in its cells, and a note under it. ``strong``: the row that is set apart."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    strong: int | None = None

    def html(self) -> str:
        """As HTML, with everything escaped; from the second column on numbers stand to the right."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = "\n".join(
            ("<tr class='strong'>" if number == self.strong else "<tr>")
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            + "</tr>"
            for number, row in enumerate(self.rows)
        )
        # A last column of words reads from the left.
        kind = " class='words'" if self.head[-1] == COMPARISON[-1] else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<section><h2>{html.escape(self.title)}</h2><div class='wide'><table{kind}><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>{note}</section>"
        )


def of_schedules(problem: Problem, rows: Sequence[tuple[str, metrics.Metrics | None, str]], plan: Plan) -> PageTable:
    """Known schedules (name, figures, why not) side by side, and the plan itself last."""
    own = ("this plan", metrics.measure(problem, plan.ops), "")
    cells = [[name, *figures(problem, measured), usable(why_not)] for name, measured, why_not in (*rows, own)]
    return PageTable("Known schedules of this problem", COMPARISON, cells, strong=len(cells) - 1)


def of_plans(plan: Plan, other: Plan) -> PageTable:
    """Two plans, figure by figure."""
    one, two = (metrics.measure(p.problem, p.ops) for p in (plan, other))
    rows = [
        [
            "makespan",
            f"{one.makespan_ms:,.6g} ms",
            f"{two.makespan_ms:,.6g} ms",
            _change(one.makespan_ms, two.makespan_ms),
        ],
        ["bubble", f"{one.bubble_ratio:.2%}", f"{two.bubble_ratio:.2%}", ""],
        ["fullest device", size_text(max(one.peak_bytes)), size_text(max(two.peak_bytes)), ""],
        ["offloaded", size_text(sum(one.offloaded_bytes)), size_text(sum(two.offloaded_bytes)), ""],
        ["found by", str(plan.solver.get("method", "-")), str(other.solver.get("method", "-")), ""],
    ]
    return PageTable("Plan and other plan", ["", "plan", "other plan", "change"], rows)


def of_run(plan: Plan, step: StepTrace) -> list[PageTable]:
    """Where reality differed: durations by stage and kind, and devices."""
    return [_durations(plan, step), _devices(plan, step)]


def _durations(plan: Plan, step: StepTrace) -> PageTable:
    problem, run = plan.problem, step.ops
    planned = semantics.durations(problem, run)
    took = run.end - run.start
    rows = []
    group = run.stage * NUM_KINDS + run.kind
    for number in np.unique(group).tolist():
        stage, kind = divmod(number, NUM_KINDS)
        own = group == number
        expected, real = float(np.median(planned[own])), float(np.median(took[own]))
        low, high = np.percentile(took[own], [25, 75])
        spread = f"{low:.4g} to {high:.4g} ms"
        rows.append(
            [
                f"{Kind(kind).name} of stage {stage}",
                f"{expected:.4g} ms",
                f"{real:.4g} ms",
                spread,
                _change(expected, real),
            ]
        )
    return PageTable(
        "Where the run differed: durations",
        ["op", "planned", "median", "middle half", "change"],
        rows,
        f"Step {step.number}, the one of median length among those recorded.",
    )


def _devices(plan: Plan, step: StepTrace) -> PageTable:
    problem = plan.problem
    device = semantics.device_of(problem, step.ops)
    planned = metrics.measure(problem, plan.ops)
    rows = []
    for number in range(problem.num_devices):
        own, mine = device == number, semantics.device_of(problem, plan.ops) == number
        busy = float((step.ops.end - step.ops.start)[own & step.ops.is_compute].sum())
        expected = float((plan.ops.end - plan.ops.start)[mine & plan.ops.is_compute].sum())
        rows.append(
            [
                f"device {number}",
                f"{expected:.4g} ms",
                f"{busy:.4g} ms",
                f"{step.memory_wait_ms[own].sum():.4g} ms",
                f"{step.message_wait_ms[own & step.ops.is_compute].sum():.4g} ms",
                size_text(planned.peak_bytes[number]),
                size_text(step.peak_bytes[number]),
            ]
        )
    rows.append(["step", f"{planned.makespan_ms:.4g} ms", f"{semantics.makespan(step.ops):.4g} ms", "", "", "", ""])
    head = ["", "planned busy", "busy", "waited for memory", "waited for messages", "planned peak", "peak"]
    return PageTable("Where the run differed: devices", head, rows, "The last row is the length of the whole step.")


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""
