"""The verifier: accepts what is valid, names every kind of damage."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import memory, timing
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from tests.random_schedules import fitted, random_problem, random_schedule


def example() -> Plan:
    """One device, two microbatches, the first one offloaded over the second."""
    problem = Problem.model_validate(
        {
            "num_microbatches": 2,
            "devices": [{"memory_bytes": 10}],
            "stages": [
                {
                    "device": 0,
                    "forward_ms": 1.0,
                    "backward_ms": 2.0,
                    "weight_ms": 1.0,
                    "activation_bytes": 10,
                    "weight_context_bytes": 4,
                    "offloadable_bytes": 10,
                    "offload_ms": 1.0,
                    "reload_ms": 1.0,
                }
            ],
            "comm_ms": [],
            "channels": [{"name": "link", "transfers": [{"device": 0, "direction": x} for x in ("d2h", "h2d")]}],
        }
    )
    rows = [(Kind.F, 0), (Kind.O, 0), (Kind.F, 1), (Kind.B, 1), (Kind.W, 1), (Kind.R, 0), (Kind.B, 0), (Kind.W, 0)]
    ops = Ops.of([Op(kind, 0, j, n, n + 0.5) for n, (kind, j) in enumerate(rows)])
    return Plan(problem, timing.earliest(problem, ops), lower_bound_ms=5.0)


def changed(plan: Plan, edit: Callable[[list[Op]], list[Op]]) -> list[str]:
    return verify(plan.problem, Ops.of(edit(list(plan.ops))))


def replace(kind: Kind, microbatch: int, **parts: float) -> Callable[[list[Op]], list[Op]]:
    def edit(ops: list[Op]) -> list[Op]:
        return [op._replace(**parts) if (op.kind, op.microbatch) == (kind, microbatch) else op for op in ops]

    return edit


def test_the_example_is_valid() -> None:
    assert verify_plan(example()) == []


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (replace(Kind.W, 0, end=99.0), "expected 1 ms"),
        (replace(Kind.B, 1, start=2.2, end=4.2), "B(0,1) starts at 2.2 ms, before F(0,1) ends at 3 ms"),
        (replace(Kind.R, 0, start=5.0, end=6.0), "over its budget of 10 bytes"),
        (replace(Kind.R, 0, start=1.5, end=2.5), "R(0,0) starts at 1.5 ms, before O(0,0) ends"),
        (replace(Kind.F, 1, start=0.5, end=1.5), "device 0 compute: F(0,1) [0.5, 1.5] overlaps F(0,0) [0, 1]"),
        (replace(Kind.R, 0, start=1.5, end=2.5), "channel link: R(0,0) [1.5, 2.5] overlaps O(0,0) [1, 2]"),
        (replace(Kind.F, 0, start=-1.0, end=0.0), "F(0,0) starts at -1 ms, before 0"),
        (replace(Kind.O, 0, bytes=5), "expected 0.5 ms"),
        (replace(Kind.O, 0, bytes=11), "moves 11 bytes, expected 1 to 10"),
        (replace(Kind.O, 0, bytes=0), "moves 0 bytes, expected 1 to 10"),
        (replace(Kind.R, 0, bytes=9), "R(0,0) reloads 9 bytes, but O(0,0) moved 10"),
        (replace(Kind.F, 0, bytes=9), "F(0,0) names bytes"),
        (lambda ops: [op for op in ops if op.kind != Kind.R], "O(0,0) has no reload"),
        (lambda ops: [op for op in ops if op.kind != Kind.O], "R(0,0) has no offload"),
        (lambda ops: [op for op in ops if op.kind != Kind.F], "F(0,0) is missing"),
        (lambda ops: [op for op in ops if op.kind != Kind.B], "B(0,0) is missing"),
        (lambda ops: [op for op in ops if op.kind != Kind.W], "W(0,1) is missing"),
        (lambda ops: [*ops, ops[0]], "F(0,0) is there 2 times"),
        (lambda ops: [*ops, Op(Kind.BW, 0, 0, 20, 23)], "BW(0,0) is there beside B or W"),
        (lambda ops: [*ops, Op(Kind.C, 0, 0, 20, 21)], "C(0,0) and O(0,0) are both there"),
        (lambda ops: [*ops, Op(Kind.C, 0, 1, 20, 21)], "stage 0 cannot be recomputed"),
    ],
)
def test_each_damage_is_named(edit: Callable[[list[Op]], list[Op]], words: str) -> None:
    assert any(words in line for line in changed(example(), edit)), changed(example(), edit)


def test_wrong_makespan_and_bound_are_named() -> None:
    plan = example()
    assert any("makespan_ms says" in line for line in verify_plan(dataclasses.replace(plan, makespan_ms=3.0)))
    assert any("lower_bound_ms says" in line for line in verify_plan(dataclasses.replace(plan, lower_bound_ms=50.0)))


def test_a_transfer_without_a_channel_is_named() -> None:
    plan = example()
    bare = plan.problem.changed(channels=())
    assert any("no channel carries d2h of device 0" in line for line in verify(bare, plan.ops))


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_any_op_moved_earlier_breaks_a_tight_schedule(seed: int) -> None:
    """In a schedule with earliest times no op can start earlier: something it waits for is always in the way."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    problem = fitted(problem, ops)
    ops = timing.earliest(problem, ops)
    index = rng.randrange(len(ops))
    if ops.end[index] - ops.start[index] < 0.01:
        return
    by = max(0.01 * ops.end.max(), 0.3 * (ops.end[index] - ops.start[index]))
    start, end = ops.start.copy(), ops.end.copy()
    start[index] -= by
    end[index] -= by
    moved = ops.at(start, end)
    # Waits for memory may allow it where another order fits too; then memory is still respected.
    waited_for_memory = index in {int(i) for i in _memory_waiters(problem, ops)}
    assert verify(problem, moved) or waited_for_memory


def _memory_waiters(problem: Problem, ops: Ops) -> np.ndarray:
    from optpipe import semantics

    return semantics.memory_waits(problem, ops).after


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_one_byte_less_is_over_budget(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    peaks = memory.peaks(problem, ops)
    device = rng.randrange(problem.num_devices)
    budgets: list[int | None] = list(peaks)
    budgets[device] = peaks[device] - 1
    found = verify(problem.with_budgets(budgets), ops)
    assert found
    assert all(line.startswith(f"device {device} holds") for line in found)
