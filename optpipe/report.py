"""Results for people, as tables and lines, and for machines, as JSON."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from optpipe import metrics, semantics
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.profile import Profile, Timing

#: A table of devices is cut to the fullest ones beyond this many.
MOST_DEVICES = 16


def size_text(size: float) -> str:
    """Bytes for people: ``1.5 MB`` (decimal units, three digits)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"


def printable(value: Any) -> str:
    """As text for a terminal, whatever a file held: control characters become question marks."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def facts(plan: Plan) -> list[str]:
    """What there is to say about a plan as a whole, in two lines: what it is, and how good."""
    problem, measured = plan.problem, metrics.measure(plan.problem, plan.ops)
    sizes = ", ".join(
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in (
            (problem.num_devices, "device"),
            (problem.num_stages, "stage"),
            (problem.num_microbatches, "microbatch"),
        )
    ).replace("batchs", "batches")
    method = f", by {printable(plan.solver['method'])}" if plan.solver.get("method") else ""
    if plan.solver.get("source") not in (None, "", plan.solver.get("method")):
        method += f" ({printable(plan.solver['source'])})"
    figures = [f"makespan {measured.makespan_ms:.5g} ms"]
    if plan.lower_bound_ms is not None:
        gap = "" if plan.gap is None else f" (gap {max(plan.gap, 0.0):.2%})"
        figures.append(f"proven lower bound {plan.lower_bound_ms:.5g} ms{gap}")
    figures.append(f"bubble {measured.bubble_ratio:.2%}")
    if any(measured.offloaded_bytes):
        figures.append(f"offloaded {size_text(sum(measured.offloaded_bytes))}")
    return [f"{problem.name or 'plan'}: {sizes}{method}", " · ".join(figures)]


def device_table(plan: Plan) -> Table:
    """One row a device: its stages, peak against budget, offloaded bytes, and the share of the makespan it computes."""
    problem, measured = plan.problem, metrics.measure(plan.problem, plan.ops)
    compute = plan.ops.is_compute
    device = semantics.device_of(problem, plan.ops)[compute]
    busy = np.bincount(device, (plan.ops.end - plan.ops.start)[compute], problem.num_devices)
    table = plain_table("device", "stages", "peak", "budget", "filled", "offloaded", "busy")
    fullest = sorted(range(problem.num_devices), key=lambda d: (-_filled(plan, measured, d), d))
    for number in sorted(fullest[:MOST_DEVICES]):
        budget = problem.devices[number].memory_bytes
        table.add_row(
            str(number),
            ", ".join(map(str, problem.stages_of[number])),
            size_text(measured.peak_bytes[number]),
            "no limit" if budget is None else size_text(budget),
            "" if not budget else f"{measured.peak_bytes[number] / budget:.0%}",
            size_text(measured.offloaded_bytes[number]) if measured.offloaded_bytes[number] else "-",
            f"{busy[number] / measured.makespan_ms:.0%}" if measured.makespan_ms else "",
        )
    if problem.num_devices > MOST_DEVICES:
        table.caption = Text(f"the {MOST_DEVICES} fullest of {problem.num_devices} devices")
    return table


#: Columns of a comparison of schedules: its name, ``figures``, whether it can be used.
COMPARISON = ("schedule", "makespan ms", "bubble", "fullest device", "offloaded", "usable")


def figures(problem: Problem, measured: metrics.Metrics | None) -> tuple[str, str, str, str]:
    """Makespan, bubble, peak of the device that is filled most (of its budget, if it has one), and offloaded bytes, as
    cells of a table; empty where nothing was measured."""
    if measured is None:
        return ("", "", "", "")

    def filled(number: int) -> float:
        budget = problem.devices[number].memory_bytes
        return measured.peak_bytes[number] / budget if budget else float(measured.peak_bytes[number] > 0)

    number = max(range(problem.num_devices), key=lambda d: (filled(d), measured.peak_bytes[d]))
    budget = problem.devices[number].memory_bytes
    peak = f"{number}: {size_text(measured.peak_bytes[number])}" + (f" of {size_text(budget)}" if budget else "")
    offloaded = sum(measured.offloaded_bytes)
    return (
        f"{measured.makespan_ms:,.6g}",
        f"{measured.bubble_ratio:.2%}",
        peak,
        size_text(offloaded) if offloaded else "-",
    )


def usable(why_not: str) -> str:
    """The last cell of a schedule's row: ``yes``, or ``no`` and why."""
    return f"no: {why_not}" if why_not else "yes"


