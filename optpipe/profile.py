"""The profile file: what was measured, or estimated, of a model on its devices, and the problem that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from optpipe import files
from optpipe.config import Config, Listed
from optpipe.errors import InputError
from optpipe.hardware import Hardware
from optpipe.problem import Bytes, Direction, Milliseconds, Name, Problem, check_channels, check_use

FORMAT, VERSION = "optpipe-profile", 1
#: Samples of one timing that a file keeps.
MAX_SAMPLES = 20

# Keys of a config that change what is measured.
_MUST_BE_AS_MEASURED = (
    "model",
    "batch.microbatch_size",
    "pipeline",
    "device",
    "offload.bandwidth_bytes_per_s",
    "offload.half_duplex",
    "offload.shared",
    "train.shards",
    "train.tensor_parallel",
)

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _wrong(key: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("profile", "{message}", {"key": key, "message": message})


class _Part(BaseModel):
    # Unknown keys are kept: a later version may say more.
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class Timing(_Part):
    """A duration in ms: median and interquartile range of its samples, and some of them."""

    median: Milliseconds
    iqr: Milliseconds = 0.0
    samples: Listed[Milliseconds] = ()

    @classmethod
    def of(cls, samples: Iterable[float]) -> Timing:
        """The timing of samples in ms (at least one); evenly spaced ones are kept where there are many."""
        values = np.asarray(list(samples), np.float64)
        low, median, high = np.percentile(values, [25, 50, 75])
        picked = values[np.unique(np.linspace(0, len(values) - 1, MAX_SAMPLES).round().astype(int))]
        return cls(
            median=round(float(median), 6),
            iqr=round(float(high - low), 6),
            samples=tuple(round(float(value), 6) for value in picked),
        )


class StageProfile(_Part):
    """One stage, per microbatch.

    Attributes
    ----------
    device, layers
        Where it runs, and how many layers it holds.
    forward_ms, backward_ms, weight_ms, fused_backward_ms, recompute_ms
        Compute alone, without waits: F, B, W, BW and C. A plan takes C to last as long as F.
    activation_bytes, weight_context_bytes
        Held after F, and still held after B.
    offloadable_bytes, offload_ms, reload_ms
        What a whole offload moves, and how long it takes each way; no times where offloading is off.
    checkpoint_bytes
        Held when the stage is to be recomputed; None: it cannot be.
    """

    device: Annotated[int, Field(ge=0)]
    layers: Annotated[int, Field(ge=1)]
    forward_ms: Timing
    backward_ms: Timing
    weight_ms: Timing
    fused_backward_ms: Timing
    recompute_ms: Timing | None = None
    activation_bytes: Bytes
    weight_context_bytes: Bytes
    offloadable_bytes: Bytes = 0
    offload_ms: Timing | None = None
    reload_ms: Timing | None = None
    checkpoint_bytes: Bytes | None = None


class DeviceProfile(_Part):
    """One device: its static memory, the most that messages under way took, which no plan counts, and its load (wall
    over CPU time of compute; 1: the core was its own)."""

    weight_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    message_bytes: Bytes = 0
    load: Annotated[float, Field(ge=0)] | None = None

    @property
    def static_bytes(self) -> int:
        """What activations cannot have: weights, gradients, optimiser state and messages."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.message_bytes


class LinkProfile(_Part):
    """From stage s to stage s+1: one message of ``message_bytes`` takes ``message_ms``.

    ``latency_ms`` and ``bytes_per_s`` (of an empty and of a large message) serve to reckon other sizes.
    """

    message_bytes: Bytes
    message_ms: Timing
    latency_ms: Milliseconds = 0.0
    bytes_per_s: Rate | None = None


class TransferProfile(_Part):
    """One direction of one device's host link, in bytes per second, alone and while its neighbours copy too."""

    device: Annotated[int, Field(ge=0)]
    direction: Direction
    alone_bytes_per_s: Rate | None = None
    together_bytes_per_s: Rate | None = None


