"""BatchNorm over a mini-batch that comes in microbatches.

Training normalises each microbatch by its own statistics. What evaluation uses are moving averages, and they are to be
those of the whole mini-batch, whatever the schedule: a microbatch's forward only notes its statistics, the end of the
step moves the averages once, and a forward that is run again (C, or a checkpoint inside the stage) notes nothing. As in
GPipe (arXiv:1811.06965, section 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_again = False


class _Statistics(NamedTuple):
    """Of some microbatches together: values a channel, their mean, and the sum of squared differences from it."""

    values: float
    mean: Tensor
    squares: Tensor

    def with_(self, other: _Statistics) -> _Statistics:
        """Of both together (Chan, Golub and LeVeque 1979, https://doi.org/10.2307/2683386)."""
        count = self.values + other.values
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.values / count)
        squares = self.squares + other.squares + delta**2 * (self.values * other.values / count)
        return _Statistics(count, mean, squares)


class _MiniBatch(_BatchNorm):
    """The forward of the three below; ``move_averages`` ends a mini-batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.track_running_stats or self.running_mean is None:
            return super().forward(x)
        self._check_input_dim(x)
        assert self.running_var is not None
        # With momentum 1 torch's kernel leaves the statistics of this microbatch in place of averages.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not _again:
            count = x.numel() / x.shape[1]
            here = _Statistics(count, mean, variance * (count - 1))  # the kernel's variance is the unbiased one
            noted: _Statistics | None = self.__dict__.get("_noted")
            self._noted = here if noted is None else noted.with_(here)
        return out

    def move_averages(self) -> None:
        """Count the microbatches since the last call as one mini-batch."""
        noted: _Statistics | None = self.__dict__.pop("_noted", None)
        if noted is None:
            return
        assert self.running_mean is not None and self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        assert momentum is not None
        self.running_mean.lerp_(noted.mean, momentum)
        self.running_var.lerp_(noted.squares / (noted.values - 1), momentum)

    def numbers(self) -> Tensor:
        """What has been noted, as one row: how many values, their means, their squares; all 0 of none."""
        assert self.running_mean is not None
        noted: _Statistics | None = self.__dict__.get("_noted")
        if noted is None:
            return self.running_mean.new_zeros(1 + 2 * self.num_features, dtype=torch.float64)
        values = noted.mean.new_tensor([noted.values], dtype=torch.float64)
        return torch.cat([values, noted.mean.double(), noted.squares.double()])

    def note(self, rows: Iterable[Tensor]) -> None:
        """Have noted what such rows say, in their order, in place of what has been."""
        assert self.running_mean is not None
        together: _Statistics | None = None
        for row in rows:
            if values := float(row[0]):
                mean, squares = row[1:].to(self.running_mean.dtype).chunk(2)
                here = _Statistics(values, mean, squares)
                together = here if together is None else together.with_(here)
        if together is not None:
            self._noted = together


class MiniBatchNorm1d(_MiniBatch, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over mini-batches."""


class MiniBatchNorm2d(_MiniBatch, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over mini-batches."""


class MiniBatchNorm3d(_MiniBatch, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over mini-batches."""


_CLASSES: dict[type, type] = {
    nn.BatchNorm1d: MiniBatchNorm1d,
    nn.BatchNorm2d: MiniBatchNorm2d,
    nn.BatchNorm3d: MiniBatchNorm3d,
}


def convert(module: nn.Module) -> nn.Module:
    """Let the BatchNorm layers of ``module`` move their averages by mini-batches, in place; subclasses stay as they
    are. Names and values do not change."""
    for layer in module.modules():
        if type(layer) in _CLASSES:
            layer.__class__ = _CLASSES[type(layer)]
    return module


@torch.no_grad()
def move_averages(module: nn.Module) -> None:
    """End a mini-batch in all layers of ``module``."""
    for layer in module.modules():
        if isinstance(layer, _MiniBatch):
            layer.move_averages()


@torch.no_grad()
def share(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """What the layers of ``modules`` have noted becomes that of all ranks of ``group`` together, which call this with
    the same layers: their averages then move by the whole of all ranks' mini-batches, to the same bits."""
    every = dict.fromkeys(layer for module in modules for layer in module.modules() if isinstance(layer, _MiniBatch))
    layers = [layer for layer in every if layer.running_mean is not None]
    if not layers:
        return
    parts = [layer.numbers() for layer in layers]
    own = torch.cat(parts)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    of_each = zip(*(row.split([len(part) for part in parts]) for row in rows), strict=True)
    for layer, found in zip(layers, of_each, strict=True):
        layer.note(found)


class run_again:  # noqa: N801 (as a function would be called)
    """Forwards inside have been run before: they note nothing. (A class: a generator would take twice the time.)"""

    # Plain and global: on CUDA a backward, and a checkpoint's forward in it, runs on a thread of autograd's.

    def __enter__(self) -> None:
        global _again
        self._outer, _again = _again, True

    def __exit__(self, *_: object) -> None:
        global _again
        _again = self._outer
