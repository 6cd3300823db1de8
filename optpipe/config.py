"""The YAML config: what to train, on which devices, within which memory, and how to plan it.

Every section is optional. A file is read once and checked whole; whatever is wrong with it is one line that names
the key. Paths that a config reads (``profile``, ``hardware``, ``data.folder``) count from the config's folder; paths
that a run writes count from the working folder, as those of ``-o`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PrivateAttr, model_validator

from optpipe import files
from optpipe.errors import InputError
from optpipe.hardware import Hardware
from optpipe.problem import Name, Problem
from optpipe.sections import (
    BatchConfig,
    DataConfig,
    Listed,
    MeasureConfig,
    MemoryConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PathText,
    PipelineConfig,
    ReplanConfig,
    Section,
    SolverConfig,
    TrainConfig,
    expected,
    wrong,
)

__all__ = [
    "TRAINING_SECTIONS",
    "BatchConfig",
    "Config",
    "DataConfig",
    "Listed",
    "MeasureConfig",
    "MemoryConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "ReplanConfig",
    "SolverConfig",
    "TrainConfig",
]

#: The sections that a plan carries, so that it can be trained alone.
TRAINING_SECTIONS = ("model", "data", "batch", "pipeline", "offload", "device", "optimizer", "train")


def _hardware(value: Any) -> Any:
    """A file, or a description that is read already. A union of both would name pydantic's branches in the error."""
    if value is None or isinstance(value, str | Hardware):
        return value
    raise expected("expected the path of a hardware file, or a mapping")


class Config(Section):
    """A whole config file. ``problem``, ``profile`` or ``hardware`` say what to solve without measuring first."""

    name: Name = ""
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
    profile: PathText | None = None
    hardware: Annotated[str | Hardware | None, BeforeValidator(_hardware)] = None
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
        if isinstance(config.hardware, str):
            changes["hardware"] = str(folder / config.hardware)
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
            if isinstance(value.get("hardware"), dict):
                inner = f"{prefix}.hardware" if prefix else "hardware"
                value["hardware"] = Hardware.from_json(value["hardware"], file, inner)
        config = files.validated(cls, value, file, prefix)
        config._file = str(file)
        return config

    def to_json(self) -> dict[str, Any]:
        """The config as JSON, defaults written out."""
        value = self.model_dump(mode="json", exclude={"problem", "profile", "hardware"})
        if self.problem is not None:
            value["problem"] = self.problem.to_json()
        if self.profile is not None:
            value["profile"] = self.profile
        if self.hardware is not None:
            value["hardware"] = self.hardware if isinstance(self.hardware, str) else self.hardware.to_json()
        return value

    def training(self) -> dict[str, Any]:
        """The part that a plan carries, so that it can be trained alone."""
        return self.model_dump(mode="json", include={"name", *TRAINING_SECTIONS})

    def filled_from(self, other: Config) -> Config:
        """The same config, its memory and training sections from another one where its file leaves them out."""
        left_out = [name for name in (*TRAINING_SECTIONS, "memory") if name not in self.model_fields_set]
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
    def described_hardware(self) -> Hardware:
        """What ``hardware`` says, read where it names a file.

        Raises
        ------
        InputError
            The config has none, or its file is wrong.
        """
        if self.hardware is None:
            message = "is missing, expected the path of a hardware file, or a mapping"
            raise InputError(self.file, "hardware", message)
        return Hardware.read(self.hardware) if isinstance(self.hardware, str) else self.hardware

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
        sources = [key for key in ("problem", "profile", "hardware") if getattr(self, key) is not None]
        if len(sources) > 1:
            raise wrong(sources[1], f"is given beside {sources[0]}, expected only one of the two")
        count = self.pipeline.devices
        given = self.memory.activation_budget_bytes
        if isinstance(given, tuple) and self.problem is None and self.profile is None and len(given) != count:
            raise wrong("memory.activation_budget_bytes", f"has {len(given)} entries, expected {count}: one a device")
        for index, group in enumerate(self.offload.shared):
            if self.problem is None and self.profile is None and max(group) >= count:
                raise wrong(
                    f"offload.shared[{index}]", f"device {max(group)} does not exist, expected 0 to {count - 1}"
                )
        if self.model is not None:
            self._stages_have_layers(self.model)
            self._heads_can_be_shared(self.model)
        return self

    def _heads_can_be_shared(self, model: ModelConfig) -> None:
        ranks = self.train.tensor_parallel
        if model.heads % ranks:
            raise wrong(
                "train.tensor_parallel", f"{ranks} does not divide model.heads, expected a divisor of {model.heads}"
            )
        if ranks > 1 and model.dropout:
            raise wrong(
                "model.dropout",
                f"is {model.dropout} with train.tensor_parallel, expected 0: heads on different ranks would drop alike",
            )

    def _stages_have_layers(self, model: ModelConfig) -> None:
        partition, layers = self.pipeline.partition, model.num_layers
        parts = f"the embedding, {model.layers} blocks and the head"
        if self.pipeline.num_stages > layers:
            raise wrong(
                "pipeline.devices",
                f"makes {self.pipeline.num_stages} stages, expected at most {layers}: one a layer ({parts})",
            )
        if partition != "balanced" and sum(partition) != layers:
            raise wrong("pipeline.partition", f"adds up to {sum(partition)} layers, expected {layers}: {parts}")
