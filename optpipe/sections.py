"""The sections of a config: each a frozen model that checks itself. ``config`` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from optpipe.problem import MOST_MICROBATCHES, Bytes

Item = TypeVar("Item")
#: A list in the file; strict mode would take only a tuple.
Listed = Annotated[tuple[Item, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


def _is_place(value: str) -> str:
    """A path that a system can take; pydantic's own words would not say so."""
    if not value or "\0" in value:
        raise PydanticCustomError("config", "expected a path")
    return value


PathText = Annotated[str, AfterValidator(_is_place)]
#: Blocks of a model at most: with more, cutting it into stages would take minutes.
MOST_LAYERS = 100_000

#: Layers of the model beside its blocks: the embedding in front and the head behind.
EXTRA_LAYERS = 2
#: Tokens that the model knows: a token is a byte.
VOCABULARY = 256


def wrong(key: str, message: str) -> PydanticCustomError:
    """An error at a key, as validators raise it."""
    # The text goes in as a parameter: pydantic would read braces in a template as fields.
    return PydanticCustomError("config", "{message}", {"key": key, "message": message})


def expected(message: str) -> PydanticCustomError:
    """An error at the field itself; the value is named behind the message."""
    return PydanticCustomError("config", "{message}", {"message": message})


def groups_are_apart(groups: Sequence[Sequence[int]], key: str) -> None:
    """Refuse groups of devices behind one switch (under ``key``) that are too small or overlap, as validators do."""
    seen: set[int] = set()
    for index, group in enumerate(groups):
        if len(group) < 2:
            raise wrong(f"{key}[{index}]", "expected at least two devices that share a switch")
        for device in group:
            if device in seen:
                raise wrong(f"{key}[{index}]", f"device {device} is given twice, expected it once in all")
            seen.add(device)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _partition(value: Any) -> Any:
    """'balanced' or layer counts. A union of both would name pydantic's branches in the error."""
    if value == "balanced":
        return value
    if isinstance(value, list | tuple) and value and all(_is_count(item) for item in value):
        return tuple(value)
    raise expected("expected 'balanced' or a list of layer counts, each at least 1")


def _budget(value: Any) -> Any:
    """One number of bytes for every device, or a list with one entry a device (null: no limit)."""
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if item is not None and (isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**62):
            raise expected("expected an integer number of bytes, at least 0, or a list with one a device")
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A section of a config: unknown keys are errors."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ModelConfig(Section):
    """A GPT over bytes: an embedding, ``layers`` blocks and a head, so ``layers + 2`` layers to cut into stages.

    ``tied``: the head's matrix is the embedding's.
    """

    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    width: Count
    heads: Count
    context: Count
    dropout: Fraction = 0.0
    tied: bool = False

    @property
    def num_layers(self) -> int:
        """Layers that a partition cuts: the embedding, the blocks and the head."""
        return self.layers + EXTRA_LAYERS

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.width % self.heads:
            raise wrong("model.width", f"{self.width} is not a multiple of heads, expected a multiple of {self.heads}")
        return self


def _is_pattern(value: str) -> str:
    try:
        Path("file").match(value)
    except ValueError:
        raise PydanticCustomError("config", "expected a glob, such as *.txt") from None
    return value


class DataConfig(Section):
    """Text to learn. ``folder`` null: the sources of the Python standard library.

    ``pattern`` is a glob in the folder (null: every file; ``*.py`` for the default folder). At most ``max_bytes`` are
    read, in the order of the file names; the last ``validation_fraction`` of every file is held out.
    """

    folder: PathText | None = None
    pattern: Annotated[str, AfterValidator(_is_pattern)] | None = None
    max_bytes: Count = 8_000_000
    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05


class BatchConfig(Section):
    """A step's batch: ``accumulate`` runs of a plan of ``microbatches`` times ``microbatch_size`` sequences."""

    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 8
    microbatch_size: Count = 4
    accumulate: Count = 1

    @property
    def sequences(self) -> int:
        """Sequences a step, of one replica."""
        return self.microbatches * self.microbatch_size * self.accumulate


