"""Runs a plan: one training step after another on this rank's device.

The executor replays the plan's order, not its clock. Its host goes through the device's program once a step (``run``):
it runs compute ops, and between them hands transfers to the copy lanes and messages to the transport, which do their
part meanwhile. On CUDA the host only enqueues, and waits are between streams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe import memory
from optpipe.errors import InputError, RunFailed
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.verify import verify
from runtime import checks, host_layout
from runtime import program as programs
from runtime.accounting import Ledger
from runtime.allocator import keep_freed_memory
from runtime.boundary import Boundary, TensorSpec, most_bytes
from runtime.channel import copy_lane
from runtime.connect import connect
from runtime.events import Failure, PeerLost
from runtime.gradients import GradientSync, TiedWeights
from runtime.host_memory import HostPool
from runtime.memory_manager import MemoryManager, cuda_headroom
from runtime.memory_watch import MemoryWatch
from runtime.result import OpRecord, StepResult
from runtime.run import BeforeOp, Parts, Run
from runtime.stage import LossFn, Stage, own_random_numbers

__all__ = ["Boundary", "Executor", "LossFn", "OpRecord", "PeerLost", "StepResult", "TensorSpec"]


class Executor:
    """Runs a plan's steps on one device. One executor lives for many steps; close it, or use it in a ``with``.

    All ranks construct it together (on NCCL it connects the links).

    Parameters
    ----------
    plan
        A valid plan. Its device d is run by rank ``ranks[d]``; a plan of one device needs no process group. On NCCL
        all ranks of the world construct their executors together, whichever pipeline they are in.
    stages
        This rank's stages by number: modules that take one tensor and give one. Linear and Embedding layers in them
        are converted in place to defer their weight gradients, BatchNorm layers to move their averages once a step.
    boundaries
        ``boundaries[s]``: what stage s hands to s+1; S - 1 entries. A batch that does not divide evenly has an entry a
        microbatch in place of each (``boundary.uneven``).
    loss_fn
        ``loss_fn(output, target)``: the scalar loss of one microbatch; the step's is the mean over microbatches, or
        their sum over the ``denominator`` that ``step`` is given.
    device
        Where the stages live.
    ranks
        Global ranks that run the plan's devices; default 0, 1, 2, ...
    bandwidth
        CPU only: bytes per second of the offload and of the reload lane, to emulate a link; None: as fast as it goes.
    seed
        Of random numbers: each (step, stage, microbatch) has a seed of its own, so any order gives the same numbers.
    timeout_s
        A wait for another rank that takes longer ends the run.
    syncs
        What gradients go through before ``step`` returns, in this order, but for ``TiedWeights``, which go last:
        ``gradients``, ``data_parallel``.
    fixed_order
        The stages talk to other ranks while they compute, so that these must run the same ops in the same order: the
        memory manager keeps the plan's. Stages with DTensors as parameters are known to.
    before_op
        Called in the op's lane as the op begins (transfers: on CPU only).
    watch_memory
        Take samples of what is held: ``StepResult.memory``.
    pool
        Host memory that is laid out for the plan (``host_memory.reserved``); None: it takes its own.

    Raises
    ------
    InputError
        The plan is not valid, or what is given does not fit it.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        boundaries: Sequence[Boundary],
        loss_fn: LossFn,
        *,
        device: torch.device | str = "cpu",
        ranks: Sequence[int] | None = None,
        bandwidth: tuple[float | None, float | None] = (None, None),
        seed: int = 0,
        timeout_s: float = 300.0,
        syncs: Sequence[GradientSync] = (),
        fixed_order: bool = False,
        before_op: BeforeOp | None = None,
        watch_memory: bool = False,
        pool: HostPool | None = None,
    ) -> None:
        problem = plan.problem
        if violations := verify(problem, plan.ops):
            raise InputError("", "ops", f"{violations[0]}, expected a valid plan")
        self.plan, self.device = plan, checks.with_index(torch.device(device))
        if self.device.type == "cpu":
            keep_freed_memory()
        self._ranks = list(range(problem.num_devices)) if ranks is None else list(ranks)
        self._number = checks.own_device(self._ranks)
        self._boundaries = list(boundaries)
        checks.check_parts(problem, self._number, self._ranks, stages, self._boundaries)
        # Copies of a shared weight are added up behind the rest: what replicas average has been on its way before.
        self._syncs = sorted(syncs, key=lambda sync: isinstance(sync, TiedWeights))
        self.program = programs.build(plan, self._number, [most_bytes(boundary) for boundary in self._boundaries])
        self.ledger, self.failure = Ledger(), Failure()
        self._offloads = host_layout.intervals(plan, self._number)
        layout = host_layout.lay_out(self._offloads)
        self.planned_host_bytes: int = layout.most_bytes
        self.pool = HostPool(pinned=self.device.type == "cuda") if pool is None else pool
        if pool is None:
            self.pool.lay_out(layout)
        self._stages = {
            s: Stage(
                module,
                s,
                problem.num_stages,
                loss_fn,
                problem.num_microbatches,
                self.device,
                self.ledger,
                self.pool,
            )
            for s, module in stages.items()
        }
        self._transport = connect(
            problem, self.program, self._boundaries, self.device, self.ledger, self.failure, self._ranks, timeout_s
        )
        out = copy_lane("offload lane", self.device, self.failure, bandwidth[0])
        back = out if self.program.half_duplex else copy_lane("reload lane", self.device, self.failure, bandwidth[1])
        self.planned_peak_bytes: int = memory.peaks(problem, plan.ops)[self._number]
        headroom = cuda_headroom(self.device) if self.device.type == "cuda" else None
        alone = not fixed_order and not any(
            isinstance(p, DTensor) for module in stages.values() for p in module.parameters()
        )
        self.manager = MemoryManager(problem, self.program, self.ledger, headroom, may_reorder=alone)
        self._parts = Parts(
            self.device,
            self.program,
            self._stages,
            self._boundaries,
            self._transport,
            {Kind.O: out, Kind.R: back},
            self.failure,
            self.manager,
            self._syncs,
            seed,
            before_op,
            MemoryWatch(self.ledger, self.device) if watch_memory else None,
        )
        self._run: Run | None = None
        self._counted_peak: int | None = None  # of a run in which everything was counted

    @property
    def message_bytes(self) -> int:
        """The most that messages under way can take on this device: to be kept free besides the plan's budget."""
        return self.program.message_bytes

    def step(
        self,
        inputs: Sequence[Tensor] | None = None,
        targets: Sequence[Tensor] | None = None,
        *,
        number: int = 0,
        denominator: float | None = None,
        first_microbatch: int = 0,
        is_last: bool = True,
    ) -> StepResult:
        """One run of the plan: gradients are added to ``.grad`` of the stages' parameters; no optimiser runs.

        Several runs may make one step of the optimiser (gradient accumulation): each but the last with ``is_last``
        False, each with the number of microbatches before it, and all with a denominator that counts all of them.

        Parameters
        ----------
        inputs
            One tensor a microbatch, on the rank that holds stage 0; not used elsewhere. All of one shape, unless the
            boundaries are given for each microbatch.
        targets
            One tensor a microbatch, on the rank that holds the last stage; not used elsewhere.
        number
            The step's number, for the seeds.
        denominator
            What the sum of the microbatches' losses is divided by; default: their number. With a loss that sums over
            tokens and the number of tokens that count in the whole batch here, gradients do not depend on how the batch
            is cut, whichever tokens the loss ignores.
        first_microbatch
            How many microbatches of the same step came before these, for the seeds.
        is_last
            The last run of the step: gradients go through the syncs, and BatchNorm moves its averages.

        Raises
        ------
        InputError
            The batch does not fit the plan.
        RunFailed
            Something failed here, or another rank is gone; the first cause. The executor is of no use afterwards.
        """
        self.failure.check()
        inputs, targets = self._batch(inputs, targets)
        for sync in self._syncs:
            sync.begin()
        for stage in self._stages.values():
            stage.begin([*inputs, *targets], denominator, self._handled(stage.index))
        self.ledger.reset_peaks()
        self.pool.reset_peak()
        self._run = run = Run(self._parts, inputs, targets, number, first_microbatch, is_last)
        syncing = False
        try:
            with own_random_numbers(self.device):
                run.go()
            self._settle()
            step_ms = (time.perf_counter() - run.origin) * 1e3
            syncing = True
            for sync in self._syncs if is_last else ():
                sync.finish()
            # Behind the syncs: replicas share what BatchNorm's averages are moved by.
            for stage in self._stages.values():
                stage.finish(is_last=is_last)
        except BaseException as error:
            self.failure.report(error, "gradients between ranks" if syncing else run.doing)
            self._transport.abort()
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            # What failed first is the cause, in whichever thread it was.
            first = self.failure.first
            assert first is not None
            raise first from first.__cause__
        finally:
            self._run = None
        return self._result(run, step_ms)

    def _handled(self, stage: int) -> set[int] | None:
        """The microbatches whose saved activations have to be in hand; None: all of them.

        Where nothing limits the device's memory, that is what the plan moves, once a run has counted everything.
        """
        if self._counted_peak is None or self.manager.watches or self._parts.watch is not None:
            return None
        moves = (item for item in self.program.items if isinstance(item, programs.Move))
        return {move.microbatch for move in moves if move.stage == stage}

    def _settle(self) -> None:
        """Wait for what is still under way."""
        for lane in self._parts.lanes.values():
            lane.settle()
        self._transport.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.pool.overflowed and not self.pool.in_use:
            # The plan's sizes are not the model's: from the next run on there is a place for everything.
            self.pool.lay_out(host_layout.lay_out(self._offloads, self.pool.needs()))

    def _result(self, run: Run, step_ms: float) -> StepResult:
        watch = self._parts.watch
        peak = max(self.ledger.activation_peak, 0 if watch is None else watch.peak, self._counted_peak or 0)
        if self._counted_peak is None:
            self._counted_peak = peak
        return StepResult(
            run.loss() if self._holds_last else None,
            peak,
            self.ledger.message_peak,
            self.pool.peak,
            tuple(run.records()),
            run.origin,
            step_ms,
            tuple(self.manager.reliefs),
            () if watch is None else watch.samples(run.origin),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lanes and the threads, wait until they have, and free the host memory. Twice does no harm."""
        self.failure.wake = None  # the connections live on
        self.failure.report(RunFailed("the executor is closed"))
        for lane in set(self._parts.lanes.values()):
            lane.close()
        self._transport.close()
        self.pool.free()

    @property
    def _holds_last(self) -> bool:
        return self.plan.problem.num_stages - 1 in self._stages

    def _batch(
        self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What of the batch this rank uses."""
        count, batch = self.plan.problem.num_microbatches, []
        for name, needed, tensors in (("inputs", 0 in self._stages, inputs), ("targets", self._holds_last, targets)):
            if needed:
                checks.check_batch(name, tensors, count, self._boundaries)
            batch.append(list(tensors or []) if needed else [])
        return batch[0], batch[1]
