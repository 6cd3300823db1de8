"""A plan in your own training loop: layers in, ``step()`` out.

    with Pipeline(plan, layers, loss_fn, example) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())
        for inputs, targets in batches:
            loss = pipeline.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

Every rank runs the same lines, under torchrun or any other launcher that sets up ``torch.distributed``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.config import ReplanConfig
from optpipe.errors import InputError
from optpipe.plan import Plan
from runtime import batch_norm, checks, gather, idle_links, worker
from runtime.buffers import unmoved
from runtime.executor import Boundary, Executor, LossFn, StepResult, TensorSpec
from runtime.metrics_log import Replanned
from runtime.own_model import cut
from runtime.replan import Replanner
from runtime.stage import own_random_numbers

#: The plan's key for how many layers each stage holds.
PARTITION = "partition"


class Pipeline:
    """A model under a plan. One pipeline lives for many steps; close it, or use it in a ``with``.

    All ranks construct it together.

    Parameters
    ----------
    plan
        A valid plan; its device d is run by rank ``ranks[d]``.
    layers
        The whole model on every rank: each layer takes one tensor and gives one. Those of this rank's stages are moved
        to ``device`` and trained, and converted in place as the executor says; the others are only run once, without
        gradients, to see what shapes they give (not where ``boundaries`` are given: then they may be None).
    loss_fn
        ``loss_fn(output, target)``: the scalar loss of one microbatch; the step's is the mean over microbatches.
    example
        One microbatch of inputs.
    partition
        How many layers each stage holds; default what the plan says under the key ``partition``.
    boundaries
        What each stage hands to the next one; default as seen with ``example``.
    device
        Where this rank's stages live.
    first_step
        How many steps came before, where a run goes on: the seeds of dropout come from the numbers of steps.
    replan
        Solve again beside the training (``train.replan`` of a config): another plan may run from some step on, which
        changes no number but by rounding. ``replanned`` says after each step what became of it, ``plan`` is the one of
        the next step.
    replanned_file
        Where rank 0 keeps a plan that takes over; None: it is not kept.
    options
        As of ``Executor``: ranks, bandwidth, seed, timeout_s, syncs, fixed_order.

    Raises
    ------
    InputError
        The plan is not valid, or the layers do not fit it.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[nn.Module | None],
        loss_fn: LossFn,
        example: Tensor,
        *,
        partition: Sequence[int] | None = None,
        boundaries: Sequence[Boundary] | None = None,
        device: torch.device | str = "cpu",
        first_step: int = 0,
        replan: ReplanConfig | None = None,
        replanned_file: str | Path | None = None,
        **options: Any,
    ) -> None:
        problem = plan.problem
        counts = plan.extra.get(PARTITION) if partition is None else partition
        if not isinstance(counts, Sequence) or not all(type(count) is int for count in counts):
            raise InputError("", PARTITION, "is missing, expected the number of layers of each stage")
        ranks = options.get("ranks")
        own = checks.own_device(list(range(problem.num_devices)) if ranks is None else list(ranks))
        parts = cut(layers, counts, problem.num_stages)
        if boundaries is None:
            boundaries = _seen(parts, example)
        self.stages = {s: _module(parts, s).to(device) for s in problem.stages_of[own]}
        self.device = torch.device(device)
        self._loss_fn = loss_fn.to(device) if isinstance(loss_fn, nn.Module) else None
        self.result: StepResult | None = None
        self._holds = 0 in self.stages, problem.num_stages - 1 in self.stages
        self._microbatches, self._number = problem.num_microbatches, first_step
        self.plan, self.replanned = plan, None
        options |= {"device": device}
        self._made = lambda plan, **more: Executor(plan, self.stages, boundaries, loss_fn, **options, **more)
        self._executor = self._made(plan)
        self._replanner: Replanner | None = None
        if replan is not None:
            self._replanner = Replanner(
                replan,
                plan,
                list(range(problem.num_devices)) if ranks is None else list(ranks),
                is_chief=not dist.is_initialized() or dist.get_rank() == 0,
                with_host=self.device.type == "cpu",
                measure=idle_links.measured_on(self.device, options.get("bandwidth", (None, None))),
                file=replanned_file,
            )

    #: What became of solving again, behind the last step.
    replanned: Replanned | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, and of the loss where this rank holds the last one, each once."""
        seen: set[int] = set()
        loss = [self._loss_fn] if self._loss_fn is not None and self._holds[1] else []
        for part in (*self.stages.values(), *loss):
            for parameter in part.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def step(self, inputs: Tensor | Sequence[Tensor] | None, targets: Tensor | Sequence[Tensor] | None) -> float:
        """Forward and backward of one batch; gradients are added to ``.grad``. The loss, on every rank: with replicas
        the mean of theirs.

        Parameters
        ----------
        inputs, targets
            The batch, which is cut along its first dimension into microbatches of one size, or a list of microbatches.
            Inputs are used on the rank that holds the first stage, targets on that of the last; others may give None.

        Raises
        ------
        InputError
            The batch does not fit the plan.
        RunFailed
            Something failed here or on another rank.
        """
        self._run_under_the_plan()
        batch = [self._cut(*part) for part in zip(("inputs", "targets"), (inputs, targets), self._holds, strict=True)]
        self.result = self._executor.step(*batch, number=self._number)
        self._number += 1
        # Replicas, and ranks that make up one device together, each have a loss.
        loss = [0.0, 0.0] if self.result.loss is None else [self.result.loss, 1.0]
        answered = self._replanner is not None and self._replanner.answered
        rows = gather.numbers([*loss, self.result.step_ms, float(answered)])
        if self._replanner is not None:
            slowest_ms = max(row[2] for row in rows)
            plan, self.replanned = self._replanner.after(self.result, slowest_ms, bool(rows[0][3]))
            self.plan = plan or self.plan
        return sum(row[0] for row in rows) / sum(row[1] for row in rows)

    def _run_under_the_plan(self) -> None:
        """Where the plan is another one now; all ranks call it between the same two steps."""
        if self._executor.plan is not self.plan:
            self._executor.close()  # first: its host memory is wanted
            assert self._replanner is not None
            pool = self._replanner.room()
            self.plan = self._replanner.plan
            self._executor = self._made(self.plan, pool=pool)

    def _cut(self, name: str, batch: Tensor | Sequence[Tensor] | None, needed: bool) -> list[Tensor] | None:
        if batch is None or not needed:
            return None
        if isinstance(batch, Tensor):
            if len(batch) % self._microbatches:
                raise InputError(
                    "", name, f"are {len(batch)}, expected a multiple of {self._microbatches} microbatches"
                )
            batch = batch.chunk(self._microbatches)
        return [part.to(self.device) for part in batch]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the executor's threads, and the solver beside. Twice does no harm."""
        if self._replanner is not None:
            self._replanner.close()
        self._executor.close()


