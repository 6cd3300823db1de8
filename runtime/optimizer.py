"""AdamW over the stages of a rank, with warm-up, and clipping by the norm of all ranks' gradients together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.config import OptimizerConfig
from runtime import gather, groups


def adamw(modules: Iterable[nn.Module], settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices and embeddings decay, biases and norms do not."""
    # Once each, though stages may share them.
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))
    groups = [
        {"params": alike, "weight_decay": decay}
        for part, decay in (
            ([p for p in parameters if p.dim() >= 2], settings.weight_decay),
            ([p for p in parameters if p.dim() < 2], 0.0),
        )
        for alike in _by_mesh(part) or [[]]
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """The rate of a step (from 0): it grows linearly over ``warmup_steps``, then stays."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def apply(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerConfig,
    step: int,
    group: dist.ProcessGroup | None = None,
    counts: Callable[[Tensor], bool] = lambda parameter: True,
) -> float | None:
    """Clip, step and clear the gradients of this rank; every rank must call it.

    Parameters
    ----------
    optimizer, settings, step
        The optimiser of this rank's stages, the config's section, and the step's number.
    group, counts
        As for ``clip``.

    Returns
    -------
    float or None
        The norm of all gradients together before clipping; None where nothing clips.
    """
    rate = learning_rate(settings, step)
    for part in optimizer.param_groups:
        part["lr"] = rate
    norm = None
    if settings.clip_norm is not None:
        norm = clip(_parameters(optimizer), settings.clip_norm, group, counts)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def clip(
    parameters: Iterable[Tensor],
    most: float,
    group: dist.ProcessGroup | None = None,
    counts: Callable[[Tensor], bool] = lambda parameter: True,
) -> float:
    """Scale gradients in place so that their norm over all ranks is at most ``most``; the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, whose sum stays on one rank. The norm has the same bits however parameters
    are spread over the ranks of a pipeline, so that clipping does not tell one partition from another.

    Parameters
    ----------
    parameters
        Of this rank; those without a gradient are left out.
    most
        The norm that is allowed.
    group
        The ranks whose gradients are different ones: those of one pipeline, where there are replicas; default all.
    counts
        Whether a parameter's gradient goes into the norm here: of copies of one weight only one may.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    squares = _squares([p.grad for p in parameters if p.grad is not None and counts(p)])
    norm = gather.exact_sum(squares, None if group is None else groups.on_host(group)) ** 0.5
    scale = most / (norm + 1e-6)
    if scale < 1.0:
        for alike in _by_mesh([p.grad for p in parameters if p.grad is not None]):
            torch._foreach_mul_(alike, scale)
    return norm


def _squares(gradients: list[Tensor]) -> list[float]:
    """Sums of squares that make the whole, of plain gradients one by one; of DTensors with those of the ranks that hold
    other parts."""
    squares: list[float] = []
    for alike in _by_mesh(gradients):
        first = alike[0]
        if isinstance(first, DTensor) and any(placement.is_partial() for placement in first.placements):
            norm = nn.utils.get_total_norm(alike)
            squares.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
            continue
        here = [float(norm) ** 2 for norm in torch._foreach_norm([_local(gradient) for gradient in alike])]
        if isinstance(first, DTensor):
            total = torch.tensor(sum(here), dtype=torch.float64, device=_local(first).device)
            for dimension, placement in enumerate(first.placements):
                if not placement.is_replicate():
                    dist.all_reduce(total, group=first.device_mesh.get_group(dimension))
            here = [float(total)]
        squares += here
    return squares


def _by_mesh(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Plain tensors, and those of each mesh, apart: torch does not take them together."""
    found: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        found.setdefault(key, []).append(gradient)
    return list(found.values())


def state_bytes(modules: Iterable[nn.Module], shards: int = 1) -> tuple[int, int, int]:
    """Bytes of the weights, of their gradients, and of AdamW's two moments and step count, on this rank.

    Parameters
    ----------
    modules
        Stages that are not under FSDP.
    shards
        How many ranks each would be spread over by FSDP: then a rank keeps a part of everything, and the whole weights
        and gradients besides while a step runs.
    """
    modules = list(modules)
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    trained = [p for p in parameters if p.requires_grad]
    size = sum(_local(p).nbytes for p in trained)
    buffers = sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
    frozen = sum(_local(p).nbytes for p in parameters if not p.requires_grad)
    weights, kept = size + frozen + buffers, -(-size // shards)
    besides = -(-(size + frozen) // shards) if shards > 1 else 0
    return weights + besides, size + (kept if shards > 1 else 0), 2 * kept + 4 * len(trained)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for part in optimizer.param_groups for parameter in part["params"]]
