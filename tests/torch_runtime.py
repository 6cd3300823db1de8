"""What ranks do in the test that runs one schedule under torch's own runtime and under the executor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from optpipe.plan import Plan
from runtime.executor import Executor
from runtime.model import loss_fn
from runtime.worker import Rank
from tests import pipelines


def both(rank: Rank, csv: str, plan: dict[str, Any]) -> dict[str, Any]:
    """One step under each, from the same weights and batch: their losses, and the largest difference of a gradient."""
    torch.set_num_threads(1)
    schedule = Plan.from_json(plan, "")
    problem = schedule.problem
    count, own = problem.num_stages, problem.stages_of[rank.rank]
    theirs, ours = ({s: pipelines.stage_module(s, count) for s in own} for _ in range(2))
    inputs, targets = pipelines.batch(problem.num_microbatches)
    losses = _torch_step(rank, csv, theirs, count, torch.cat(inputs), torch.cat(targets), problem.num_microbatches)
    with Executor(schedule, ours, pipelines.boundaries(count), loss_fn) as executor:
        loss = executor.step(inputs, targets).loss
    most = 0.0
    for stage in own:
        for one, other in zip(theirs[stage].parameters(), ours[stage].parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert one.grad.abs().max() > 0
            most = max(most, float((one.grad - other.grad).abs().max()))
    mine = {"rank": rank.rank, "difference": most, "ours": loss}
    mine["torch"] = None if loss is None else float(torch.stack(losses).mean())
    rank.send(mine)
    return mine


def _torch_step(
    rank: Rank,
    csv: str,
    stages: dict[int, torch.nn.Module],
    count: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    microbatches: int,
) -> list[torch.Tensor]:
    parts = [pipelining.PipelineStage(module, s, count, rank.device) for s, module in stages.items()]
    runtime = _PipelineScheduleRuntime(parts, microbatches, loss_fn=loss_fn)
    runtime._load_csv(csv)
    losses: list[torch.Tensor] = []
    last = {"target": targets, "losses": losses} if count - 1 in stages else {}
    runtime.step(*((inputs,) if 0 in stages else ()), return_outputs=False, **last)
    return losses
