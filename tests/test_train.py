"""Training under a plan is the training of one process, and it reports what happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from optpipe.config import Config
from optpipe.errors import InputError, RunFailed
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from runtime import checkpoint, data, launch, optimizer, stages
from runtime.metrics_log import MetricsLog, Step
from runtime.model import build_layers, loss_fn
from runtime.train import settings_of, train
from runtime.trainer import VALIDATION_BATCHES
from runtime.trial import Trial

STEPS = 5
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "device": "cpu",
    "model": {"layers": 2, "width": 32, "heads": 2, "context": 16},
    "data": {"max_bytes": 200_000},
    "batch": {"microbatches": 4, "microbatch_size": 2},
    # A norm this small clips every step, a rate this large moves every parameter.
    "optimizer": {"learning_rate": 0.01, "clip_norm": 0.1, "warmup_steps": 2},
    "train": {"steps": STEPS, "seed": 3},
}
PIPELINES = {
    "alone": {"devices": 1, "partition": [4]},
    "line": {"devices": 2, "partition": [2, 2]},
    "v": {"devices": 2, "stages_per_device": 2, "placement": "v", "partition": [1, 1, 1, 1]},
}


def config_of(pipeline: str, **changes: Any) -> Config:
    return Config.from_json({**SETTINGS, "pipeline": PIPELINES[pipeline], **changes}, "some.yaml")


def plan_of(config: Config, *, split: bool = True, offload: bool = True, held: int = 1 << 20) -> Plan:
    """1F1B with every second microbatch offloaded, in a problem whose bytes are larger than the model's."""
    trial = Trial(config.pipeline.stage_devices, config.batch.microbatches, split=split, offload=offload).plan()
    sizes = {"activation_bytes": held, "weight_context_bytes": held, "offloadable_bytes": held if offload else 0}
    value = trial.problem.to_json()
    value["stages"] = [{**stage, **sizes} for stage in value["stages"]]
    problem = Problem.model_validate(value)
    return Plan(problem, earliest(problem, trial.ops), solver={"method": "1f1b"}, training=config.training())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: torch.Tensor, config: Config) -> float:
    batches = [data.batch(text, config.train.seed, n, data.batch_shape(config)) for n in range(VALIDATION_BATCHES)]
    return fmean(float(loss_fn(model(x), y)) for batch in batches for x, y in zip(*batch, strict=True))


def one_process(config: Config) -> tuple[list[float], list[float], dict[str, torch.Tensor], list[float]]:
    """The same training without a pipeline: losses, norms before clipping, parameters, and losses on held-out text."""
    model = nn.Sequential(*build_layers(stages.gpt_config(config), config.train.seed))
    if config.gpt.tied:
        assert torch.equal(model[-1].out.weight, model[0].token.weight)
        model[-1].out.weight = model[0].token.weight
    adamw = optimizer.adamw([model], config.optimizer)
    corpus = data.Corpus.load(config.data, config.gpt.context)
    losses, norms, held_out = [], [], []
    for step in range(config.train.steps):
        tokens, targets = data.batch(corpus.train, config.train.seed, step, data.batch_shape(config))
        total = 0.0
        for x, y in zip(tokens, targets, strict=True):
            loss = loss_fn(model(x), y) / len(tokens)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1e9)))
        for group in adamw.param_groups:
            group["lr"] = optimizer.learning_rate(config.optimizer, step)
        adamw.step()
        adamw.zero_grad()
        if (step + 1) % 2 == 0:
            held_out.append(held_out_loss(model, corpus.validation, config))
    return losses, norms, model.state_dict(), held_out


