"""What ranks do in the tests of solving again beside the training: they train until something becomes of it."""

from __future__ import annotations

import time
from typing import Any

import torch

from optpipe.config import Config, ReplanConfig
from optpipe.plan import Plan
from runtime import gather, host_memory
from runtime.pipeline import Pipeline
from runtime.trainer import Trainer
from runtime.worker import Rank
from tests import own_training as own

#: Steps behind the change of plan, and seconds within which it has to come.
MORE, SECONDS = 3, 120.0


def _goes_on(began: float, taken: int, done: int, steps: int | None, more: int = MORE) -> bool:
    """Whether to take another step, the same on every rank: as many as another run took, or until something came of
    it and some steps more."""
    if steps is not None:
        return done < steps
    late = max(row[0] for row in gather.numbers([time.monotonic() - began])) > SECONDS
    return not late and (not taken or done < taken + more)


def train(
    rank: Rank,
    plan: dict[str, Any],
    config: dict[str, Any],
    file: str | None,
    trace: str | None,
    steps: int | None,
    more: int,
) -> dict[str, Any]:
    """A trainer's steps: losses, what was said of plans, the plan that ran last and its summary."""
    run = Trainer(
        rank, Config.from_json(config, ""), Plan.from_json(plan, ""), traced=trace is not None, replanned=file
    )
    said: list[dict[str, Any]] = []
    began, taken, number = time.monotonic(), 0, 0
    try:
        while _goes_on(began, taken, number, steps, more):
            record = run.step(number)
            number += 1
            if record.replanned is not None:
                said.append(record.to_json()["replanned"])
                if record.replanned.outcome != "asked":
                    taken = taken or number
        if run.tracer is not None and trace is not None:
            run.tracer.write(trace, run.plan.problem, run.place.of_first(range(rank.world_size)))
    finally:
        run.close()
    losses = [record.loss for record in run.records]
    return {"losses": losses, "said": said, "plan": run.plan.to_json(), "summary": run.summary().to_json()}


def _nothing_left(*_: Any, **__: Any) -> Any:
    raise MemoryError("nothing is left")


def own_loop(
    rank: Rank, plan: dict[str, Any], partition: list[int], file: str | None, steps: int | None, poor: int | None = None
) -> dict[str, Any]:
    """The same in one's own loop. Rank ``poor`` has no host memory for a plan that takes over."""
    torch.set_num_threads(1)
    if rank.rank == poor:
        host_memory.reserved = _nothing_left
    schedule = Plan.from_json(plan, "")
    count = schedule.problem.num_microbatches
    replan = None if steps is not None else ReplanConfig(every=3, time_limit_s=2.0)
    losses: list[float] = []
    said, taken, began = [], 0, time.monotonic()
    example = own.batch(count, 0)[0][: own.SIZE]
    with Pipeline(
        schedule, own.layers(), own.loss_fn, example, partition=partition, replan=replan, replanned_file=file
    ) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        while _goes_on(began, taken, len(losses), steps):
            losses.append(pipeline.step(*own.batch(count, len(losses))))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.replanned is not None:
                said.append(pipeline.replanned.outcome)
                if said[-1] != "asked":
                    taken = taken or len(losses)
        return {"losses": losses, "said": said, "plan": pipeline.plan.to_json()}
