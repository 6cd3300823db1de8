"""Which side is to blame for a gap: whether a plan could be shorter than the best one known, in some kinds of plans.

    python benchmarks/shorter.py --seconds 900

HiGHS looks for a schedule with transfers of any part whose microbatches ascend in every kind of op of every stage;
CP-SAT for one with whole transfers, or of halves, whose microbatches overtake each other.
Where both prove that there is none, only a plan that moves other parts and has microbatches overtake each other could
be shorter; the proven bounds, which allow that and more, are then short, or such a plan exists.

Where the memory of one device alone explains a makespan, ``one_device.py`` says so to CP-SAT in a much smaller program.

Where there are too many microbatches for that, CP-SAT looks for a pattern that repeats (``repeating.py``), one
microbatch a period, at a pace between the bound's and that of the best plans. Where there is none, plans that are
shorter have no steady state, or one of more than one microbatch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not the script beside this

from ortools.sat.python import cp_model

from benchmarks import tables
from benchmarks.cpsat import build
from benchmarks.lab import RESULTS, instance_file, references
from benchmarks.one_device import without_others_memory
from benchmarks.repeating import IN_FLIGHT, repeats
from optpipe.problem import Problem
from solver.milp import child
from solver.milp.formulation import Options, formulate
from solver.milp.highs import Settings
from solver.milp.precedence import Contradiction

PARTS = "microbatches in order, any part"
LAST_TWO = f"{PARTS}; memory limits the last two devices alone"
WHOLE = "microbatches in any order, whole transfers"
HALVES = "microbatches in any order, halves and wholes"
THIRD = f"{HALVES}; memory limits device 2 alone"
REPEATING = "one microbatch a period, again and again, parts of a tick"
#: Problems with a gap, makespans (ms; of patterns: periods) below which a plan is looked for, and of which kind.
CASES = (
    ("unit-s4-m8-memS2-off1", 28.713, PARTS),
    ("unit-s4-m8-memS2-off1", 29.0, THIRD),
    ("unit-s4-m8-memS2-off2", 32.0, WHOLE),
    ("unit-s4-m8-memS2-off2", 32.0, HALVES),
    ("unit-s8-m16-memS3-off2", 59.3, LAST_TWO),
    ("flat-s8-m32-memS3-off2", 54.5, REPEATING),
    ("flat-s8-m32-memS3-off2", 54.0, REPEATING),
    ("unit-s8-m32-memS3-off1-halfpair", 3.3, REPEATING),
)
HEADER = ("instance", "proven bound", "best known", "plans with", "shorter than", "there is", "seconds")
#: What a solver's status says of such plans.
_THERE_IS = {"infeasible": "none", "optimal": "one", "feasible": "one"}


def with_parts(problem: Problem, below: float, lower: float, seconds: float) -> str:
    """Whether HiGHS finds a schedule shorter than ``below`` ms whose microbatches ascend: none, one or unknown."""
    try:
        program = formulate(problem, Options(parts=True), upper=below, lower=lower)
    except Contradiction:
        return "none"
    result = child.solve(program.matrix, Settings(threads=2, time_limit=seconds))
    return "one" if result.solution is not None else _THERE_IS.get(result.status, "unknown")


def with_equal_parts(problem: Problem, below: float, parts: int, seconds: float, threads: int) -> str:
    """The same of CP-SAT, in any order, for transfers of some of a microbatch's equal parts. ``below`` and all times,
    also that of a part, are whole ms."""
    model = build(problem, longest=math.ceil(below) - 1, ascending=(), parts=parts)
    assert model.unit == 1.0, "times are whole ms: else a tick below is not the next shorter makespan"
    return _solved(model.cp, seconds, threads)


def with_one_budget(problem: Problem, device: int, below: float, parts: int, seconds: float, threads: int) -> str:
    """The same where only one device has a budget. All times are whole ms, those of a part whole parts of one."""
    return _solved(without_others_memory(problem, device, below, parts, ticks=parts), seconds, threads, linear=0)


def _solved(model: cp_model.CpModel, seconds: float, threads: int, linear: int = 1) -> str:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_time_in_seconds = threads, seconds
    solver.parameters.linearization_level = linear
    return _THERE_IS.get(solver.status_name(solver.solve(model)).lower(), "unknown")


def searched(name: str, below: float, kind: str, seconds: float, threads: int) -> list[tables.Cell]:
    """Look for a schedule of a kind shorter than ``below`` ms; a row."""
    problem, known, began = Problem.read(instance_file(name)), references()[name], time.monotonic()
    if kind == REPEATING:
        found = _THERE_IS.get(repeats(problem, below, 1, seconds, threads), "unknown")
        return [name, known.bound_ms, known.best_ms, kind, f"{below:g} a period", found, _since(began)]
    if kind == LAST_TWO:
        limits = [None] * (problem.num_devices - 2) + [device.memory_bytes for device in problem.devices[-2:]]
        problem = problem.with_budgets(limits)
    if kind == THIRD:
        found = with_one_budget(problem, 2, below, 2, seconds, threads)
    elif kind in (PARTS, LAST_TWO):
        found = with_parts(problem, below, known.bound_ms, seconds)
    else:
        found = with_equal_parts(problem, below, 2 if kind == HALVES else 1, seconds, threads)
    return [name, known.bound_ms, known.best_ms, kind, below, found, _since(began)]


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Shorter plans of some kinds.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="of each")
    parser.add_argument("--threads", type=int, default=8, help="of CP-SAT: its strategies take turns on fewer cores")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table")
    given = parser.parse_args()
    rows = []
    for name, below, kind in CASES:
        rows.append(searched(name, below, kind, given.seconds, given.threads))
        print(*rows[-1], sep="  ", flush=True)
    about = (
        f"{given.seconds:g} s each. HiGHS (2 threads) looks for schedules with transfers of any part whose "
        f"microbatches ascend in every kind of op of every stage; CP-SAT ({given.threads} threads) for schedules with "
        "transfers of wholes, or of halves and wholes, on whole ms, which loses nothing where all times are whole, and "
        f"for patterns that repeat, whose microbatches are in flight for {IN_FLIGHT} periods at most: where there is "
        "none of a period there is none of a shorter one.\n"
    )
    tables.show("Shorter plans", HEADER, rows)
    tables.write_markdown(
        given.output / "shorter.md", "Could a plan be shorter?", [about, tables.markdown(HEADER, rows)]
    )


if __name__ == "__main__":
    main()
