"""Within the budget when reality is above the plan; idle where the plan holds."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from optpipe import memory
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime.executor import Executor
from runtime.memory_manager import counts
from runtime.model import loss_fn
from tests.pipelines import (
    batch,
    boundaries,
    gpipe,
    gradients,
    in_processes,
    model_problem,
    one_f_one_b,
    one_process,
    plan_of_orders,
    random_plan,
    stage_module,
)

M = 8
STEPS = 3


def understated(problem: Problem, share: float) -> Problem:
    """The same problem, whose stages are said to hold less than they do."""
    names = ("activation_bytes", "weight_context_bytes", "offloadable_bytes", "checkpoint_bytes")
    stages = [
        stage.model_copy(update={name: int(share * getattr(stage, name)) for name in names}) for stage in problem.stages
    ]
    return problem.changed(stages=tuple(stages))


def with_budgets(plan: Plan, budgets: list[int]) -> Plan:
    return Plan(plan.problem.with_budgets(budgets), plan.ops)


def check(plan: Plan, rank: int = 0, **options: object) -> list[dict[str, int]]:
    """Run the plan: gradients of one process, and what the manager did in each step; peaks stay within the budget once
    sizes are known."""
    problem = plan.problem
    stages = {s: stage_module(s, problem.num_stages) for s in problem.stages_of[rank]}
    budget = problem.devices[rank].memory_bytes
    done = []
    with Executor(plan, stages, boundaries(problem.num_stages), loss_fn, **options) as executor:
        for number in range(STEPS):
            for module in stages.values():
                module.zero_grad()
            result = executor.step(*batch(problem.num_microbatches), number=number)
            done.append(counts(result.reliefs))
            if number and not done[-1]["went on"]:
                assert result.peak_bytes <= budget
            assert all(relief.short_bytes > 0 for relief in result.reliefs)
    plain = one_process(problem.num_stages, problem.num_microbatches, 0.0, STEPS - 1)
    for key, value in gradients(stages).items():
        assert torch.equal(value, plain.gradients[key]), key
    assert executor.ledger.activation_bytes == executor.pool.in_use == 0
    return done


def test_where_the_plan_holds_nothing_is_done():
    rng = random.Random(0)
    for seed in range(10):
        plan = random_plan(model_problem(1, 3, "linear", 4), seed)
        stages = {s: stage_module(s, 3) for s in range(3)}
        delay = None if seed % 2 else lambda *_: time.sleep(rng.random() * 1e-3)
        with Executor(plan, stages, boundaries(3), loss_fn, before_op=delay) as executor:
            for number in range(2):
                assert executor.step(*batch(4), number=number).reliefs == ()


@pytest.mark.parametrize("stages", [1, 2])
def test_forwards_are_put_off_or_more_is_offloaded(stages):
    """GPipe that is planned to hold all microbatches, on a device that holds half of them."""
    problem = model_problem(1, stages, microbatches=M)
    order = [(Kind.F, s, j) for j in range(M) for s in range(stages)]
    order += [(Kind.BW, s, j) for j in range(M) for s in reversed(range(stages))]
    plan = plan_of_orders(understated(problem, 0.4), [order])
    real = sum(stage.activation_bytes for stage in problem.stages)
    plan = with_budgets(plan, [max(memory.peaks(plan.problem, plan.ops)[0], 4 * real)])
    done = check(plan)
    for step in done[1:]:
        assert step["earlier"] > 0 and step["went on"] == 0


def overstated_plan() -> Plan:
    """The plan says ten times as much as is held, and its offloads and reloads are under way all the time."""
    problem = model_problem(1, 2, microbatches=M)
    order = [(Kind.F, s, j) for j in range(M) for s in range(2)]
    order += [(kind, s, j) for j in range(M) for s in (1, 0) for kind in (Kind.B, Kind.W)]
    return plan_of_orders(understated(problem, 10.0), [order], {(s, j) for s in range(2) for j in range(M)})


def test_a_plan_that_says_too_much_is_kept_to():
    rng = random.Random(1)
    done = check(overstated_plan(), before_op=lambda *_: time.sleep(rng.random() * 2e-3))
    assert not any(any(step.values()) for step in done)


def test_the_order_is_kept_where_ranks_must_keep_step():
    """As with tensor parallel layers: nothing runs earlier, and offloads do."""
    problem = model_problem(1, 2, microbatches=M)
    order = [(Kind.F, s, j) for j in range(M) for s in range(2)]
    order += [(Kind.BW, s, j) for j in range(M) for s in (1, 0)]
    plan = plan_of_orders(understated(problem, 0.4), [order])
    real = sum(stage.activation_bytes for stage in problem.stages)
    plan = with_budgets(plan, [max(memory.peaks(plan.problem, plan.ops)[0], 5 * real)])
    stages = {s: stage_module(s, 2) for s in range(2)}
    with Executor(plan, stages, boundaries(2), loss_fn, fixed_order=True) as executor:
        for number in range(2):
            result = executor.step(*batch(M), number=number)
        done = counts(result.reliefs)
        computed = [(op.kind, op.stage, op.microbatch) for op in result.ops if op.kind < Kind.O]
    assert done["offloaded"] > 0 and done["earlier"] == 0
    assert computed == order


def blocked_plan(device_orders, count):
    plan = plan_of_orders(understated(model_problem(count, microbatches=M), 0.4), device_orders)
    real = model_problem(count, microbatches=M)
    budgets = [
        max(peak, 4 * stage.activation_bytes)
        for peak, stage in zip(memory.peaks(plan.problem, plan.ops), real.stages, strict=True)
    ]
    return with_budgets(plan, budgets)


def on_ranks(rank, count):
    """GPipe: rank 0 has no gradient before the last forward, so only offloads help it; rank 1 runs its backwards."""
    found = {"gpipe": check(blocked_plan(gpipe(count, M), count), rank)}
    split = blocked_plan(one_f_one_b(count, M, split=True), count)
    found["split"] = check(split, rank)
    low = understated(model_problem(count, microbatches=M), 10.0)
    moved = {(0, 1), (1, 2), (1, 3)}
    found["overstated"] = check(plan_of_orders(low, one_f_one_b(count, M, split=True), moved), rank)
    return found


def test_ranks_do_it_each_on_their_own():
    first, second = in_processes(2, on_ranks)
    assert all(step["offloaded"] > 0 for step in first["gpipe"][1:])
    assert all(step["earlier"] > 0 for step in second["gpipe"][1:])
    assert not any(sum(step.values()) for found in (first, second) for step in found["overstated"])
    assert all(step["went on"] == 0 for found in (first, second) for step in found["gpipe"][1:])


def test_an_offload_under_way_is_waited_for():
    """Planned offloads that are slow, and nothing else that would free memory: the next forward waits for them."""
    problem = model_problem(1, 2, microbatches=M)
    order = [(Kind.F, 0, j) for j in range(M)]
    order += [(kind, s, j) for j in range(M) for kind, s in ((Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0))]
    plan = plan_of_orders(understated(problem, 0.4), [order], {(0, j) for j in range(M)})
    budget = max(int(1.9 * problem.stages[0].activation_bytes), memory.peaks(plan.problem, plan.ops)[0])
    done = check(with_budgets(plan, [budget]), before_op=lambda kind, *_: time.sleep(0.01 * (kind == Kind.O)))
    assert all(step["waited"] > 0 for step in done[1:])


def test_what_cannot_be_helped_goes_on_and_is_told():
    problem = understated(model_problem(1, microbatches=2), 0.1)
    plan = plan_of_orders(problem, [[(Kind.F, 0, 0), (Kind.BW, 0, 0), (Kind.F, 0, 1), (Kind.BW, 0, 1)]])
    done = check(plan)
    assert done[0] == {"earlier": 0, "waited": 0, "offloaded": 0, "went on": 1}, "the first forward shows the sizes"
    assert all(step["went on"] == 2 for step in done[1:])


def test_the_allocator_counts_too():
    """No budget in the plan, but an allocator that has room for four microbatches."""
    problem = model_problem(1, 2, microbatches=M)
    order = [(Kind.F, s, j) for j in range(M) for s in range(2)]
    order += [(Kind.BW, s, j) for j in range(M) for s in (1, 0)]
    plan = plan_of_orders(problem, [order])
    plan = Plan(plan.problem.with_budgets([None]), plan.ops)
    room = 4 * sum(stage.activation_bytes for stage in problem.stages)
    stages = {s: stage_module(s, 2) for s in range(2)}
    with Executor(plan, stages, boundaries(2), loss_fn) as executor:
        free = executor.step(*batch(M))
        assert not executor.manager.watches and free.reliefs == () and free.peak_bytes > room
    with Executor(plan, stages, boundaries(2), loss_fn) as executor:
        executor.manager._headroom = lambda: room - executor.ledger.activation_bytes
        held = executor.step(*batch(M))
    assert held.peak_bytes <= room and held.reliefs and math.isclose(held.loss, free.loss, rel_tol=1e-6)