def join(device: torch.device | str = "cpu") -> int:
    """Set up ``torch.distributed`` for a pipeline from torchrun's variables; this process's rank.

    Raises
    ------
    InputError
        The variables are not there.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError("", missing[0], "is not set: start with torchrun")
    rank = int(os.environ["RANK"])
    worker.join(rank, int(os.environ["WORLD_SIZE"]), torch.device(device))
    return rank


def _module(parts: Sequence[Sequence[nn.Module | None]], stage: int) -> nn.Sequential:
    """The layers of a stage, named by their numbers along the model: state does not depend on the cut."""
    first = sum(len(part) for part in parts[:stage])
    module = nn.Sequential()
    for number, layer in enumerate(parts[stage], first):
        if layer is None:
            raise InputError("", f"layers[{number}]", f"is missing, expected the layers of stage {stage} on this rank")
        module.add_module(str(number), layer)
    return module


def _seen(parts: Sequence[Sequence[nn.Module | None]], example: Tensor) -> list[TensorSpec]:
    """What each stage hands on, by running the layers once without gradients; what they keep in buffers stays."""
    found, x = [], example
    with torch.no_grad(), batch_norm.run_again(), own_random_numbers(example.device):
        for stage in range(len(parts) - 1):
            module = _module(parts, stage)
            with unmoved([module]):
                x = module(x)
            found.append(TensorSpec(tuple(x.shape), x.dtype))
    return found
