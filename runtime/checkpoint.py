"""Checkpoints: what a run needs to go on, in a folder that is whole or not there.

    weights/                    the run's folder: it holds the checkpoint written last
      step-00000200/
        checkpoint.json         step, and the config's training part
        stage-0.pt              parameters and optimiser state of a stage (see ``stored``);
        stage-1.pt              where stages are spread over ranks: part-0.pt ... and index.json

A checkpoint is written beside the one before under a hidden name, renamed once it is whole, and only then the one
before is removed. The files are torch's, and ``weights_only`` loading takes them. Names count layers along the whole
model (``3.mlp_in.weight``), so that a run with another cut into stages can go on from them, and with other shards.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe import files
from optpipe.errors import InputError
from runtime import gather, stored
from runtime.model import by_heads
from runtime.stored import State

FORMAT, VERSION = "optpipe-checkpoint", 2
#: In version 1 the rows of an attention's query_key_value were in another order.
_READABLE = 1, VERSION
_FACTS = "checkpoint.json"


def save(
    folder: str | Path,
    stages: Mapping[int, nn.Module],
    facts: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    spread: bool = False,
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
    spread
        Several ranks have parts of one stage, as DTensors: each writes its own. The same on all ranks.

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
        if spread:
            states = [stored.flat(_state(stage, optimizer)) for stage in stages.values()]
            stored.write_parts(partial, {key: value for state in states for key, value in state.items()})
        else:
            for number, stage in stages.items():
                stored.write_stage(partial, number, _on_host(_state(stage, optimizer)))
        gather.barrier()
        if chief:
            before = _checkpoints(target)
            number = 1 + max(map(_number, before.values()), default=0)
            known = {"format": FORMAT, "version": VERSION, "number": number}
            files.write_json(partial / _FACTS, {**facts, **known})
            partial.rename(_free_name(target, facts["step"]))
            for path in before:
                shutil.rmtree(path)
        gather.barrier()
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # where the disk is full, others need the place
        raise InputError(target, "", f"cannot be written: {error.strerror or error}") from None


def find(folder: str | Path) -> tuple[Path, State]:
    """The checkpoint in a run's folder, or the one that the folder itself is: its path and its facts.

    Raises
    ------
    InputError
        There is none, or it is of another format.
    """
    path = Path(folder)
    if not (path / _FACTS).exists():
        found = _checkpoints(path)
        if not found:
            raise InputError(folder, "", "holds no checkpoint, expected a folder that train.checkpoint wrote")
        # More than one only where a run was killed between two last touches: both are whole.
        path = max(found, key=lambda path: _number(found[path]))
    facts = files.read_json(path / _FACTS)
    _check_facts(facts, path / _FACTS)
    return path, facts


def _check_facts(facts: Any, file: Path) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") not in _READABLE:
        raise InputError(file, "format", f"expected '{FORMAT}', version 1 or {VERSION}")
    for key in ("step", "number"):
        if type(facts.get(key)) is not int or facts[key] < 0:
            raise InputError(file, key, f"expected a whole number, not {facts.get(key)!r:.40}")
    part = facts
    for key in ("training", "model"):
        part = part.get(key, {})
        if not isinstance(part, dict):
            raise InputError(file, key, f"expected a mapping, not {part!r:.40}")


def load(folder: str | Path) -> tuple[dict[str, Tensor], State]:
    """The parameters and buffers of the whole model by name, on the CPU, and the facts saved with them.

    Raises
    ------
    InputError
        The folder holds no checkpoint, or a damaged one.
    """
    path, facts = find(folder)
    tensors = _open(path, facts)
    target = {key: tensors.empty(key) for key in tensors.keys("model/")}
    tensors.read(target)
    return {key.removeprefix("model/"): value for key, value in target.items()}, facts


@torch.no_grad()
def restore(
    folder: str | Path, stages: Mapping[int, nn.Module], optimizer: torch.optim.Optimizer | None = None
) -> State:
    """Put a checkpoint's values into this rank's stages and their optimiser; the facts saved with them.

    The run that wrote it may have had another plan, another number of ranks and another cut into stages; and other
    shards, replicas and tensor parallel layers. Of each file only what belongs to this rank is read.

    Raises
    ------
    InputError
        The folder holds no checkpoint, a damaged one, or one of another model.
    """
    path, facts = find(folder)
    tensors = _open(path, facts)
    target = {name: value for stage in stages.values() for name, value in stage.state_dict().items()}
    for name in sorted(target):
        size, expected = tensors.size(f"model/{name}"), tuple(target[name].shape)
        if size is None:
            raise InputError(path, name, "is missing: it is of another model")
        if tuple(size) != expected:
            raise InputError(path, name, f"has shape {tuple(size)}, expected {expected}: it is of another model")
    tensors.read({f"model/{name}": value for name, value in target.items()})
    if optimizer is not None:
        _restore_optimizer(tensors, _names(stages), optimizer)
    return facts


def _open(path: Path, facts: State) -> stored.Stored:
    model = (facts.get("training") or {}).get("model")
    if facts["version"] == VERSION or not isinstance(model, dict) or "heads" not in model:
        return stored.open_(path)

    def now(key: str, tensor: Tensor) -> Tensor:
        return by_heads(tensor, model["heads"]) if ".query_key_value." in key and tensor.dim() else tensor

    return stored.open_(path, now)


def _restore_optimizer(
    tensors: stored.Stored, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    target: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for key in tensors.keys("optimizer/"):
        name, moment = key.removeprefix("optimizer/").rsplit("/", 1)
        if name in parameters:
            # The count of steps stays on the host.
            like = None if moment == "step" else parameters[name]
            states.setdefault(name, {})[moment] = target[key] = tensors.empty(key, like)
    tensors.read(target)
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def _names(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}


def _state(stage: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    moments = {} if optimizer is None else optimizer.state
    return {
        "model": {name: value.detach() for name, value in stage.state_dict().items()},
        "optimizer": {
            name: dict(moments[parameter]) for name, parameter in stage.named_parameters() if parameter in moments
        },
    }


def _on_host(state: Any) -> Any:
    """The same with all tensors in host memory."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    return {key: _on_host(value) for key, value in state.items()}


def _checkpoints(folder: Path) -> dict[Path, State]:
    """Whole checkpoints in a run's folder, with their facts."""
    found = {path.parent: files.read_json(path) for path in folder.glob(f"step-*/{_FACTS}")}
    return {path: facts for path, facts in found.items() if isinstance(facts, dict) and facts.get("format") == FORMAT}


def _number(facts: State) -> int:
    """Which of several it is; a damaged one is none that would be read."""
    number = facts.get("number")
    return number if isinstance(number, int) else 0


def _free_name(folder: Path, step: int) -> Path:
    """``step-00000200``; where an older checkpoint has that name, another one, so that it stays until this is there."""
    path, n = folder / f"step-{step:08d}", 1
    while path.exists():
        n += 1
        path = folder / f"step-{step:08d}-{n}"
    return path
