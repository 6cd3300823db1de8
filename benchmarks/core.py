"""How long the core takes: time, verify, read and write plans up to 64 devices x 1,024 microbatches.

    python benchmarks/core.py

The schedule is GPipe's order with every microbatch offloaded and reloaded: the most ops that a plan can have.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from optpipe import jitter, memory, semantics, timing
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan

SIZES = ((4, 8), (16, 64), (32, 256), (64, 1024))


def problem_of(devices: int, microbatches: int) -> Problem:
    """One stage a device, private links."""
    stage = {
        "forward_ms": 18.5,
        "backward_ms": 18.1,
        "weight_ms": 9.3,
        "activation_bytes": 1_000_000,
        "weight_context_bytes": 500_000,
        "offloadable_bytes": 1_000_000,
        "offload_ms": 9.0,
        "reload_ms": 9.0,
    }
    return Problem.model_validate(
        {
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * devices,
            "stages": [{"device": d, **stage} for d in range(devices)],
            "comm_ms": [0.6] * (devices - 1),
            "channels": [
                {"name": f"{x}:{d}", "transfers": [{"device": d, "direction": x}]}
                for d in range(devices)
                for x in ("d2h", "h2d")
            ],
        }
    )


def offload_everything(problem: Problem) -> Ops:
    """All forwards, then all backwards; each microbatch moves out after its F and back before its B."""
    s, j = (x.ravel() for x in np.indices((problem.num_stages, problem.num_microbatches)))
    rounds = {Kind.F: s + j, Kind.O: s + j + 1, Kind.R: problem.num_stages - 1 - s + j, Kind.B: 0, Kind.W: 0}
    later = problem.num_stages + problem.num_microbatches + 2
    rounds[Kind.B] = later + problem.num_stages - s + j + 1
    rounds[Kind.W] = rounds[Kind.B] + 0.5
    rounds[Kind.R] = later + rounds[Kind.R]
    parts = [(np.full(len(s), kind), s, j, 1.0 * start, start + 0.4) for kind, start in rounds.items()]
    return timing.earliest(problem, Ops.columns(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measured(devices: int, microbatches: int) -> tuple[int, list[float]]:
    """The number of ops, and the seconds of each part of the core."""
    problem = problem_of(devices, microbatches)
    ops = offload_everything(problem)
    problem = problem.with_budgets(list(memory.peaks(problem, ops)))
    plan = Plan(problem, ops)
    if violations := verify_plan(plan):
        raise SystemExit(f"the benchmark's own plan is invalid: {violations[0]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        return len(ops), [
            seconds(lambda: timing.earliest(problem, ops)),
            seconds(lambda: verify_plan(plan)),
            seconds(lambda: memory.peaks(problem, ops)),
            seconds(lambda: semantics.device_orders(problem, ops)),
            seconds(lambda: jitter.check_replays(problem, ops, 1)),
            seconds(lambda: plan.write(path)),
            seconds(lambda: Plan.read(path)),
        ]


def main() -> None:
    table = Table(title="The core, seconds", box=None)
    for name in ("size", "ops", "earliest", "verify", "peaks", "orders", "replay", "write", "read"):
        table.add_column(name, justify="right")
    for devices, microbatches in SIZES:
        count, took = measured(devices, microbatches)
        table.add_row(f"{devices} x {microbatches}", f"{count:,}", *(f"{t:.3f}" for t in took))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
