"""Bounds from the relaxation of some devices: never above an optimum or a schedule, above those of single ones."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from optpipe import metrics, semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.bounds import lower_bound
from solver.list_scheduler import list_schedule
from solver.milp import highs
from solver.milp.formulation import Options, formulate
from solver.milp.highs import Settings
from solver.milp.model import Objective
from solver.milp.prove import block_sizes, prove, prove_by_blocks
from solver.milp.solve import solve_milp
from tests.random_schedules import random_problem
from tests.small_problems import small_problem
from tests.test_list_scheduler import random_rule, with_random_budgets
from tests.time_indexed import optimum

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"
BRIEF = Settings(time_limit=3.0, nodes=20)


def without_offload(name: str, activations: int) -> Problem:
    """A benchmark problem with memory for so many microbatches, of which nothing can leave."""
    problem = Problem.read(INSTANCES / f"{name}.json")
    stages = [stage.model_dump() | {"offloadable_bytes": 0} for stage in problem.stages]
    budgets: list[int | None] = [activations * problem.stages[0].activation_bytes] * problem.num_devices
    return Problem.model_validate(problem.model_dump() | {"stages": stages, "channels": []}).with_budgets(budgets)


@pytest.mark.parametrize("seed", [*range(20, 24), *range(26, 34)])
def test_no_block_is_above_the_optimum(seed: int) -> None:
    """Of all schedules: also those whose microbatches overtake each other and that move a half."""
    problem = small_problem(random.Random(seed), devices=2)
    value = highs.solve(formulate(problem).matrix, Settings(time_limit=60)).objective
    best = optimum(problem, round(value), ascending=False, parts=2, fuse=True)
    assert best is not None
    for block in ((0,), (1,), (0, 1)):
        program = formulate(problem, Options(relaxed=True, devices=block), upper=value)
        result = highs.solve(program.matrix, Settings(time_limit=60))
        assert result.status == "optimal"
        assert result.objective <= best + 1e-5


@given(st.integers(0, 2**32))
@effort(max_examples=12, deadline=None)
def test_no_proof_is_above_a_schedule(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_random_budgets(random_problem(rng, microbatches=rng.randint(1, 5)), rng)
    found = [list_schedule(problem, random_rule(problem, rng)) for _ in range(4)]
    measures: tuple[tuple[Objective, Callable[[Ops], float]], ...] = (
        ("makespan", semantics.makespan),
        ("span", lambda ops: metrics.span(problem, ops)),
    )
    for objective, value in measures:
        values = sorted(value(ops) for ops in found if ops is not None)
        lower = lower_bound(problem, objective)
        # The worst schedule is the upper bound, so that the proof cannot lean on the best one.
        proof = prove_by_blocks(problem, Options(objective=objective), BRIEF, values[-1], lower, in_child=False)
        assert proof.bound is None or lower < proof.bound <= values[0] * (1 + 1e-6)


def test_neighbours_say_more_than_single_devices() -> None:
    """With memory for 3 of 4 pipelined microbatches, two devices' program proves what the whole problem takes."""
    problem = without_offload("flat-s4-m8-memS-nooff", 3)
    found = solve_milp(problem, None, gap=0.0, time_limit=60, backend="highs-here")
    assert found.ops is not None
    best = semantics.makespan(found.ops)
    pair = formulate(problem, Options(relaxed=True, devices=(0, 1)), upper=best, lower=lower_bound(problem))
    assert lower_bound(problem) < 0.99 * best
    assert highs.solve(pair.matrix, Settings(time_limit=60)).bound == pytest.approx(best, rel=1e-6)


def test_a_proof_in_a_child_process() -> None:
    problem = without_offload("flat-s4-m8-memS-nooff", 2)
    best = prove(problem, upper=720.0, seconds=60.0, lower=lower_bound(problem))
    assert best == pytest.approx(699.3, rel=1e-6)


def test_nothing_is_proven_at_the_bound_or_without_time() -> None:
    problem = without_offload("flat-s4-m8-memS-nooff", 4)
    bound = lower_bound(problem)
    assert prove(problem, upper=bound, seconds=10.0, lower=bound) is None
    assert prove(problem, seconds=0.0, lower=bound) is None


def test_all_devices_of_the_relaxation_are_the_relaxation() -> None:
    problem = small_problem(random.Random(3), devices=2)
    whole = formulate(problem, Options(relaxed=True))
    told = formulate(problem, replace(Options(relaxed=True), devices=(0, 1)))
    assert whole.matrix.num_rows == told.matrix.num_rows
    assert whole.matrix.num_binaries == told.matrix.num_binaries


@pytest.mark.parametrize("devices", range(1, 20))
def test_blocks_cover_all_devices_and_overlap(devices: int) -> None:
    sizes = list(block_sizes(devices))
    assert sizes[-1] == (devices, [tuple(range(devices))])
    for size, blocks in sizes:
        assert {d for block in blocks for d in block} == set(range(devices))
        assert all(len(block) == size for block in blocks)
        assert len(set(blocks)) == len(blocks)
        assert all(set(a) & set(b) for a, b in pairwise(blocks))
