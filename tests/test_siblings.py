"""Siblings: what comes of their schedules is valid, and a middle that loses nothing loses nothing more often."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.bounds import lower_bound
from solver.feasibility import smallest_budgets
from solver.microbatches import Outline, with_microbatches
from solver.schedules import generate
from solver.search.siblings import sibling, stretched
from tests.random_schedules import random_problem, random_schedule

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"


def _tight(rng: random.Random) -> Problem:
    """A random problem of up to 12 microbatches whose budgets are between the smallest ones and twice that."""
    problem = random_problem(rng, devices=rng.randint(1, 3), microbatches=rng.randint(6, 12))
    budgets = [int(least * rng.uniform(1.0, 2.0)) for least in smallest_budgets(problem)]
    return problem.changed(devices=[{"memory_bytes": budget} for budget in budgets])


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_what_comes_of_a_sibling_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    problem = _tight(rng)
    other = sibling(problem, rng)
    assert other is not None
    assert problem.num_devices < other.num_microbatches < problem.num_microbatches
    for found in stretched(problem, other, ada_offload(other), below=float("inf"), seconds=60.0):
        assert verify(problem, found) == []


@pytest.mark.parametrize("name", ["unit-s8-m32-memS-nooff", "het-s8-m32-mem1x-nooff"])
def test_a_pattern_goes_on(name: str) -> None:
    problem = Problem.read(INSTANCES / f"{name}.json")
    small = problem.model_copy(update={"num_microbatches": 16})
    ops = generate("zero-bubble", small, "makespan")
    found = stretched(problem, small, ops, below=float("inf"), seconds=60.0)
    lost = semantics.makespan(ops) - lower_bound(small, "makespan")
    shortest = min(map(semantics.makespan, found))
    assert shortest <= (lower_bound(problem, "makespan") + lost) * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_blocks_are_complete(seed: int, block: int) -> None:
    """Whatever is cut where: all microbatches have all their ops, in an order that data allow or that is refused."""
    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=rng.randint(1, 6))
    ops = random_schedule(problem, rng)
    m = problem.num_microbatches + rng.randint(0, 5)
    larger = problem.model_copy(update={"num_microbatches": m})
    for outline in with_microbatches(Outline.of(problem, ops), m, block=block):
        found = outline.ops(larger)
        try:
            tight = earliest(larger, found)
        except ValueError:
            continue
        assert [each for each in verify(larger, tight) if " bytes at " not in each] == []


def test_few_microbatches_have_no_sibling() -> None:
    problem = Problem.read(INSTANCES / "unit-s4-m8-memS-nooff.json")
    few = problem.model_copy(update={"num_microbatches": 5})
    assert sibling(few, random.Random(0)) is None
