"""Runs over a mesh of ranks train as one process does, and go on from each other's checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optpipe.config import Config
from runtime import checkpoint
from runtime.metrics_log import Step
from runtime.trainer import Trainer
from runtime.worker import Rank
from tests.pipelines import in_processes
from tests.test_train import SETTINGS, one_process, plan_of

LINE: dict[str, Any] = {"devices": 2, "partition": [2, 2]}
ALONE: dict[str, Any] = {"devices": 1, "partition": [4]}
#: Four ranks, and a batch of four microbatches: the pipeline, what is around it, microbatches of a run, runs.
MESHES: list[tuple[dict[str, Any], dict[str, int], int, int]] = [
    (ALONE, {"replicas": 4}, 1, 1),
    (LINE, {"tensor_parallel": 2}, 4, 1),
    (LINE, {"shards": 2}, 1, 2),
    (ALONE, {"replicas": 2, "shards": 2}, 1, 1),
    (ALONE, {"shards": 2, "tensor_parallel": 2}, 2, 1),
    (ALONE, {"replicas": 2, "tensor_parallel": 2}, 2, 1),
    (LINE, {"replicas": 2}, 1, 2),
]
STEPS = len(MESHES)


def config_of(number: int, folder: Path) -> Config:
    """That of one mesh: it goes on from the checkpoint of the one before, and does one step."""
    pipeline, around, microbatches, runs = MESHES[number]
    train = {"steps": STEPS, "seed": 3, "checkpoint": str(folder / str(number)), "validate_every": 2, **around}
    if number:
        train["resume"] = str(folder / str(number - 1))
    parts = {
        "pipeline": pipeline,
        "train": train,
        "batch": {"microbatches": microbatches, "microbatch_size": 2, "accumulate": runs},
        "model": {**SETTINGS["model"], "tied": True},
        "optimizer": {**SETTINGS["optimizer"], "learning_rate": 0.003},
    }
    return Config.from_json({**SETTINGS, **parts}, "some.yaml")


def on_ranks(folder: Path, rank: int, count: int) -> list[Step]:
    """One step on each mesh. The first stage's embedding is the last stage's head."""
    steps = []
    for number in range(STEPS):
        config = config_of(number, folder)
        assert config.num_ranks == count
        plan = plan_of(config)
        run = Trainer(Rank(rank, count, torch.device("cpu"), lambda message: None), config, plan)
        with contextlib.closing(run):
            assert run.first == number
            steps.append(run.step(number))
            run.save(number + 1)
            summary = run.summary()
            assert summary.within_plan and min(summary.measured_peak_bytes) > 0
            assert len(summary.measured_peak_bytes) == len(steps[-1].peak_bytes) == config.pipeline.devices
            # Four microbatches of two sequences, whatever the mesh.
            assert steps[-1].tokens_per_s == pytest.approx(4 * 2 * 16 / steps[-1].step_ms * 1e3)
    return steps


def test_meshes_train_as_one_process_and_take_over_from_each_other(tmp_path: Path) -> None:
    found = in_processes(4, partial(on_ranks, tmp_path))
    assert found[1:] == found[:-1], "every rank knows the same"
    losses, norms, parameters, held_out = one_process(config_of(0, tmp_path))
    steps = found[0]
    # float32, summed in another order, and clipped.
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-5)
    assert [step.validation_loss for step in steps[1::2]] == pytest.approx(held_out, rel=1e-5)
    state, facts = checkpoint.load(tmp_path / str(STEPS - 1))
    assert facts["step"] == STEPS and state.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    assert torch.equal(state["0.token.weight"], state["3.out.weight"])
    for number, (_, around, _, _) in enumerate(MESHES):
        path, _ = checkpoint.find(tmp_path / str(number))
        written = [file.name for file in path.glob("*.pt")]
        assert all(name.startswith("stage" if around.keys() == {"replicas"} else "part") for name in written)
        if (path / "index.json").exists():
            holds_every_number_once(path)


def holds_every_number_once(path: Path) -> None:
    """No rank writes what another one does, and nothing is left out."""
    tensors = json.loads((path / "index.json").read_text())["tensors"]
    held = 0
    for tensor in tensors.values():
        sizes = [math.prod(chunk["sizes"]) for chunk in tensor["chunks"]]
        assert sum(sizes) == math.prod(tensor["size"])
        held += sum(sizes)
    parts = [torch.load(file, weights_only=True) for file in path.glob("part-*.pt")]
    assert sum(chunk.untyped_storage().nbytes() // chunk.element_size() for part in parts for chunk in part) == held
