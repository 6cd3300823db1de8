"""The whole loop on this machine: measure a GPT, solve for a schedule within a memory budget, train under it.

GPipe and 1F1B do not fit the budget; for the table they are planned and run for a few steps with the budget lifted.
Ends with the table and a list of what had to hold; the exit status is 0 only if all of it did.

    python benchmarks/demo.py [--config configs/demo.yaml] [--output runs/demo]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not the script beside this

from optpipe import metrics
from optpipe.errors import Infeasible
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.profile import Profile
from optpipe.report import plain_table, size_text
from optpipe.task import Task, read_task
from runtime.metrics_log import Summary
from runtime.train import train
from solver.options import SolveOptions
from solver.solve import solve

ROOT = Path(__file__).resolve().parent.parent
KNOWN = {"gpipe": "GPipe", "1f1b": "1F1B"}
#: Steps of a schedule that is run for comparison only.
FEW_STEPS = 5
#: The loss has clearly fallen where it ends below this share of its start.
CLEARLY = 0.8
LEAST_STEPS = 30


@dataclass(frozen=True)
class Row:
    """One schedule of the table: its plan, whether it fits the budget, and what a run of it measured."""

    name: str
    plan: Plan
    fits: bool
    run: Summary


def main() -> int:
    """Run the demo; 0 if all that it is to show has held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "demo.yaml"))
    parser.add_argument("--output", default="runs/demo", help="folder for the profile, the plans and the metrics")
    parser.add_argument("--time-limit", default=30.0, type=float, help="seconds for the solver")
    options = parser.parse_args()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    profile_file, plan_file = folder / "profile.json", folder / "plan.json"

    began = time.monotonic()
    optpipe("Measure the model on its ranks", "profile", options.config, "-o", profile_file)
    limit = f"{options.time_limit:g}"
    optpipe("Find a schedule within the budget", "solve", profile_file, "--time-limit", limit, "-o", plan_file)
    optpipe("Verify it, also under random durations", "check", plan_file, "--jitter", "100")
    optpipe("Look at it", "show", plan_file)

    task, plan = read_task(profile_file), Plan.read(plan_file)
    heading("Try the known schedules under the same budget")
    known = [known_schedule(method, task) for method in KNOWN]
    rows = [Row(KNOWN[method], *found) for method, found in zip(KNOWN, known, strict=True)]
    heading(f"Train under the plan: optpipe train --schedule {plan_file}")
    total = Profile.read(profile_file).settings.train.steps
    planned = metrics.measure(plan.problem, plan.ops).peak_bytes
    summary = train(plan, on_step=lambda step: print(step.line(total, planned), flush=True), file=plan_file)
    rows.append(Row("OptPipe", plan, True, summary))

    print()
    Console(width=120, highlight=False).print(table(rows))
    print()
    held = True
    for name, holds in verdicts(rows, task).items():
        print(f"{'ok    ' if holds else 'FAILED'}  {name}")
        held &= holds
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if held else 1


def heading(text: str) -> None:
    """A line that says what comes."""
    print(f"\n== {text}", flush=True)


def optpipe(text: str, *arguments: str | Path) -> None:
    """Run a command of OptPipe and show it, as a person would type it; end where it fails."""
    words = [str(argument) for argument in arguments]
    heading(f"{text}: optpipe {shlex.join(words)}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    status = subprocess.run([sys.executable, "-m", "cli", *words], env=environment, check=False).returncode
    if status != 0:
        sys.exit(status)


def known_schedule(method: str, task: Task) -> tuple[Plan, bool, Summary]:
    """A known schedule: its plan and a short run with the budget lifted, and whether it fits with the budget."""
    try:
        solve(task.problem, SolveOptions(method=method))
        fits = True
        print(f"{KNOWN[method]} fits", flush=True)
    except Infeasible as error:
        fits = False
        print(error, flush=True)
    lifted = task.problem.with_budgets([None] * task.problem.num_devices)
    plan = replace(solve(lifted, SolveOptions(method=method)), training=task.training)
    return plan, fits, train(plan, steps=FEW_STEPS)


def table(rows: list[Row]) -> Table:
    """Planned beside measured, a row a schedule."""
    result = plain_table("schedule", "fits?", "step planned", "measured", "peak a device planned", "measured")
    for row in rows:
        run = row.run
        result.add_row(
            row.name,
            "yes" if row.fits else "no",
            f"{run.planned_ms:.0f} ms",
            f"{run.measured_ms:.0f} ms",
            sizes(run.planned_peak_bytes),
            sizes(run.measured_peak_bytes),
        )
    budget = sizes([device.memory_bytes or 0 for device in rows[-1].plan.problem.devices])
    result.caption = f"budget {budget} a device; schedules that do not fit ran {FEW_STEPS} steps with it lifted"
    return result


def sizes(values: list[int]) -> str:
    """Bytes of each device, such as ``12.1, 9.8 MB``."""
    texts = [size_text(value).split() for value in values]
    if len({unit for _, unit in texts}) > 1:
        return ", ".join(map(size_text, values))
    numbers = [number for number, _ in texts]
    return (numbers[0] if len(set(numbers)) == 1 else ", ".join(numbers)) + f" {texts[0][1]}"


def verdicts(rows: list[Row], task: Task) -> dict[str, bool]:
    """What had to hold, by its name."""
    *known, own = rows
    run = own.run
    offloads = int((own.plan.ops.kind == Kind.O).sum())
    budgets = [device.memory_bytes for device in task.problem.devices]
    return {
        **{f"{row.name} does not fit the budget": not row.fits for row in known},
        f"OptPipe's plan fits, with {offloads} offloads": offloads > 0
        and all(b is None or peak <= b for peak, b in zip(run.planned_peak_bytes, budgets, strict=True)),
        "no device ever held more activation bytes than planned": run.within_plan,
        f"the loss fell from {run.first_loss:.3f} to {run.last_loss:.3f} in {run.steps} steps": run.steps >= LEAST_STEPS
        and run.last_loss < CLEARLY * run.first_loss,
    }


if __name__ == "__main__":
    sys.exit(main())
