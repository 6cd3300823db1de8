"""Small random problems in whole ms, small enough to solve to the end in more than one way."""

from __future__ import annotations

import random

from optpipe.problem import Problem
from solver.feasibility import smallest_budgets
from tests.random_schedules import PLACEMENTS, placement


def small_problem(rng: random.Random, *, devices: int | None = None, offload: bool = True) -> Problem:
    """A problem with budgets between the smallest that work and what everything takes.

    Unequal stages, one or two a device in any placement, channels of every kind, a BW that is shorter than B and W
    here and there; an op takes 1 to 3 ms, a W and a transfer may take none.
    """
    count = devices or rng.choice([1, 2, 2])
    per_device = rng.choice([1, 1, 1, 2]) if count == 2 else rng.choice([1, 2])
    places = placement(rng.choice(PLACEMENTS), count, per_device)
    m = rng.choice([2, 3]) if len(places) <= 2 else 2
    stages = []
    for device in places:
        activation = rng.choice([1, 2, 3, 4])
        stage = {
            "device": device,
            "forward_ms": float(rng.randint(1, 3)),
            "backward_ms": float(rng.randint(1, 3)),
            "weight_ms": float(rng.randint(0, 2)),
            "activation_bytes": activation,
            "weight_context_bytes": rng.randint(0, activation),
            "offloadable_bytes": rng.choice([0, activation, activation, activation - 1]) if offload else 0,
            "offload_ms": 2.0 * rng.randint(0, 2),
            "reload_ms": 2.0 * rng.randint(0, 2),
        }
        if rng.random() < 0.4:
            stage["fused_backward_ms"] = max(1.0, stage["backward_ms"] + stage["weight_ms"] - 1)
        stages.append(stage)
    problem = Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * count,
            "stages": stages,
            "comm_ms": [float(rng.choice([0, 0, 1])) for _ in places[1:]],
            "channels": _channels(rng.choice(["duplex", "duplex", "half", "pair", "halfpair"]), count),
        }
    )
    least = smallest_budgets(problem)
    whole = [m * sum(stages[s]["activation_bytes"] for s in held) for held in problem.stages_of]
    return problem.with_budgets(
        [rng.randint(low, max(low, min(high, 2 * low + 1))) for low, high in zip(least, whole, strict=True)]
    )


def _channels(kind: str, devices: int) -> list[dict[str, object]]:
    both = ("d2h", "h2d")
    everyone = range(devices)
    groups = {
        "duplex": [[(d, x)] for d in everyone for x in both],
        "half": [[(d, x) for x in both] for d in everyone],
        "pair": [[(d, x) for d in everyone] for x in both],
        "halfpair": [[(d, x) for d in everyone for x in both]],
    }[kind]
    return [
        {"name": f"c{n}", "transfers": [{"device": d, "direction": x} for d, x in group]}
        for n, group in enumerate(groups)
    ]
