"""The list scheduler: whatever the rule, every schedule is complete and breaks nothing, and memory never dead-ends."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.jitter import check_replays
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.feasibility import smallest_budgets
from solver.list_scheduler import (
    KEEP,
    OFFLOAD,
    ON_DEMAND,
    RECOMPUTE,
    Rule,
    backward_first,
    list_schedule,
    makespan,
    run,
)
from solver.policy import draw
from solver.tables import least_work, paths, tables
from tests.random_schedules import random_problem

SEEDS = st.integers(0, 2**32)


def with_random_budgets(problem: Problem, rng: random.Random) -> Problem:
    """Budgets from one microbatch's activations of a device up to three times that; sometimes none."""
    whole = tables(problem).whole
    return problem.with_budgets([rng.choice([None, w, int(w * rng.uniform(1, 3))]) for w in whole])


def random_rule(problem: Problem, rng: random.Random) -> Rule:
    """A rule with nothing sensible about it."""
    tab = tables(problem)
    n, S = tab.S * tab.m, tab.S
    can = [[KEEP] + [OFFLOAD, ON_DEMAND] * (tab.movable[s] > 0) + [RECOMPUTE] * (tab.dropped[s] > 0) for s in range(S)]
    rule = draw(tab, rng).rule(tab, paths(tab))

    def keys() -> list[float]:
        return [rng.uniform(0, 10) for _ in range(n)]

    if rng.random() < 0.5:
        rule = rule.but(forward_key=keys(), backward_key=keys(), weight_key=keys(), reload_key=keys())
    return rule.but(
        treatment=[rng.choice(can[k // tab.m]) for k in range(n)],
        fused=[rng.randint(0, 1) for _ in range(n)],
        threshold=[rng.randint(0, 3) for _ in range(S)],
        reload_lead=rng.choice([0.0, 1.0, float("inf")]),
        reserve_all=rng.random() < 0.5,
    )


@settings(max_examples=200)
@given(SEEDS)
def test_every_schedule_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_random_budgets(random_problem(rng), rng)
    parts = [rng.choice([1.0, rng.uniform(0.1, 1)]) for _ in problem.stages] if rng.random() < 0.5 else None
    ops = list_schedule(problem, random_rule(problem, rng), parts)
    assert ops is not None
    assert verify(problem, ops) == []


@settings(max_examples=100)
@given(SEEDS)
def test_with_evictions_it_goes_down_to_the_smallest_budgets(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    least, whole = smallest_budgets(problem), tables(problem).whole
    tight = problem.with_budgets(
        [rng.choice([low, rng.randint(low, high)]) for low, high in zip(least, whole, strict=True)]
    )
    tab = tables(tight)
    rule = random_rule(tight, rng).but(treatment=draw(tab, rng).rule(tab, paths(tab)).treatment, evict=True)
    ops = list_schedule(tight, rule)
    assert ops is not None
    assert verify(tight, ops) == []


@settings(max_examples=25)
@given(SEEDS)
def test_a_schedule_stays_within_memory_under_any_timing(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_random_budgets(random_problem(rng), rng)
    ops = list_schedule(problem, random_rule(problem, rng))
    assert ops is not None
    assert check_replays(problem, ops, 5, seed) == []


def test_one_byte_less_than_a_microbatch_needs_is_refused(tiny_problem: Problem) -> None:
    tab = tables(tiny_problem)
    rule = backward_first(tab, paths(tab), max(least_work(tab)))
    assert list_schedule(tiny_problem.with_budgets(list(tab.whole)), rule) is not None
    assert list_schedule(tiny_problem.with_budgets([w - 1 for w in tab.whole]), rule) is None


@settings(max_examples=50)
@given(SEEDS)
def test_the_start_times_of_a_schedule_as_keys_are_no_worse(seed: int) -> None:
    """Without offload and fixed treatments, keys that are start times give the same order or a shorter schedule."""
    rng = random.Random(seed)
    problem = random_problem(rng, kind="linear", stages_per_device=1)
    tab = tables(problem)
    rule = draw(tab, rng).rule(tab, paths(tab))
    first = run(tab, rule)
    assert first is not None
    again = run(
        tab,
        rule.but(
            forward_key=first.f_start,
            backward_key=first.b_start,
            weight_key=first.w_start,
            limit=[tab.m] * tab.S,
            patience=1e9,
            alternation=0.0,
            share_idle=False,
            treatment=[KEEP] * (tab.S * tab.m),
        ),
    )
    assert again is not None
    no_offload = max(o for o in first.o_start) < 0
    if no_offload:
        assert makespan(again) <= makespan(first) * (1 + 1e-9)


def test_treatments_are_followed(tiny_problem: Problem) -> None:
    tab = tables(tiny_problem)
    rule = backward_first(tab, paths(tab), max(least_work(tab)))
    movable = [s for s in range(tab.S) if tab.movable[s]]
    assert movable, "the tiny problem has a stage that can be offloaded"
    treatment = list(rule.treatment)
    for s in movable:
        treatment[s * tab.m] = OFFLOAD
    ops = list_schedule(tiny_problem.with_budgets([None] * tab.D), rule.but(treatment=treatment))
    assert ops is not None
    for kind in (Kind.O, Kind.R):
        chosen = ops.kind == kind
        assert list(ops.stage[chosen]) == movable
        assert not np.any(ops.microbatch[chosen])


def test_the_same_rule_gives_the_same_schedule(tiny_problem: Problem) -> None:
    tab = tables(tiny_problem)
    rule = draw(tab, random.Random(5)).rule(tab, paths(tab))
    first, second = list_schedule(tiny_problem, rule), list_schedule(tiny_problem, rule)
    assert isinstance(first, Ops) and isinstance(second, Ops)
    assert np.array_equal(first.start, second.start) and np.array_equal(first.kind, second.kind)


_SCRIPT = """
import os
import random
import subprocess
import sys
from solver.list_scheduler import run
from solver.policy import draw
from solver.tables import paths, tables
from tests.random_schedules import random_problem
rng = random.Random(11)
for _ in range(8):
    tab = tables(random_problem(rng))
    state = run(tab, draw(tab, rng).rule(tab, paths(tab)))
    print([[float(x) for x in column] for column in state])
"""


def test_plain_python_gives_the_same_schedules() -> None:
    pytest.importorskip("numba", reason="without numba there is only plain Python")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        ).stdout
        for extra in ({"OPTPIPE_COMPILE": "1"}, {"OPTPIPE_COMPILE": "0"})
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 8
