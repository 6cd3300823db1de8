"""What ops wait for, the critical path and idle times."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import metrics, semantics
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.timing import earliest
from optpipe.waits import Why, critical_path, gaps, waits
from tests.conftest import plan_in_order
from tests.random_schedules import random_problem, random_schedule


def index(plan: Plan, label: str) -> int:
    return next(n for n, op in enumerate(plan.ops) if op.label == label)


@pytest.mark.parametrize(
    ("label", "waits_for", "why"),
    [
        ("F(0,0)", None, Why.NOTHING),
        ("F(0,1)", "F(0,0)", Why.LANE),
        ("F(1,0)", "F(0,0)", Why.DATA),
        ("B(0,0)", "F(0,2)", Why.LANE),
        ("B(1,0)", "F(1,0)", Why.DATA),
        ("O(0,1)", "F(0,1)", Why.DATA),
        ("F(0,2)", "O(0,1)", Why.MEMORY),
        ("R(0,1)", "W(0,0)", Why.MEMORY),
    ],
)
def test_what_an_op_waits_for(tiny_plan, label, waits_for, why):
    found = waits(tiny_plan.problem, tiny_plan.ops)
    op = index(tiny_plan, label)
    assert found.why[op] == why
    assert (None if found.before[op] < 0 else tiny_plan.ops[int(found.before[op])].label) == waits_for


@given(st.integers(0, 2**32))
def test_in_a_schedule_without_slack_every_op_starts_when_what_it_waits_for_is_over(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    ops = earliest(problem, ops)
    found = waits(problem, ops)
    assert ops.start == pytest.approx(found.ready, abs=4 * semantics.tolerance(ops))
    path = critical_path(ops, found)
    assert found.before[path[0]] == -1
    assert ops.start[path[0]] == 0.0
    assert ops.end[path[-1]] == ops.end.max()
    comm = sum(found.ready[b] - ops.end[a] for a, b in pairwise(path))
    work = float((ops.end - ops.start)[path].sum())
    assert work + comm == pytest.approx(semantics.makespan(ops), rel=1e-4)


@given(st.integers(0, 2**32))
def test_idle_and_busy_time_are_all_there_is(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    idle = np.zeros(problem.num_devices)
    for gap in gaps(problem, ops):
        assert gap.length > 0
        idle[gap.device] += gap.length
        if gap.until >= 0:
            assert problem.stages[ops.stage[gap.until]].device == gap.device
            assert ops.start[gap.until] == gap.end
    figures = metrics.measure(problem, ops)
    assert idle.sum() / (problem.num_devices * figures.makespan_ms) == pytest.approx(figures.bubble_ratio, abs=1e-5)


def test_nothing_waits_for_nothing(tiny_problem):
    empty = Ops.of([])
    assert gaps(tiny_problem, empty) == []
    assert critical_path(empty, waits(tiny_problem, empty)) == []


def test_a_contradictory_order_has_a_path_that_ends(tiny_problem):
    plan = plan_in_order(tiny_problem, "F(0,0) F(1,0) B(1,0) B(0,0)")
    # The forward of the second stage behind its own backward.
    start = plan.ops.start.copy()
    start[1] = start[3] + 5
    broken = plan.ops.at(start, start + 1)
    assert len(critical_path(broken, waits(tiny_problem, broken))) <= len(broken) + 1
