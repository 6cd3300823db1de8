"""AdamW over the stages of a rank, with warm-up, and clipping by the norm of all ranks' gradients together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.config import OptimizerConfig


def adamw(modules: Iterable[nn.Module], settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices and embeddings decay, biases and norms do not."""
    # Once each, though stages may share them.
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """The rate of a step (from 0): it grows linearly over ``warmup_steps``, then stays."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def apply(optimizer: torch.optim.Optimizer, settings: OptimizerConfig, step: int) -> float | None:
    """Clip, step and clear the gradients of this rank; every rank must call it.

    Returns
    -------
    float or None
        The norm of all gradients together before clipping; None where nothing clips.
    """
    rate = learning_rate(settings, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = None
    if settings.clip_norm is not None:
        norm = clip(_gradients(optimizer), settings.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def clip(gradients: list[Tensor], most: float) -> float:
    """Scale the gradients in place so that their norm over all ranks is at most ``most``; the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, whose sum stays on one rank.
    """
    square = sum((float(norm) ** 2 for norm in torch._foreach_norm(gradients)), 0.0)
    if dist.is_initialized():
        total = torch.tensor(square, dtype=torch.float64)
        dist.all_reduce(total)
        square = float(total)
    norm = square**0.5
    scale = most / (norm + 1e-6)
    if scale < 1.0:
        torch._foreach_mul_(gradients, scale)
    return norm


def state_bytes(modules: Iterable[nn.Module]) -> tuple[int, int, int]:
    """Bytes of the weights, of their gradients, and of AdamW's two moments and step count."""
    modules = list(modules)
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    trained = [p for p in parameters if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    buffers = sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
    frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
    return size + frozen + buffers, size, 2 * size + 4 * len(trained)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
