"""Which side is to blame for a gap: whether a plan could be shorter while its microbatches keep their order.

    python benchmarks/ascending.py --seconds 600

HiGHS looks for a schedule a little shorter than the best plan known, with transfers of any part, whose microbatches
ascend in every kind of op of every stage. Where it proves that there is none, only a plan whose microbatches overtake
each other could be shorter; the proven bounds, which allow that and more, are then short, or such a plan exists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not the script beside this

from benchmarks import tables
from benchmarks.lab import RESULTS, instance_file, references
from optpipe.problem import Problem
from solver.milp import child
from solver.milp.formulation import Options, formulate
from solver.milp.highs import Settings
from solver.milp.precedence import Contradiction

#: Small problems with a gap, and the makespans (ms) below which nothing is known: within 1% of the best plan, and below
#: the next whole time unit of the problem.
CASES = (("unit-s4-m8-memS2-off1", 28.7), ("unit-s4-m8-memS2-off2", 31.0), ("unit-s4-m8-memS2-off2", 31.6))
HEADER = ("instance", "proven bound", "best known", "shorter than", "there is", "seconds", "nodes", "binaries")


def searched(name: str, below: float, seconds: float, threads: int) -> list[tables.Cell]:
    """Look for a schedule shorter than ``below``; a row."""
    problem, known = Problem.read(instance_file(name)), references()[name]
    row: list[tables.Cell] = [name, known.bound_ms, known.best_ms, below]
    try:
        program = formulate(problem, Options(parts=True), upper=below, lower=known.bound_ms)
    except Contradiction:
        return [*row, "none", 0.0, 0, 0]
    result = child.solve(program.matrix, Settings(threads=threads, time_limit=seconds))
    facts = result.facts()
    there = "none" if result.status == "infeasible" else "unknown" if result.solution is None else "one"
    return [*row, there, round(facts["seconds"], 1), facts["nodes"], facts["binaries"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Shorter plans with ascending microbatches.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table")
    given = parser.parse_args()
    rows = []
    for name, below in CASES:
        rows.append(searched(name, below, given.seconds, given.threads))
        print(*rows[-1], sep="  ", flush=True)
    about = (
        f"HiGHS, {given.seconds:g} s and {given.threads} threads each, looks for a schedule shorter than what is said, "
        "with transfers of any part, whose microbatches ascend in every kind of op of every stage.\n"
    )
    tables.show("Ascending microbatches", HEADER, rows)
    tables.write_markdown(
        given.output / "ascending.md", "Could a plan be shorter?", [about, tables.markdown(HEADER, rows)]
    )


if __name__ == "__main__":
    main()
