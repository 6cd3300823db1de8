"""The benchmarks' own parts: the CP-SAT model allows what the rules allow, results survive interruption."""

import random

import pytest

from optpipe import semantics
from tests.random_schedules import random_problem


@pytest.mark.parametrize("seed", range(8))
def test_cpsat_solves_what_the_rules_describe(seed: int) -> None:
    """Fused backwards, recomputation, shared channels, tight memory: each solution verifies, and from a start it is
    no worse than that."""
    pytest.importorskip("ortools")
    from benchmarks.cpsat import solve_with_cpsat
    from solver.list_scheduler import backward_first, list_schedule
    from solver.tables import least_work, paths, tables

    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=3)
    tab = tables(problem)
    problem = problem.with_budgets([int(w * rng.uniform(1, 2)) for w in tab.whole])
    tab = tables(problem)
    start = list_schedule(problem, backward_first(tab, paths(tab), max(least_work(tab))))
    assert start is not None
    found = solve_with_cpsat(problem, 1.0, 1, from_start=True)  # raises where a solution breaks a rule
    assert found.ops is not None
    assert found.bound_ms <= semantics.makespan(found.ops) * 1.01
    if found.status == "optimal":
        assert semantics.makespan(found.ops) <= semantics.makespan(start) * 1.01
