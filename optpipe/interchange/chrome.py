"""Plans and runs as Chrome traces, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A device is a process: of the plan, and below it the same device of the run. Its threads are compute, the two directions
of its host link and, of a run, what compute ops waited for; memory is a counter. Arrows lead from ops to those of other
devices that need them. Times in the file are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from optpipe import draw, memory, semantics
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.trace import StepTrace, Trace

Event = dict[str, Any]
_COMPUTE, _OUT, _BACK, _WAITS = 0, 1, 2, 3
_THREADS = {_COMPUTE: "compute", _OUT: "offload (d2h)", _BACK: "reload (h2d)", _WAITS: "waits"}


class _Track(NamedTuple):
    """The processes of one timeline: their numbers and names, by device; ``begin`` in ms shifts all its times."""

    problem: Problem
    first_process: int
    name: str
    begin: float


def text_of(plan: Plan, trace: Trace | None = None) -> str:
    """The JSON text of a plan, and of a run of it beside the plan: both begin at 0, the steps of a run follow."""
    problem = plan.problem
    own = _Track(problem, 0, "plan", -float(plan.ops.start.min(initial=0.0)))
    events = [*_processes(own, with_waits=False), *_ops(own, plan.ops)]
    for device in range(problem.num_devices):
        events += _memory(own, device, *memory.curve(problem, plan.ops, device))
    if trace is not None:
        events += _processes(_Track(problem, problem.num_devices, "run", 0.0), with_waits=True)
        for step in trace.steps:
            events += _step(_Track(problem, problem.num_devices, "run", step.begin_ms), step)
    value = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"problem": problem.name}}
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _processes(track: _Track, *, with_waits: bool) -> Iterator[Event]:
    """Names, and the order on the screen: a device of the plan, the same of the run, the next device."""
    for device in range(track.problem.num_devices):
        process = track.first_process + device
        stages = ", ".join(map(str, track.problem.stages_of[device]))
        name = f"{track.name}: device {device} (stage {stages})"
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        place = 2 * device + (track.first_process > 0)
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": place}}
        for thread, text in _THREADS.items():
            if thread != _WAITS or with_waits:
                yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": text}}


def _ops(track: _Track, ops: Ops) -> Iterator[Event]:
    """A slice an op, and an arrow for each message between devices."""
    device = semantics.device_of(track.problem, ops)
    columns = (ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, device)
    for kind, stage, microbatch, start, end, number in zip(*(column.tolist() for column in columns), strict=True):
        yield {
            "ph": "X",
            "pid": track.first_process + number,
            "tid": _thread(kind),
            "name": f"{Kind(kind).name}({stage},{microbatch})",
            "cat": draw.MEANING[Kind(kind)],
            "ts": _us(start + track.begin),
            "dur": _us(end - start),
            "args": {"stage": stage, "microbatch": microbatch},
        }
    edges = semantics.dependencies(track.problem, ops)
    for before, after in zip(edges.before.tolist(), edges.after.tolist(), strict=True):
        if device[before] == device[after]:
            continue
        label = f"{track.name} {track.begin:g} {before}>{after}"
        for phase, op, time in (("s", before, ops.end[before]), ("f", after, ops.start[after])):
            yield {
                "ph": phase,
                "id": label,
                "pid": track.first_process + int(device[op]),
                "tid": _thread(int(ops.kind[op])),
                "name": "message",
                "cat": "message",
                "ts": _us(float(time) + track.begin),
                # An arrow ends at the slice that begins here, and begins in the one that ends here.
                **({"bp": "e"} if phase == "f" else {}),
            }


def _thread(kind: int) -> int:
    return {Kind.O: _OUT, Kind.R: _BACK}.get(Kind(kind), _COMPUTE)


def _memory(track: _Track, device: int, times: Floats, levels: Ints) -> Iterator[Event]:
    """The counter of a device: of several levels at one instant the highest, then the last."""
    if not len(times):
        return
    for instant in np.unique(times).tolist():
        low, high = np.searchsorted(times, instant, "left"), np.searchsorted(times, instant, "right")
        here = levels[low:high]
        for level in dict.fromkeys((int(here.max()), int(here[-1]))):
            yield {
                "ph": "C",
                "pid": track.first_process + device,
                "name": "memory",
                "ts": _us(instant + track.begin),
                "args": {"bytes": level},
            }


def _step(track: _Track, step: StepTrace) -> Iterator[Event]:
    """One step of a run: its ops, their waits, memory."""
    yield from _ops(track, step.ops)
    device = semantics.device_of(track.problem, step.ops)
    for op in np.flatnonzero(step.ops.is_compute).tolist():
        message, transfer = float(step.message_wait_ms[op]), float(step.memory_wait_ms[op])
        start = float(step.ops.start[op])
        for name, begin, length in (
            ("waits for memory or a reload", start - message - transfer, transfer),
            ("waits for a message", start - message, message),
        ):
            if length > 0:
                yield {
                    "ph": "X",
                    "pid": track.first_process + int(device[op]),
                    "tid": _WAITS,
                    "name": name,
                    "cat": "wait",
                    "ts": _us(begin + track.begin),
                    "dur": _us(length),
                    "args": {"op": step.ops[op].label},
                }
    for number in range(track.problem.num_devices):
        yield from _memory(track, number, *step.held(track.problem, number))


def _us(time: float) -> float:
    return round(1e3 * time, 3)
