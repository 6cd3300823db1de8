"""How good the solver is, over all problems in benchmarks/instances.

    python benchmarks/solver.py --seconds 5,60 --threads 2          the table
    python benchmarks/solver.py --only 'unit-s8-*' --methods auto,cpsat
    python benchmarks/solver.py --scale                             time and memory against size
    python benchmarks/solver.py --ablation                          what each part is worth

Each trial runs in a process of its own, its plan is written, read back and verified. Results go to
benchmarks/results/*.jsonl at once: a run that was interrupted goes on where it stopped, and sources that changed are
measured anew (unless --version names what to go on with).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not this file

from benchmarks import ablation, comparison, scale
from benchmarks.lab import RESULTS, Results


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The solver on all benchmark problems.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", default="5,60", help="time limits, the last one is judged")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="instances whose names match, as in a shell")
    parser.add_argument("--methods", default="schedules,auto", help="schedules, cpsat, cpsat-start, or the solver's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", action="store_true", help="time and memory against stages x microbatches")
    parser.add_argument("--ablation", action="store_true", help="the solver without some of its parts")
    parser.add_argument("--version", help="label of the results; default: a digest of the sources; any: the newest")
    parser.add_argument("--known", action="store_true", help="measure nothing, only tell what is known")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    seconds = [float(text) for text in given.seconds.split(",")]
    mode = "scale" if given.scale else "ablation" if given.ablation else "solver"
    results = Results(given.output / f"{mode}.jsonl", given.version, measure=not given.known)
    if given.scale:
        scale.main(results, given.only, given.threads)
    elif given.ablation:
        ablation.main(results, given.only, seconds, given.threads)
    else:
        comparison.main(results, given.only, seconds, given.methods.split(","), given.threads, given.seed)


if __name__ == "__main__":
    main()
