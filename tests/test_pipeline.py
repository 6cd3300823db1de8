"""A plan in one's own training loop: measured, run, and the same as plain training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optpipe
from optpipe import memory
from optpipe.errors import InputError
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan
from runtime import launch
from runtime.data_parallel import Replicas
from runtime.own_model import measure
from runtime.pipeline import Pipeline, join
from solver.schedules import generate
from tests import own_training as own
from tests.pipelines import in_processes

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "llama.py"
M = 4


def measured(devices: tuple[int, ...], **options: Any) -> tuple[Problem, list[int]]:
    inputs, targets = own.batch(1, 0)
    return measure(own.layers(), own.loss_fn, inputs, targets, stage_devices=devices, microbatches=M, **options)


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one process without any of it."""
    model = nn.Sequential(*own.layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(own.STEPS):
        inputs, targets = own.batch(M, number)
        total = 0.0
        for x, y in zip(inputs.chunk(M), targets.chunk(M), strict=True):
            loss = own.loss_fn(model(x), y) / M
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def test_a_model_is_measured_stage_by_stage():
    problem, counts = measured((0, 1), bandwidth=1e9, budget_bytes=10_000, message_ms=0.2, name="mine")
    assert len(counts) == 2 and sum(counts) == 4
    assert problem.name == "mine" and problem.num_microbatches == M and problem.comm_ms == (0.2,)
    for stage in problem.stages:
        assert min(stage.forward_ms, stage.backward_ms) > 0 and stage.weight_ms >= 0
        assert stage.activation_bytes >= stage.offloadable_bytes > 0
        assert stage.offload_ms == pytest.approx(stage.offloadable_bytes / 1e9 * 1e3)
    assert problem.can_offload(0) and problem.can_offload(1)
    without, _ = measured((0, 1), counts=[1, 3])
    assert not without.channels and not without.can_offload(0)


def test_measuring_leaves_no_gradients_and_no_other_random_numbers():
    layers = own.layers()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    inputs, targets = own.batch(1, 0)
    measure(layers, own.loss_fn, inputs, targets, stage_devices=(0, 1), microbatches=M)
    assert torch.equal(torch.rand(2), expected)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


class Loss(nn.Module):
    """A loss that learns its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, targets):
        return own.loss_fn(output * self.temperature, targets)


def test_a_loss_may_learn():
    """Measuring leaves it alone; its parameters are among those to train, on the rank that has it."""
    loss, layers = Loss(), own.layers()
    inputs, targets = own.batch(1, 0)
    problem, counts = measure(layers, loss, inputs, targets, stage_devices=(0, 0), microbatches=M)
    assert loss.temperature.grad is None
    plan = Plan(problem, generate("gpipe", problem, "makespan"), extra={"partition": counts})
    with Pipeline(plan, layers, loss, inputs) as pipeline:
        trained = list(pipeline.parameters())
        assert any(parameter is loss.temperature for parameter in trained)
        assert len({id(parameter) for parameter in trained}) == len(trained)
        pipeline.step(*own.batch(M, 0))
    assert loss.temperature.grad is not None


class Wide(nn.Module):
    """Gives a view of a smaller storage."""

    def forward(self, x):
        return x.mean(1, keepdim=True).expand(-1, 256)


def handing_on_a_view(rank: int, count: int) -> tuple[int, int]:
    """The peak as measured and as planned."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), Wide(), nn.Linear(256, 256), nn.Tanh(), nn.Tanh(), nn.Tanh()]
    inputs, targets = torch.randn(8, 16), torch.randn(8, 256)
    loss = nn.functional.mse_loss
    problem, counts = measure(layers, loss, inputs, targets, stage_devices=(0, 1), microbatches=M, counts=[2, 4])
    plan = Plan(problem, generate("gpipe", problem, "makespan"), extra={"partition": counts})
    with Pipeline(plan, layers, loss, inputs) as pipeline:
        pipeline.step(inputs.repeat(M, 1), targets.repeat(M, 1))
        return pipeline.result.peak_bytes, memory.peaks(problem, plan.ops)[rank]


def test_what_is_measured_has_the_layout_of_what_is_received():
    for peak, planned in in_processes(2, handing_on_a_view):
        assert 0 < peak <= planned


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"partition: is \[1, 1\], expected 2 counts that add up to 4 layers"):
        measured((0, 1), counts=[1, 1])
    with pytest.raises(InputError, match="layers: are 4, expected at least one for each stage"):
        measured((0, 1, 0, 1, 0))


@pytest.mark.parametrize(("devices", "schedule"), [((0, 1), "zero-bubble"), ((0, 1, 1, 0), "zb-v")])
def test_training_is_that_of_one_process(devices, schedule):
    problem, counts = measured(devices, counts=None if len(devices) == 2 else [1, 1, 1, 1])
    plan = Plan(problem, generate(schedule, problem, "makespan"), extra={"partition": counts})
    heard: list[dict[str, Any]] = []
    arguments = {"plan": plan.to_json(), "partition": None if len(devices) == 2 else counts}
    launch.launch(own.train, arguments, 2, "cpu", heard.append)
    losses, state = plain()
    together: dict[str, Any] = {}
    for answer in heard:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5), "the loss is the same on every rank"
        together |= answer["state"]
    assert together.keys() == state.keys(), "names do not depend on the cut"
    for name, value in state.items():
        torch.testing.assert_close(torch.tensor(together[name]), value, rtol=1e-4, atol=1e-6)