@pytest.mark.parametrize(("pipeline", "split", "offload"), [("line", True, True), ("v", False, True)])
def test_training_is_that_of_one_process(pipeline: str, split: bool, offload: bool, tmp_path: Path) -> None:
    files = {"checkpoint": str(tmp_path / "weights"), "metrics": str(tmp_path / "metrics.jsonl")}
    config = config_of(pipeline, train={**SETTINGS["train"], **files, "validate_every": 2})
    heard: list[Step] = []
    plan = plan_of(config, split=split, offload=offload)
    summary = train(plan, on_step=heard.append)

    losses, norms, parameters, held_out = one_process(config)
    assert [step.step for step in heard] == list(range(1, STEPS + 1))
    # The norm is summed in another order, and clipping hands that on to everything: float32 tolerance.
    assert [step.loss for step in heard] == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in heard] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.1
    told = [step.validation_loss for step in heard]
    assert told[0::2] == [None] * 3 and told[1::2] == pytest.approx(held_out, rel=1e-5)
    assert summary.validation_loss == told[3]
    state, facts = checkpoint.load(tmp_path / "weights")
    assert state.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    assert facts["step"] == STEPS and facts["training"] == config.training()

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [step.to_json() for step in heard]
    assert summary.steps == STEPS and summary.first_loss == heard[0].loss
    assert summary.within_plan and min(summary.measured_peak_bytes) > 0
    assert min(summary.host_peak_bytes) > 0, "every device offloads something"
    assert all(step.pipeline_ms <= step.step_ms and 0 <= step.bubble_ratio < 1 for step in heard)
    assert json.loads(json.dumps(summary.to_json()))["within_plan"] is True


def test_a_run_above_its_plans_bytes_is_seen() -> None:
    plan = plan_of(config_of("line"), held=1000)
    summary = train(plan, steps=1)
    assert not summary.within_plan
    assert summary.steps == 1, "steps may be set for one run"
    assert summary.reliefs is None, "no budget, nothing to keep"
    tight = Plan(plan.problem.with_budgets([10_000, 10_000]), plan.ops, solver=plan.solver, training=plan.training)
    heard: list[Step] = []
    summary = train(tight, steps=2, on_step=heard.append)
    assert summary.reliefs is not None and summary.reliefs["went on"] > 0
    assert all(step.reliefs and "above plan" in step.line(2, summary.planned_peak_bytes) for step in heard)


def test_a_rank_that_is_killed_is_the_cause() -> None:
    config = config_of("line", train={"steps": 10_000})
    with pytest.raises(RunFailed) as caught:
        train(plan_of(config), on_step=lambda step: kill_last_rank() if step.step == 2 else None)
    assert str(caught.value) == "rank 1 was killed by SIGKILL (out of memory?)"


def test_a_killed_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    """From the last checkpoint, cut into other stages, with the numbers of one process that was never stopped."""
    weights, log = tmp_path / "weights", tmp_path / "metrics.jsonl"
    files = {"checkpoint": str(weights), "checkpoint_every": 2, "metrics": str(log)}
    # The ranks go on until the kill arrives.
    first = config_of("line", train={**SETTINGS["train"], **files, "steps": 1000})
    with pytest.raises(RunFailed, match="SIGKILL"):
        train(plan_of(first), on_step=lambda step: kill_last_rank() if step.step == 3 else None)
    reached = checkpoint.find(weights)[1]["step"]
    assert reached >= 2 and reached % 2 == 0

    steps = reached + 3
    second = config_of("v", train={**SETTINGS["train"], **files, "steps": steps, "resume": str(weights)})
    heard: list[Step] = []
    summary = train(plan_of(second, split=False), on_step=heard.append)
    losses, norms, parameters, _ = one_process(second)
    assert [step.step for step in heard] == list(range(reached + 1, steps + 1))
    # float32, summed in another order, and clipped.
    assert [step.loss for step in heard] == pytest.approx(losses[reached:], rel=1e-4)
    assert [step.grad_norm for step in heard] == pytest.approx(norms[reached:], rel=1e-4)
    state, facts = checkpoint.load(weights)
    assert facts["step"] == steps and summary.steps == 3
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, steps + 1))

    with pytest.raises(InputError, match=rf"^train.steps: is {steps}, but .* is at step {steps} already"):
        train(plan_of(second))
    wider = config_of("line", model={**SETTINGS["model"], "width": 48})
    with pytest.raises(InputError, match="is of a model whose width is 32, but the config's is 48"):
        train(plan_of(wider), resume=weights)


