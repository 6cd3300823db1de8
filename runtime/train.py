"""Training under a plan: what fits what, and the loop on every rank (``trainer``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optpipe.config import Config
from optpipe.errors import InputError
from optpipe.plan import Plan
from optpipe.verify import verify_plan
from runtime import checkpoint, data, launch
from runtime.metrics_log import MetricsLog, Step, Summary
from runtime.trainer import Trainer
from runtime.worker import Rank


def train(
    plan: Plan,
    config: Config | None = None,
    *,
    steps: int | None = None,
    resume: str | Path | None = None,
    on_step: Callable[[Step], None] | None = None,
    trace: str | Path | None = None,
    replanned: str | Path | None = None,
    file: str | Path = "",
) -> Summary:
    """Train the model of a plan under its schedule, on the config's number of local ranks, or on those of torchrun.

    Parameters
    ----------
    plan
        A valid plan. Without ``config`` it must carry its training part, as plans made from a profile do.
    config
        Its sections go before those that the plan carries; its pipeline and microbatches must be the plan's.
    steps, resume
        Go before the config's ``train.steps`` and ``train.resume``.
    on_step
        Called after every ``train.log_every``-th step, and where another plan takes over, in the launching process
        (under torchrun: on rank 0).
    trace
        Where the trace of the last steps goes (see ``optpipe.trace``).
    replanned
        Where a plan goes that takes over, with ``train.replan``; None: it is not kept.
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
    ranks = settings.num_ranks
    device = launch.resolve_device(settings.device, ranks, settings.file)
    data.check(settings)
    _check_place(settings.train.checkpoint)
    first = _check_resume(settings)
    every, total = settings.train.log_every, settings.train.steps

    def hear(message: dict[str, Any]) -> None:
        step = Step.from_json(message)
        if on_step is not None and (step.step % every == 0 or step.step in (first + 1, total) or step.replanned):
            on_step(step)

    arguments = {"plan": plan.to_json(), "config": settings.to_json(), "file": str(settings.file)}
    for name, place in (("trace", trace), ("replanned", replanned)):
        if place is not None:
            arguments[name] = str(place)
    return Summary(**launch.launch(train_rank, arguments, ranks, device, hear))


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
    if carried is not None and settings.train.tensor_parallel != carried.train.tensor_parallel:
        raise InputError(
            where,
            "train.tensor_parallel",
            f"is {settings.train.tensor_parallel}, but the plan's times and sizes are of "
            f"{carried.train.tensor_parallel}, expected the same, or a plan from a new profile",
        )
    # Sections of two files: they have to fit together as those of one do.
    return Config.from_json(settings.to_json(), where)


def train_rank(
    rank: Rank,
    plan: dict[str, Any],
    config: dict[str, Any],
    file: str,
    trace: str | None = None,
    replanned: str | None = None,
) -> dict[str, Any]:
    """The training loop of one rank; the fields of the summary, the same on every rank."""
    settings, schedule = Config.from_json(config, file), Plan.from_json(plan, file)
    run = Trainer(rank, settings, schedule, traced=trace is not None, replanned=replanned)
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
        run.tracer.write(trace, schedule.problem, run.place.of_first(range(rank.world_size)))
    return vars(run.summary())
