"""One trial in a process of its own: reads what to do from stdin as JSON, prints the result as one line of JSON.

Every schedule that a result counts has been written to a plan file, read back and verified.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from optpipe import metrics
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan

Asked = dict[str, Any]
Result = dict[str, Any]


def main() -> None:
    asked: Asked = json.load(sys.stdin)
    problem = Problem.read(asked["problem"])
    method = _METHODS.get(asked["method"], solver)
    print(json.dumps({**method(problem, asked), "peak_mb": round(peak_megabytes(), 1)}))


def peak_megabytes() -> float:
    """Most memory that this process, or one of its children, held."""
    kilobytes = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(kilobytes) / 1024


def solver(problem: Problem, asked: Asked) -> Result:
    """A method of the solver: the plan it writes, how long from the start of the process, and what it was like on the
    way: (seconds, objective, bound, source) of each improvement."""
    from optpipe.errors import OptPipeError
    from solver.compiled import COMPILED
    from solver.options import SolveOptions
    from solver.solve import solve

    trace: list[tuple[float, float, float, str]] = []
    options = SolveOptions(
        method=asked["method"],
        objective=asked["objective"],
        time_limit=asked["seconds"],
        gap=0.0,
        threads=asked["threads"],
        seed=asked["seed"],
        **asked["options"],
    )
    begin = time.monotonic()
    try:
        plan = solve(
            problem, options, lambda now: trace.append((round(now.seconds, 4), now.best, now.bound, now.source))
        )
    except OptPipeError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.monotonic() - begin
    facts = {key: plan.solver.get(key) for key in ("method", "source", "status", "milp", "cache") if key in plan.solver}
    return {
        **written(plan, asked),
        "bound_ms": plan.lower_bound_ms,
        "solve_s": round(seconds, 3),
        "solver": facts,
        "trace": trace,
        "compiled": COMPILED,
    }


def written(plan: Plan, asked: Asked) -> Result:
    """Write the plan, note the time, and verify what was written."""
    plan.write(asked["plan"])
    elapsed = time.time() - asked["began"]
    again = Plan.read(asked["plan"])
    measured = metrics.measure(again.problem, again.ops)
    return {
        "makespan_ms": measured.makespan_ms,
        "span_ms": measured.span_ms,
        "offloaded_bytes": sum(measured.offloaded_bytes),
        "violations": verify_plan(again)[:3],
        "written_s": round(elapsed, 3),
    }


def schedules(problem: Problem, asked: Asked) -> Result:
    """Every known schedule: its makespan and span, or why there is none."""
    from solver.ada_offload import ada_offload
    from solver.schedules import SCHEDULES, DoesNotApply

    found: dict[str, Result] = {}
    for name, generate in {**SCHEDULES, "ada-offload": ada_offload}.items():
        begin = time.monotonic()
        try:
            ops = generate(problem)
        except DoesNotApply as reason:
            found[name] = {"why": f"it {reason}"}
            continue
        violations = verify(problem, ops)
        took = round(time.monotonic() - begin, 3)
        if violations:
            over = any("over its budget" in text for text in violations)
            found[name] = {"why": "needs more memory than there is" if over else violations[0], "seconds": took}
        else:
            found[name] = {**_judged(problem, ops), "seconds": took}
    return {"schedules": found}


def _judged(problem: Problem, ops: Ops) -> Result:
    measured = metrics.measure(problem, ops)
    return {"makespan_ms": measured.makespan_ms, "span_ms": measured.span_ms}


def cpsat(problem: Problem, asked: Asked) -> Result:
    """OR-tools CP-SAT on the same problem."""
    from benchmarks.cpsat import solve_with_cpsat

    hint = asked["method"] == "cpsat-start"
    found = solve_with_cpsat(problem, asked["seconds"], asked["threads"], asked["seed"], from_start=hint)
    result = {"status": found.status, "model_bound_ms": found.bound_ms, "solve_s": round(found.seconds, 3)}
    return result if found.ops is None else {**result, **written(Plan(problem, found.ops), asked)}


def milp_rows(problem: Problem, asked: Asked) -> Result:
    """The MILP alone, with the families of rows that ``options`` names, from 1F1B or, where that does not fit,
    AdaOffload's schedule: its size, and what HiGHS makes of it in this process; with ``seconds`` 0 its size only."""
    from solver.ada_offload import ada_offload
    from solver.milp.extract import schedule
    from solver.milp.formulation import Options, formulate
    from solver.milp.highs import Settings
    from solver.milp.highs import solve as solve_with_highs
    from solver.schedules.one_f_one_b import one_f_one_b

    start = one_f_one_b(problem)
    if verify(problem, start):
        start = ada_offload(problem)
    upper = metrics.measure(problem, start).makespan_ms
    begin = time.monotonic()
    program = formulate(problem, Options(**asked["options"]), upper=upper * (1 + 1e-6))
    matrix = program.matrix
    size = {
        "columns": matrix.num_columns,
        "binaries": matrix.num_binaries,
        "rows": matrix.num_rows,
        "entries": len(matrix.value),
        "build_s": round(time.monotonic() - begin, 3),
    }
    if not asked["seconds"]:
        return size
    settings = Settings(time_limit=asked["seconds"], threads=asked["threads"], seed=asked["seed"])
    found = solve_with_highs(matrix, settings, start=program.vector_of(start))
    ops = None if found.solution is None else schedule(program, found.solution)
    return {
        **size,
        "rows": found.rows,
        "status": found.status,
        "start_ms": upper,
        "program_ms": _finite(found.objective),
        "makespan_ms": None if ops is None else metrics.measure(problem, ops).makespan_ms,
        "program_bound_ms": _finite(found.bound),
        "nodes": found.nodes,
        "solve_s": round(found.seconds, 3),
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e30 else None


_METHODS: dict[str, Callable[[Problem, Asked], Result]] = {
    "schedules": schedules,
    "cpsat": cpsat,
    "cpsat-start": cpsat,
    "milp-rows": milp_rows,
}

if __name__ == "__main__":
    main()