def test_one_device_needs_no_process_group():
    problem, counts = measured((0,))
    plan = Plan(problem, generate("1f1b", problem, "makespan"), extra={"partition": counts})
    with Pipeline(plan, own.layers(), own.loss_fn, own.batch(1, 0)[0]) as pipeline:
        assert pipeline.step(*own.batch(M, 0)) == pytest.approx(plain()[0][0], rel=1e-5)
        assert pipeline.result is not None and pipeline.result.peak_bytes > 0
        with pytest.raises(InputError, match="inputs: are 3, expected a multiple of 4"):
            pipeline.step(*(part[:3] for part in own.batch(M, 0)))


def side_by_side(rank: int, count: int) -> float:
    """A replica of a pipeline on one rank, with a batch of its own; the loss."""
    problem, counts = measured((0,))
    plan = Plan(problem, generate("1f1b", problem, "makespan"), extra={"partition": counts})
    layers = own.layers()
    syncs = [Replicas({0: nn.Sequential(*layers)}, dist.group.WORLD)]
    with Pipeline(plan, layers, own.loss_fn, own.batch(1, 0)[0], ranks=[rank], syncs=syncs) as pipeline:
        return pipeline.step(*own.batch(M, rank))


def test_the_loss_of_replicas_is_that_of_the_whole_batch():
    model = nn.Sequential(*own.layers())
    inputs, targets = (torch.cat(parts) for parts in zip(own.batch(M, 0), own.batch(M, 1), strict=True))
    expected = float(own.loss_fn(model(inputs), targets).detach())
    assert in_processes(2, side_by_side) == pytest.approx([expected] * 2, rel=1e-5)


def normed() -> list[nn.Module]:
    """Layers that keep what a forward in training changes."""
    torch.manual_seed(1)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), spectral, nn.Linear(4, 4)]


def test_making_a_pipeline_changes_nothing_of_the_layers():
    problem, counts = measured((0, 0), counts=[3, 1])
    plan = Plan(problem, generate("sequential", problem, "makespan"))
    layers, x = normed(), torch.randn(5, 4)
    state = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    for _ in range(2):  # the second time they are converted already
        Pipeline(plan, layers, nn.functional.mse_loss, x, partition=counts).close()
        for layer, before in zip(layers, state, strict=True):
            assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    expected = nn.BatchNorm1d(4)
    expected(layers[0](x))
    with Pipeline(plan, layers, nn.functional.mse_loss, x, partition=counts) as pipeline:
        pipeline.step(x.repeat(M, 1), torch.randn(5 * M, 4))
    torch.testing.assert_close(layers[1].running_mean, expected.running_mean)
    assert int(layers[1].num_batches_tracked) == 1


def test_a_run_that_goes_on_draws_other_random_numbers_than_at_its_start():
    plan = Plan(problem := measured((0,))[0], generate("1f1b", problem, "makespan"))

    def losses(first_step: int, steps: int) -> list[float]:
        layers = [own.layers()[0], nn.Dropout(0.5), *own.layers()[1:]]
        example = own.batch(1, 0)[0]
        with Pipeline(plan, layers, own.loss_fn, example, partition=[5], first_step=first_step) as pipeline:
            return [pipeline.step(*own.batch(M, 0)) for _ in range(steps)]

    whole = losses(0, 3)
    assert len(set(whole)) == 3 and losses(2, 1) == whole[2:]


def test_what_does_not_fit_the_plan_is_refused():
    problem, counts = measured((0,))
    plan = Plan(problem, generate("1f1b", problem, "makespan"))
    example = own.batch(1, 0)[0]
    with pytest.raises(InputError, match="partition: is missing"):
        Pipeline(plan, own.layers(), own.loss_fn, example)
    with pytest.raises(InputError, match="expected 1 counts that add up to 4 layers"):
        Pipeline(plan, own.layers(), own.loss_fn, example, partition=[3])
    with pytest.raises(InputError, match=r"layers\[2\]: is missing"):
        layers: list[nn.Module | None] = [*own.layers()]
        layers[2] = None
        Pipeline(plan, layers, own.loss_fn, example, partition=counts, boundaries=[])


def test_join_says_that_torchrun_is_missing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK: is not set: start with torchrun"):
        join()


def test_a_llama_of_huggingface_trains_under_a_plan(tmp_path):
    """The example of the docs, on two ranks under torchrun: the losses of the whole model in one process."""
    transformers = pytest.importorskip("transformers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, *words, str(tmp_path / "plan.json")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run(str(EXAMPLE), "plan")
    plan = optpipe.load(tmp_path / "plan.json")
    assert verify_plan(plan) == [] and plan.extra["partition"]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = run(*torchrun, str(EXAMPLE), "train")
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", shown, re.M)]

    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import llama
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    model = llama.build()
    assert isinstance(model, transformers.LlamaForCausalLM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for _, (inputs, targets) in zip(range(llama.STEPS), llama.batches(), strict=False):
        total = 0.0
        for x, y in zip(inputs.chunk(llama.MICROBATCHES), targets.chunk(llama.MICROBATCHES), strict=True):
            loss = llama.loss_fn(model(x).logits, y) / llama.MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        expected.append(total)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < losses[0]
