"""Random problems and random valid schedules, for tests of properties that hold for all of them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from optpipe import memory
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem

PLACEMENTS = ("linear", "interleaved", "v")


def placement(kind: str, devices: int, stages_per_device: int) -> list[int]:
    """The device of each stage."""
    found: list[int] = []
    for chunk in range(stages_per_device):
        row = list(range(devices))
        found += row[::-1] if kind == "v" and chunk % 2 else row
    return sorted(found) if kind == "linear" else found


def random_problem(
    rng: random.Random,
    *,
    devices: int | None = None,
    stages_per_device: int | None = None,
    microbatches: int | None = None,
    kind: str | None = None,
) -> Problem:
    """A problem without memory limits; unequal stages, channels of every kind."""
    devices = devices or rng.randint(1, 4)
    per_device = stages_per_device or rng.randint(1, 2)
    places = placement(kind or rng.choice(PLACEMENTS), devices, per_device)

    def time(low: float, high: float) -> float:
        return round(rng.uniform(low, high), rng.choice([0, 1, 3]))

    stages = []
    for device in places:
        activation = rng.randint(1, 20) * 100
        stages.append(
            {
                "device": device,
                "forward_ms": time(0.6, 5),
                "backward_ms": time(0.6, 5),
                "weight_ms": time(0, 4),
                "activation_bytes": activation,
                "weight_context_bytes": rng.choice([0, activation // 2, activation]),
                "offloadable_bytes": rng.choice([0, activation, activation * 2 // 3]),
                "offload_ms": time(0, 4),
                "reload_ms": time(0, 4),
                "checkpoint_bytes": rng.choice([None, 0, activation // 4]),
                **({"fused_backward_ms": time(0.6, 8)} if rng.random() < 0.5 else {}),
            }
        )
    both = ("d2h", "h2d")
    link = rng.choice(["duplex", "half", "pair", "halfpair", "none"])
    if link == "duplex":
        groups = [[(d, x)] for d in range(devices) for x in both]
    elif link == "half":
        groups = [[(d, x) for x in both] for d in range(devices)]
    elif link == "pair":
        groups = [[(d, x) for d in range(p, min(p + 2, devices))] for p in range(0, devices, 2) for x in both]
    elif link == "halfpair":
        groups = [[(d, x) for d in range(p, min(p + 2, devices)) for x in both] for p in range(0, devices, 2)]
    else:
        groups = []
    return Problem.model_validate(
        {
            "name": "random",
            "num_microbatches": microbatches or rng.randint(1, 6),
            "devices": [{"memory_bytes": None}] * devices,
            "stages": stages,
            "comm_ms": [time(0, 1) for _ in places[1:]],
            "channels": [
                {"name": f"c{n}", "transfers": [{"device": d, "direction": x} for d, x in group]}
                for n, group in enumerate(groups)
            ],
        }
    )


def random_schedule(
    problem: Problem,
    rng: random.Random,
    *,
    offload: float = 0.5,
    fused: float = 0.3,
    parts: float = 0.3,
    recompute: float = 0.3,
) -> Ops:
    """A valid schedule: ops in a random order that their data allow, each as early as its lanes are free. The numbers:
    how many stages and microbatches are offloaded, fused, offloaded in part, and of the rest recomputed."""
    cells = [(s, j) for s in range(problem.num_stages) for j in range(problem.num_microbatches)]
    ops: dict[tuple[Kind, int, int], list[tuple[Kind, int, int]]] = {}
    backward = {cell: Kind.BW if rng.random() < fused else Kind.B for cell in cells}
    part: dict[tuple[int, int], int | None] = {}
    for s, j in cells:
        ops[Kind.F, s, j] = [(Kind.F, s - 1, j)] if s else []
        needs = [(Kind.F, s, j)]
        if s + 1 < problem.num_stages:
            needs.append((backward[s + 1, j], s + 1, j))
        if problem.can_offload(s) and rng.random() < offload:
            most = problem.stages[s].offloadable_bytes
            part[s, j] = rng.randint(1, most) if rng.random() < parts else None
            ops[Kind.O, s, j] = [(Kind.F, s, j)]
            ops[Kind.R, s, j] = [(Kind.O, s, j)]
            needs.append((Kind.R, s, j))
        elif problem.stages[s].checkpoint_bytes is not None and rng.random() < recompute:
            ops[Kind.C, s, j] = [(Kind.F, s, j)]
            needs.append((Kind.C, s, j))
        ops[backward[s, j], s, j] = needs
        if backward[s, j] == Kind.B:
            ops[Kind.W, s, j] = [(Kind.B, s, j)]
    return _as_early_as_lanes_allow(problem, rng, ops, part)


def _as_early_as_lanes_allow(
    problem: Problem,
    rng: random.Random,
    ops: dict[tuple[Kind, int, int], list[tuple[Kind, int, int]]],
    part: dict[tuple[int, int], int | None],
) -> Ops:
    end: dict[tuple[Kind, int, int], float] = {}
    free: dict[object, float] = {}
    done: list[Op] = []
    while len(end) < len(ops):
        key = rng.choice([k for k, needs in ops.items() if k not in end and all(n in end for n in needs)])
        kind, s, j = key
        stage = problem.stages[s]
        if kind in (Kind.O, Kind.R):
            lanes: list[object] = list(problem.channels_of[stage.device, "d2h" if kind == Kind.O else "h2d"])
        else:
            lanes = [("compute", stage.device)]
        start = max((free.get(lane, 0.0) for lane in lanes), default=0.0)
        for need in ops[key]:
            hop = problem.comm_ms[min(s, need[1])] if need[1] != s else 0.0
            start = max(start, end[need] + hop)
        took = {
            Kind.F: stage.forward_ms,
            Kind.B: stage.backward_ms,
            Kind.W: stage.weight_ms,
            Kind.BW: stage.bw_ms,
            Kind.C: stage.forward_ms,
            Kind.O: stage.offload_ms,
            Kind.R: stage.reload_ms,
        }[kind]
        moved = part.get((s, j)) if kind in (Kind.O, Kind.R) else None
        if moved is not None:
            took *= moved / stage.offloadable_bytes
        end[key] = start + took
        for lane in lanes:
            free[lane] = end[key]
        done.append(Op(kind, s, j, start, end[key], moved))
    return Ops.of(done)


def fitted(problem: Problem, ops: Ops) -> Problem:
    """The problem with each device's budget at just what the schedule needs."""
    return problem.with_budgets(list(memory.peaks(problem, ops)))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Problem, Ops]:
    """A random problem with a random valid schedule that uses its budgets to the last byte."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    return fitted(problem, ops), ops
