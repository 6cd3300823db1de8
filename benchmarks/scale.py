"""Time and memory of the solver against stages x microbatches, and what large problems reach in seconds."""

from __future__ import annotations

import fnmatch
from typing import Any

from benchmarks import tables
from benchmarks.lab import Results, Trial, instance_file, references, size_of
from optpipe.problem import Problem

#: Stages and microbatches of the table, each some 4 times as large as the one before.
_SIZES = ((4, 16), (8, 32), (16, 64), (16, 256), (32, 512), (64, 1024))

#: Instance -> seconds from start to written plan, gap to reach.
_GOALS = {
    "scale-s64-m256-memS2-off1": (5.0, 0.01),
    "scale-s64-m1024-memS2-off1": (20.0, 0.005),
    "scale-s32-m512-mem1x-V-nooff": (8.0, 0.01),
}

#: Of the seconds from start to written plan, what the solver gets; the rest is for imports and writing.
_PART = 0.75


def sized(stages: int, microbatches: int) -> Problem:
    """``flat``, memory for S/2 activations a device, an offload as long as a forward."""
    base: dict[str, Any] = Problem.read(instance_file("flat-s8-m32-memS2-off1")).to_json()
    return Problem.model_validate(
        {
            "name": f"flat-s{stages}-m{microbatches}-memS2-off1",
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": stages * base["stages"][0]["activation_bytes"] // 2}] * stages,
            "stages": [{**base["stages"][0], "device": d} for d in range(stages)],
            "comm_ms": [base["comm_ms"][0]] * (stages - 1),
            "channels": [
                {"name": f"{x}:{d}", "transfers": [{"device": d, "direction": x}]}
                for d in range(stages)
                for x in ("d2h", "h2d")
            ],
        }
    )


def main(results: Results, only: str, threads: int) -> None:
    """Measure what is missing, print and write both tables."""
    growth_header = ["stages x microbatches", "S m", "first plan, s", "written, s", "us per S m", "peak MB", "gap"]
    growth: list[list[tables.Cell]] = []
    for stages, microbatches in _SIZES:
        problem = sized(stages, microbatches)
        if not fnmatch.fnmatch(problem.name, only):
            continue
        row = results.measured(Trial(problem.name, "auto", 0.001, threads), problem)
        title, size = f"{stages} x {microbatches}", size_of(problem)
        if "makespan_ms" not in row:
            growth.append([title, size, row.get("error", "failed")])
            continue
        first = row["trace"][0][0]
        gap = tables.percent(row["makespan_ms"] / row["bound_ms"] - 1)
        growth.append([title, size, first, row["written_s"], 1e6 * row["written_s"] / size, row["peak_mb"], gap])
    goals_header = ["instance", "limit, s", "written, s", "makespan", "bound", "gap", "wanted", "peak MB"]
    goals: list[list[tables.Cell]] = []
    known = references()
    for name, (seconds, wanted) in _GOALS.items():
        if not fnmatch.fnmatch(name, only):
            continue
        row = results.measured(Trial(name, "auto", _PART * seconds, threads), Problem.read(instance_file(name)))
        if "makespan_ms" not in row:
            goals.append([name, seconds, row.get("error", "failed")])
            continue
        bound = max(row["bound_ms"], known[name].bound_ms)
        gap = row["makespan_ms"] / bound - 1
        judged: list[tables.Cell] = [name, seconds, row["written_s"], row["makespan_ms"], bound, tables.percent(gap)]
        goals.append([*judged, f"at most {100 * wanted:g}%", row["peak_mb"]])
    tables.show("From the start of the process to the written plan, no time to search", growth_header, growth)
    tables.show("Large problems", goals_header, goals)
    parts = [
        "No time to search: the first schedules only. The process starts, imports, reads the problem, solves, verifies "
        "and writes the plan.\n",
        tables.markdown(growth_header, growth),
        f"Large problems; the solver was told {_PART:g} of the limit.\n",
        tables.markdown(goals_header, goals),
    ]
    tables.write_markdown(results.path.with_suffix(".md"), "The solver against size", parts)
