"""The trace of a run: when its ops really ran, what they waited for, and what memory they held, on one clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optpipe import files, memory, semantics
from optpipe.errors import InputError
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.problem import LONGEST_MS, Problem

FORMAT, VERSION = "optpipe-trace", 1
_SAMPLE_KEYS = ("time", "bytes", "most_bytes", "allocated_bytes")
_OP_KEYS = ("kind", "stage", "microbatch", "start", "end", "memory_wait_ms", "message_wait_ms", "bytes")


class Samples(NamedTuple):
    """What a device held, as its ops began and ended. Without samples all are empty.

    ``time``: float64 (n,), ms, ascending. ``held``: int64 (n,), activation bytes. ``most``: int64 (n,), the most since
    the sample before. ``allocated``: int64, all bytes that torch held on the device, (n,) on CUDA and empty elsewhere.
    """

    time: Floats
    held: Ints
    most: Ints
    allocated: Ints


@dataclass(frozen=True)
class StepTrace:
    """One training step of all devices. Times in ms since the first device began it.

    Attributes
    ----------
    number
        Of the step, from 1.
    begin_ms
        When it began, since the first step of the trace.
    ops
        As they ran.
    memory_wait_ms, message_wait_ms
        float64 (n,): how long each op waited for transfers, and then for its input or gradient, before it ran.
    memory
        Per device.
    peak_bytes, message_peak_bytes, host_peak_bytes
        Per device: the most activation bytes, bytes in messages under way, and offloaded bytes on the host.
    """

    number: int
    begin_ms: float
    ops: Ops
    memory_wait_ms: Floats
    message_wait_ms: Floats
    memory: list[Samples]
    peak_bytes: list[int]
    message_peak_bytes: list[int]
    host_peak_bytes: list[int]

    def held(self, problem: Problem, device: int) -> tuple[Floats, Ints]:
        """The memory curve of a device: instants (ms), and the bytes held from each on.

        Between two samples it is the most that was held there. Without samples it is what the ops, as they ran, hold
        by the plan's figures.
        """
        samples = self.memory[device]
        if not len(samples.time):
            return memory.curve(problem, self.ops, device)
        return samples.time, np.append(np.maximum(samples.held[:-1], samples.most[1:]), samples.held[-1])


@dataclass(frozen=True)
class Trace:
    """A run, or some steps of it.

    Attributes
    ----------
    name
        Of the problem.
    steps
        At least one.
    """

    name: str
    steps: list[StepTrace]

    @property
    def typical(self) -> StepTrace:
        """The step of median length (of an even number, the shorter one of the middle)."""
        by_length = sorted(self.steps, key=lambda step: semantics.makespan(step.ops))
        return by_length[(len(by_length) - 1) // 2]

    @classmethod
    def read(cls, path: str | Path, problem: Problem) -> Trace:
        """The trace in a file.

        Raises
        ------
        InputError
            The file is no trace, or none of a run of this problem.
        """
        value = files.read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise InputError(path, "format", f"expected '{FORMAT}': the file that 'optpipe train --trace' writes")
        if value.get("version") != VERSION or isinstance(value["version"], bool):
            raise InputError(path, "version", f"expected {VERSION}, not {value.get('version')!r:.40}")
        if not isinstance(steps := value.get("steps"), list) or not steps:
            raise InputError(path, "steps", "expected a list with at least one step")
        name = value.get("name")
        found = [_step(step, problem, path, f"steps[{n}]") for n, step in enumerate(steps)]
        return cls(name if isinstance(name, str) else "", found)


def device_json(
    ops: Ops,
    memory_wait_ms: Floats,
    message_wait_ms: Floats,
    samples: Samples,
    peaks: tuple[int, int, int],
) -> dict[str, Any]:
    """What the file holds of one device in one step: columns of ops and of memory samples, and three peaks."""
    columns = {
        "kind": [Kind(kind).name for kind in ops.kind.tolist()],
        "stage": ops.stage.tolist(),
        "microbatch": ops.microbatch.tolist(),
        "start": np.round(ops.start, 6).tolist(),
        "end": np.round(ops.end, 6).tolist(),
        "memory_wait_ms": np.round(memory_wait_ms, 6).tolist(),
        "message_wait_ms": np.round(message_wait_ms, 6).tolist(),
        "bytes": np.maximum(ops.bytes, 0).tolist(),
    }
    rounded = samples._replace(time=np.round(samples.time, 6))
    sampled = {key: column.tolist() for key, column in zip(_SAMPLE_KEYS, rounded, strict=True)}
    names = ("peak_bytes", "message_peak_bytes", "host_peak_bytes")
    return {"ops": columns, "memory": sampled, **dict(zip(names, peaks, strict=True))}


def trace_json(problem: Problem, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON object of a trace file; a step is ``{"step": number, "begin_ms": ..., "devices": [device_json(...),
    ...]}``."""
    return {"format": FORMAT, "version": VERSION, "name": problem.name, "steps": steps}


