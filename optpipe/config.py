"""The YAML config: what to train, on which devices, within which memory, and how to plan it.

Every section is optional. A file is read once and checked whole; whatever is wrong with it is one line that names
the key. Paths that a config reads (``profile``, ``data.folder``) count from the config's folder; paths that a run
writes count from the working folder, as those of ``-o`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from optpipe import files
from optpipe.errors import InputError
from optpipe.problem import Bytes, Problem

Item = TypeVar("Item")
#: A list in the file; strict mode would take only a tuple.
Listed = Annotated[tuple[Item, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]

#: Layers of the model beside its blocks: the embedding in front and the head behind.
EXTRA_LAYERS = 2


#: The sections that a plan carries, so that it can be trained alone.
TRAINING_SECTIONS = ("model", "data", "batch", "pipeline", "offload", "device", "optimizer", "train")


def _wrong(key: str, message: str) -> PydanticCustomError:
    # The text goes in as a parameter: pydantic would read braces in a template as fields.
    return PydanticCustomError("config", "{message}", {"key": key, "message": message})


def _expected(message: str) -> PydanticCustomError:
    """An error at the field itself; the value is named behind the message."""
    return PydanticCustomError("config", "{message}", {"message": message})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _partition(value: Any) -> Any:
    """'balanced' or layer counts. A union of both would name pydantic's branches in the error."""
    if value == "balanced":
        return value
    if isinstance(value, list | tuple) and value and all(_is_count(item) for item in value):
        return tuple(value)
    raise _expected("expected 'balanced' or a list of layer counts, each at least 1")


def _budget(value: Any) -> Any:
    """One number of bytes for every device, or a list with one entry a device (null: no limit)."""
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if item is not None and (isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**62):
            raise _expected("expected an integer number of bytes, at least 0, or a list with one a device")
    return tuple(value) if isinstance(value, list) else value


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ModelConfig(_Section):
    """A GPT over bytes: an embedding, ``layers`` blocks and a head, so ``layers + 2`` layers to cut into stages.

    ``tied``: the head's matrix is the embedding's.
    """

    layers: Count
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
            raise _wrong("model.width", f"{self.width} is not a multiple of heads, expected a multiple of {self.heads}")
        return self


class DataConfig(_Section):
    """Text to learn. ``folder`` null: the sources of the Python standard library.

    ``pattern`` is a glob in the folder (null: every file; ``*.py`` for the default folder). At most ``max_bytes`` are
    read, in the order of the file names; the last ``validation_fraction`` of every file is held out.
    """

    folder: str | None = None
    pattern: str | None = None
    max_bytes: Count = 8_000_000
    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05


class BatchConfig(_Section):
    """A step's batch: ``accumulate`` runs of a plan of ``microbatches`` times ``microbatch_size`` sequences."""

    microbatches: Count = 8
    microbatch_size: Count = 4
    accumulate: Count = 1

    @property
    def sequences(self) -> int:
        """Sequences a step, of one replica."""
        return self.microbatches * self.microbatch_size * self.accumulate


class PipelineConfig(_Section):
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
            raise _wrong(
                "pipeline.stages_per_device", f"{self.stages_per_device} does not make a V, expected 2 with placement v"
            )
        if self.partition != "balanced" and len(self.partition) != self.num_stages:
            raise _wrong(
                "pipeline.partition",
                f"has {len(self.partition)} entries, expected {self.num_stages}: one a stage "
                "(devices x stages_per_device)",
            )
        return self


class MemoryConfig(_Section):
    """What activations may take. Either ``activation_budget_bytes`` (all devices alike, or a list; null: no limit), or
    ``device_bytes``, from which weights, gradients, optimiser state, messages and ``reserve_bytes`` are taken off."""

    activation_budget_bytes: Annotated[int | tuple[int | None, ...] | None, BeforeValidator(_budget)] = None
    device_bytes: Bytes | None = None
    reserve_bytes: Bytes = 0

    @model_validator(mode="after")
    def _one_way_or_the_other(self) -> Self:
        if self.activation_budget_bytes is not None and self.device_bytes is not None:
            raise _wrong("memory.device_bytes", "is given beside activation_budget_bytes, expected only one of the two")
        if self.device_bytes is None and self.reserve_bytes:
            raise _wrong("memory.reserve_bytes", "needs device_bytes, expected both or neither")
        return self


