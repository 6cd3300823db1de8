"""Checkpoints: what a run needs to go on, in a folder that is whole or not there.

    weights/                    the run's folder: it holds the checkpoint written last
      step-00000200/
        checkpoint.json         step, and the config's training part
        stage-0.pt              {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, ...}}}
        stage-1.pt

A checkpoint is written beside the one before under a hidden name, renamed once it is whole, and only then the one
before is removed. The files are torch's, and ``weights_only`` loading takes them. Names count layers along the whole
model (``3.mlp_in.weight``), so that a run with another cut into stages can go on from them.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe import files
from optpipe.errors import InputError
from runtime import gather

FORMAT, VERSION = "optpipe-checkpoint", 1
_FACTS = "checkpoint.json"

State = dict[str, Any]


def save(
    folder: str | Path,
    stages: Mapping[int, nn.Module],
    facts: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write a checkpoint; every rank calls it with its own stages. It takes the place of those in the folder.

    Parameters
    ----------
    folder
        The run's folder, on a file system that all ranks share.
    stages
        This rank's stages by number.
    facts
        JSON that goes along; ``step`` must be in it.
    optimizer
        Of the parameters of these stages; None: weights only.

    Raises
    ------
    InputError
        The folder cannot be written to.
    """
    target = Path(folder)
    partial = target / f".step-{facts['step']:08d}.partial"
    chief = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if chief:
            for left in target.glob(".step-*.partial"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        gather.barrier()
        for number, stage in stages.items():
            _write(partial / f"stage-{number}.pt", _state(stage, optimizer))
        gather.barrier()
        if chief:
            before = _checkpoints(target)
            number = 1 + max((found["number"] for found in before.values()), default=0)
            known = {"format": FORMAT, "version": VERSION, "number": number}
            files.write_json(partial / _FACTS, {**facts, **known})
            partial.rename(_free_name(target, facts["step"]))
            for path in before:
                shutil.rmtree(path)
        gather.barrier()
    except OSError as error:
        raise InputError(target, "", f"cannot be written: {error.strerror or error}") from None


def find(folder: str | Path) -> tuple[Path, State]:
    """The checkpoint in a run's folder, or the one that the folder itself is: its path and its facts.

    Raises
    ------
    InputError
        There is none, or it is of another format.
    """
    path = Path(folder)
    if (path / _FACTS).exists():
        facts = files.read_json(path / _FACTS)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") != VERSION:
            raise InputError(path / _FACTS, "format", f"expected '{FORMAT}', version {VERSION}")
        return path, facts
    found = _checkpoints(path)
    if not found:
        raise InputError(folder, "", "holds no checkpoint, expected a folder that train.checkpoint wrote")
    # More than one only where a run was killed between two last touches: both are whole.
    newest = max(found, key=lambda path: found[path]["number"])
    return newest, found[newest]


def load(folder: str | Path) -> tuple[dict[str, Tensor], State]:
    """The parameters and buffers of the whole model by name, on the CPU, and the facts saved with them.

    Raises
    ------
    InputError
        The folder holds no checkpoint, or a damaged one.
    """
    path, facts = find(folder)
    return {name: value for part in _parts(path) for name, value in part["model"].items()}, facts


@torch.no_grad()
def restore(
    folder: str | Path, stages: Mapping[int, nn.Module], optimizer: torch.optim.Optimizer | None = None
) -> State:
    """Put a checkpoint's values into this rank's stages and their optimiser; the facts saved with them.

    The run that wrote it may have had another plan, another number of ranks and another cut into stages.

    Raises
    ------
    InputError
        The folder holds no checkpoint, a damaged one, or one of another model.
    """
    path, facts = find(folder)
    wanted = {name: value for stage in stages.values() for name, value in stage.state_dict().items()}
    missing = set(wanted)
    # Mapped, not read: of each file only what belongs to this rank is touched.
    for part in _parts(path):
        for name, value in part["model"].items():
            if name not in wanted:
                continue
            if value.shape != wanted[name].shape:
                shapes = tuple(value.shape), tuple(wanted[name].shape)
                raise InputError(path, name, f"has shape {shapes[0]}, expected {shapes[1]}: it is of another model")
            wanted[name].copy_(value)
            missing.discard(name)
        if optimizer is not None:
            _restore_optimizer(part["optimizer"], _names(stages), optimizer)
    if missing:
        raise InputError(path, min(missing), "is missing: it is of another model")
    return facts


def _restore_optimizer(states: State, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for name in states.keys() & parameters.keys():
        device = parameters[name].device
        # A scalar, such as the count of steps, stays on the host.
        optimizer.state[parameters[name]] = {
            key: value.clone() if value.dim() == 0 else value.to(device, copy=True)
            for key, value in states[name].items()
        }


def _names(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}


def _state(stage: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    moments = {} if optimizer is None else optimizer.state
    return {
        "model": {name: value.detach().cpu() for name, value in stage.state_dict().items()},
        "optimizer": {
            name: {key: value.detach().cpu() for key, value in moments[parameter].items()}
            for name, parameter in stage.named_parameters()
            if parameter in moments
        },
    }


def _write(path: Path, state: State) -> None:
    with open(path, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())  # a rename must not come before what it names


def _parts(path: Path) -> Iterator[State]:
    for file in sorted(path.glob("stage-*.pt")):
        try:
            part = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            assert isinstance(part["model"], dict) and isinstance(part["optimizer"], dict)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AssertionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(file, "", f"is damaged: {reason}") from None
        yield part


def _checkpoints(folder: Path) -> dict[Path, State]:
    """Whole checkpoints in a run's folder, with their facts."""
    found = {path.parent: files.read_json(path) for path in folder.glob(f"step-*/{_FACTS}")}
    return {path: facts for path, facts in found.items() if isinstance(facts, dict) and facts.get("format") == FORMAT}


def _free_name(folder: Path, step: int) -> Path:
    """``step-00000200``; where an older checkpoint has that name, another one, so that it stays until this is there."""
    path, n = folder / f"step-{step:08d}", 1
    while path.exists():
        n += 1
        path = folder / f"step-{step:08d}-{n}"
    return path
