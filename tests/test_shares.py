"""The linear program of shares: what it gives is valid, no longer, and the best for its orders."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.jitter import check_replays
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from solver.feasibility import smallest_budgets
from solver.list_scheduler import list_schedule
from solver.options import SolveOptions
from solver.policy import draw
from solver.search.shares import with_best_shares, with_least_moved
from solver.solve import solve
from solver.tables import paths, tables
from tests.random_schedules import random_problem


def _tight(rng: random.Random) -> Problem:
    """A random problem whose budgets are between the smallest ones and three times that."""
    problem = random_problem(rng)
    budgets = [int(least * rng.uniform(1.0, 3.0)) for least in smallest_budgets(problem)]
    return problem.changed(devices=[{"memory_bytes": budget} for budget in budgets])


def _schedule(rng: random.Random) -> tuple[Problem, Ops | None]:
    """A tight problem and a list schedule of it; None where none fits."""
    problem = _tight(rng)
    tab = tables(problem)
    ops = list_schedule(problem, draw(tab, rng).rule(tab, paths(tab)))
    return problem, None if ops is None or verify(problem, ops) else ops


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_what_it_gives_is_valid_and_no_longer(seed: int) -> None:
    problem, ops = _schedule(random.Random(seed))
    if ops is None or ops.is_compute.all():
        return
    found = with_best_shares(problem, ops, seconds=60.0)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= semantics.makespan(ops) * (1 + 1e-9)
    assert check_replays(problem, found, 3) == []


def _problem(offload_ms: float, budget: int) -> Problem:
    stage = {"device": 0, "forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 0.0, "activation_bytes": 1000}
    stage |= {"offloadable_bytes": 1000, "offload_ms": offload_ms, "reload_ms": offload_ms}
    lanes = [{"name": way, "transfers": [{"device": 0, "direction": way}]} for way in ("d2h", "h2d")]
    return Problem.model_validate(
        {
            "num_microbatches": 2,
            "devices": [{"memory_bytes": budget}],
            "stages": [stage],
            "comm_ms": [],
            "channels": lanes,
        }
    )


@pytest.mark.parametrize(("budget", "share"), [(1000, 1.0), (1250, 0.75), (1900, 0.1)])
def test_just_what_has_to_leave_leaves(budget: int, share: float) -> None:
    """F0, O0, F1, B1, R0, B0 on one device: the second forward waits for as much of the first one's as does not fit."""
    problem = _problem(10.0, budget)
    order = [(Kind.F, 0, 0), (Kind.O, 0, 1), (Kind.F, 1, 11), (Kind.B, 1, 12), (Kind.R, 0, 13), (Kind.B, 0, 23)]
    order += [(Kind.W, 0, 24), (Kind.W, 1, 24)]
    ops = Ops.of([Op(kind, 0, j, float(at), at + 1.0) for kind, j, at in order])
    ops = earliest(problem, ops)
    assert semantics.makespan(ops) == pytest.approx(24.0)
    found = with_best_shares(problem, ops, seconds=60.0)
    moved = semantics.moved_bytes(problem, found)
    assert set(moved[found.kind >= Kind.O].tolist()) == {round(share * 1000)}
    assert semantics.makespan(found) == pytest.approx(4.0 + 20.0 * share)


def test_transfers_that_need_not_be_are_left_out() -> None:
    problem = _problem(10.0, 2000)
    order = [(Kind.F, 0, 0), (Kind.O, 0, 1), (Kind.F, 1, 11), (Kind.B, 1, 12), (Kind.R, 0, 13), (Kind.B, 0, 23)]
    order += [(Kind.W, 0, 24), (Kind.W, 1, 24)]
    ops = earliest(problem, Ops.of([Op(kind, 0, j, float(at), at + 1.0) for kind, j, at in order]))
    found = with_best_shares(problem, ops, seconds=60.0)
    assert found.is_compute.all() and semantics.makespan(found) == pytest.approx(4.0)
    assert np.array_equal(np.sort(found.kind), np.sort(ops.kind[ops.is_compute]))


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_what_moves_least_is_as_long(seed: int) -> None:
    problem, ops = _schedule(random.Random(seed))
    if ops is None or ops.is_compute.all():
        return
    found = with_least_moved(problem, ops, seconds=60.0)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= semantics.makespan(ops) * (1 + 1e-6)
    moved, before = (int(semantics.moved_bytes(problem, each).sum()) for each in (found, ops))
    assert moved < before or found is ops


def test_a_plan_moves_no_more_than_it_has_to() -> None:
    """Budget for a microbatch and a half: half of one has to leave, whatever else there is time for."""
    plan = solve(_problem(0.5, 1500), SolveOptions(gap=0.0, time_limit=60.0, threads=1))
    assert plan.makespan_ms == pytest.approx(plan.lower_bound_ms)
    out = plan.ops.kind == Kind.O
    assert semantics.moved_bytes(plan.problem, plan.ops)[out].sum() <= 500
