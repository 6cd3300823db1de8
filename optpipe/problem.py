"""The data of one scheduling task. Times in milliseconds, sizes in bytes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from optpipe import files
from optpipe.errors import InputError

#: More microbatches than any step has; what is larger is a slip, and would not fit into memory as a plan.
MOST_MICROBATCHES = 100_000
#: Thirty years in ms: beyond it sums of times lose their last digits.
LONGEST_MS = 1e12

Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, lt=2**62)]


def _without_control(name: str) -> str:
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise PydanticCustomError("control_characters", "expected text without control characters")
    return name


#: Names are printed as they are.
Name = Annotated[str, AfterValidator(_without_control)]
Direction = Literal["d2h", "h2d"]

#: Unknown keys are kept, so that a plan of a later version survives a round trip; ``Problem.read`` refuses them.
_MODEL = ConfigDict(strict=True, frozen=True, extra="allow")


def _wrong(key: str, message: str) -> PydanticCustomError:
    # The text goes in as a parameter: pydantic would read braces in a template as fields.
    return PydanticCustomError("problem", "{message}", {"key": key, "message": message})


class _OnDevice(Protocol):
    """A stage or a transfer, of a problem or of a profile."""

    @property
    def device(self) -> int: ...


class _Carried(_OnDevice, Protocol):
    @property
    def direction(self) -> Direction: ...


class _Carrier(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def transfers(self) -> Sequence[_Carried]: ...


def check_use(stages: Sequence[_OnDevice], num_devices: int) -> None:
    """Refuse a device without a stage, as validators do."""
    used = {stage.device for stage in stages}
    for device in range(num_devices):
        if device not in used:
            raise _wrong(f"devices[{device}]", "no stage uses this device, expected at least one")


def check_channels(channels: Sequence[_Carrier], num_devices: int) -> None:
    """Refuse channels that have one name, or carry a transfer twice or of no device, as validators do."""
    names: set[str] = set()
    for index, channel in enumerate(channels):
        key = f"channels[{index}]"
        if channel.name in names:
            raise _wrong(f"{key}.name", f"'{channel.name}' is given twice, expected different names")
        names.add(channel.name)
        seen: set[tuple[int, str]] = set()
        for number, transfer in enumerate(channel.transfers):
            where = f"{key}.transfers[{number}]"
            if transfer.device >= num_devices:
                raise _wrong(
                    f"{where}.device", f"device {transfer.device} does not exist, expected 0 to {num_devices - 1}"
                )
            if (transfer.device, transfer.direction) in seen:
                raise _wrong(where, "is given twice, expected each device and direction once")
            seen.add((transfer.device, transfer.direction))


class Device(BaseModel):
    """One accelerator. ``memory_bytes``: its activation budget; None: no limit."""

    model_config = _MODEL
    memory_bytes: Bytes | None


class Stage(BaseModel):
    """A contiguous run of the model's layers on one device, per microbatch.

    ``fused_backward_ms`` None: ``backward_ms + weight_ms``. ``checkpoint_bytes`` None: cannot be recomputed.
    """

    model_config = _MODEL
    device: Annotated[int, Field(ge=0)]
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    weight_ms: Milliseconds
    fused_backward_ms: Milliseconds | None = None
    activation_bytes: Bytes
    weight_context_bytes: Bytes = 0
    offloadable_bytes: Bytes = 0
    offload_ms: Milliseconds = 0.0
    reload_ms: Milliseconds = 0.0
    checkpoint_bytes: Bytes | None = None

    @property
    def bw_ms(self) -> float:
        """Time of a fused backward (BW)."""
        return self.backward_ms + self.weight_ms if self.fused_backward_ms is None else self.fused_backward_ms


class Transfer(BaseModel):
    """What a channel carries: one direction of one device's host link."""

    model_config = _MODEL
    device: Annotated[int, Field(ge=0)]
    direction: Direction


class Channel(BaseModel):
    """Something that carries one transfer at a time."""

    model_config = _MODEL
    name: Name
    transfers: tuple[Transfer, ...]


