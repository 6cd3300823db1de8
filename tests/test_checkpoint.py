"""Checkpoints are whole or not there, name layers along the model, and load without running code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optpipe.errors import InputError
from runtime import checkpoint


def stage(first: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential()
    module.add_module(str(first), nn.Linear(2, 2))
    module.add_module(str(first + 1), nn.LayerNorm(2))
    return module


def test_what_was_saved_comes_back_by_layer(tmp_path: Path) -> None:
    stages = {0: stage(0, 1), 1: stage(2, 2)}
    checkpoint.save(tmp_path / "run", stages, {"step": 7})
    state, facts = checkpoint.load(tmp_path / "run")
    assert facts["step"] == 7
    assert {name.split(".")[0] for name in state} == {"0", "1", "2", "3"}
    whole = nn.Sequential(*stages[0], *stages[1])
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value)


def test_a_new_one_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / "run", {0: stage(0, step)}, {"step": step})
    assert checkpoint.load(tmp_path / "run")[1]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "run", {0: stage(0, 1)}, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="run: cannot be written: No space left on device"):
        checkpoint.save(tmp_path / "run", {0: stage(0, 2)}, {"step": 2})
    assert checkpoint.load(tmp_path / "run")[1]["step"] == 1


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        checkpoint.load(tmp_path)
    (tmp_path / "checkpoint.json").write_text('{"format": "other"}')
    with pytest.raises(InputError, match="format: expected 'optpipe-checkpoint', version 1"):
        checkpoint.load(tmp_path)
