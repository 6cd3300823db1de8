"""Checkpoints are whole or not there, name layers along the model, and load without running code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from optpipe.errors import InputError
from runtime import checkpoint
from runtime.model import Block, GPTConfig
from runtime.stored import _make_up


def stage(first: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential()
    module.add_module(str(first), nn.Linear(2, 2))
    module.add_module(str(first + 1), nn.LayerNorm(2))
    return module


@pytest.mark.parametrize("spread", [False, True])
def test_what_was_saved_comes_back_by_layer(tmp_path: Path, spread: bool) -> None:
    stages = {0: stage(0, 1), 1: stage(2, 2)}
    checkpoint.save(tmp_path / "run", stages, {"step": 7}, spread=spread)
    state, facts = checkpoint.load(tmp_path / "run")
    assert facts["step"] == 7
    assert {name.split(".")[0] for name in state} == {"0", "1", "2", "3"}
    whole = nn.Sequential(*stages[0], *stages[1])
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value)


def test_a_new_one_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    for step in (5, 2, 2):  # a lower step: of a run that began anew
        checkpoint.save(tmp_path / "run", {0: stage(0, step)}, {"step": step})
        path, facts = checkpoint.find(tmp_path / "run")
        assert facts["step"] == step
        assert [path] == list((tmp_path / "run").iterdir())
        assert sorted(file.name for file in path.iterdir()) == ["checkpoint.json", "stage-0.pt"]
        assert checkpoint.find(path) == (path, facts), "a checkpoint itself may be named too"


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("killed_at", ["rmtree", "rename", "write_json", "fsync"])
def test_a_save_that_is_killed_at_any_point_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, spread: bool
) -> None:
    checkpoint.save(tmp_path, {0: stage(0, 1)}, {"step": 1}, spread=spread)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        owner = {"rmtree": checkpoint.shutil, "rename": Path, "write_json": checkpoint.files, "fsync": os}[killed_at]
        patch.setattr(owner, killed_at, die)
        checkpoint.save(tmp_path, {0: stage(0, 2)}, {"step": 2}, spread=spread)
    state, facts = checkpoint.load(tmp_path)
    assert facts["step"] == (2 if killed_at == "rmtree" else 1)
    assert torch.equal(state["0.weight"], stage(0, facts["step"]).state_dict()["0.weight"])
    checkpoint.save(tmp_path, {0: stage(0, 3)}, {"step": 3}, spread=spread)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("spread", [False, True])
def test_weights_and_optimiser_come_back_under_another_cut(tmp_path: Path, spread: bool) -> None:
    def optimiser(stages: dict[int, nn.Sequential]) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for module in stages.values() for p in module.parameters()], lr=0.1)

    def step(stages: dict[int, nn.Sequential], adamw: torch.optim.AdamW) -> None:
        x = torch.ones(1, 2)
        for number in sorted(stages):
            x = stages[number](x)
        x.square().sum().backward()
        adamw.step()
        adamw.zero_grad()

    stages = {0: stage(0, 1), 1: stage(2, 2)}
    adamw = optimiser(stages)
    step(stages, adamw)
    checkpoint.save(tmp_path, stages, {"step": 1}, adamw, spread=spread)
    whole = {0: nn.Sequential()}
    for first in (0, 2):
        for name, layer in stage(first, 9).named_children():
            whole[0].add_module(name, layer)
    again = optimiser(whole)
    assert checkpoint.restore(tmp_path, whole, again)["step"] == 1
    for _ in range(2):
        step(stages, adamw)
        step(whole, again)
    expected = {name: value for module in stages.values() for name, value in module.state_dict().items()}
    assert expected.keys() == whole[0].state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in whole[0].state_dict().items())


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {0: stage(0, 1)}, {"step": 1})
    with pytest.raises(InputError, match=r"2\.bias: is missing: it is of another model"):
        checkpoint.restore(tmp_path, {0: stage(0, 1), 1: stage(2, 1)})
    other = nn.Sequential()
    other.add_module("0", nn.Linear(3, 2))
    with pytest.raises(InputError, match=r"0\.weight: has shape \(2, 2\), expected \(2, 3\)"):
        checkpoint.restore(tmp_path, {0: other})
    file = checkpoint.find(tmp_path)[0] / "stage-0.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"stage-0\.pt: is damaged"):
        checkpoint.load(tmp_path)
    for value in ({"model": print}, {"model": {"0.weight": 3}, "optimizer": {}}):
        torch.save(value, file)
        with pytest.raises(InputError, match=r"stage-0\.pt: is damaged"):
            checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("version", 3, "format: expected 'optpipe-checkpoint', version 1 or 2"),
        ("step", "9", "step: expected a whole number, not '9'"),
        ("step", -1, "step: expected a whole number, not -1"),
        ("number", None, "number: expected a whole number, not None"),
        ("training", [1], r"training: expected a mapping, not \[1\]"),
        ("training", [], r"training: expected a mapping, not \[\]"),
        ("training", None, "training: expected a mapping, not None"),
        ("training", {"model": 0}, "model: expected a mapping, not 0"),
        ("training", {"model": 5}, "model: expected a mapping, not 5"),
    ],
)
def test_facts_that_are_wrong_are_one_line_wherever_they_are_read_from(
    tmp_path: Path, key: str, value: object, text: str
) -> None:
    checkpoint.save(tmp_path, {0: stage(0, 1)}, {"step": 1})
    path = checkpoint.find(tmp_path)[0]
    facts = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**facts, key: value}))
    for folder in (tmp_path, path):
        with pytest.raises(InputError, match=rf"checkpoint\.json: .*{text}"):
            checkpoint.restore(folder, {0: stage(0, 1)})
    checkpoint.save(tmp_path, {0: stage(0, 1)}, {"step": 2})
    assert checkpoint.find(tmp_path)[1]["step"] == 2, "a new one takes its place all the same"


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2)), ((0, 3), (4, 0))], True),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),
        ([((0, 0), (2, 3)), ((3, 0), (2, 3))], False),
        ([((0, 0), (2, 3))], False),
        ([((0,), (12,))], False),
        ([((0, 0), (2, 3)), ((-2, 0), (2, 3))], False),
    ],
)
def test_chunks_make_up_a_tensor_or_they_do_not(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: bool
) -> None:
    assert _make_up([(torch.Size(low), torch.Size(size)) for low, size in boxes], torch.Size((4, 3))) == whole


def test_a_single_number_is_made_up_by_one_chunk() -> None:
    one = (torch.Size(()), torch.Size(()))
    assert _make_up([one], torch.Size(())) and not _make_up([one, one], torch.Size(()))


class Runs:
    """What a pickle runs as it is read."""

    def __reduce__(self):
        return print, ("this must not be run",)


def test_parts_that_are_damaged_are_one_line_and_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def saved() -> Path:
        checkpoint.save(tmp_path, {0: stage(0, 1)}, {"step": 1}, spread=True)
        return checkpoint.find(tmp_path)[0]

    for value in (Runs(), [], {"tensors": []}, [1, 2, 3, 4], [torch.zeros(1)] * 9):
        file = saved() / "part-0.pt"
        torch.save(value, file)
        with pytest.raises(InputError, match=r"part-0\.pt: is damaged"):
            checkpoint.load(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=r"part-0\.pt: is damaged"):
        checkpoint.load(tmp_path)
    index = saved() / "index.json"
    whole = index.read_text()
    half = whole.replace('"size": [', '"size": [2, ')
    for damaged in ("{}", half, whole.replace('"float32"', '"load"'), whole.replace('"place"', '"spot"'), "[3]"):
        index.write_text(damaged)
        with pytest.raises(InputError, match=r"index\.json: is damaged"):
            checkpoint.load(tmp_path)
    assert "run" not in capsys.readouterr().out


def test_attention_of_the_first_version_comes_in_the_order_of_now(tmp_path: Path) -> None:
    """There all queries came first, then all keys, then all values."""
    heads, width = 2, 6
    layer = Block(GPTConfig(layers=1, width=width, heads=heads, context=4))
    module, adamw = nn.Sequential(layer), torch.optim.AdamW(layer.parameters())
    module(torch.randn(2, 4, width)).sum().backward()
    adamw.step()
    checkpoint.save(tmp_path, {0: module}, {"step": 1, "training": {"model": {"heads": heads}}}, adamw)
    path, facts = checkpoint.find(tmp_path)
    before = torch.load(path / "stage-0.pt", weights_only=True)

    def apart(rows: torch.Tensor) -> torch.Tensor:
        each = [rows[3 * h * 3 : 3 * (h + 1) * 3].chunk(3) for h in range(heads)]
        return torch.cat([each[h][part] for part in range(3) for h in range(heads)])

    for name in ("0.query_key_value.weight", "0.query_key_value.bias"):
        before["model"][name] = apart(before["model"][name])
        for moment in ("exp_avg", "exp_avg_sq"):
            before["optimizer"][name][moment] = apart(before["optimizer"][name][moment])
    torch.save(before, path / "stage-0.pt")
    (path / "checkpoint.json").write_text(json.dumps({**facts, "version": 1}))
    again = nn.Sequential(Block(GPTConfig(layers=1, width=width, heads=heads, context=4)))
    optimizer = torch.optim.AdamW(again.parameters())
    checkpoint.restore(tmp_path, {0: again}, optimizer)
    for (name, value), one, other in zip(
        again.named_parameters(), adamw.state.values(), optimizer.state.values(), strict=True
    ):
        assert torch.equal(value, module.get_parameter(name)), name
        assert all(torch.equal(one[key], other[key]) for key in one), name


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "run", {0: stage(0, 1)}, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="run: cannot be written: No space left on device"):
        checkpoint.save(tmp_path / "run", {0: stage(0, 2)}, {"step": 2})
    with pytest.raises(InputError, match="run: cannot be written: No space left on device"):
        checkpoint.save(tmp_path / "run", {0: stage(0, 2)}, {"step": 2}, spread=True)
    assert checkpoint.load(tmp_path / "run")[1]["step"] == 1
    assert not list((tmp_path / "run").glob(".*")), "what was begun takes no place"


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no checkpoint, expected a folder that train\.checkpoint wrote"):
        checkpoint.load(tmp_path)
    (tmp_path / "checkpoint.json").write_text('{"format": "other"}')
    with pytest.raises(InputError, match="format: expected 'optpipe-checkpoint', version 1"):
        checkpoint.load(tmp_path)
