import os
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from optpipe import memory
from optpipe.errors import InputError, RunFailed
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from runtime.executor import Executor, PeerLost
from runtime.model import loss_fn
from runtime.stage import measure_bytes
from tests.odd_models import without_budgets
from tests.pipelines import (
    batch,
    boundaries,
    gpipe,
    in_processes,
    model_problem,
    one_f_one_b,
    plan_of_orders,
    planned,
    random_plan,
    run_plan,
    stage_module,
    v_order,
)
from tests.steps import TOLERANCE, M, check_run


def test_a_step_on_one_rank_equals_one_process():
    check_run("gpipe", plan_of_orders(model_problem(1), gpipe(1, M)), 0, exact=True)
    for seed in range(12):
        dropout = 0.1 * (seed % 2)
        problem = model_problem(1, 3, "linear", 4, dropout)
        check_run(f"random {seed}", random_plan(problem, seed), 0, exact=False, dropout=dropout)


def test_the_last_stage_may_take_microbatches_in_any_order():
    problem = model_problem(1, 1, "linear", 4, 0.2)
    forward, backward = [2, 0, 3, 1], [3, 1, 0, 2]
    order = [(Kind.F, 0, j) for j in forward] + [(Kind.BW, 0, j) for j in backward]
    check_run("any order", plan_of_orders(problem, [order]), 0, exact=False, dropout=0.2)
    # With the backwards in ascending order the sums are those of one process again.
    order = [(Kind.F, 0, j) for j in forward] + [(Kind.BW, 0, j) for j in range(4)]
    check_run("forwards in any order", plan_of_orders(problem, [order]), 0, exact=True, dropout=0.2)


def one_microbatch(*kinds, stages=1):
    """The plan of a single stage and microbatch that does these ops one after the other."""
    problem = model_problem(1, stages, microbatches=1)
    ops = [Op(kind, 0, 0, float(n), n + 1.0) for n, kind in enumerate(kinds)]
    return planned(problem, Ops.of(ops))


@pytest.mark.parametrize(
    "kinds",
    [
        (Kind.F, Kind.O, Kind.R, Kind.B, Kind.W),
        (Kind.F, Kind.O, Kind.R, Kind.BW),
        (Kind.F, Kind.C, Kind.BW),
        (Kind.F, Kind.C, Kind.B, Kind.W),
    ],
)
def test_what_is_offloaded_or_will_be_recomputed_holds_no_memory(kinds):
    levels = {}
    plan = one_microbatch(*kinds)

    def note(kind, stage, microbatch):
        levels[kind] = executor.ledger.activation_bytes

    module = stage_module(0, 1, 0.1)
    executor = Executor(plan, {0: module}, [], loss_fn, before_op=note)
    executor.step(*batch(1))
    executor.close()
    assert levels[Kind.R if Kind.R in kinds else Kind.C] == 0
    assert levels[kinds[-1]] > 0


def test_bytes_measured_alone_are_what_a_run_holds():
    inputs, targets = batch(1)
    found = measure_bytes(stage_module(0, 1), 0, 1, inputs[0], targets[0], loss_fn)
    plan = one_microbatch(Kind.F, Kind.B, Kind.W)
    levels = {}

    def note(kind, stage, microbatch):
        levels[kind] = executor.ledger.activation_bytes

    executor = Executor(plan, {0: stage_module(0, 1)}, [], loss_fn, before_op=note)
    result = executor.step(inputs, targets)
    executor.close()
    assert result.peak_bytes == found.activation_bytes
    assert levels[Kind.B] == found.offloadable_bytes
    assert levels[Kind.W] == found.weight_context_bytes


def test_measuring_leaves_gradients_alone():
    module = stage_module(0, 1)
    before = {}
    for name, parameter in module.named_parameters():
        parameter.grad = before[name] = torch.ones_like(parameter)
    inputs, targets = batch(1)
    measure_bytes(module, 0, 1, inputs[0], targets[0], loss_fn)
    assert all(p.grad is before[name] and bool((p.grad == 1).all()) for name, p in module.named_parameters())


