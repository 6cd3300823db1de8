"""Searches in several processes: the same plan for the same seed, and no loss where one of them breaks down."""

import os
import signal

import numpy as np
import pytest

from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from solver.bounds import lower_bound
from solver.incumbent import Incumbent
from solver.options import SolveOptions
from solver.schedules import generate
from solver.search.lanes import Lane, Lanes, arrays_of, join, ops_of
from solver.solve import solve
from tests.test_solver import instance, same


def _incumbent(problem: Problem, seconds: float = 600.0) -> Incumbent:
    found = Incumbent(problem, SolveOptions(time_limit=seconds, gap=0.0), lower_bound(problem, "makespan"))
    assert found.offer(generate("sequential", problem, "makespan"), "sequential")
    return found


def test_schedules_travel_whole(tiny_plan) -> None:  # type: ignore[no-untyped-def]
    back = ops_of(arrays_of(tiny_plan.ops))
    for name in ("kind", "stage", "microbatch", "start", "end", "bytes"):
        np.testing.assert_array_equal(getattr(back, name), getattr(tiny_plan.ops, name))


@pytest.mark.parametrize("task", ["round", "milp"])
def test_a_lane_finds_better_schedules(task: str, tiny_problem: Problem) -> None:
    incumbent = _incumbent(tiny_problem)
    before = incumbent.value
    with Lanes(incumbent, 1) as lanes:
        join(lanes.begin(task, 300.0), incumbent)
        assert lanes.idle == lanes.lanes
    assert incumbent.value < before and incumbent.ops is not None
    assert verify(incumbent.problem, incumbent.ops) == []


def test_what_a_lane_has_sent_counts_where_time_runs_out() -> None:
    incumbent = _incumbent(instance("unit-s8-m16-memS3-off2")[0])
    before = incumbent.value
    with Lanes(incumbent, 1) as lanes:
        [lane] = lanes.begin("round", 600.0)
        while lane._latest is None and not lane.wait(0.1):
            pass
        lane.offer()
    assert incumbent.value < before


def test_a_lane_that_breaks_down_is_done_without() -> None:
    incumbent = _incumbent(instance("unit-s8-m16-memS3-off2")[0])
    lane = Lane(incumbent, 1)
    try:
        lane.begin("round", 600.0)
        os.kill(lane._process._process.pid, signal.SIGKILL)
        assert lane.wait(30.0)
        assert incumbent.facts["lost_lanes"] == 1
    finally:
        lane.close()


def test_the_same_seed_and_threads_give_the_same_plan() -> None:
    """Rounds of fixed work until the bound; the time limit never cuts in."""
    problem, _ = instance("unit-s8-m16-memS2-off1")
    options = SolveOptions(method="search", time_limit=3000.0, gap=0.0, seed=1, threads=2)
    first, second = solve(problem, options), solve(problem, options)
    assert first.solver["status"] == "optimal" and verify_plan(first) == []
    assert same(first, second)


def test_the_milp_beside_the_search_proves_what_it_proves_alone(tiny_problem: Problem) -> None:
    alone, beside = (solve(tiny_problem, SolveOptions(gap=0.0, time_limit=60.0, threads=n)) for n in (1, 2))
    assert alone.solver["status"] == beside.solver["status"] == "optimal"
    assert alone.makespan_ms == pytest.approx(beside.makespan_ms)