def _step(value: Any, problem: Problem, file: str | Path, key: str) -> StepTrace:
    devices = value.get("devices") if isinstance(value, dict) else None
    if not isinstance(devices, list) or len(devices) != problem.num_devices:
        raise InputError(file, f"{key}.devices", f"expected {problem.num_devices} of them, as in the plan")
    if type(value.get("step")) is not int:
        raise InputError(file, f"{key}.step", f"expected an integer, not {value.get('step')!r:.40}")
    begin = float(_floats([value.get("begin_ms")], file, f"{key}.begin_ms")[0])
    columns: dict[str, list[Any]] = {name: [] for name in _OP_KEYS}
    held, peaks = [], []
    for number, device in enumerate(devices):
        where = f"{key}.devices[{number}]"
        if not isinstance(device, dict):
            raise InputError(file, where, "expected an object")
        found = _columns(device.get("ops"), _OP_KEYS, file, f"{where}.ops")
        for name, values in _checked(found, problem, number, file, f"{where}.ops").items():
            columns[name] += values
        held.append(_samples(device.get("memory"), file, f"{where}.memory"))
        names = ("peak_bytes", "message_peak_bytes", "host_peak_bytes")
        peaks.append([_floats([device.get(name)], file, f"{where}.{name}")[0] for name in names])
    starts, ends = (_floats(columns[name], file, key) for name in ("start", "end"))
    ops = Ops.columns(columns["kind"], columns["stage"], columns["microbatch"], starts, ends, columns["bytes"])
    most, sent, host = ([int(row[n]) for row in peaks] for n in range(3))
    waits = [_floats(columns[name], file, key) for name in ("memory_wait_ms", "message_wait_ms")]
    return StepTrace(value["step"], begin, ops, waits[0], waits[1], held, most, sent, host)


def _samples(value: Any, file: str | Path, key: str) -> Samples:
    """Sorted by time. ``allocated_bytes`` may be empty or missing."""
    if not isinstance(value, dict) or not value.get(_SAMPLE_KEYS[-1]):
        found = {**_columns(value, _SAMPLE_KEYS[:-1], file, key), _SAMPLE_KEYS[-1]: []}
    else:
        found = _columns(value, _SAMPLE_KEYS, file, key)
    time, *sizes = (_floats(found[name], file, key) for name in _SAMPLE_KEYS)
    order = np.argsort(time, kind="stable")
    return Samples(time[order], *(size[order[: len(size)]].astype(np.int64) for size in sizes))


def _columns(value: Any, names: tuple[str, ...], file: str | Path, key: str) -> dict[str, list[Any]]:
    """Lists of equal length."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in names):
        raise InputError(file, key, f"expected the lists {', '.join(names)}")
    if len({len(value[name]) for name in names}) > 1:
        raise InputError(file, key, "has lists of different lengths")
    return {name: value[name] for name in names}


def _checked(
    found: dict[str, list[Any]], problem: Problem, device: int, file: str | Path, key: str
) -> dict[str, list[Any]]:
    """Kinds as numbers; stages and microbatches of the problem; bytes -1 where nothing moves."""
    names = {kind.name: int(kind) for kind in Kind}
    for name, stage, microbatch, moved in zip(
        found["kind"], found["stage"], found["microbatch"], found["bytes"], strict=True
    ):
        held = type(stage) is int and 0 <= stage < problem.num_stages and problem.stages[stage].device == device
        known = type(microbatch) is int and 0 <= microbatch < problem.num_microbatches
        real = isinstance(name, str) and name in names and type(moved) is int and 0 <= moved < 2**62
        if not (real and held and known):
            raise InputError(file, key, f"has {f'{name}({stage},{microbatch})':.60}, which is not of this plan")
    kinds = [names[name] for name in found["kind"]]
    moved = [b if kind >= Kind.O else -1 for kind, b in zip(kinds, found["bytes"], strict=True)]
    return {**found, "kind": kinds, "bytes": moved}


def _floats(values: list[Any], file: str | Path, key: str) -> Floats:
    largest = 2**62
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -LONGEST_MS <= value < largest:
            raise InputError(file, key, f"expected numbers, not {value!r:.40}")
    return np.array(values, np.float64)
