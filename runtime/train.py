"""Training under a plan: the loop around the executor, and what it reports."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optpipe import metrics
from optpipe.config import Config
from optpipe.errors import InputError, RunFailed
from optpipe.plan import Plan
from optpipe.verify import verify_plan
from runtime import checkpoint, data, evaluate, gather, launch, memory_manager, optimizer, stages
from runtime.executor import Executor, StepResult
from runtime.metrics_log import MetricsLog, Step, Summary
from runtime.model import loss_fn
from runtime.tracing import Tracer
from runtime.worker import Rank

#: Steps at the start that the summary's times leave out: they set up connections and caches.
WARM_UP = 3
#: Batches of held-out text that a validation loss is the mean of.
VALIDATION_BATCHES = 2


def train(
    plan: Plan,
    config: Config | None = None,
    *,
    steps: int | None = None,
    resume: str | Path | None = None,
    on_step: Callable[[Step], None] | None = None,
    trace: str | Path | None = None,
    file: str | Path = "",
) -> Summary:
    """Train the model of a plan under its schedule, on one local rank a device, or on the ranks of torchrun.

    Parameters
    ----------
    plan
        A valid plan. Without ``config`` it must carry its training part, as plans made from a profile do.
    config
        Its sections go before those that the plan carries; its pipeline and microbatches must be the plan's.
    steps, resume
        Go before the config's ``train.steps`` and ``train.resume``.
    on_step
        Called after every ``train.log_every``-th step, in the launching process (under torchrun: on rank 0).
    trace
        Where the trace of the last steps goes (see ``optpipe.trace``).
    file
        The plan's file, for messages.

    Returns
    -------
    Summary
        Planned beside measured.

    Raises
    ------
    InputError
        The plan has no training part, breaks its own rules, or does not fit the config; the text cannot be read.
    RunFailed
        A rank failed: the first cause.
    """
    settings = settings_of(plan, config, file)
    given = {"steps": steps, "resume": None if resume is None else str(resume)}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = settings.model_copy(update={"train": settings.train.model_copy(update=changes)})
    if violations := verify_plan(plan):
        raise InputError(file, "", f"is not a valid plan: {violations[0]}")
    ranks = plan.problem.num_devices
    device = launch.resolve_device(settings.device, ranks, settings.file)
    _check_text(settings)
    _check_place(settings.train.checkpoint)
    first = _check_resume(settings)
    every, total = settings.train.log_every, settings.train.steps

    def hear(message: dict[str, Any]) -> None:
        step = Step(**message)
        if on_step is not None and (step.step % every == 0 or step.step in (first + 1, total)):
            on_step(step)

    arguments = {"plan": plan.to_json(), "config": settings.to_json(), "file": str(settings.file)}
    if trace is not None:
        arguments["trace"] = str(trace)
    return Summary(**launch.launch(train_rank, arguments, ranks, device, hear))


def _check_text(settings: Config) -> None:
    """Read the text once in the launching process: what is missing is one line, not a failed run."""
    data.Corpus.load(settings.data, settings.gpt.context, settings.file)
    if settings.train.validate_every is not None and not settings.data.validation_fraction:
        raise InputError(settings.file, "train.validate_every", "needs held-out text, expected a validation_fraction")


def _check_place(folder: str | None) -> None:
    """Make the folder of the checkpoints now: that it cannot be written to is to be known before the first step."""
    if folder is not None and launch.is_chief():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(folder, "", f"cannot be written: {error.strerror or error}") from None
        if not os.access(folder, os.W_OK):
            raise InputError(folder, "", "cannot be written: permission denied")


def _check_resume(settings: Config) -> int:
    """The step that a run goes on from; what does not fit is one line, before any rank starts."""
    if settings.train.resume is None:
        return 0
    path, facts = checkpoint.find(settings.train.resume)
    sizes, now = facts.get("training", {}).get("model", {}), settings.gpt.model_dump()
    for key in sorted(sizes.keys() & now.keys() - {"dropout"}):
        if sizes[key] != now[key]:
            raise InputError(path, "", f"is of a model whose {key} is {sizes[key]}, but the config's is {now[key]}")
    step = int(facts["step"])
    if step >= settings.train.steps:
        raise InputError(
            settings.file, "train.steps", f"is {settings.train.steps}, but {path} is at step {step} already"
        )
    return step


def settings_of(plan: Plan, config: Config | None = None, file: str | Path = "") -> Config:
    """The config that a plan is trained with: the given one, or the training part that the plan carries.

    Raises
    ------
    InputError
        There is none, or it does not fit the plan.
    """
    carried = None if plan.training is None else Config.from_json(plan.training, file, "training")
    settings = config.filled_from(carried) if config and carried else config or carried
    if settings is None:
        raise InputError(file, "training", "is missing, expected a plan made from a profile, or a config beside it")
    where = settings.file
    problem = plan.problem
    if settings.pipeline.partition == "balanced" and carried is not None and carried.pipeline.partition != "balanced":
        settings = settings.with_partition(carried.pipeline.partition)
    if settings.pipeline.partition == "balanced":
        raise InputError(where, "pipeline.partition", "is not settled, expected the layer counts of the plan's stages")
    if settings.pipeline.stage_devices != tuple(stage.device for stage in problem.stages):
        raise InputError(where, "pipeline", "does not place the stages as the plan does")
    if settings.batch.microbatches != problem.num_microbatches:
        raise InputError(
            where,
            "batch.microbatches",
            f"is {settings.batch.microbatches}, but the plan has {problem.num_microbatches}",
        )
    layers = sum(settings.pipeline.partition)
    if layers != settings.gpt.num_layers:
        raise InputError(where, "model.layers", f"makes {settings.gpt.num_layers} layers, but the plan's hold {layers}")
    return settings


def train_rank(
    rank: Rank, plan: dict[str, Any], config: dict[str, Any], file: str, trace: str | None = None
) -> dict[str, Any]:
    """The training loop of one rank; the fields of the summary, the same on every rank."""
    settings, schedule = Config.from_json(config, file), Plan.from_json(plan, file)
    run = _Run(rank, settings, schedule, traced=trace is not None)
    every, total = settings.train.checkpoint_every, settings.train.steps
    with contextlib.closing(run), MetricsLog(settings.train.metrics if rank.rank == 0 else None, run.first) as log:
        for number in range(run.first, total):
            step = run.step(number)
            if rank.rank == 0:
                log.write(step.to_json())
                rank.send(step.to_json())
            if step.step == total or (every is not None and step.step % every == 0):
                run.save(step.step)
    if run.tracer is not None and trace is not None:
        run.tracer.write(trace, schedule.problem)
    return vars(run.summary())


class _Run:
    """One rank's model, data and optimiser, and the records of its steps."""

    def __init__(self, rank: Rank, config: Config, plan: Plan, *, traced: bool = False) -> None:
        self.tracer = Tracer(samples=rank.device.type == "cpu") if traced else None
        self.rank, self.config, self.plan = rank, config, plan
        self.stages = stages.build_stages(config, rank.rank, rank.device)
        bandwidth = config.offload.bandwidth_bytes_per_s
        self.executor = Executor(
            plan,
            self.stages,
            stages.boundaries(config),
            loss_fn,
            device=rank.device,
            bandwidth=(bandwidth, bandwidth),
            seed=config.train.seed,
            before_op=None if self.tracer is None else self.tracer.sample,
        )
        if self.tracer is not None:
            self.tracer.ledger = self.executor.ledger
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
        began = time.perf_counter()
        inputs, targets = self._batch(number)
        result = self.executor.step(inputs, targets, number=number)
        if self.tracer is not None:
            self.tracer.record(number + 1, result)
        norm = optimizer.apply(self.optimizer, self.config.optimizer, number)
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
        step_ms = (time.perf_counter() - began) * 1e3
        record = self._record(number, result, norm, step_ms)
        every = self.config.train.validate_every
        if every is not None and (number + 1) % every == 0:
            record = replace(record, validation_loss=self._validation_loss())
        self.records.append(record)
        return record

    def save(self, step: int) -> None:
        """Write a checkpoint after a step, where the config asks for it."""
        if self.config.train.checkpoint is not None:
            facts = {"step": step, "training": self.config.training()}
            checkpoint.save(self.config.train.checkpoint, self.stages, facts, self.optimizer)

    def _validation_loss(self) -> float:
        """The mean over a few batches, the same ones every time; the same on every rank."""
        batches = [
            data.batch(self.text.validation, self.config.train.seed, number, self.shape)
            for number in range(VALIDATION_BATCHES)
        ]
        inputs, targets = (torch.cat(parts).to(self.rank.device) for parts in zip(*batches, strict=True))
        loss = self.evaluator().loss(list(inputs), list(targets))
        return sum(row[0] for row in gather.numbers([loss or 0.0]))

    def evaluator(self) -> evaluate.Evaluator:
        """Made on first use; by all ranks together."""
        if self._evaluator is None:
            problem = self.plan.problem
            self._evaluator = evaluate.Evaluator(
                problem.changed(num_microbatches=VALIDATION_BATCHES * problem.num_microbatches),
                self.stages,
                stages.boundaries(self.config),
                loss_fn,
                device=self.rank.device,
            )
        return self._evaluator

    def close(self) -> None:
        """End the threads."""
        self.executor.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def _batch(self, number: int) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]:
        if not (self.is_first or self.is_last):
            return None, None
        tokens, targets = data.batch(self.text.train, self.config.train.seed, number, self.shape)
        device = self.rank.device
        return (
            list(tokens.to(device)) if self.is_first else None,
            list(targets.to(device)) if self.is_last else None,
        )

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
        ]
        rows = gather.numbers(mine)
        loss, pipeline_ms, whole_ms = sum(row[0] for row in rows), max(r[1] for r in rows), max(r[2] for r in rows)
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
            peak_bytes=[int(row[5]) for row in rows],
            host_peak_bytes=[int(row[6]) for row in rows],
            load=total_busy / total_cpu if total_cpu > 0 else None,
            reliefs=deeds if any(deeds.values()) else None,
        )

    def _agree_on_the_text(self) -> None:
        """Ranks draw batches on their own: they must have the same text."""
        digest = zlib.crc32(self.text.train.numpy().tobytes())
        if len({row[0] for row in gather.numbers([float(digest)])}) > 1:
            raise InputError(self.config.file, "data", "is not the same text on all ranks, expected one folder for all")

    def summary(self) -> Summary:
        """The run beside its plan."""
        planned = metrics.measure(self.plan.problem, self.plan.ops)
        records, devices = self.records, range(self.plan.problem.num_devices)
        # Fewer steps than the warm-up: the last is the best there is.
        steady = records[min(WARM_UP, len(records) - 1) :]

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
            planned_ms=planned.makespan_ms,
            measured_ms=median("pipeline_ms"),
            step_ms=median("step_ms"),
            tokens_per_s=median("tokens_per_s"),
            planned_bubble_ratio=planned.bubble_ratio,
            measured_bubble_ratio=median("bubble_ratio"),
            budget_bytes=[device.memory_bytes for device in self.plan.problem.devices],
            planned_peak_bytes=planned.peak_bytes,
            measured_peak_bytes=[max(record.peak_bytes[d] for record in records) for d in devices],
            planned_offloaded_bytes=planned.offloaded_bytes,
            host_peak_bytes=[max(record.host_peak_bytes[d] for record in records) for d in devices],
            load=statistics.median(loads) if (loads := [r.load for r in steady if r.load is not None]) else None,
            checkpoint=self.config.train.checkpoint,
            reliefs=_added([record.reliefs for record in records]),
        )


def _added(reliefs: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    """The sum of what was done in all steps; None where nothing was."""
    total = Counter[str]()
    for done in reliefs:
        total.update(done or {})
    return dict(total) or None