def kill_last_rank() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ranks = [pid for pid in children if b"runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(ranks[-1]), signal.SIGKILL)


def test_only_every_nth_step_is_told_and_the_ends() -> None:
    """And the two ranks make up one device."""
    config = config_of("alone", train={"steps": 7, "log_every": 3, "tensor_parallel": 2})
    heard: list[int] = []
    train(plan_of(config, offload=False), on_step=lambda step: heard.append(step.step))
    assert heard == [1, 3, 6, 7]


def test_a_plan_without_training_part_needs_a_config() -> None:
    config = config_of("line")
    plan = plan_of(config)
    plan.training = None
    with pytest.raises(InputError, match=r"^plan.json: training: is missing"):
        settings_of(plan, None, "plan.json")
    assert settings_of(plan, config) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": {"microbatches": 5}}, "batch.microbatches: is 5, but the plan has 4"),
        ({"pipeline": {"devices": 3, "partition": [2, 1, 1]}}, "pipeline: does not place the stages as the plan does"),
        ({"model": {**SETTINGS["model"], "layers": 3}, "pipeline": {"devices": 2}}, "model.layers: makes 5 layers"),
    ],
)
def test_a_config_that_does_not_fit_the_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    other = Config.from_json({**SETTINGS, "pipeline": PIPELINES["line"], **changes}, "other.yaml")
    with pytest.raises(InputError, match=f"^other.yaml: {message}"):
        settings_of(plan_of(config_of("line")), other)


def test_as_many_ranks_are_started_as_the_config_has(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start(work: object, arguments: object, ranks: int, *_: object) -> None:
        started.append(ranks)
        raise RunFailed("enough")

    monkeypatch.setattr(launch, "launch", start)
    around = {"train": {**SETTINGS["train"], "replicas": 3, "shards": 2, "tensor_parallel": 2}}
    with pytest.raises(RunFailed, match="enough"):
        train(plan_of(config_of("line", **around)))
    assert started == [2 * 3 * 2 * 2]


def test_what_a_config_puts_around_a_plan_has_to_fit_it() -> None:
    plan = plan_of(config_of("line"))
    more = Config.from_json({"train": {"shards": 2, "replicas": 2}}, "more.yaml")
    assert settings_of(plan, more).num_ranks == 8, "bytes and times of the plan stay what they are"
    shared = Config.from_json({"train": {"tensor_parallel": 2}}, "more.yaml")
    with pytest.raises(InputError, match=r"^more.yaml: train.tensor_parallel: is 2, but the plan's .* are of 1"):
        settings_of(plan, shared)
    assert plan.training is not None
    plan.training["train"]["tensor_parallel"] = 2
    narrow = Config.from_json({"model": {**SETTINGS["model"], "heads": 1}}, "more.yaml")
    with pytest.raises(InputError, match=r"^more.yaml: train.tensor_parallel: 2 does not divide model.heads"):
        settings_of(plan, narrow)


def test_a_balanced_config_takes_the_plans_partition() -> None:
    plan = plan_of(config_of("line"))
    other = Config.from_json({**SETTINGS, "pipeline": {"devices": 2}}, "other.yaml")
    assert settings_of(plan, other).pipeline.partition == (2, 2)
    plan.training = None
    with pytest.raises(InputError, match="partition: is not settled"):
        settings_of(plan, other)


def test_sections_that_a_config_leaves_out_are_the_plans() -> None:
    settings = settings_of(plan_of(config_of("line")), Config.from_json({"train": {"steps": 9}}, "more.yaml"))
    assert settings.train.steps == 9
    assert settings.model == config_of("line").model and settings.optimizer.clip_norm == 0.1


def test_a_broken_training_part_is_one_line() -> None:
    plan = plan_of(config_of("line"))
    plan.training = {**(plan.training or {}), "modle": 3}
    with pytest.raises(InputError, match=r"^plan.json: training.modle: unknown key"):
        settings_of(plan, None, "plan.json")


def test_an_invalid_plan_is_not_run() -> None:
    plan = plan_of(config_of("line"))
    plan.ops = plan.ops.take(plan.ops.kind != Kind.W)
    with pytest.raises(InputError, match=r"^plan.json: is not a valid plan: .*W"):
        train(plan, file="plan.json")


def test_a_loss_that_explodes_ends_the_run() -> None:
    config = config_of(
        "line", optimizer={"learning_rate": 1e30, "warmup_steps": 0, "clip_norm": None, "weight_decay": 0}
    )
    with pytest.raises(RunFailed, match=r"the loss is .* in step \d: try a lower optimizer.learning_rate"):
        train(plan_of(config))


def test_a_metrics_file_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        with monkeypatch.context() as patch:
            patch.setattr(log, "_stream", Full())
            with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
                log.write({"step": 1})
        log.write({"step": 1})
