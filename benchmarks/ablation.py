"""What each part of the solver is worth: the parts one after the other, cuts, time, size, and distance from the edge of
feasibility."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from statistics import mean

from benchmarks import tables
from benchmarks.lab import Results, Row, Trial, instance_file, instances, references
from benchmarks.scale import sized
from optpipe.problem import Problem
from solver.feasibility import smallest_budgets

#: Small enough for the MILP, and what it cannot do any more.
_PARTS = (
    "unit-s4-m8-memS2-off1",
    "flat-s4-m8-memS2-off1",
    "unit-s8-m16-memS2-off2",
    "flat-s8-m16-memS3-off2",
    "unit-s8-m32-memS3-off2",
    "flat-s8-m32-memS3-off2",
    "het-s8-m32-memS2-off1",
)

#: Families of valid rows in the MILP.
_CUTS: dict[str, dict[str, bool | str]] = {
    "none": {"load": False, "staircase": False},
    "lazy triangles": {"load": False, "staircase": False, "triangles": "lazy"},
    "triangles": {"load": False, "staircase": False, "triangles": "all"},
    "staircase": {"load": False},
    "load": {"staircase": False},
    "load, lazy triangles": {"staircase": False, "triangles": "lazy"},
    "load, triangles": {"staircase": False, "triangles": "all"},
    "load, staircase": {},
    "load, staircase, lazy triangles": {"triangles": "lazy"},
    "load, staircase, triangles": {"triangles": "all"},
}
_CUT_INSTANCES = ("unit-s4-m8-memS-nooff", "flat-s4-m8-meminf-nooff", "unit-s8-m16-memS-nooff", "flat-s4-m8-memS2-off1")
#: Sizes of `flat` with offload that the MILP solves, and the seeds over which its time is averaged.
_CUT_SIZES, _SEEDS = ((4, 4), (4, 5), (4, 6)), (0, 1, 2)

_BUDGETS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


def main(results: Results, only: str, seconds: Sequence[float], threads: int) -> None:
    """Measure what is missing, print and write all tables. ``seconds``: the last one is the limit of each trial."""
    limit = seconds[-1]
    parts: list[str] = []
    for title, text, (header, rows) in (
        ("Parts", f"Makespan in ms, {limit:g} s each.", _parts(results, only, limit, threads)),
        (
            "Cuts",
            f"The MILP alone from 1F1B or AdaOffload, {limit:g} s, {len(_SEEDS)} seeds.",
            _cuts(results, only, limit, threads),
        ),
        ("Time", "Gap to the best proven bound.", _time(results, only, limit, threads)),
        ("Size of the MILP", "With load and staircase rows.", _size(results, only)),
        (
            "From the edge of feasibility on",
            f"AdaOffload's schedule against the solver's after {limit:g} s, budgets as multiples of the smallest ones.",
            _edge(results, only, limit, threads),
        ),
    ):
        if rows:
            tables.show(title, header, rows)
            parts.append(f"## {title}\n\n{text}\n\n{tables.markdown(header, rows)}")
    tables.write_markdown(results.path.with_suffix(".md"), "What each part of the solver is worth", parts)


Part = tuple[list[str], list[list[tables.Cell]]]


def _chosen(names: Sequence[str], only: str) -> list[str]:
    there = set(instances())
    return [name for name in names if name in there and fnmatch.fnmatch(name, only)]


def _gap(row: Row, bound: float) -> tables.Cell:
    if "makespan_ms" not in row:
        return row.get("error", "failed")
    return tables.percent(max(0.0, row["makespan_ms"] / bound - 1))


def _parts(results: Results, only: str, limit: float, threads: int) -> Part:
    """AdaOffload alone, with nothing but the MILP after it, with the search after it, all of it."""
    methods = {"ada-offload": "AdaOffload", "milp-rows": "+ MILP", "search": "+ search", "auto": "all"}
    header, rows = ["instance", "bound", *(t for name in methods.values() for t in (name, "gap"))], []
    for name in _chosen(_PARTS, only):
        problem = Problem.read(instance_file(name))
        found = [results.measured(Trial(name, method, limit, threads), problem) for method in methods]
        bound = max([references()[name].bound_ms, *(row["bound_ms"] for row in found if row.get("bound_ms"))])
        cells: list[tables.Cell] = [name, bound]
        for row in map(_or_start, found):
            cells += [row.get("makespan_ms"), _gap(row, bound)]
        rows.append(cells)
    return header, rows


def _or_start(row: Row) -> Row:
    """Where the MILP found nothing shorter, the schedule that it began with."""
    known = [row[name] for name in ("makespan_ms", "start_ms") if row.get(name) is not None]
    return row | {"makespan_ms": min(known)} if known else row


def _cuts(results: Results, only: str, limit: float, threads: int) -> Part:
    """The MILP with and without families of valid rows; means over the seeds, since its times scatter."""
    problems = {name: Problem.read(instance_file(name)) for name in _chosen(_CUT_INSTANCES, only)}
    made = [sized(*size) for size in _CUT_SIZES]
    problems |= {problem.name: problem for problem in made if fnmatch.fnmatch(problem.name, only)}
    header = ["instance", "valid rows", "rows", "solved", "seconds", "nodes", "makespan", "gap of the program"]
    rows: list[list[tables.Cell]] = []
    for name, problem in problems.items():
        for title, options in _CUTS.items():
            trials = [Trial(name, "milp-rows", limit, threads, seed, options=dict(options)) for seed in _SEEDS]
            found = [row for trial in trials if "error" not in (row := results.measured(trial, problem))]
            if found:
                rows.append([name, title, *_means(found)])
    return header, rows


def _means(found: list[Row]) -> list[tables.Cell]:
    gaps = [1.0 - (row["program_bound_ms"] or 0.0) / row["program_ms"] for row in found if row["program_ms"]]
    return [
        f"{mean(row['rows'] for row in found):.0f}",
        f"{sum(row['status'] == 'optimal' for row in found)} of {len(found)}",
        f"{mean(row['solve_s'] for row in found):.2f}",
        f"{mean(row['nodes'] for row in found):.0f}",
        min((row["makespan_ms"] for row in found if row["makespan_ms"]), default=None),
        tables.percent(mean(gaps)) if gaps else None,
    ]


def _time(results: Results, only: str, limit: float, threads: int) -> Part:
    """Quality against the time budget."""
    budgets = [s for s in _SECONDS if s <= limit]
    header, rows = ["instance", *(f"{s:g} s" for s in budgets)], []
    for name in _chosen(_PARTS, only):
        problem = Problem.read(instance_file(name))
        found = [results.measured(Trial(name, "auto", s, threads), problem) for s in budgets]
        bound = max([references()[name].bound_ms, *(row["bound_ms"] for row in found if row.get("bound_ms"))])
        rows.append([name, *(_gap(row, bound) for row in found)])
    return header, rows


def _size(results: Results, only: str) -> Part:
    """Columns and rows of the MILP against size."""
    header = ["instance", "columns", "binaries", "rows", "entries", "build, s"]
    rows: list[list[tables.Cell]] = []
    for name in _chosen(
        [f"unit-s{s}-m{m}-memS{k}" for s, m in ((4, 8), (8, 16), (8, 32)) for k in ("-nooff", "2-off1")], only
    ):
        row = results.measured(Trial(name, "milp-rows"), Problem.read(instance_file(name)))
        rows.append([name, *(row.get(part) for part in ("columns", "binaries", "rows", "entries", "build_s"))])
    return header, rows


def _edge(results: Results, only: str, limit: float, threads: int) -> Part:
    """What AdaOffload is worth near the smallest budget and far from it."""
    header = ["instance", "budget", "AdaOffload", "gap", "solver", "gap", "AdaOffload above the solver"]
    rows: list[list[tables.Cell]] = []
    for name in _chosen(("flat-s8-m16-memS2-off1", "flat-s8-m32-memS2-off1"), only):
        problem = Problem.read(instance_file(name))
        for factor in _BUDGETS:
            tight = problem.with_budgets([round(factor * budget) for budget in smallest_budgets(problem)])
            label = f"{name} x {factor:g}"
            first = results.measured(Trial(label, "ada-offload", limit, threads), tight)
            best = results.measured(Trial(label, "auto", limit, threads), tight)
            bound = max([0.0, *(row["bound_ms"] for row in (first, best) if row.get("bound_ms"))])
            cells: list[tables.Cell] = [name, f"{factor:g}"]
            for row in (first, best):
                cells += [row.get("makespan_ms"), _gap(row, bound) if bound else None]
            both = "makespan_ms" in first and "makespan_ms" in best
            cells.append(tables.percent(first["makespan_ms"] / best["makespan_ms"] - 1) if both else None)
            rows.append(cells)
    return header, rows