def comparison_table(problem: Problem, rows: Sequence[tuple[str, metrics.Metrics | None, str]]) -> Table:
    """One row a schedule: its name, its figures, whether it can be used (or why not)."""
    table = plain_table(*COMPARISON)
    table.columns[-1].justify = "left"
    for name, measured, why_not in rows:
        table.add_row(name, *figures(problem, measured), usable(why_not))
    return table


def comparison_html(problem: Problem, rows: Sequence[tuple[str, metrics.Metrics | None, str]]) -> str:
    """The same as an HTML table."""
    cells = [COMPARISON, *((name, *figures(problem, m), usable(why_not)) for name, m, why_not in rows)]
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells]
    lines[0] = lines[0].replace("td>", "th>")
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def profile_table(profile: Profile) -> Table:
    """One row a stage: its times and sizes, per microbatch; the spread of a time where it is worth a look."""
    table = plain_table("stage", "device", "layers", "F ms", "B ms", "W ms", "BW ms", "held", "after B", "O ms", "R ms")
    for number, stage in enumerate(profile.stages):
        table.add_row(
            str(number),
            str(stage.device),
            str(stage.layers),
            *(
                _timing_text(timing)
                for timing in (stage.forward_ms, stage.backward_ms, stage.weight_ms, stage.fused_backward_ms)
            ),
            size_text(stage.activation_bytes),
            size_text(stage.weight_context_bytes),
            _timing_text(stage.offload_ms),
            _timing_text(stage.reload_ms),
        )
    links = ", ".join(f"{link.message_ms.median:.3g}" for link in profile.links)
    if links:
        table.caption = Text(f"from stage to stage: {links} ms")
    return table


def _timing_text(timing: Timing | None) -> str:
    """Median, and the interquartile range where it is above a tenth of it."""
    if timing is None:
        return "-"
    spread = f" ±{timing.iqr / 2:.2g}" if timing.iqr > 0.1 * timing.median else ""
    return f"{timing.median:.3g}{spread}"


def run_table(run: dict[str, Any]) -> Table:
    """A training run beside its plan.

    Parameters
    ----------
    run
        The summary of a run as JSON: planned and measured time, bubble and bytes.
    """
    table = plain_table("", "planned", "measured")
    table.add_row("step", f"{run['planned_ms']:.4g} ms", f"{run['measured_ms']:.4g} ms")
    table.add_row("bubble", f"{run['planned_bubble_ratio']:.1%}", f"{run['measured_bubble_ratio']:.1%}")
    for device, (planned, measured) in enumerate(
        zip(run["planned_peak_bytes"], run["measured_peak_bytes"], strict=True)
    ):
        table.add_row(f"peak of device {device}", size_text(planned), size_text(measured))
    loss = f"loss {run['first_loss']:.4f} -> {run['last_loss']:.4f} in {run['steps']} steps"
    table.caption = Text(f"{loss}, {run['tokens_per_s']:,.0f} tokens/s")
    return table


def cache_table(entries: Sequence[dict[str, Any]]) -> Table:
    """One row a schedule that is kept, from its facts as JSON."""
    table = plain_table("problem", "stages", "microbatches", "objective", "makespan ms", "method", "size")
    for e in entries:
        shape = (str(e["stages"]), str(e["microbatches"]), e["objective"], f"{e['makespan_ms']:.6g}", e["method"])
        table.add_row(e["name"], *shape, size_text(e["size"]))
    return table


def _filled(plan: Plan, measured: metrics.Metrics, device: int) -> float:
    return measured.peak_bytes[device] / (plan.problem.devices[device].memory_bytes or 2**62)


def plain_table(*columns: str) -> Table:
    """A table that can be pasted: no colours, a rule under the head, numbers to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def summary(plan: Plan) -> dict[str, Any]:
    """The same facts for machines: times in ms, sizes in bytes, one entry a device in lists."""
    problem = plan.problem
    return {
        "name": problem.name,
        "num_devices": problem.num_devices,
        "num_stages": problem.num_stages,
        "num_microbatches": problem.num_microbatches,
        **metrics.measure(problem, plan.ops).to_json(),
        "lower_bound_ms": plan.lower_bound_ms,
        "gap": plan.gap,
        "budget_bytes": [device.memory_bytes for device in problem.devices],
        "solver": plan.solver,
    }
