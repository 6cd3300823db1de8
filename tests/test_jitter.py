"""'Memory-safe under any timing': replays stay within the plan, and only because of the memory waits."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings

from optpipe import jitter, memory, timing
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from tests.random_schedules import schedules


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
