"""Checkpoints: a folder with one file a stage, whole or not there at all.

The files are torch's, holding plain state dicts that ``weights_only`` loading takes. Names count layers along the
whole model (``3.mlp_in.weight``), so that another cut into stages can read them.
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
from runtime import gather

FORMAT, VERSION = "optpipe-checkpoint", 1
_FACTS = "checkpoint.json"


def save(folder: str | Path, stages: Mapping[int, nn.Module], facts: dict[str, Any]) -> None:
    """Write a checkpoint; every rank calls it with its own stages. An older one there is replaced.

    Parameters
    ----------
    folder
        Where it goes, on a file system that all ranks share.
    stages
        This rank's stages by number.
    facts
        JSON that goes along, such as the step and the config.

    Raises
    ------
    InputError
        The folder cannot be written to.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial")
    chief = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if chief:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        gather.barrier()
        for number, stage in stages.items():
            state = {name: value.detach().cpu() for name, value in stage.state_dict().items()}
            torch.save(state, partial / f"stage-{number}.pt")
        gather.barrier()
        if chief:
            files.write_json(partial / _FACTS, {"format": FORMAT, "version": VERSION, **facts})
            _replace(partial, target)
        gather.barrier()
    except OSError as error:
        raise InputError(target, "", f"cannot be written: {error.strerror or error}") from None


def load(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters of the whole model by name, on the CPU, and the facts saved with them.

    Raises
    ------
    InputError
        The folder holds no checkpoint.
    """
    facts = files.read_json(Path(folder) / _FACTS)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") != VERSION:
        raise InputError(folder, "format", f"expected '{FORMAT}', version {VERSION}")
    state: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("stage-*.pt")):
        state |= torch.load(path, map_location="cpu", weights_only=True)
    return state, facts


def _replace(partial: Path, target: Path) -> None:
    """Put the new folder in the old one's place; at any moment a whole checkpoint is there under one of the names."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
