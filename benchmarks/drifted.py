"""Machines that are not what the profile says: what a plan made from it costs, and what solving again beside the
training gets back. Stages sleep in place of computing; messages are real, offloads copy real bytes at a set pace.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import emulated
from benchmarks.tables import Cell, percent
from optpipe.config import ReplanConfig
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime import gather, launch
from runtime.emulate import SleepStage, begin
from runtime.executor import TensorSpec
from runtime.pipeline import Pipeline
from runtime.worker import Rank
from solver.solve import solve

#: ms between stages, as gloo takes for such a message on one machine.
COMM_MS = 0.5
#: Saved by each op, of which whole ones move.
SAVED_TENSORS = 16
#: Seconds that the plan of the profile is looked for, and that each later one is.
SOLVE_S = 5.0
WANTED = ReplanConfig(every=6, time_limit_s=SOLVE_S)
#: Seconds after which a row that has come to nothing is given up.
MOST_S = 180.0
HEADER = (
    "ranks", "what the machine is", "plan of the profile, ms", "its step, ms", "plan of what was seen, ms",
    "its step, ms", "shorter by", "steps until then",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """``link``: bytes per second of the host links; ``forward``, ``weight``: by how much F and W last longer;
    ``slow``: devices on which everything does, by how much."""

    link: float = 0.4e9
    forward: float = 1.0
    weight: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)


PROFILE = Machine()
DRIFTS = (
    ("as in the profile", PROFILE, PROFILE),
    ("links a third as fast", PROFILE, replace(PROFILE, link=PROFILE.link / 3)),
    ("links six times as fast", replace(PROFILE, link=PROFILE.link / 6), PROFILE),
    ("device 1 takes half as long again", PROFILE, replace(PROFILE, slow={1: 1.5})),
    ("W takes half the time", PROFILE, replace(PROFILE, weight=0.5)),
)


def problem_of(devices: int, machine: Machine) -> Problem:
    """Equal stages; half a microbatch more than half of what 1F1B holds on its first device."""
    value = emulated.problem_of(devices, COMM_MS, machine.link, 1.0, v=False).to_json()
    for stage in value["stages"]:
        factor = machine.slow.get(stage["device"], 1.0)
        stage["forward_ms"] *= machine.forward * factor
        stage["backward_ms"] *= factor
        stage["weight_ms"] *= machine.weight * factor
    budget = (devices + 1) * value["stages"][0]["activation_bytes"] // 2
    return Problem.model_validate({**value, "devices": [{"memory_bytes": budget}] * devices})


def table(ranks: int) -> list[list[Cell]]:
    """A row a machine."""
    rows: list[list[Cell]] = []
    for name, profile, machine in DRIFTS:
        plan = solve(problem_of(ranks, profile), time_limit=SOLVE_S, threads=2)
        real = problem_of(ranks, machine)
        task = {"plan": plan.to_json(), "problem": real.to_json(), "bytes_per_s": machine.link}
        found = launch.launch(train_rank, task, ranks, "cpu")
        shorter = 1.0 - found["after_ms"] / found["before_ms"] if found["taken"] else None
        rows.append(
            [
                ranks,
                name,
                round(plan.makespan_ms, 1),
                round(found["before_ms"], 1),
                round(found["planned_ms"], 1) if found["taken"] else found["outcome"],
                round(found["after_ms"], 1) if found["taken"] else None,
                percent(shorter),
                found["steps"] if found["taken"] else None,
            ]
        )
    return rows


def train_rank(rank: Rank, plan: dict[str, Any], problem: dict[str, Any], bytes_per_s: float) -> dict[str, Any]:
    """Steps until it is settled which plan is the faster one; what rank 0 knows of them."""
    schedule, real = Plan.from_json(plan, ""), Problem.from_json(problem, "")
    layers = [_stage(real, s) for s in range(real.num_stages)]
    boundaries = [TensorSpec(emulated.SHAPE)] * (real.num_stages - 1)
    batch = [torch.zeros(emulated.SHAPE)] * real.num_microbatches
    times: list[float] = []
    told: dict[str, Any] = {"taken": False, "outcome": "not answered", "before_ms": 0.0, "after_ms": 0.0}
    with Pipeline(
        schedule,
        layers,
        lambda y, _: y.view(-1)[0],  # no time for a loss
        batch[0],
        partition=[1] * real.num_stages,
        boundaries=boundaries,
        replan=WANTED,
        bandwidth=(bytes_per_s, bytes_per_s),
        before_op=begin,
    ) as pipeline:
        began = time.monotonic()
        while max(row[0] for row in gather.numbers([time.monotonic() - began])) < MOST_S:
            gather.barrier()
            pipeline.step(batch, batch)
            assert pipeline.result is not None
            times.append(max(row[0] for row in gather.numbers([pipeline.result.step_ms])))
            said = pipeline.replanned
            if said is None or said.outcome == "asked":
                continue
            told["outcome"] = said.outcome
            if said.outcome != "taken":
                break
            told |= {"taken": True, "steps": len(times), "planned_ms": said.planned_ms}
        if told["taken"]:
            told |= {"before_ms": said.before_ms, "after_ms": said.after_ms} if said is not None else {}
        else:
            told["before_ms"] = statistics.median(times[2:])
    return told


def _stage(problem: Problem, number: int) -> SleepStage:
    stage = problem.stages[number]
    times = stage.forward_ms, stage.backward_ms, stage.weight_ms
    return SleepStage(*times, emulated.SHAPE, emulated.SAVED_BYTES, SAVED_TENSORS)
