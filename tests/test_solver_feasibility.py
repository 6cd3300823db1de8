"""The smallest budgets: no schedule needs less, and one byte less is refused with the number that works."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import memory
from optpipe.errors import Infeasible
from optpipe.problem import Problem
from solver import feasibility
from solver.list_scheduler import list_schedule
from tests.random_schedules import random_problem, schedules
from tests.test_list_scheduler import random_rule

SEEDS = st.integers(0, 2**32)


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_no_random_schedule_needs_less(case) -> None:  # type: ignore[no-untyped-def]
    problem, ops = case
    peaks = memory.peaks(problem, ops)
    assert all(peak >= least for peak, least in zip(peaks, feasibility.smallest_budgets(problem), strict=True))


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_no_list_schedule_needs_less(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = list_schedule(problem, random_rule(problem, rng))
    assert ops is not None
    peaks = memory.peaks(problem, ops)
    assert all(peak >= least for peak, least in zip(peaks, feasibility.smallest_budgets(problem), strict=True))


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_the_check_draws_the_line_at_the_smallest_budgets(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    least = feasibility.smallest_budgets(problem)
    feasibility.check(problem.with_budgets(list(least)))
    device = rng.randrange(problem.num_devices)
    with pytest.raises(Infeasible, match=f"device {device} needs at least {least[device]} bytes") as caught:
        feasibility.check(problem.with_budgets([b - (d == device) for d, b in enumerate(least)]))
    assert caught.value.smallest_budget == least


def test_two_stages_on_one_device() -> None:
    """F of the later stage runs beside what rests of the earlier one: all of it, or what cannot be moved."""
    stage = {"device": 0, "forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    parts = {
        "num_microbatches": 3,
        "devices": [{"memory_bytes": None}],
        "comm_ms": [0.0],
        "stages": [stage, {**stage, "activation_bytes": 7}],
    }
    assert feasibility.smallest_budgets(Problem.model_validate(parts)) == [17]
    movable = {**stage, "offloadable_bytes": 8, "offload_ms": 1.0, "reload_ms": 1.0}
    both = [{"device": 0, "direction": x} for x in ("d2h", "h2d")]
    with_link = {**parts, "stages": [movable, parts["stages"][1]], "channels": [{"name": "link", "transfers": both}]}
    assert feasibility.smallest_budgets(Problem.model_validate(with_link)) == [10]
    one_way = {**with_link, "channels": [{"name": "link", "transfers": both[:1]}]}
    assert feasibility.smallest_budgets(Problem.model_validate(one_way)) == [17]
    dropped = {**parts, "stages": [{**stage, "checkpoint_bytes": 4}, parts["stages"][1]]}
    assert feasibility.smallest_budgets(Problem.model_validate(dropped)) == [11]
