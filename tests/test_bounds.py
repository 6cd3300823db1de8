"""Lower bounds: never above an optimum (the worst bug a solver can have), and where they are known to be sharp."""

import csv
import random
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optpipe import metrics, semantics
from optpipe.problem import Problem
from solver.ada_offload import ada_offload
from solver.bounds import all_bounds, lower_bound
from solver.bounds.knapsack import Item, most_value
from solver.feasibility import smallest_budgets
from solver.list_scheduler import list_schedule
from solver.schedules import SCHEDULES
from tests.exact import TooLarge, optimum, tiny_problem
from tests.random_schedules import random_problem, schedules
from tests.test_list_scheduler import random_rule, with_random_budgets

SEEDS = st.integers(0, 2**32)
INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"


def reference() -> list[dict[str, str]]:
    with (INSTANCES / "reference.csv").open() as stream:
        return list(csv.DictReader(stream))


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_no_schedule_of_a_tiny_problem_is_shorter_than_a_bound(seed: int) -> None:
    problem = tiny_problem(random.Random(seed))
    try:
        better = optimum(problem, lower_bound(problem) - 1e-6, most_states=2000)
    except TooLarge:
        assume(False)
        return
    assert better is None, f"a schedule takes {better} ms, the bounds say {all_bounds(problem)}"


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_bounds_are_below_random_schedules_that_just_fit(case) -> None:  # type: ignore[no-untyped-def]
    problem, ops = case
    assert lower_bound(problem) <= semantics.makespan(ops) * (1 + 1e-9)
    assert lower_bound(problem, "span") <= metrics.span(problem, ops) * (1 + 1e-9)


def test_where_one_microbatch_fits_it_counts_how_long_each_is_whole() -> None:
    problem = Problem.read(str(INSTANCES / "flat-s8-m32-memS2-off1.json"))
    tight = problem.with_budgets([1_500_000] * 8)
    found = all_bounds(tight)
    assert found["slots"] > 1.2 * max(value for name, value in found.items() if name != "slots")
    # Moved whole, each is whole for F, O, R and B; kept in part, it takes what is left of the memory for long.
    assert found["slots"] < 32 * (2 * 18.5 + 18.5 + 18.1)


@pytest.mark.parametrize("microbatches", [16, 32])
def test_with_the_smallest_budgets_the_bound_is_reached(microbatches: int) -> None:
    """One microbatch at a time on a device, from the start of its F or its way back until it is away or its W has run:
    the device before the last has no better turn than to send everything away, and AdaOffload is as short."""
    problem = Problem.read(str(INSTANCES / f"flat-s8-m{microbatches}-memS2-off1.json"))
    tight = problem.with_budgets(smallest_budgets(problem))
    assert semantics.makespan(ada_offload(tight)) == pytest.approx(all_bounds(tight)["slots"])


def test_room_beside_the_one_that_is_whole_weakens_the_bound_of_slots() -> None:
    problem = Problem.read(str(INSTANCES / "flat-s8-m32-memS2-off1.json"))
    budgets = [1_000_000, 1_100_000, 1_250_000, 1_499_999, 1_500_000, 1_999_999, 2_000_000]
    found = [all_bounds(problem.with_budgets([budget] * 8))["slots"] for budget in budgets]
    assert found == sorted(found, reverse=True)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_bounds_are_below_list_schedules(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_random_budgets(random_problem(rng, microbatches=rng.randint(1, 12)), rng)
    bound, span_bound = lower_bound(problem), lower_bound(problem, "span")
    for _ in range(3):
        ops = list_schedule(problem, random_rule(problem, rng), [rng.uniform(0.1, 1) for _ in problem.stages])
        assert ops is not None
        assert bound <= semantics.makespan(ops) * (1 + 1e-9)
        assert span_bound <= metrics.span(problem, ops) * (1 + 1e-9)


def test_a_straddling_forward_counts_by_its_work() -> None:
    """Counting whole forwards in the fill would say 78 here; a schedule of 75 exists."""
    stage = {"activation_bytes": 1, "weight_context_bytes": 1, "offloadable_bytes": 0}
    problem = Problem.model_validate(
        {
            "num_microbatches": 5,
            "devices": [{"memory_bytes": 3}] * 2,
            "stages": [
                {**stage, "device": 0, "forward_ms": 5.0, "backward_ms": 7.0, "weight_ms": 3.0},
                {**stage, "device": 1, "forward_ms": 3.0, "backward_ms": 5.0, "weight_ms": 1.0},
            ],
            "comm_ms": [0.0],
        }
    )
    assert semantics.makespan(SCHEDULES["zero-bubble"](problem)) == pytest.approx(75.0)
    assert lower_bound(problem) <= 75.0


@pytest.mark.parametrize("row", reference(), ids=lambda row: row["instance"])
def test_benchmark_bounds(row: dict[str, str]) -> None:
    """Never above the best schedule known; and at it where memory for one pipeline and nothing to offload is given."""
    bound, best = lower_bound(Problem.read(INSTANCES / f"{row['instance']}.json")), float(row["best_known_ms"])
    assert bound <= best + 0.001
    if row["instance"].endswith("nooff") and "-V-" not in row["instance"]:
        assert bound == pytest.approx(best, abs=0.001)


def test_knapsack_takes_the_densest_first_and_free_items_whole() -> None:
    items = [Item(4.0, 2.0, 1.0), Item(3.0, 1.0, 2.0), Item(5.0, 0.0, 2.0), Item(-1.0, 1.0, 9.0)]
    assert most_value(items, 3.0) == pytest.approx(10.0 + 6.0 + 2.0)
    assert most_value(items, 0.0) == pytest.approx(10.0)