@pytest.mark.parametrize("slow", [(Kind.O,), (Kind.F, Kind.BW), (Kind.O, Kind.R), (Kind.BW, Kind.R)])
def test_memory_stays_within_a_tight_plan_whatever_is_slow(slow):
    m = 6
    order = [(Kind.F, 0, j) for j in range(m)] + [(Kind.BW, 0, j) for j in range(m)]
    plan = plan_of_orders(model_problem(1, 1, "linear", m), [order], {(0, j) for j in range(m)})
    stage = plan.problem.stages[0]
    assert memory.peaks(plan.problem, plan.ops)[0] <= 3 * stage.activation_bytes

    def delay(kind, stage, microbatch):
        if kind in slow:
            time.sleep(0.01)

    check_run(f"slow {slow}", plan, 0, exact=True, before_op=delay)


def test_host_memory_is_used_again():
    m = 6
    one_by_one = [op for j in range(m) for op in ((Kind.F, 0, j), (Kind.BW, 0, j))]
    plan = plan_of_orders(model_problem(1, microbatches=m), [one_by_one], {(0, j) for j in range(m)})
    executor = Executor(plan, {0: stage_module(0, 1)}, [], loss_fn)
    results = [executor.step(*batch(m)) for _ in range(3)]
    allocated = executor.pool.allocated
    executor.close()
    moved = [op.bytes for result in results for op in result.ops if op.kind == Kind.O]
    assert len(moved) == 3 * m and len(set(moved)) == 1
    assert {result.host_peak_bytes for result in results} == {moved[0]}
    assert moved[0] <= allocated < moved[0] + 64 and executor.pool.allocations == 1
    assert executor.pool.allocated == 0, "a closed executor keeps nothing"


def test_gradients_add_up_over_steps():
    plan = plan_of_orders(model_problem(1, 2, microbatches=2), [v_order(1, 2)[0]])
    stages = {s: stage_module(s, 2) for s in range(2)}
    executor = Executor(plan, stages, boundaries(2), loss_fn)
    executor.step(*batch(2))
    once = [p.grad.clone() for module in stages.values() for p in module.parameters()]
    executor.step(*batch(2))
    executor.close()
    twice = [p.grad for module in stages.values() for p in module.parameters()]
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-6, atol=TOLERANCE)


def test_a_record_of_every_op_follows_the_plan():
    plan = random_plan(model_problem(1, 2, microbatches=4), 3, offload=1.0)
    results, _, _ = run_plan(plan, 0)
    records = {(r.kind, r.stage, r.microbatch): r for r in results[0].ops}
    assert set(records) == {op[:3] for op in plan.ops}
    lanes = [[r for r in results[0].ops if r.kind == kind] for kind in (Kind.O, Kind.R)]
    lanes.append([r for r in results[0].ops if r.kind not in (Kind.O, Kind.R)])
    for lane in lanes:
        assert all(one.end <= other.start for one, other in pairwise(lane))
    for (kind, s, j), record in records.items():
        assert 0 <= record.start <= record.end <= results[0].step_ms
        assert (record.bytes > 0) == (kind in (Kind.O, Kind.R))
        if kind == Kind.R:
            assert records[Kind.O, s, j].end <= record.start
            assert record.bytes == records[Kind.O, s, j].bytes


class Slow:
    """What gradients go through takes its time."""

    def begin(self):
        pass

    def ready(self, stage):
        pass

    def finish(self):
        time.sleep(0.5)


def test_the_time_of_a_step_ends_before_gradients_travel():
    with Executor(one_microbatch(Kind.F, Kind.BW), {0: stage_module(0, 1)}, [], loss_fn, syncs=[Slow()]) as executor:
        results = [executor.step(*batch(1)) for _ in range(2)]
    assert results[1].ops[-1].end <= results[1].step_ms < 500