class ChannelProfile(_Part):
    """Something that carries one transfer at a time, and the transfers that it carries."""

    name: Name
    transfers: Listed[TransferProfile]


class TrialProfile(_Part):
    """A schedule that the profile was taken under: its step as it ran, and as this profile predicts it.

    ``transfer_wait_ms``, ``message_wait_ms``: per device, what its compute stood still in a step for offloads and
    reloads, and for its neighbours.
    """

    name: str
    predicted_ms: Milliseconds
    measured_ms: Milliseconds
    transfer_wait_ms: Listed[Milliseconds] = ()
    message_wait_ms: Listed[Milliseconds] = ()


class Profile(_Part):
    """A measured or estimated model. ``settings``: its config, the partition settled. ``hardware``: what it was
    estimated for; None: it was measured."""

    format: Literal["optpipe-profile"]
    version: Literal[1]
    name: Name = ""
    machine: dict[str, Any] = {}
    stages: Annotated[tuple[StageProfile, ...], Field(strict=False, min_length=1)]
    devices: Annotated[tuple[DeviceProfile, ...], Field(strict=False, min_length=1)]
    links: Listed[LinkProfile]
    channels: Listed[ChannelProfile] = ()
    trials: Listed[TrialProfile] = ()
    settings: Config
    hardware: Hardware | None = None
    warnings: Listed[str] = ()

    @classmethod
    def make(cls, **parts: Any) -> Profile:
        """A profile from its parts; format and version are filled in."""
        return cls(format="optpipe-profile", version=1, **parts)

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """The profile of a file.

        Raises
        ------
        InputError
            The file is no profile: wrong format or version, a key missing or of a wrong type.
        """
        return cls.from_json(files.read_json(path), path)

    @classmethod
    def from_json(cls, value: Any, file: str | Path) -> Profile:
        """A profile from the JSON object of its file; ``file`` names it in errors."""
        if not isinstance(value, dict):
            raise InputError(file, "", "is not a profile, expected an object")
        if value.get("format") != FORMAT:
            raise InputError(file, "format", f"expected '{FORMAT}', not {value.get('format')!r}")
        if value.get("version") != VERSION or isinstance(value["version"], bool):
            raise InputError(file, "version", f"expected {VERSION}, not {value.get('version')!r}")
        if "settings" in value:
            value = {**value, "settings": Config.from_json(value["settings"], file, "settings")}
        return files.validated(cls, value, file)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the profile file."""
        measured = {"hardware"} if self.hardware is None else set()
        value = self.model_dump(mode="json", exclude={"settings", *measured})
        value["settings"] = self.settings.to_json()
        return value

    def write(self, path: str | Path) -> None:
        """Write the profile file, whole or not at all."""
        files.write_json(path, self.to_json())

    def for_config(self, config: Config) -> Profile:
        """The same measurements under another config's memory, number of microbatches, optimiser and so on.

        Sections that the config leaves out are those that were measured.

        Raises
        ------
        InputError
            The config asks for something that changes the measurements: another model, microbatch size, pipeline,
            device or offload link.
        """
        measured = self.settings
        config = config.filled_from(measured)
        if config.device == "auto":
            config = config.model_copy(update={"device": measured.device})
        counts = tuple(stage.layers for stage in self.stages)
        if config.pipeline.partition == "balanced" and len(counts) == config.pipeline.num_stages:
            config = config.with_partition(counts)
        for key in _MUST_BE_AS_MEASURED:
            _same(key, _at(config, key), _at(measured, key), config.file, self.made)
        return self.model_copy(update={"settings": config, "name": config.name or self.name})

    @property
    def made(self) -> str:
        """How its figures came about, in a word."""
        return "measured" if self.hardware is None else "estimated"

    @property
    def static_bytes(self) -> list[int]:
        """Per device: weights, gradients, optimiser state and messages."""
        return [device.static_bytes for device in self.devices]

    @property
    def training(self) -> dict[str, Any]:
        """The part of the config that a plan carries, its partition settled."""
        return self.settings.training()

    def to_problem(self, budgets: Sequence[int | None] | None = None) -> Problem:
        """The scheduling task.

        Parameters
        ----------
        budgets
            Activation bytes a device may hold (None: no limit), one entry a device; default what the config says.

        Raises
        ------
        InputError
            The config's memory leaves nothing for activations.
        """
        if budgets is None:
            budgets = self.settings.budgets(self.static_bytes)
        offload = self.settings.offload.enabled
        return Problem.from_json(
            {
                "name": self.name,
                "num_microbatches": self.settings.batch.microbatches,
                "devices": [{"memory_bytes": budget} for budget in budgets],
                "stages": [_stage(stage, offload=offload) for stage in self.stages],
                "comm_ms": [link.message_ms.median for link in self.links],
                "channels": [_channel(channel) for channel in self.channels] if offload else [],
            },
            self.settings.file,
        )

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        count = len(self.devices)
        for index, stage in enumerate(self.stages):
            if stage.device >= count:
                raise _wrong(
                    f"stages[{index}].device", f"device {stage.device} does not exist, expected 0 to {count - 1}"
                )
            for part in ("weight_context_bytes", "offloadable_bytes", "checkpoint_bytes"):
                size = getattr(stage, part)
                if size is not None and size > stage.activation_bytes:
                    raise _wrong(
                        f"stages[{index}].{part}",
                        f"{size} is more than activation_bytes, expected at most {stage.activation_bytes}",
                    )
        if len(self.links) != len(self.stages) - 1:
            raise _wrong(
                "links", f"has {len(self.links)} entries, expected {len(self.stages) - 1}: one between each two stages"
            )
        check_use(self.stages, count)
        check_channels(self.channels, count)
        if self.settings.pipeline.partition != tuple(stage.layers for stage in self.stages):
            raise _wrong("settings.pipeline.partition", "is not what the stages hold, expected their layer counts")
        if self.settings.pipeline.stage_devices != tuple(stage.device for stage in self.stages):
            raise _wrong("settings.pipeline", "does not place the stages where they were measured")
        return self


def _stage(stage: StageProfile, *, offload: bool) -> dict[str, Any]:
    """The stage as a problem has it."""
    value: dict[str, Any] = {
        "device": stage.device,
        "forward_ms": stage.forward_ms.median,
        "backward_ms": stage.backward_ms.median,
        "weight_ms": stage.weight_ms.median,
        "fused_backward_ms": stage.fused_backward_ms.median,
        "activation_bytes": stage.activation_bytes,
        "weight_context_bytes": stage.weight_context_bytes,
    }
    if offload and stage.offload_ms is not None and stage.reload_ms is not None:
        value["offloadable_bytes"] = stage.offloadable_bytes
        value["offload_ms"] = stage.offload_ms.median
        value["reload_ms"] = stage.reload_ms.median
    if stage.checkpoint_bytes is not None:
        value["checkpoint_bytes"] = stage.checkpoint_bytes
    return value


def _channel(channel: ChannelProfile) -> dict[str, Any]:
    return {
        "name": channel.name,
        "transfers": [{"device": t.device, "direction": t.direction} for t in channel.transfers],
    }


def _at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _same(key: str, now: Any, measured: Any, file: str, made: str) -> None:
    """Refuse a value that differs from the measured (or estimated) one, naming the innermost key."""
    if isinstance(now, BaseModel) and isinstance(measured, BaseModel):
        for name in type(now).model_fields:
            _same(f"{key}.{name}", getattr(now, name), getattr(measured, name), file, made)
    elif now != measured:
        expected = list(measured) if isinstance(measured, tuple) else measured
        raise InputError(file, key, f"is not what was {made}, expected {expected!r}, or a new profile")
