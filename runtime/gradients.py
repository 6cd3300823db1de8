"""What is to happen with gradients once a stage has all of them: sums over copies of a weight, means over replicas.

An executor calls these around the runs of its plan:

    begin      before a run: parameters are to be where the stages find them
    ready(s)   right after the last backward op of stage s in the last run of an optimiser's step
    finish     at the end of that run: gradients are to be whole

so what one stage starts in ``ready`` goes on while others still compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from runtime import groups as process_groups
from runtime.groups import Wanted


class GradientSync(Protocol):
    """Something that gradients go through before the optimiser sees them."""

    def begin(self) -> None:
        """Before a run of a plan."""

    def ready(self, stage: int) -> None:
        """The stage has its gradients of all microbatches."""

    def finish(self) -> None:
        """After the last run of a step."""


class Copy(NamedTuple):
    """A parameter of a stage, by its name in the stage's module."""

    stage: int
    name: str


class TiedWeights:
    """Weights that several stages share, such as an embedding and a head, when the stages are not on one rank.

    Each rank has a copy. The copies start as the first one is; a step gives all of them the sum of their gradients, so
    that an optimiser does the same to all. Stages of one rank may as well hold the very same parameter.

    All ranks of the world construct it together, each with the weights of its own pipeline.

    Parameters
    ----------
    groups
        The copies of each shared weight, the first one in front.
    stages
        This rank's stages by number.
    stage_ranks
        The global rank of each stage.

    Raises
    ------
    InputError
        A parameter does not exist, or copies differ in shape.
    """

    def __init__(
        self, groups: Sequence[Sequence[Copy]], stages: Mapping[int, nn.Module], stage_ranks: Sequence[int]
    ) -> None:
        # Per weight: this rank's copies, and the process group of its ranks (None: one rank).
        self._shared: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        self._counted_elsewhere: set[Tensor] = set()
        keys = [_wanted(copies, stage_ranks) for copies in groups]
        held = [
            list(dict.fromkeys(_parameter(stages, copy) for copy in copies if copy.stage in stages))
            for copies in groups
        ]
        made: dict[Wanted, dist.ProcessGroup] = {}
        if dist.is_initialized():
            made = process_groups.make(key for key, here in zip(keys, held, strict=True) if here and len(key.ranks) > 1)
        for copies, key, here in zip(groups, keys, held, strict=True):
            if not here or (len(key.ranks) == 1 and len(here) == 1):
                continue
            group = made.get(key)
            source = copies[0]
            owner = stage_ranks[source.stage]
            _make_equal(here, group, owner, first=_parameter(stages, source) if source.stage in stages else None)
            self._shared.append((here, group))
            self._counted_elsewhere |= set(here[1:] if source.stage in stages else here)

    def begin(self) -> None:
        pass

    def ready(self, stage: int) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        for copies, group in self._shared:
            total = _sum([copy.grad for copy in copies if copy.grad is not None])
            if group is not None:
                if total is None:
                    total = torch.zeros_like(copies[0])
                dist.all_reduce(_local(total), group=group)
            for copy in copies:
                copy.grad = total if copy is copies[0] or total is None else total.clone()

    def counts(self, parameter: Tensor) -> bool:
        """Whether a norm over all ranks is to count this rank's gradient of a parameter: of copies only the first."""
        return parameter not in self._counted_elsewhere


def _wanted(copies: Sequence[Copy], stage_ranks: Sequence[int]) -> Wanted:
    return Wanted("shared weights", tuple(sorted({stage_ranks[copy.stage] for copy in copies})))


def _parameter(stages: Mapping[int, nn.Module], copy: Copy) -> nn.Parameter:
    try:
        return stages[copy.stage].get_parameter(copy.name)
    except AttributeError:
        raise InputError("", "tied", f"stage {copy.stage} has no parameter {copy.name}") from None


@torch.no_grad()
def _make_equal(here: list[nn.Parameter], group: dist.ProcessGroup | None, owner: int, first: Tensor | None) -> None:
    value = here[0] if first is None else first
    if any(copy.shape != value.shape for copy in here):
        raise InputError("", "tied", f"copies have shapes {[tuple(copy.shape) for copy in here]}, expected one shape")
    if group is not None:
        dist.broadcast(_local(value), owner, group=group)
    for copy in here:
        if copy is not value:
            copy.copy_(value)


def _sum(gradients: list[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
