"""solve(): always a verified plan, the same one for the same seed, and a clear answer where there is none."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import timing
from optpipe.errors import Infeasible, InputError
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan
from solver import feasibility
from solver.incumbent import Progress
from solver.options import SolveOptions, physical_cores
from solver.search.portfolio import twin
from solver.solve import methods, solve
from tests.exact import TooLarge, optimum, tiny_problem
from tests.random_schedules import random_problem
from tests.test_schedules import pipeline

SEEDS = st.integers(0, 2**32)
INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"
QUICK = SolveOptions(method="search", time_limit=2.0, threads=1)


def instance(name: str) -> tuple[Problem, float]:
    """A benchmark problem and the best makespan known."""
    with (INSTANCES / "reference.csv").open() as stream:
        best = {row["instance"]: float(row["best_known_ms"]) for row in csv.DictReader(stream)}
    return Problem.read(INSTANCES / f"{name}.json"), best[name]


def same(first: Plan, second: Plan) -> bool:
    columns = ("kind", "stage", "microbatch", "start", "end", "bytes")
    return all(np.array_equal(getattr(first.ops, c), getattr(second.ops, c)) for c in columns)


@settings(max_examples=8, deadline=None)
@given(SEEDS)
def test_every_plan_is_valid_and_above_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    least = feasibility.smallest_budgets(problem)
    problem = problem.with_budgets([rng.choice([None, b, int(b * rng.uniform(1, 3))]) for b in least])
    plan = solve(problem, SolveOptions(method="search", time_limit=0.5, objective=rng.choice(["makespan", "span"])))
    assert verify_plan(plan) == []
    assert plan.lower_bound_ms is not None and plan.lower_bound_ms <= plan.makespan_ms * (1 + 1e-9)


def test_no_op_starts_later_than_it_has_to() -> None:
    problem, _ = instance("flat-s4-m8-memS2-off1")
    plan = solve(problem, QUICK)
    early = timing.earliest(problem, plan.ops)
    assert np.allclose(plan.ops.start, early.start, rtol=0, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(SEEDS)
def test_the_smallest_budget_works_and_one_byte_less_does_not(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    least = feasibility.smallest_budgets(problem)
    assert verify_plan(solve(problem.with_budgets(list(least)), SolveOptions(method="search", time_limit=0.3))) == []
    with pytest.raises(Infeasible) as caught:
        solve(problem.with_budgets([b - 1 for b in least]), QUICK)
    assert caught.value.smallest_budget == least and caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["unit-s4-m8-memS-nooff", "flat-s8-m32-memS-nooff", "1.5B-s8-m24-mem1x-nooff"])
def test_without_offload_the_bound_is_reached(name: str) -> None:
    problem, best = instance(name)
    plan = solve(problem, SolveOptions(time_limit=60.0, threads=1))
    assert plan.makespan_ms == pytest.approx(best, abs=1e-3) == plan.lower_bound_ms
    assert plan.solver["status"] == "optimal"


@pytest.mark.parametrize("name", ["flat-s8-m32-memS2-off1", "unit-s16-m64-memS3-off1", "1.5B-s8-m24-mem1x-V-nooff"])
def test_the_first_schedules_are_near_the_best_known(name: str) -> None:
    problem, best = instance(name)
    plan = solve(problem, SolveOptions(method="search", time_limit=20.0, gap=0.05))
    assert plan.makespan_ms <= 1.01 * best


def test_the_same_seed_gives_the_same_plan(tiny_problem: Problem) -> None:
    """One round of all searches; small enough for the time limit never to cut in."""
    options = SolveOptions(method="search", time_limit=3000.0, gap=0.5, seed=3)
    assert same(solve(tiny_problem, options), solve(tiny_problem, options))


@settings(max_examples=20)
@given(SEEDS)
def test_a_twin_is_a_little_off(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    other = twin(problem, rng)
    for mine, theirs in zip(problem.stages, other.stages, strict=True):
        assert mine.activation_bytes == theirs.activation_bytes and mine.device == theirs.device
        for name in ("forward_ms", "backward_ms", "weight_ms", "offload_ms", "reload_ms"):
            more = getattr(theirs, name) - getattr(mine, name)
            # Compute takes longer and transfers less, so that orders are preferred that leave transfers some slack.
            assert 0.0 <= (-more if name in ("offload_ms", "reload_ms") else more) <= 0.031 * getattr(mine, name)


def test_ties_do_not_end_the_search() -> None:
    """Whole microbatches give 60 at best, and no small change of such a schedule is shorter; parts give 59."""
    problem, _ = instance("unit-s8-m16-memS3-off1")
    plan = solve(problem, SolveOptions(method="search", time_limit=3000.0, gap=0.005, threads=1, seed=2))
    assert plan.makespan_ms < 59.3 and verify_plan(plan) == []


def test_overtaking_on_the_host_is_found() -> None:
    """CP-SAT proves that 58 ms is the least with whole transfers and halves; annealing ends at 60
    where no microbatches change places."""
    stage = {"forward_ms": 2.0, "backward_ms": 2.0, "weight_ms": 2.0, "offload_ms": 4.0, "reload_ms": 4.0}
    stage |= {"activation_bytes": 8, "weight_context_bytes": 4, "offloadable_bytes": 8}
    lanes = [(device, direction) for device in range(3) for direction in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 8,
            "devices": [{"memory_bytes": size} for size in (16, 16, 14)],
            "stages": [{"device": device, **stage} for device in range(3)],
            "comm_ms": [0.0] * 2,
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )
    plan = solve(problem, SolveOptions(method="search", time_limit=60.0, gap=0.08, threads=1))
    assert plan.makespan_ms < 58.5 and verify_plan(plan) == []


def test_the_time_limit_ends_it() -> None:
    problem, _ = instance("unit-s8-m16-memS3-off2")
    plan = solve(problem, SolveOptions(method="search", time_limit=1.0, gap=0.0))
    assert plan.solver["status"] == "time limit" and verify_plan(plan) == []


def test_an_interrupt_keeps_the_best_plan() -> None:
    problem, _ = instance("unit-s4-m8-memS2-off2")
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 2:
            raise KeyboardInterrupt

    plan = solve(problem, SolveOptions(method="search", time_limit=60.0, gap=0.0), on_progress=interrupt)
    assert plan.solver["interrupted"] and verify_plan(plan) == []
    assert plan.makespan_ms == pytest.approx(seen[-1].best)


def test_progress_only_improves() -> None:
    problem, _ = instance("unit-s4-m8-memS2-off1")
    seen: list[Progress] = []
    plan = solve(problem, SolveOptions(method="search", time_limit=3.0, gap=0.3), on_progress=seen.append)
    assert [p.best for p in seen] == sorted((p.best for p in seen), reverse=True)
    assert seen[-1].best == pytest.approx(plan.makespan_ms)


@pytest.mark.parametrize("name", [name for name in methods() if name not in ("auto", "search", "milp")])
def test_a_schedule_by_its_name(name: str) -> None:
    """A plan, or why there is none: not defined (bad input), or too little memory (infeasible, with what works)."""
    for budget in (None, 8, 2):
        problem = pipeline(4, 8, budget=budget)
        try:
            plan = solve(problem, SolveOptions(method=name))
        except InputError as error:
            assert "does not apply: it needs" in str(error) or "no stage" in str(error)
        except Infeasible as error:
            assert budget is not None and "does not fit" in str(error)
            assert error.smallest_budget == [2] * 4
        else:
            assert verify_plan(plan) == [] and plan.solver["method"] == name


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="'fast' is unknown, expected one of auto, search, milp"):
        solve(pipeline(2, 2), SolveOptions(method="fast"))


def test_span_is_shortened_when_asked_for() -> None:
    problem = pipeline(4, 16, budget=16)
    short = solve(problem, SolveOptions(objective="span", time_limit=5.0, threads=1, method="search"))
    assert short.solver["span_ms"] == pytest.approx(48.0)
    assert short.solver["span_lower_bound_ms"] <= 48.0 + 1e-9
    assert short.lower_bound_ms is not None and short.lower_bound_ms <= short.makespan_ms


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_tiny_problems_without_transfers_are_solved_to_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    problem = tiny_problem(rng)
    if problem.channels or any(s.checkpoint_bytes is not None for s in problem.stages):
        return
    plan = solve(problem, SolveOptions(method="search", time_limit=3.0, gap=0.0))
    try:
        assert optimum(problem, plan.makespan_ms - 1e-6, most_states=2000) is None
    except TooLarge:
        return


def test_cores_are_counted() -> None:
    assert 1 <= physical_cores() <= 4096
