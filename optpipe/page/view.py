"""What a chart of the page shows, as plain data: lanes of ops, memory curves, what each op waits for, facts."""

from __future__ import annotations

from typing import Any

import numpy as np

from optpipe import memory, metrics, semantics
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.report import size_text
from optpipe.trace import StepTrace
from optpipe.waits import critical_path, waits
from optpipe.words import explain

#: Digits behind the point, of times in ms: nanoseconds.
_DIGITS = 6


def of_plan(plan: Plan, label: str) -> dict[str, Any]:
    """The chart of a plan."""
    curves = [memory.curve(plan.problem, plan.ops, device) for device in range(plan.problem.num_devices)]
    return {
        "label": label,
        "words": explain(plan),
        "facts": _facts(plan),
        **_chart(plan.problem, plan.ops, curves),
    }


def of_run(plan: Plan, step: StepTrace) -> dict[str, Any]:
    """The chart of a measured step of a plan."""
    problem = plan.problem
    curves = [step.held(problem, device) for device in range(problem.num_devices)]
    facts = [
        *_what(problem),
        ["makespan", f"{semantics.makespan(step.ops):,.6g} ms"],
        ["bubble", f"{metrics.measure(problem, step.ops).bubble_ratio:.2%}"],
        ["found by", f"step {step.number} of a run, as measured"],
    ]
    chart = _chart(problem, step.ops, curves)
    for device, peak in enumerate(step.peak_bytes):
        chart["devices"][device]["peak"] = peak
    return {"label": "run", "words": [], "facts": facts, **chart}


def _chart(problem: Problem, ops: Ops, curves: list[tuple[Floats, Ints]]) -> dict[str, Any]:
    found = waits(problem, ops)
    device_of = semantics.device_of(problem, ops)
    peaks = [int(levels.max(initial=0)) for _, levels in curves]
    length = semantics.makespan(ops)
    took = (ops.end - ops.start) * ops.is_compute
    devices = []
    for device, (times, levels) in enumerate(curves):
        own = device_of == device
        lanes = [_lane("compute", ops, own & ops.is_compute)]
        for name, kind in (("d2h", Kind.O), ("h2d", Kind.R)):
            if (own & (ops.kind == kind)).any():
                lanes.append(_lane(name, ops, own & (ops.kind == kind)))
        devices.append(
            {
                "name": f"device {device}",
                "stages": list(problem.stages_of[device]),
                "budget": problem.devices[device].memory_bytes,
                "peak": peaks[device],
                "busy": round(float(took[own].sum()) / length, 4) if length else 0.0,
                "lanes": lanes,
                "memory": _steps(times, levels),
            }
        )
    return {
        "start": _rounded(ops.start.min(initial=0.0)),
        "end": _rounded(ops.end.max(initial=0.0)),
        "microbatches": problem.num_microbatches,
        "devices": devices,
        "shared": _shared(problem, ops),
        "ops": {
            "kind": ops.kind.tolist(),
            "stage": ops.stage.tolist(),
            "microbatch": ops.microbatch.tolist(),
            "start": _list(ops.start),
            "end": _list(ops.end),
            "before": found.before.tolist(),
            "why": found.why.tolist(),
        },
        "critical": critical_path(ops, found),
    }


def _lane(name: str, ops: Ops, mask: np.ndarray) -> dict[str, Any]:
    index = np.flatnonzero(mask)
    return {"name": name, "ops": index[np.argsort(ops.start[index], kind="stable")].tolist()}


def _shared(problem: Problem, ops: Ops) -> list[dict[str, Any]]:
    """Lanes of channels that carry more than one direction of one device."""
    lanes = {lane.name: lane for lane in semantics.channel_lanes(problem, ops)}
    found = []
    for channel in problem.channels:
        lane = lanes[f"channel {channel.name}"]
        if len(channel.transfers) > 1 and len(lane.ops):
            found.append({"name": channel.name, "ops": lane.ops.tolist()})
    return found


def _steps(times: Floats, levels: Ints) -> dict[str, Any]:
    """A curve without instants: of several levels at one time the highest and the last stay."""
    time, level = _list(times), levels.tolist()
    kept: list[tuple[float, int]] = []
    for t, b in zip(time, level, strict=True):
        if len(kept) >= 2 and kept[-1][0] == t == kept[-2][0] and kept[-1][1] <= max(kept[-2][1], b):
            kept[-1] = (t, b)
        else:
            kept.append((t, b))
    return {"time": [t for t, _ in kept], "bytes": [b for _, b in kept]}


def _facts(plan: Plan) -> list[list[str]]:
    """What the plan is, how good, and how it was found."""
    problem, solver = plan.problem, plan.solver
    measured = metrics.measure(problem, plan.ops)
    facts = [*_what(problem), ["makespan", f"{measured.makespan_ms:,.6g} ms"]]
    if plan.lower_bound_ms is not None:
        facts.append(["proven bound", f"{plan.lower_bound_ms:,.6g} ms"])
    if plan.gap is not None:
        facts.append(["gap", f"{max(plan.gap, 0.0):.2%}"])
    facts.append(["bubble", f"{measured.bubble_ratio:.2%}"])
    if any(measured.offloaded_bytes):
        facts.append(["offloaded", size_text(sum(measured.offloaded_bytes))])
    source = "" if solver.get("source") in (None, "", solver.get("method")) else f" ({solver['source']})"
    facts.append(["found by", f"{solver.get('method', '-')}{source}"])
    for key, text in (("status", "status"), ("seconds", "solver time"), ("seed", "seed")):
        if solver.get(key) is not None:
            facts.append([text, f"{_figure(solver[key], '.4g')} s" if key == "seconds" else str(solver[key])])
    milp = solver.get("milp")
    if isinstance(milp, dict) and "columns" in milp:
        columns, binaries, rows = (_figure(milp.get(key, 0), ",") for key in ("columns", "binaries", "rows"))
        facts += [["variables", f"{columns}, {binaries} of them binary"], ["rows", rows]]
    return facts


def _figure(value: Any, form: str) -> str:
    """A number in a form; whatever else another tool wrote in its place, as it is."""
    return format(value, form) if isinstance(value, int | float) else str(value)


def _what(problem: Problem) -> list[list[str]]:
    size = f"{problem.num_devices} devices, {problem.num_stages} stages, {problem.num_microbatches} microbatches"
    return [["problem", problem.name or "-"], ["size", size]]


def _list(values: Floats) -> list[float]:
    return np.round(values, _DIGITS).tolist()


def _rounded(value: Any) -> float:
    return round(float(value), _DIGITS)
