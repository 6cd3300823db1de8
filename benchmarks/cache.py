"""What the schedule cache is worth while a model's profile drifts.

    python benchmarks/cache.py --problems 200 --seconds 10
    python benchmarks/cache.py --problems 20 --seconds 1 --instance flat-s8-m32-memS-nooff

The instance is solved once and stored. Then problems are drawn one after the other, as later profiles of the model
would be: every time of every stage off by up to 10% on its own, one problem in four with a microbatch more or less.
Each is looked up first, then solved anew without the cache, and the fresh plan is stored, as it would be in use. An
answer counts if it is within 1% of the fresh plan. Fresh plans are kept in a folder (--work) and not made again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not the script beside this

from benchmarks import tables
from benchmarks.lab import RESULTS, ROOT, Trial, instance_file, run
from optpipe import semantics
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from solver.cache import Cache

#: Answers are told apart by how many problems came before: the cache learns.
_STRETCH = 50

#: The goal: this part of the problems answered within 1% and 100 ms.
_SHARE, _CLOSE, _PROMPT = 0.7, 0.01, 0.1


@dataclass(frozen=True)
class Answer:
    """One problem: whether and how it was answered, how far that is above a fresh plan, and in what time."""

    hit: str
    apart: float
    excess: float
    seconds: float
    cpu_seconds: float
    entries: int

    @property
    def is_good(self) -> bool:
        return self.excess <= _CLOSE


def drifted(problem: Problem, rng: random.Random, drift: float = 0.1) -> Problem:
    """The problem as a later profile would show it."""
    value = problem.to_json()
    for stage in value["stages"]:
        for key in stage:
            if key.endswith("_ms") and stage[key] is not None:
                stage[key] *= rng.uniform(1 - drift, 1 + drift)
    value["comm_ms"] = [time_ms * rng.uniform(1 - drift, 1 + drift) for time_ms in value["comm_ms"]]
    if rng.random() < 0.25:
        value["num_microbatches"] += rng.choice([-1, 1])
    return Problem.model_validate(value)


def measure(problem: Problem, cache: Cache, fresh: Plan) -> Answer:
    """Look one problem up, and compare the answer with a fresh plan."""
    begin, cpu = time.perf_counter(), time.process_time()
    found = cache.lookup(problem)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    entries = len(cache.entries())
    if found is None:
        return Answer("none", float("inf"), float("inf"), seconds, cpu_seconds, entries)
    ops, facts = found
    if violations := verify(problem, ops):
        raise SystemExit(f"the cache gave an invalid schedule: {violations[0]}")
    excess = semantics.makespan(ops) / fresh.makespan_ms - 1.0
    return Answer(facts["hit"], facts["distance"], excess, seconds, cpu_seconds, entries)


def solved(path: Path, problem: Problem, seconds: float, threads: int) -> Plan:
    """A plan found without the cache; from ``path`` if this problem has been solved before."""
    if path.exists():
        plan = Plan.read(path)
        if plan.problem == problem and not verify_plan(plan):
            return plan
    path.parent.mkdir(parents=True, exist_ok=True)
    row = run(Trial(path.stem, "auto", seconds, threads), problem, path)
    if "error" in row or row["violations"]:
        raise SystemExit(f"{path.stem}: {row.get('error') or row['violations'][0]}")
    return Plan.read(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The schedule cache under drift.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--instance", default="flat-s8-m32-memS2-off1", help="name in benchmarks/instances")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each fresh solve")
    parser.add_argument("--drift", type=float, default=0.1, help="each time is off by up to this part")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "cache", help="folder of the fresh plans")
    given = parser.parse_args()
    problem, rng = Problem.read(instance_file(given.instance)), random.Random(given.seed)
    work = given.work / f"{given.instance}-{given.seconds:g}s-drift{given.drift:g}-seed{given.seed}"
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        cache.store(solved(work / "base.json", problem, given.seconds, given.threads))
        for number in range(given.problems):
            asked = drifted(problem, rng, given.drift)
            fresh = solved(work / f"{number:03d}.json", asked, given.seconds, given.threads)
            answers.append(measure(asked, cache, fresh))
            cache.store(fresh)
            last = answers[-1]
            print(
                f"{number:3d} {last.hit:9s} {100 * last.excess:+6.2f}%  {1000 * last.seconds:5.0f} ms  "
                f"distance {last.apart:.3f}",
                file=sys.stderr,
                flush=True,
            )
    _write(given, answers)


def _write(given: argparse.Namespace, answers: list[Answer]) -> None:
    header = ["problems", "entries", "hits", "within 1%", "worse by, mean", "worst", "better", "ms, median", "ms, most"]
    stretches = [answers[first : first + _STRETCH] for first in range(0, len(answers), _STRETCH)]
    rows = [_figures(f"{_STRETCH * n + 1} to {_STRETCH * n + len(part)}", part) for n, part in enumerate(stretches)]
    rows.append(_figures("all", answers))
    tables.show(f"Cache: {given.instance}, fresh solves of {given.seconds:g} s", header, rows)
    good = sum(a.is_good for a in answers)
    prompt = sum(a.is_good and a.seconds <= _PROMPT for a in answers)
    busy = sum(a.is_good and a.cpu_seconds <= _PROMPT for a in answers)
    said = (
        f"{good} of {len(answers)} ({good / len(answers):.0%}) answered within {_CLOSE:.0%} of a fresh solve of "
        f"{given.seconds:g} s (goal {_SHARE:.0%}); {prompt} of them in under {1000 * _PROMPT:.0f} ms of wall time, "
        f"{busy} of processor time"
    )
    print(said)
    text = (
        f"Instance `{given.instance}`, every time of every stage off by up to {given.drift:.0%}, a quarter of the "
        "problems with one microbatch more or less. Entries: in the cache at the end of the stretch. Excess over the "
        "fresh plan; negative: the answer was shorter.\n"
    )
    name = f"cache-{given.instance}"
    tables.write_csv(given.output / f"{name}.csv", header, rows)
    tables.write_markdown(
        given.output / f"{name}.md",
        "The schedule cache under drift",
        [text, tables.markdown(header, rows), said + "\n"],
    )


def _figures(title: str, answers: list[Answer]) -> list[tables.Cell]:
    hits = [a for a in answers if a.hit != "none"]
    times = sorted(1000 * a.seconds for a in answers)
    return [
        title,
        answers[-1].entries,
        len(hits),
        f"{sum(a.is_good for a in answers)} ({sum(a.is_good for a in answers) / len(answers):.0%})",
        tables.percent(statistics.mean(a.excess for a in hits)) if hits else None,
        tables.percent(max(a.excess for a in hits)) if hits else None,
        sum(a.excess < 0 for a in hits),
        f"{statistics.median(times):.0f}",
        f"{times[-1]:.0f}",
    ]


if __name__ == "__main__":
    main()
