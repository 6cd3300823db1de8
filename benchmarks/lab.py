"""What the solver's benchmarks share: problems, trials in fresh processes, results that survive an interruption."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from optpipe.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
INSTANCES = ROOT / "benchmarks" / "instances"
RESULTS = ROOT / "benchmarks" / "results"

#: The ``error`` of what is not known where nothing is to be measured.
NOT_MEASURED = "not measured"
#: A trial that takes so many seconds more than its limit is ended.
_GRACE = 120.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The best makespan known for an instance, and its best proven bound, ms; where it is known to be more, that of the
    plans that move activations whole, of some only with microbatches in order (``shorter.py``)."""

    best_ms: float
    bound_ms: float
    whole_bound_ms: float | None = None


def instances(pattern: str = "*") -> list[str]:
    """Names of the instances that match a shell pattern, small ones first."""
    names = [path.stem for path in INSTANCES.glob(f"{pattern}.json")]
    return sorted(names, key=lambda name: (size_of(Problem.read(instance_file(name))), name))


def instance_file(name: str) -> Path:
    return INSTANCES / f"{name}.json"


def size_of(problem: Problem) -> int:
    """Stages x microbatches."""
    return problem.num_stages * problem.num_microbatches


def references() -> dict[str, Reference]:
    """What ``reference.csv`` says of each instance."""
    with (INSTANCES / "reference.csv").open(encoding="utf-8", newline="") as stream:
        return {
            row["instance"]: Reference(
                float(row["best_known_ms"]),
                float(row["proven_bound_ms"]),
                float(row["whole_bound_ms"]) if row["whole_bound_ms"] else None,
            )
            for row in csv.DictReader(stream)
        }


@dataclass(frozen=True)
class Trial:
    """One measurement: a method on a problem.

    Attributes
    ----------
    label
        The problem's name in the tables.
    method
        ``schedules`` (every known schedule), ``cpsat``, ``cpsat-start``, ``milp-rows`` (the MILP alone, see
        ``options``), else a method of the solver.
    seconds
        Time limit.
    threads, seed, objective
        As the solver takes them.
    options
        More of what the method takes.
    """

    label: str
    method: str
    seconds: float = 0.0
    threads: int = 2
    seed: int = 0
    objective: str = "makespan"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def version() -> str:
    """A digest of the sources that a result depends on."""
    content = hashlib.sha256()
    for package in ("optpipe", "solver"):
        for path in sorted((ROOT / package).rglob("*.py")):
            content.update(path.read_bytes())
    return content.hexdigest()[:10]


class Results:
    """Results of trials in a file of JSON lines: each is written as soon as it is there, and is not measured again.

    Parameters
    ----------
    path
        The file.
    label
        Version under which results are looked up and kept; default a digest of the sources; ``any``: take the newest
        result of any version.
    measure
        False: what is not known stays unknown.
    """

    def __init__(self, path: Path, label: str | None = None, *, measure: bool = True) -> None:
        self.path, self.measure = path, measure
        self.take_any = label == "any"
        self.version = version() if label in (None, "any") else str(label)
        self._rows: dict[str, Row] = {}
        for row in self._read():
            if self.take_any or row["version"] == self.version:
                self._rows[row["key"]] = row

    def _read(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off while it was written
            if isinstance(row, dict) and {"key", "version", "result"} <= row.keys():
                yield row

    def known(self, trial: Trial) -> Row | None:
        """The result of a trial, if it has been measured."""
        row = self._rows.get(trial.key)
        return None if row is None else row["result"]

    def measured(self, trial: Trial, problem: Problem) -> Row:
        """The result of a trial; measured now if it is not known."""
        found = self.known(trial)
        if self.measure and (found is None or "error" in found):
            print(
                f"{time.strftime('%T')} {trial.label} {trial.method} {trial.seconds:g} s", file=sys.stderr, flush=True
            )
            found = run(trial, problem)
            self.add(trial, found)
        return found or {"error": NOT_MEASURED}

    def add(self, trial: Trial, result: Row) -> None:
        row = {"key": trial.key, "version": self.version, "when": time.strftime("%F %T"), "result": result}
        self._rows[trial.key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def run(trial: Trial, problem: Problem, plan_file: Path | None = None) -> Row:
    """Measure a trial in a fresh process (see ``benchmarks.trial``), without a schedule cache, in compiled code where
    numba is installed.

    Parameters
    ----------
    trial, problem
        What is measured.
    plan_file
        Where the plan goes; default: nowhere.

    Returns
    -------
    dict
        What the trial printed; ``error`` where it failed.
    """
    _compile_once()
    with tempfile.TemporaryDirectory() as folder:
        problem_file = Path(folder) / "problem.json"
        problem_file.write_text(json.dumps(problem.to_json()), encoding="utf-8")
        plan = (plan_file or Path(folder) / "plan.json").resolve()
        asked = {**asdict(trial), "problem": str(problem_file), "plan": str(plan)}
        limit = 1.5 * trial.seconds + _GRACE
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(trial.threads)}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.trial"],
                input=json.dumps({**asked, "began": time.time()}),
                capture_output=True,
                text=True,
                timeout=limit,
                cwd=folder,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"ended after {limit:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    result: Row = json.loads(lines[-1])
    return result


@cache
def _compile_once() -> None:
    """What numba compiles is compiled before anything is measured."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "solver.warm_up"], env=environment, check=True)
