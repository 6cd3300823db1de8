"""'Memory-safe under any timing': replays stay within the plan, and only because of the memory waits."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import jitter, memory, timing
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.feasibility import smallest_budgets
from solver.solve import solve
from tests.random_schedules import random_problem, schedules


@given(schedules())
@settings(max_examples=120, deadline=None)
def test_replays_stay_within_the_plan_and_end(case: tuple[Problem, Ops]) -> None:
    problem, ops = case
    assert jitter.check_replays(problem, ops, 5, seed=3) == []


@given(schedules())
@settings(max_examples=50, deadline=None)
def test_replays_keep_the_data_dependencies(case: tuple[Problem, Ops]) -> None:
    from optpipe import semantics

    problem, ops = case
    again = jitter.replay(problem, ops, np.random.default_rng(1))
    edges = semantics.dependencies(problem, again)
    assert (again.start[edges.after] >= again.end[edges.before] - 1e-9).all()


def test_without_the_waits_a_late_offload_breaks_the_budget() -> None:
    """The rule is what keeps the promise: the same replay without its edges goes over."""
    problem = Problem.model_validate(
        {
            "num_microbatches": 2,
            "devices": [{"memory_bytes": 10}],
            "stages": [
                {
                    "device": 0,
                    "forward_ms": 1.0,
                    "backward_ms": 1.0,
                    "weight_ms": 1.0,
                    "activation_bytes": 10,
                    "offloadable_bytes": 10,
                    "offload_ms": 1.0,
                    "reload_ms": 1.0,
                }
            ],
            "comm_ms": [],
            "channels": [
                {"name": "out", "transfers": [{"device": 0, "direction": "d2h"}]},
                {"name": "in", "transfers": [{"device": 0, "direction": "h2d"}]},
            ],
        }
    )
    ops = Ops.of(
        [
            Op(Kind.F, 0, 0, 0, 1),
            Op(Kind.O, 0, 0, 1, 2),
            Op(Kind.F, 0, 1, 2, 3),
            Op(Kind.BW, 0, 1, 3, 5),
            Op(Kind.R, 0, 0, 5, 6),
            Op(Kind.BW, 0, 0, 6, 8),
        ]
    )
    graph = timing.order_graph(problem, ops)
    late = np.array([1.0, 50.0, 1.0, 2.0, 1.0, 2.0])
    start = graph.starts(late)
    assert max(memory.peaks(problem, ops.at(start, start + late))) == 10

    from optpipe import semantics

    data = semantics.dependencies(problem, ops)
    pairs = set(zip(data.before.tolist(), data.after.tolist(), strict=True)) | {(0, 2), (2, 3), (3, 5)}
    keep = np.array(
        [(int(graph.before[e]), int(graph.order[k])) in pairs for k in range(len(ops)) for e in _edges(graph, k)]
    )
    bare = dataclasses.replace(
        graph,
        before=graph.before[keep],
        lag=graph.lag[keep],
        first=np.array([0, *np.cumsum([sum(keep[list(_edges(graph, k))]) for k in range(len(ops))])]),
    )
    start = bare.starts(late)
    assert max(memory.peaks(problem, ops.at(start, start + late))) == 20


def _edges(graph: timing.OrderGraph, k: int) -> range:
    return range(int(graph.first[k]), int(graph.first[k + 1]))


def with_short_stage(microbatches: int) -> Problem:
    """A stage whose ops are far shorter than a millionth of the step, as an embedding's beside blocks."""
    long = {"forward_ms": 10.0, "backward_ms": 10.0, "weight_ms": 10.0, "activation_bytes": 1000}
    short = {"forward_ms": 0.01, "backward_ms": 0.005, "weight_ms": 0.01, "activation_bytes": 1000}
    return Problem.model_validate(
        {
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": 2000}, {"memory_bytes": 4000}],
            "stages": [{"device": d, "weight_context_bytes": 500, **times} for d, times in enumerate((short, long))],
            "comm_ms": [0.1],
        }
    )


@pytest.mark.parametrize("method", ["zero-bubble", "sequential", "ada-offload"])
def test_ops_far_shorter_than_the_step_keep_their_order(method: str) -> None:
    problem = with_short_stage(1024)
    ops = solve(problem, method=method).ops
    assert jitter.check_replays(problem, ops, 2) == []
    early = timing.earliest(problem, ops)
    assert verify(problem, early) == []
    assert max(memory.peaks(problem, early)) <= max(memory.peaks(problem, ops))


@pytest.mark.parametrize("weight_ms", [0.0, 1.0])
def test_ops_that_take_no_time_keep_the_memory_promise(weight_ms: float) -> None:
    stage = {
        "forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": weight_ms,
        "offload_ms": 1.0, "reload_ms": 0.0,
        "activation_bytes": 10, "weight_context_bytes": 10, "offloadable_bytes": 10,
    }  # fmt: skip
    problem = Problem.model_validate(
        {
            "num_microbatches": 6,
            "devices": [{"memory_bytes": 20}] * 3,
            "stages": [{"device": d, **stage} for d in range(3)],
            "comm_ms": [0.0, 0.0],
            "channels": [
                {"name": f"{way}:{d}", "transfers": [{"device": d, "direction": way}]}
                for d in range(3)
                for way in ("d2h", "h2d")
            ],
        }
    )
    plan = solve(problem, time_limit=1.0, threads=1, cache=False)
    assert jitter.check_replays(problem, plan.ops, 20) == []


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_list_schedules_with_ops_that_take_no_time_can_be_replayed(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    value = problem.to_json()
    for stage in value["stages"]:
        for name in ("backward_ms", "weight_ms", "offload_ms", "reload_ms"):
            if stage.get(name) is not None and rng.random() < 0.4:
                stage[name] = 0.0
    problem = Problem.model_validate(value)
    tight = problem.with_budgets(smallest_budgets(problem))
    assert jitter.check_replays(tight, ada_offload(tight), 3, seed=seed) == []
