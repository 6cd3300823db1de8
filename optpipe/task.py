"""What a file asks to be solved: a config, a problem, a profile, or a plan whose problem is solved again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optpipe import files
from optpipe import plan as plans
from optpipe import profile as profiles
from optpipe.config import Config, SolverConfig
from optpipe.errors import InputError
from optpipe.estimate import estimate
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.profile import Profile


@dataclass(frozen=True)
class Task:
    """A problem, and what goes with it.

    Attributes
    ----------
    problem
        What is to be solved.
    training
        The training part of the config, which the plan carries; None where there is nothing to train.
    solver, solver_key
        How the file wants it solved, and the key under which it says so.
    extra
        Unknown keys of the plan that the problem came from, kept; of an estimate, what it is for.
    warnings
        What makes an estimate doubtful.
    start
        The schedule of the plan that the problem came from, for a search to begin with.
    """

    problem: Problem
    training: dict[str, Any] | None = None
    solver: SolverConfig = field(default_factory=SolverConfig)
    solver_key: str = "solver"
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    start: Ops | None = None


def read_task(path: str | Path, profile: str | Path | None = None) -> Task:
    """The task of a file. What the file is shows in its content, not in its name.

    Parameters
    ----------
    path
        A YAML config (with ``problem``, ``profile``, or a model and ``hardware`` to estimate), a problem as JSON or
        YAML, a profile, or a plan.
    profile
        The profile that a config is to be planned with, in place of its own ``profile`` or ``hardware``.

    Raises
    ------
    InputError
        The file is none of these, something in it is wrong, or a config says nothing to solve.
    """
    value = _value(path)
    if not isinstance(value, dict):
        raise InputError(path, "", "expected a config, a problem, a profile or a plan")
    kind = value.get("format")
    if kind == plans.FORMAT or (kind is None and "ops" in value):
        _no_profile(profile, "a plan")
        plan = Plan.from_json(value, path)
        return Task(plan.problem, plan.training, extra=plan.extra, start=plan.ops)
    if kind == profiles.FORMAT:
        _no_profile(profile, "a profile")
        return _of_profile(Profile.from_json(value, path), "settings.solver")
    if kind is not None:
        raise InputError(path, "format", f"expected '{plans.FORMAT}' or '{profiles.FORMAT}', not {kind!r:.40}")
    if "stages" in value or "devices" in value or "num_microbatches" in value:
        _no_profile(profile, "a problem")
        return Task(Problem.from_json(value, path))
    return _of_config(Config.read(path), path, profile)


def read_plan(path: str | Path) -> Plan | None:
    """The plan in a file; None where the file holds something else.

    Raises
    ------
    InputError
        The file cannot be read, or it is a plan with something wrong in it.
    """
    value = _value(path)
    is_plan = isinstance(value, dict) and (value.get("format") == plans.FORMAT or "ops" in value)
    return Plan.from_json(value, path) if is_plan else None


def _value(path: str | Path) -> Any:
    """What the file holds: JSON where it starts like an object (unless its name says YAML), else YAML."""
    text = files.read_text(path)  # once: it may be a pipe
    is_json = text.lstrip().startswith("{") and Path(path).suffix not in (".yaml", ".yml")
    return files.parse_json(text, path) if is_json else files.parse_yaml(text, path)


def _no_profile(profile: str | Path | None, what: str) -> None:
    if profile is not None:
        raise InputError("--profile", "", f"goes with a config, but {what} is given")


def _of_profile(profile: Profile, solver_key: str = "solver") -> Task:
    task = Task(profile.to_problem(), profile.training, profile.settings.solver, solver_key)
    if profile.hardware is None:
        return task
    # Whoever plans with an estimate sees what its times are worth, and so does who reads the plan.
    return replace(task, extra={"estimated_for": profile.hardware.name}, warnings=profile.warnings)


def _of_config(config: Config, path: str | Path, profile: str | Path | None) -> Task:
    if config.problem is not None:
        _no_profile(profile, "one with a problem")
    source = profile or config.profile
    if source is not None:
        return _of_profile(Profile.read(source).for_config(config))
    if config.hardware is not None:
        return _of_profile(estimate(config))
    if config.problem is None:
        message = f"is missing, expected the file that 'optpipe profile {path}' writes, a problem, or hardware"
        raise InputError(path, "profile", message)
    problem = config.problem
    _fits(config, problem)
    if config.memory.activation_budget_bytes is not None:
        problem = problem.with_budgets(config.budgets([0] * problem.num_devices))
    return Task(problem, config.training() if config.model is not None else None, config.solver)


def _fits(config: Config, problem: Problem) -> None:
    """Refuse what a config says beside its problem and the problem does not have."""
    if config.memory.device_bytes is not None:
        message = "needs what weights take, which a problem does not say, expected memory.activation_budget_bytes"
        raise InputError(config.file, "memory.device_bytes", message)
    if not config.offload.enabled and any(problem.can_offload(stage) for stage in range(problem.num_stages)):
        raise InputError(config.file, "offload.enabled", "is false, expected a problem without channels then")
    count = config.batch.microbatches
    if "microbatches" in config.batch.model_fields_set and count != problem.num_microbatches:
        message = f"is {count}, expected {problem.num_microbatches}, the problem's num_microbatches"
        raise InputError(config.file, "batch.microbatches", message)
    if config.model is not None or "pipeline" in config.model_fields_set:
        _places_alike(config, problem)


def _places_alike(config: Config, problem: Problem) -> None:
    """Refuse another pipeline than the problem's: the plan could not be trained."""
    pipeline, places = config.pipeline, tuple(stage.device for stage in problem.stages)
    if pipeline.devices != problem.num_devices:
        message = f"is {pipeline.devices}, expected {problem.num_devices}, as the problem has"
        raise InputError(config.file, "pipeline.devices", message)
    if pipeline.num_stages != len(places):
        message = f"makes {pipeline.num_stages} stages, expected {len(places)}, as the problem has"
        raise InputError(config.file, "pipeline.stages_per_device", message)
    if pipeline.stage_devices != places:
        message = f"puts the stages on devices {_listed(pipeline.stage_devices)}, but the problem on {_listed(places)}"
        raise InputError(config.file, "pipeline.placement", message)


def _listed(devices: tuple[int, ...]) -> str:
    return " ".join(map(str, devices))