class PipelineConfig(Section):
    """Stages on devices. ``partition``: 'balanced', or how many layers each stage holds."""

    devices: Count = 2
    stages_per_device: Count = 1
    placement: Literal["linear", "interleaved", "v"] = "linear"
    partition: Annotated[Literal["balanced"] | tuple[int, ...], BeforeValidator(_partition)] = "balanced"

    @property
    def num_stages(self) -> int:
        return self.devices * self.stages_per_device

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """The device of each stage, along the model.

        linear: 0 0 1 1; interleaved: 0 1 0 1; v: 0 1 1 0 (two devices, two stages each).
        """
        stages = range(self.num_stages)
        if self.placement == "linear":
            return tuple(stage // self.stages_per_device for stage in stages)
        if self.placement == "interleaved":
            return tuple(stage % self.devices for stage in stages)
        return tuple(min(stage, self.num_stages - 1 - stage) for stage in stages)

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.placement == "v" and self.stages_per_device != 2:
            raise wrong(
                "pipeline.stages_per_device", f"{self.stages_per_device} does not make a V, expected 2 with placement v"
            )
        if self.partition != "balanced" and len(self.partition) != self.num_stages:
            raise wrong(
                "pipeline.partition",
                f"has {len(self.partition)} entries, expected {self.num_stages}: one a stage "
                "(devices x stages_per_device)",
            )
        return self


class MemoryConfig(Section):
    """What activations may take. Either ``activation_budget_bytes`` (all devices alike, or a list; null: no limit), or
    ``device_bytes``, from which weights, gradients, optimiser state, messages and ``reserve_bytes`` are taken off."""

    activation_budget_bytes: Annotated[int | tuple[int | None, ...] | None, BeforeValidator(_budget)] = None
    device_bytes: Bytes | None = None
    reserve_bytes: Bytes = 0

    @model_validator(mode="after")
    def _one_way_or_the_other(self) -> Self:
        if self.activation_budget_bytes is not None and self.device_bytes is not None:
            raise wrong("memory.device_bytes", "is given beside activation_budget_bytes, expected only one of the two")
        if self.device_bytes is None and self.reserve_bytes:
            raise wrong("memory.reserve_bytes", "needs device_bytes, expected both or neither")
        return self


class OffloadConfig(Section):
    """Activations to host memory. ``bandwidth_bytes_per_s`` paces the copies of CPU devices (null: as fast as they go).

    ``half_duplex``: a link carries one direction at a time. ``shared``: groups of devices behind one switch, which
    carries one transfer at a time a direction (one in all when half duplex).
    """

    enabled: bool = True
    bandwidth_bytes_per_s: Positive | None = None
    half_duplex: bool = False
    shared: Listed[Listed[Annotated[int, Field(ge=0)]]] = ()

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Self:
        groups_are_apart(self.shared, "offload.shared")
        return self


class OptimizerConfig(Section):
    """AdamW. ``clip_norm``: the most that the norm of all gradients together may be (null: no clipping)."""

    learning_rate: Positive = 1e-3
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NotNegative = 0.1
    clip_norm: Positive | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10


class ReplanConfig(Section):
    """Solving again beside the training. Every ``every`` steps the last ones' times go to a solver, which works beside
    the training for ``time_limit_s`` with ``threads`` threads; a plan takes over whose step is shorter by ``gain`` at
    these times, and gives way to the one before if that proves to have been faster."""

    every: Count = 100
    gain: Fraction = 0.02
    time_limit_s: Positive = 30.0
    threads: Count = 1


class TrainConfig(Section):
    """The run. ``validate_every``: steps between losses on held-out text (null: none); ``checkpoint``: a folder for
    weights and optimiser state, written at the end and every ``checkpoint_every`` steps; ``resume``: such a folder to
    go on from; ``metrics``: a file, one JSON object a step; ``replan``: solving again beside the training (null: no).

    Ranks beyond one pipeline: ``replicas`` and ``shards`` count pipelines that train side by side, each on a batch of
    its own; every replica keeps whole weights, shards keep a part each (FSDP2). ``tensor_parallel``: ranks that share
    the attention heads and the perceptron of every block."""

    steps: Count = 50
    replicas: Count = 1
    shards: Count = 1
    tensor_parallel: Count = 1
    seed: Seed = 0
    log_every: Count = 1
    validate_every: Count | None = None
    checkpoint: PathText | None = None
    checkpoint_every: Count | None = None
    resume: PathText | None = None
    metrics: PathText | None = None
    replan: ReplanConfig | None = None

    @property
    def pipelines(self) -> int:
        """Pipelines that train side by side, each on a batch of its own."""
        return self.replicas * self.shards

    @model_validator(mode="after")
    def _checkpoints_have_a_place(self) -> Self:
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise wrong("train.checkpoint_every", "needs a folder, expected train.checkpoint beside it")
        return self


class MeasureConfig(Section):
    """How a profile is taken: ``iterations`` steps of each schedule, after ``warmup`` ones that do not count."""

    warmup: Annotated[int, Field(ge=0)] = 3
    iterations: Count = 10


class SolverConfig(Section):
    """How the schedule is sought. ``gap``: how far from the proven bound will do; ``threads`` null: all cores."""

    method: str = "auto"
    objective: Literal["makespan", "span"] = "makespan"
    time_limit_s: Positive = 300.0
    gap: NotNegative = 0.05
    threads: Count | None = None
    seed: Seed = 0
