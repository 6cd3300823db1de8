"""AdaOffload: valid wherever anything is, a fill as deep as memory and link allow, near the best schedules known."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.bounds import lower_bound
from solver.feasibility import smallest_budgets
from solver.schedules import DoesNotFit
from tests.random_schedules import random_problem
from tests.test_solver import instance

SEEDS = st.integers(0, 2**32)


@settings(max_examples=40)
@given(SEEDS)
def test_it_works_from_the_smallest_budget_on(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    least = smallest_budgets(problem)
    tight = problem.with_budgets([rng.choice([b, int(b * rng.uniform(1, 2)), None]) for b in least])
    assert verify(tight, ada_offload(tight)) == []
    if min(least) > 0:
        with pytest.raises(DoesNotFit):
            ada_offload(problem.with_budgets([b - 1 for b in least]))


def forwards_before_the_first_backward(problem: Problem) -> int:
    """On device 0."""
    ops = ada_offload(problem)
    first = min(ops.start[(ops.stage == 0) & (ops.kind == Kind.B)])
    return int(((ops.stage == 0) & (ops.kind == Kind.F) & (ops.start < first)).sum())


def test_the_fill_uses_what_the_link_frees() -> None:
    """Four activations fit; without a link four forwards run before the first backward, with a fast one twice that."""
    problem, _ = instance("unit-s8-m32-memS2-off0.5")
    assert forwards_before_the_first_backward(problem) >= 8
    assert forwards_before_the_first_backward(problem.changed(channels=[])) == 4


@pytest.mark.parametrize(
    "name", ["unit-s8-m32-memS2-off1", "flat-s16-m64-memS2-off1", "14.6B-s8-m32-memS2-off1", "het-s8-m32-memS2-off1"]
)
def test_near_the_best_schedule_known(name: str) -> None:
    problem, best = instance(name)
    assert semantics.makespan(ada_offload(problem)) <= 1.005 * best


def test_a_policy_chosen_on_fewer_microbatches_is_good_on_all() -> None:
    problem, _ = instance("flat-s16-m64-memS2-off1")
    longer = problem.changed(num_microbatches=256)
    chosen, all_tried = ada_offload(longer, work=40_000), ada_offload(longer, work=10**9)
    assert verify(longer, chosen) == []
    assert semantics.makespan(chosen) <= 1.01 * semantics.makespan(all_tried)


@pytest.mark.parametrize(("activations", "above"), [(1.0, 1.2), (1.25, 1.4), (1.75, 1.4), (2.0, 1.02)])
def test_with_memory_for_one_or_two_microbatches_they_still_overlap(activations: float, above: float) -> None:
    """One at a time takes four times the bound there."""
    problem, _ = instance("flat-s8-m16-memS2-off1")
    tight = problem.with_budgets([round(activations * 1_000_000)] * 8)
    ops = ada_offload(tight)
    assert verify(tight, ops) == []
    assert semantics.makespan(ops) <= above * lower_bound(tight)
