"""What ranks do in the tests of a pipeline in one's own training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optpipe.plan import Plan
from runtime.pipeline import Pipeline
from runtime.worker import Rank

SIZE, STEPS = 2, 3


def layers() -> list[nn.Module]:
    """A small model of unlike layers."""
    torch.manual_seed(7)
    return [nn.Embedding(16, 8), nn.Linear(8, 12), nn.Sequential(nn.GELU(), nn.LayerNorm(12)), nn.Linear(12, 5)]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch(microbatches: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape = (microbatches * SIZE, 6)
    return torch.randint(16, shape, generator=generator), torch.randint(5, shape, generator=generator)


def train(rank: Rank, plan: dict[str, Any], partition: list[int] | None) -> dict[str, Any]:
    """The loop of the docs; losses and this rank's parameters."""
    torch.set_num_threads(1)
    schedule = Plan.from_json(plan, "")
    count = schedule.problem.num_microbatches
    example = batch(count, 0)[0][:SIZE]
    losses = []
    with Pipeline(schedule, layers(), loss_fn, example, partition=partition) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        for number in range(STEPS):
            losses.append(pipeline.step(*batch(count, number)))
            optimizer.step()
            optimizer.zero_grad()
        state = {
            name: value.tolist() for stage in pipeline.stages.values() for name, value in stage.state_dict().items()
        }
    rank.send({"rank": rank.rank, "losses": losses, "state": state})
    return {}