class Problem(BaseModel):
    """Stages on devices, microbatches, times, sizes and channels: what a schedule is made for."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", ignored_types=(cached_property,))
    name: Name = ""
    num_microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    comm_ms: tuple[Milliseconds, ...]
    channels: tuple[Channel, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        """Strict mode takes no list for a tuple; a file has only lists."""
        if not isinstance(value, dict):
            return value
        value = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
        if isinstance(value.get("channels"), tuple):
            value["channels"] = tuple(
                {k: tuple(v) if isinstance(v, list) else v for k, v in c.items()} if isinstance(c, dict) else c
                for c in value["channels"]
            )
        return value

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Problem:
        count = len(self.devices)
        for index, stage in enumerate(self.stages):
            key = f"stages[{index}]"
            if stage.device >= count:
                raise _wrong(f"{key}.device", f"device {stage.device} does not exist, expected 0 to {count - 1}")
            for part in ("weight_context_bytes", "offloadable_bytes", "checkpoint_bytes"):
                size = getattr(stage, part)
                if size is not None and size > stage.activation_bytes:
                    raise _wrong(
                        f"{key}.{part}",
                        f"{size} is more than activation_bytes, expected at most {stage.activation_bytes}",
                    )
        check_use(self.stages, count)
        if self.num_microbatches * sum(stage.activation_bytes for stage in self.stages) >= 2**62:
            largest = max(range(len(self.stages)), key=lambda s: self.stages[s].activation_bytes)
            message = "is too large, expected less than 2^62 bytes for all microbatches of all stages together"
            raise _wrong(f"stages[{largest}].activation_bytes", message)
        if len(self.comm_ms) != len(self.stages) - 1:
            raise _wrong(
                "comm_ms",
                f"has {len(self.comm_ms)} entries, expected {len(self.stages) - 1}: one between each two stages",
            )
        check_channels(self.channels, count)
        return self

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per device, its stages in ascending order."""
        held: list[list[int]] = [[] for _ in self.devices]
        for index, stage in enumerate(self.stages):
            held[stage.device].append(index)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def channels_of(self) -> dict[tuple[int, Direction], tuple[int, ...]]:
        """The channels (indices) that a transfer of a (device, direction) occupies; () where none carries it."""
        found: dict[tuple[int, Direction], tuple[int, ...]] = {}
        for device in range(self.num_devices):
            for direction in ("d2h", "h2d"):
                found[device, direction] = tuple(
                    index
                    for index, channel in enumerate(self.channels)
                    if any(t.device == device and t.direction == direction for t in channel.transfers)
                )
        return found

    def can_offload(self, stage: int) -> bool:
        """Whether activations of this stage can move to the host and back: bytes to move, and a channel each way."""
        device = self.stages[stage].device
        return (
            self.stages[stage].offloadable_bytes > 0
            and bool(self.channels_of[device, "d2h"])
            and bool(self.channels_of[device, "h2d"])
        )

    def with_budgets(self, budgets: list[int | None] | tuple[int | None, ...]) -> Problem:
        """The same problem with other device budgets (bytes; None: no limit)."""
        return self.changed(devices=tuple({"memory_bytes": budget} for budget in budgets))

    def changed(self, **parts: Any) -> Problem:
        """The same problem with other top-level parts, validated again."""
        return Problem.model_validate({**self.to_json(), **parts})

    def to_json(self) -> dict[str, Any]:
        """The JSON object of this problem; optional values that were not given are left out."""
        return self.model_dump(mode="json", exclude_unset=True)

    def unknown_keys(self) -> list[str]:
        """Keys that the format does not know, as paths."""
        found = list(self.model_extra or ())
        for name in ("devices", "stages", "channels"):
            for index, part in enumerate(getattr(self, name)):
                found += [f"{name}[{index}].{key}" for key in part.model_extra or ()]
        for index, channel in enumerate(self.channels):
            for number, transfer in enumerate(channel.transfers):
                found += [f"channels[{index}].transfers[{number}].{key}" for key in transfer.model_extra or ()]
        return found

    @classmethod
    def from_json(cls, value: Any, file: str | Path, prefix: str = "", *, keep_unknown: bool = False) -> Problem:
        """A problem from what a file held.

        Raises
        ------
        InputError
            Something in it is wrong; unknown keys too, unless ``keep_unknown``.
        """
        problem = files.validated(cls, value, file, prefix)
        if not keep_unknown and (unknown := problem.unknown_keys()):
            key = ".".join(part for part in (prefix, unknown[0]) if part)
            raise InputError(file, key, "unknown key, expected one of " + ", ".join(_known_beside(unknown[0])))
        return problem

    @classmethod
    def read(cls, path: str | Path) -> Problem:
        """A problem from a JSON file that holds just the problem object."""
        return cls.from_json(files.read_json(path), path)


def _known_beside(key: str) -> list[str]:
    models: dict[str, type[BaseModel]] = {"devices": Device, "stages": Stage, "channels": Channel}
    model: type[BaseModel] = models.get(key.split("[")[0], Problem) if "." in key else Problem
    if ".transfers[" in key:
        model = Transfer
    return list(model.model_fields)