class OffloadConfig(_Section):
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
        seen: set[int] = set()
        for index, group in enumerate(self.shared):
            if len(group) < 2:
                raise _wrong(f"offload.shared[{index}]", "expected at least two devices that share a switch")
            for device in group:
                if device in seen:
                    raise _wrong(f"offload.shared[{index}]", f"device {device} is given twice, expected it once in all")
                seen.add(device)
        return self


class OptimizerConfig(_Section):
    """AdamW. ``clip_norm``: the most that the norm of all gradients together may be (null: no clipping)."""

    learning_rate: Positive = 1e-3
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NotNegative = 0.1
    clip_norm: Positive | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10


class TrainConfig(_Section):
    """The run. ``validate_every``: steps between losses on held-out text (null: none); ``checkpoint``: a folder for
    weights and optimiser state, written at the end and every ``checkpoint_every`` steps; ``resume``: such a folder to
    go on from; ``metrics``: a file, one JSON object a step.

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
    checkpoint: str | None = None
    checkpoint_every: Count | None = None
    resume: str | None = None
    metrics: str | None = None

    @property
    def pipelines(self) -> int:
        """Pipelines that train side by side, each on a batch of its own."""
        return self.replicas * self.shards

    @model_validator(mode="after")
    def _checkpoints_have_a_place(self) -> Self:
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise _wrong("train.checkpoint_every", "needs a folder, expected train.checkpoint beside it")
        return self


class MeasureConfig(_Section):
    """How a profile is taken: ``iterations`` steps of each schedule, after ``warmup`` ones that do not count."""

    warmup: Annotated[int, Field(ge=0)] = 3
    iterations: Count = 10


class SolverConfig(_Section):
    """How the schedule is sought. ``gap``: how far from the proven bound will do; ``threads`` null: all cores."""

    method: str = "auto"
    objective: Literal["makespan", "span"] = "makespan"
    time_limit_s: Positive = 300.0
    gap: NotNegative = 0.05
    threads: Count | None = None
    seed: Seed = 0


class Config(_Section):
    """A whole config file. ``problem`` or ``profile`` say what to solve without measuring first."""

    name: str = ""
    model: ModelConfig | None = None
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    pipeline: PipelineConfig = PipelineConfig()
    memory: MemoryConfig = MemoryConfig()
    offload: OffloadConfig = OffloadConfig()
    device: Literal["cpu", "cuda", "auto"] = "auto"
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    measure: MeasureConfig = MeasureConfig()
    solver: SolverConfig = SolverConfig()
    problem: Problem | None = None
    profile: str | None = None
    _file: str = PrivateAttr("")

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """The config of a YAML file.

        Raises
        ------
        InputError
            The file is missing, is not YAML, or anything in it is wrong.
        """
        config = cls.from_json(files.read_yaml(path), path)
        folder = Path(path).absolute().parent
        changes: dict[str, Any] = {"name": config.name or Path(path).stem}
        if config.profile is not None:
            changes["profile"] = str(folder / config.profile)
        if config.data.folder is not None:
            changes["data"] = config.data.model_copy(update={"folder": str(folder / config.data.folder)})
        return config.model_copy(update=changes)

    @classmethod
    def from_json(cls, value: Any, file: str | Path, prefix: str = "") -> Config:
        """A config from what a file held (under the key ``prefix``). Paths are taken as they are.

        Raises
        ------
        InputError
            Anything in it is wrong.
        """
        if value is None:
            value = {}
        if isinstance(value, dict):
            # A section with nothing under it is one that was left out.
            value = {key: part for key, part in value.items() if part is not None}
            if "problem" in value:
                inner = f"{prefix}.problem" if prefix else "problem"
                value["problem"] = Problem.from_json(value["problem"], file, inner)
        config = files.validated(cls, value, file, prefix)
        config._file = str(file)
        return config

    def to_json(self) -> dict[str, Any]:
        """The config as JSON, defaults written out."""
        value = self.model_dump(mode="json", exclude={"problem", "profile"})
        if self.problem is not None:
            value["problem"] = self.problem.to_json()
        if self.profile is not None:
            value["profile"] = self.profile
        return value

    def training(self) -> dict[str, Any]:
        """The part that a plan carries, so that it can be trained alone."""
        return self.model_dump(mode="json", include={"name", *TRAINING_SECTIONS})

    def filled_from(self, other: Config) -> Config:
        """The same config, with the training sections that its file leaves out taken from another one."""
        left_out = [name for name in TRAINING_SECTIONS if name not in self.model_fields_set]
        return self.model_copy(update={name: getattr(other, name) for name in left_out})

    @property
    def file(self) -> str:
        """The file that this config came from, for messages; empty where there was none."""
        return self._file

    @property
    def gpt(self) -> ModelConfig:
        """The model.

        Raises
        ------
        InputError
            The config has none.
        """
        if self.model is None:
            raise InputError(self.file, "model", "is missing, expected layers, width, heads and context")
        return self.model

    @property
    def num_ranks(self) -> int:
        """Processes of a run: the pipeline's devices times what ``train`` puts around them."""
        return self.pipeline.devices * self.train.pipelines * self.train.tensor_parallel

    def with_partition(self, counts: Sequence[int]) -> Config:
        """The same config with the layers of each stage settled."""
        pipeline = self.pipeline.model_copy(update={"partition": tuple(counts)})
        return self.model_copy(update={"pipeline": pipeline})

    def budgets(self, static_bytes: Sequence[int]) -> list[int | None]:
        """The activation budget of each device, in bytes; None: no limit.

        Parameters
        ----------
        static_bytes
            Bytes of weights, gradients, optimiser state and messages, one entry a device.

        Raises
        ------
        InputError
            ``device_bytes`` leaves nothing, or the list of budgets has another length.
        """
        memory, count = self.memory, len(static_bytes)
        given = memory.activation_budget_bytes
        if isinstance(given, tuple):
            if len(given) != count:
                problem = f"has {len(given)} entries, expected {count}: one a device"
                raise InputError(self.file, "memory.activation_budget_bytes", problem)
            return list(given)
        if memory.device_bytes is None:
            return [given] * count
        left = [memory.device_bytes - memory.reserve_bytes - static for static in static_bytes]
        for device, bytes_left in enumerate(left):
            if bytes_left < 0:
                raise InputError(
                    self.file,
                    "memory.device_bytes",
                    f"{memory.device_bytes} does not hold the reserve and the weights, gradients, optimiser state and "
                    f"messages of device {device}, expected at least {memory.device_bytes - bytes_left}",
                )
        return list(left)

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.problem is not None and self.profile is not None:
            raise _wrong("profile", "is given beside problem, expected only one of the two")
        count = self.pipeline.devices
        given = self.memory.activation_budget_bytes
        if isinstance(given, tuple) and self.problem is None and self.profile is None and len(given) != count:
            raise _wrong("memory.activation_budget_bytes", f"has {len(given)} entries, expected {count}: one a device")
        for index, group in enumerate(self.offload.shared):
            if self.problem is None and self.profile is None and max(group) >= count:
                raise _wrong(
                    f"offload.shared[{index}]", f"device {max(group)} does not exist, expected 0 to {count - 1}"
                )
        if self.model is not None:
            self._stages_have_layers(self.model)
            self._heads_can_be_shared(self.model)
        return self

    def _heads_can_be_shared(self, model: ModelConfig) -> None:
        ranks = self.train.tensor_parallel
        if model.heads % ranks:
            raise _wrong(
                "train.tensor_parallel", f"{ranks} does not divide model.heads, expected a divisor of {model.heads}"
            )
        if ranks > 1 and model.dropout:
            raise _wrong(
                "model.dropout",
                f"is {model.dropout} with train.tensor_parallel, expected 0: heads on different ranks would drop alike",
            )

    def _stages_have_layers(self, model: ModelConfig) -> None:
        partition, layers = self.pipeline.partition, model.num_layers
        parts = f"the embedding, {model.layers} blocks and the head"
        if self.pipeline.num_stages > layers:
            raise _wrong(
                "pipeline.devices",
                f"makes {self.pipeline.num_stages} stages, expected at most {layers}: one a layer ({parts})",
            )
        if partition != "balanced" and sum(partition) != layers:
            raise _wrong("pipeline.partition", f"adds up to {sum(partition)} layers, expected {layers}: {parts}")