def test_an_error_in_a_stage_is_told_with_its_op():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("a shape is wrong")

    executor = Executor(one_microbatch(Kind.F, Kind.BW), {0: Broken()}, [], loss_fn)
    for _ in range(2):  # and it stays the answer: the executor is of no use any more
        with pytest.raises(RunFailed, match=r"F\(0,0\): ValueError: a shape is wrong"):
            executor.step(*batch(1))
    executor.close()


@pytest.mark.parametrize("broken", [Kind.O, Kind.R])
def test_an_error_in_a_copy_lane_is_told_with_its_op(broken):
    def fail(kind, stage, microbatch):
        if kind == broken:
            raise OSError("the link is down")

    plan = one_microbatch(Kind.F, Kind.O, Kind.R, Kind.BW)
    executor = Executor(plan, {0: stage_module(0, 1)}, [], loss_fn, before_op=fail)
    with pytest.raises(RunFailed, match=rf"{broken.name}\(0,0\): OSError: the link is down"):
        executor.step(*batch(1))
    executor.close()


def test_an_output_of_another_shape_than_agreed_is_refused():
    plan = plan_of_orders(model_problem(1, 2, microbatches=2), [v_order(1, 2)[0]])
    executor = Executor(plan, {0: nn.Embedding(32, 5), 1: nn.Linear(5, 32)}, boundaries(2), loss_fn)
    with pytest.raises(RunFailed, match=r"stage 0 gave float32 \(2, 8, 5\), expected float32 \(2, 8, 16\)"):
        executor.step(*batch(2))
    executor.close()


def test_parts_that_do_not_fit_the_plan_are_refused():
    plan = plan_of_orders(model_problem(1, 2, microbatches=2), [v_order(1, 2)[0]])
    stages = {s: stage_module(s, 2) for s in range(2)}
    with pytest.raises(InputError, match=r"stages: are \[0\], expected \[0, 1\]"):
        Executor(plan, {0: stages[0]}, boundaries(2), loss_fn)
    with pytest.raises(InputError, match="boundaries: has 0 entries, expected 1"):
        Executor(plan, stages, [], loss_fn)
    with pytest.raises(InputError, match=r"ops: .*expected a valid plan"):
        Executor(Plan(plan.problem, plan.ops.take(plan.ops.kind != Kind.W)), stages, boundaries(2), loss_fn)
    executor = Executor(plan, stages, boundaries(2), loss_fn)
    inputs, targets = batch(2)
    with pytest.raises(InputError, match="inputs: has 1 microbatches, expected 2"):
        executor.step(inputs[:1], targets)
    with pytest.raises(InputError, match="targets: has microbatches of different shapes"):
        executor.step(inputs, [targets[0], targets[1][:1]])
    executor.step(inputs, targets)
    executor.close()


def lost_peer(rank, count, *, limited):
    """Rank 1 first does not come, then dies; rank 0 is told so, soon."""
    plan = plan_of_orders(model_problem(2, microbatches=2), one_f_one_b(2, 2))
    plan = plan if limited else without_budgets(plan)
    executor = Executor(plan, {rank: stage_module(rank, 2)}, boundaries(2), loss_fn, timeout_s=1.0)
    if rank == 1:
        time.sleep(3)
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=r"waited 1 s for the gradient for B\(0,0\) from rank 1"):
        executor.step(*batch(2))
    assert time.monotonic() - begin < 3
    again = Executor(plan, {rank: stage_module(rank, 2)}, boundaries(2), loss_fn, timeout_s=30.0)
    with pytest.raises(PeerLost, match="lost rank 1, waited for"):
        again.step(*batch(2))
    assert time.monotonic() - begin < 20
    return "told"


@pytest.mark.parametrize("limited", [True, False], ids=["budgets", "none"])
def test_a_peer_that_is_gone_ends_the_run(limited):
    assert in_processes(2, partial(lost_peer, limited=limited), survivors=[0]) == ["told", None]
