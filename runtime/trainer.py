"""One rank of a training run: its model, data and optimiser, and the records of its steps."""

from __future__ import annotations

import statistics
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from optpipe import memory, metrics
from optpipe.config import Config
from optpipe.errors import InputError, RunFailed
from optpipe.plan import Plan
from runtime import checkpoint, data, evaluate, gather, idle_links, memory_manager, optimizer, parallel, stages
from runtime.data_parallel import Replicas, Shards
from runtime.executor import Executor, StepResult
from runtime.gradients import GradientSync, TiedWeights
from runtime.host_memory import HostPool
from runtime.metrics_log import Step, Summary
from runtime.model import loss_fn
from runtime.place import Place
from runtime.replan import Replanner
from runtime.result import together
from runtime.tracing import Tracer
from runtime.worker import Rank

#: Steps at the start that the summary's times leave out: they set up connections and caches.
WARM_UP = 3
#: Batches of held-out text that a validation loss is the mean of.
VALIDATION_BATCHES = 2


class Trainer:
    """One rank's model, data and optimiser, and the records of its steps."""

    def __init__(
        self,
        rank: Rank,
        config: Config,
        plan: Plan,
        *,
        traced: bool = False,
        replanned: str | None = None,
    ) -> None:
        self.tracer = Tracer() if traced else None
        self.rank, self.config, self.plan = rank, config, plan
        self.place = Place.of(rank.rank, config, rank.device)
        self.stages = stages.build_stages(config, self.place.device, rank.device)
        parallel.parallelize(self.stages.values(), self.place)
        owners = [self.place.ranks[device] for device in config.pipeline.stage_devices]
        self._tied = TiedWeights(stages.tied(config), self.stages, owners)
        self._syncs = self._made_syncs()
        self.executor = self._executor()
        self._peaks = [memory.peaks(plan.problem, plan.ops)]  # of the plans that ran
        self._since = 0  # how many steps went before the plan
        self._next: Plan | None = None  # of the next step, where it is another one
        self._replanner: Replanner | None = None
        if config.train.replan is not None:
            self._replanner = Replanner(
                config.train.replan,
                plan,
                self.place.ranks,
                is_chief=rank.rank == 0,
                with_host=rank.device.type == "cpu",
                measure=idle_links.measured_on(rank.device, self._bandwidth()),
                runs=config.batch.accumulate,
                file=replanned,
            )
        self.optimizer = optimizer.adamw(self.stages.values(), config.optimizer)
        self.first = 0
        if config.train.resume is not None:
            self.first = checkpoint.restore(config.train.resume, self.stages, self.optimizer)["step"]
        self.shape = data.batch_shape(config)
        self.text = data.Corpus.load(config.data, config.gpt.context, config.file)
        self.is_first, self.is_last = 0 in self.stages, config.pipeline.num_stages - 1 in self.stages
        self.records: list[Step] = []
        self._evaluator: evaluate.Evaluator | None = None
        self._agree_on_the_text()

    def step(self, number: int) -> Step:
        """One optimiser step."""
        if self._next is not None:
            self._run_under_another_plan()
        began = time.perf_counter()
        result = self._run_plans(number)
        if self.tracer is not None:
            self.tracer.record(number + 1, result)
        norm = optimizer.apply(
            self.optimizer, self.config.optimizer, number, self.place.group("pipeline"), self._tied.counts
        )
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
        step_ms = (time.perf_counter() - began) * 1e3
        record = self._record(number, result, norm, step_ms)
        every = self.config.train.validate_every
        if every is not None and (number + 1) % every == 0:
            record = replace(record, validation_loss=self._validation_loss())
        if self._replanner is not None:
            self._next, said = self._replanner.after(result, record.pipeline_ms, self._answered)
            record = replace(record, replanned=said)
        self.records.append(record)
        return record

    def _executor(self, pool: HostPool | None = None) -> Executor:
        return Executor(
            self.plan,
            self.stages,
            stages.boundaries(self.config),
            loss_fn,
            device=self.rank.device,
            ranks=self.place.ranks,
            bandwidth=self._bandwidth(),
            seed=self.config.train.seed,
            syncs=self._syncs,
            watch_memory=self.tracer is not None,
            pool=pool,
        )

    def _bandwidth(self) -> tuple[float | None, float | None]:
        pace = self.config.offload.bandwidth_bytes_per_s
        return pace, pace

    def _run_under_another_plan(self) -> None:
        """The steps to come run under another plan, if there is room for it; all ranks call it between the same two
        steps."""
        self.executor.close()  # first: its host memory is wanted
        assert self._replanner is not None
        pool = self._replanner.room()
        before, self.plan, self._next = self.plan, self._replanner.plan, None
        self.executor = self._executor(pool)
        if self.plan is before:
            return
        self._peaks.append(memory.peaks(self.plan.problem, self.plan.ops))
        self._since = len(self.records)
        if self.tracer is not None:
            self.tracer.begin_again()

    def _made_syncs(self) -> list[GradientSync]:
        """Means over the pipelines first, then the sum over copies of a weight."""
        if self.place.is_sharded:
            return [Shards(self.stages), self._tied]
        across = self.place.group("data")
        replicas = [] if across is None or self.place.pipelines == 1 else [Replicas(self.stages, across)]
        return [*replicas, self._tied]

    def _run_plans(self, number: int) -> StepResult:
        """The runs of the plan that make one step, each on its part of the batch."""
        inputs, targets = self._batch(number)
        m, runs = self.plan.problem.num_microbatches, self.config.batch.accumulate
        results = []
        for run in range(runs):
            # Counted from this pipeline's part on; the seeds count over the whole batch.
            first = run * m
            part = slice(first, first + m)
            results.append(
                self.executor.step(
                    inputs and inputs[part],
                    targets and targets[part],
                    number=number,
                    denominator=m * runs,
                    first_microbatch=self.place.pipeline * runs * m + first,
                    is_last=run == runs - 1,
                )
            )
        return together(results)

    def save(self, step: int) -> None:
        """Write a checkpoint after a step, where the config asks for it."""
        if self.config.train.checkpoint is not None:
            facts = {"step": step, "training": self.config.training()}
            spread = self.place.is_sharded or self.place.tensor_parallel > 1
            mine = self.stages if spread or self.place.pipeline == 0 else {}  # the others have the same
            checkpoint.save(self.config.train.checkpoint, mine, facts, self.optimizer, spread=spread)

    def _validation_loss(self) -> float:
        """The mean over a few batches, the same ones every time; the same on every rank."""
        batches = [self._part(self.text.validation, number) for number in range(VALIDATION_BATCHES)]
        inputs, targets = (torch.cat(parts).to(self.rank.device) for parts in zip(*batches, strict=True))
        loss = self.evaluator().loss(list(inputs), list(targets))
        # Every pipeline has the same model, and takes its part of the text.
        return sum(row[0] for row in gather.numbers([loss or 0.0])) / self.place.copies

    def evaluator(self) -> evaluate.Evaluator:
        """Made on first use; by all ranks together."""
        if self._evaluator is None:
            count = VALIDATION_BATCHES * self.shape[0] // self.place.pipelines
            self._evaluator = evaluate.Evaluator(
                self.plan.problem.changed(num_microbatches=count),
                self.stages,
                stages.boundaries(self.config),
                loss_fn,
                device=self.rank.device,
                ranks=self.place.ranks,
            )
        return self._evaluator

    def close(self) -> None:
        """End the threads, and the solver beside."""
        if self._replanner is not None:
            self._replanner.close()
        self.executor.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def _batch(self, number: int) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]:
        if not (self.is_first or self.is_last):
            return None, None
        tokens, targets = self._part(self.text.train, number)
        device = self.rank.device
        return (
            list(tokens.to(device)) if self.is_first else None,
            list(targets.to(device)) if self.is_last else None,
        )

    def _part(self, text: Tensor, number: int) -> list[Tensor]:
        """Tokens and targets of this pipeline, of a batch of all pipelines."""
        whole = data.batch(text, self.config.train.seed, number, self.shape)
        return [part.chunk(self.place.pipelines)[self.place.pipeline] for part in whole]

    def _record(self, number: int, result: StepResult, norm: float | None, step_ms: float) -> Step:
        """The step over all ranks; every rank gets the same."""
        compute = [op for op in result.ops if op.kind <= 4]
        busy, cpu = sum(op.end - op.start for op in compute), sum(op.cpu_ms for op in compute)
        mine = [
            result.loss if result.loss is not None else 0.0,
            result.step_ms,
            step_ms,
            busy,
            cpu,
            float(result.peak_bytes),
            float(result.host_peak_bytes),
            *map(float, memory_manager.counts(result.reliefs).values()),
            float(self._replanner is not None and self._replanner.answered),
        ]
        rows = gather.numbers(mine)
        self._answered = bool(rows[0][-1])
        loss = sum(row[0] for row in rows) / self.place.copies
        pipeline_ms, whole_ms = max(row[1] for row in rows), max(row[2] for row in rows)
        if loss != loss or loss == float("inf"):
            raise RunFailed(f"the loss is {loss} in step {number + 1}: try a lower optimizer.learning_rate")
        count, size, context = self.shape
        deeds: dict[str, int] = {
            action: int(sum(row[7 + n] for row in rows)) for n, action in enumerate(memory_manager.ACTIONS)
        }
        total_busy, total_cpu = sum(row[3] for row in rows), sum(row[4] for row in rows)
        return Step(
            step=number + 1,
            loss=loss,
            learning_rate=optimizer.learning_rate(self.config.optimizer, number),
            grad_norm=norm,
            pipeline_ms=pipeline_ms,
            step_ms=whole_ms,
            tokens_per_s=count * size * context / whole_ms * 1e3,
            bubble_ratio=1.0 - total_busy / (len(rows) * pipeline_ms),
            peak_bytes=self._of_devices([int(row[5]) for row in rows]),
            host_peak_bytes=self._of_devices([int(row[6]) for row in rows]),
            # Ranks that share tensors wait for each other within ops.
            load=total_busy / total_cpu if total_cpu > 0 and self.place.tensor_parallel == 1 else None,
            reliefs=deeds if any(deeds.values()) else None,
        )

    def _of_devices(self, of_ranks: list[int]) -> list[int]:
        """The largest of all ranks that are this device, by device."""
        most = [0] * self.place.devices
        for rank, value in enumerate(of_ranks):
            most[self.place.device_of(rank)] = max(most[self.place.device_of(rank)], value)
        return most

    def _agree_on_the_text(self) -> None:
        """Ranks draw batches on their own: they must have the same text."""
        digest = zlib.crc32(self.text.train.numpy().tobytes())
        if len({row[0] for row in gather.numbers([float(digest)])}) > 1:
            raise InputError(self.config.file, "data", "is not the same text on all ranks, expected one folder for all")

    def summary(self) -> Summary:
        """The run beside its plan."""
        planned = metrics.measure(self.plan.problem, self.plan.ops)
        records, devices = self.records, range(self.plan.problem.num_devices)
        own = records[self._since :] or records[-1:]  # of the last plan
        # Fewer steps than the warm-up: the last is the best there is.
        steady = own[min(WARM_UP, len(own) - 1) :]

        def median(name: str) -> float:
            return float(statistics.median(getattr(record, name) for record in steady))

        edge = max(1, min(5, len(records) // 4))
        return Summary(
            name=self.plan.problem.name,
            method=str(self.plan.solver.get("method", "")),
            steps=len(records),
            device=self.rank.device.type,
            first_loss=records[0].loss,
            last_loss=statistics.fmean(record.loss for record in records[-edge:]),
            validation_loss=next((r.validation_loss for r in records[::-1] if r.validation_loss is not None), None),
            planned_ms=planned.makespan_ms * self.config.batch.accumulate,
            measured_ms=median("pipeline_ms"),
            step_ms=median("step_ms"),
            tokens_per_s=median("tokens_per_s"),
            planned_bubble_ratio=planned.bubble_ratio,
            measured_bubble_ratio=median("bubble_ratio"),
            budget_bytes=[device.memory_bytes for device in self.plan.problem.devices],
            planned_peak_bytes=[max(peaks) for peaks in zip(*self._peaks, strict=True)],
            measured_peak_bytes=[max(record.peak_bytes[d] for record in records) for d in devices],
            planned_offloaded_bytes=planned.offloaded_bytes,
            host_peak_bytes=[max(record.host_peak_bytes[d] for record in records) for d in devices],
            load=statistics.median(loads) if (loads := [r.load for r in steady if r.load is not None]) else None,
            checkpoint=self.config.train.checkpoint,
            reliefs=_added([record.reliefs for record in records]),
            plans=len(self._peaks),
        )


def _added(reliefs: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    """The sum of what was done in all steps; None where nothing was."""
    total = Counter[str]()
    for done in reliefs:
        total.update(done or {})
    return dict(total) or None
