"""Partial transfers as whole ones of another problem, and back: nothing is lost."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.list_scheduler import list_schedule
from solver.policy import draw
from solver.search.parts import as_parts, as_whole
from solver.tables import paths, tables, with_parts
from tests.random_schedules import random_problem


def _schedule(rng: random.Random) -> tuple[Problem, Ops] | None:
    """A random problem and a list schedule of it whose stages move parts of their activations."""
    problem = random_problem(rng)
    parts = [rng.choice([1.0, rng.uniform(0.05, 1.0)]) for _ in problem.stages]
    tab = with_parts(tables(problem), parts)
    ops = list_schedule(problem, draw(tab, rng).rule(tab, paths(tab)), parts)
    return None if ops is None else (problem, ops)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_there_and_back(seed: int) -> None:
    made = _schedule(random.Random(seed))
    if made is None:
        return
    problem, ops = made
    there = as_whole(problem, ops)
    assert there is not None
    whole, same = there
    assert (same.bytes < 0).all() and verify(whole, same) == [] and verify(problem, ops) == []
    np.testing.assert_allclose(semantics.durations(whole, same), semantics.durations(problem, ops))
    back = as_parts(problem, whole, same)
    np.testing.assert_array_equal(semantics.moved_bytes(problem, back), semantics.moved_bytes(problem, ops))
    np.testing.assert_array_equal(back.start, ops.start)


def test_different_parts_of_one_stage_have_no_such_problem(tiny_plan) -> None:  # type: ignore[no-untyped-def]
    problem, ops = tiny_plan.problem, tiny_plan.ops
    moved = np.flatnonzero(ops.kind >= Kind.O)
    amounts = ops.bytes.copy()
    amounts[moved[0]] = 1
    mixed = Ops(ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, amounts, {})
    assert as_whole(problem, mixed) is None
