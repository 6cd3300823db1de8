"""The loss on held-out text: forwards only, microbatch by microbatch along the stages.

    rank 0   F(0,0) F(0,1) F(0,2)
    rank 1          F(1,0) F(1,1) F(1,2)

Every rank goes through (microbatch, stage) in one order and a message has one place in it, so nothing deadlocks; a rank
that holds several stages waits for its microbatch to come back before it takes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime import gather
from runtime.boundary import Boundary, spec_of

#: Apart from the tags of a training step.
_TAG = 1 << 30


@torch.no_grad()
def loss(
    stages: Mapping[int, nn.Module],
    stage_ranks: Sequence[int],
    boundaries: Sequence[Boundary],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    targets: Tensor,
    device: torch.device,
) -> float:
    """Mean loss over microbatches, the same on every rank; every rank must call it.

    Parameters
    ----------
    stages
        This rank's stages by number. They run in evaluation mode and are put back.
    stage_ranks
        The rank of each stage.
    boundaries
        What stage s hands to s+1.
    loss_fn
        Of (output, target) of the last stage.
    tokens, targets
        int64 (microbatches, microbatch size, context), on any device.
    device
        Where the stages live.
    """
    rank = dist.get_rank()
    modes = [(module, module.training) for module in stages.values()]
    for module, _ in modes:
        module.eval()
    total = 0.0
    sent: list[tuple[dist.Work, Tensor]] = []
    for x, target in zip(tokens, targets, strict=True):
        here: Tensor | None = None
        for number, owner in enumerate(stage_ranks):
            if owner != rank:
                continue
            if number == 0:
                here = x.to(device)
            elif stage_ranks[number - 1] != rank:
                spec = spec_of(boundaries[number - 1], 0)
                here = torch.empty(spec.shape, dtype=spec.dtype, device=device)
                dist.recv(here, stage_ranks[number - 1], tag=_TAG)
            assert here is not None
            here = stages[number](here)
            if number == len(stage_ranks) - 1:
                total += float(loss_fn(here, target.to(device)))
            elif stage_ranks[number + 1] != rank:
                _finish(sent, but=1)
                here = here.contiguous()
                work = dist.isend(here, stage_ranks[number + 1], tag=_TAG)
                assert work is not None
                sent.append((work, here))
    _finish(sent)
    for module, training in modes:
        module.train(training)
    return sum(row[0] for row in gather.numbers([total])) / len(tokens)


def _finish(sent: list[tuple[dist.Work, Tensor]], but: int = 0) -> None:
    """Wait for sends, all but the last few; a tensor must live until its send has ended."""
    while len(sent) > but:
        sent.pop(0)[0].wait()
