"""``optpipe train --trace``: what really ran, of all ranks, on one clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe import memory, semantics
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.trace import Trace
from runtime import tracing
from runtime.train import train
from tests.test_train import SETTINGS, config_of, plan_of

STEPS = tracing.STEPS + 2


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Trace]:
    """A plan of two ranks with offloads, and the trace of its run."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    plan = plan_of(config_of("line", train={**SETTINGS["train"], "steps": STEPS}))
    train(plan, trace=path)
    return plan, Trace.read(path, plan.problem)


def test_the_last_steps_are_there_in_order(traced):
    _, trace = traced
    assert [step.number for step in trace.steps] == list(range(STEPS - tracing.STEPS + 1, STEPS + 1))
    begins = [step.begin_ms for step in trace.steps]
    assert begins[0] == 0 and begins == sorted(begins)
    for step, following in zip(trace.steps, trace.steps[1:], strict=False):
        assert step.begin_ms + step.ops.end.max() <= following.begin_ms + following.ops.start.min()


def test_every_op_of_the_plan_ran_once_and_moved_what_it_says(traced):
    plan, trace = traced
    expected = sorted((op.kind, op.stage, op.microbatch) for op in plan.ops)
    assert Kind.O in {op.kind for op in plan.ops}
    for step in trace.steps:
        assert sorted((op.kind, op.stage, op.microbatch) for op in step.ops) == expected
        moved = semantics.moved_bytes(plan.problem, step.ops)
        assert (moved[~step.ops.is_compute] > 0).all()


def test_ranks_share_a_clock(traced):
    """No op begins before what it needs has ended, on whatever rank that was; and a device does one at a time."""
    plan, trace = traced
    for step in trace.steps:
        ops = step.ops
        edges = semantics.dependencies(plan.problem, ops)
        assert (ops.start[edges.after] >= ops.end[edges.before] - 1e-3).all()
        for lane in semantics.compute_lanes(plan.problem, ops):
            assert (ops.start[lane.ops][1:] >= ops.end[lane.ops][:-1] - 1e-3).all()
        assert (step.memory_wait_ms >= 0).all() and (step.message_wait_ms >= 0).all()
        assert (ops.start - step.message_wait_ms - step.memory_wait_ms >= -1e-3).all()


def test_memory_is_that_of_the_ledger(traced):
    plan, trace = traced
    planned = memory.peaks(plan.problem, plan.ops)
    for step in trace.steps:
        for device in range(plan.problem.num_devices):
            samples = step.memory[device]
            own = semantics.device_of(plan.problem, step.ops) == device
            assert len(samples.time) == 2 * int(own.sum())
            assert (samples.held <= samples.most).all() and not len(samples.allocated)
            assert samples.most.max() == step.peak_bytes[device] <= planned[device]
            assert samples.held[-1] == 0
            assert step.held(plan.problem, device)[1].max() == step.peak_bytes[device]


def test_of_several_runs_a_step_the_first_is_kept(tmp_path: Path):
    batch = {**SETTINGS["batch"], "accumulate": 2}
    plan = plan_of(config_of("line", batch=batch, train={**SETTINGS["train"], "steps": 1}))
    train(plan, trace=tmp_path / "run.json")
    (step,) = Trace.read(tmp_path / "run.json", plan.problem).steps
    assert sorted((op.kind, op.stage, op.microbatch) for op in step.ops) == sorted(
        (op.kind, op.stage, op.microbatch) for op in plan.ops
    )
    edges = semantics.dependencies(plan.problem, step.ops)
    assert (step.ops.start[edges.after] >= step.ops.end[edges.before] - 1e-3).all()
    for device, samples in enumerate(step.memory):
        assert len(samples.time) == 2 * int((semantics.device_of(plan.problem, step.ops) == device).sum())


def test_a_trace_goes_only_where_it_can_be_written(traced, tmp_path: Path):
    from click.testing import CliRunner

    from cli import main

    traced[0].write(tmp_path / "plan.json")
    done = CliRunner().invoke(main, ["train", "--schedule", str(tmp_path / "plan.json"), "--trace", str(tmp_path)])
    assert done.exit_code == 2
    assert "cannot be written: it is a folder" in done.stderr
