"""Plans and runs as Chrome traces, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A device is a process: of the plan, and below it the same device of the run. Its threads are compute, the two directions
of its host link and, of a run, what compute ops waited for; memory is a counter. Arrows lead from ops to those of other
devices that need them. Times in the file are microseconds.

What readers of the format ask for beyond its description, and the tests check:

- numbers of processes and threads are above 0 (0 is the idle process), and none is used twice;
- slices of a thread do not overlap, not by a nanosecond: Perfetto drops a slice that does;
- slices have a length: Perfetto puts one without inside the slice that begins there, and gives it that one's arrows;
- nothing begins before 0: Perfetto drops what does;
- an arrow has a number for an id, and its ends lie inside the slices: at the border of two slices readers differ about
  which one it belongs to.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from optpipe import draw, memory, semantics
from optpipe.errors import InputError
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.trace import StepTrace, Trace

Event = dict[str, Any]
_COMPUTE, _OUT, _BACK, _WAITS = 1, 2, 3, 4
_THREADS = {_COMPUTE: "compute", _OUT: "offload (d2h)", _BACK: "reload (h2d)", _WAITS: "waits"}
#: Between the numbers of two processes; a process's threads are the numbers that follow its own.
_PLACES = 10
#: ns. Nobody sees it, and yet a slice as short has an inside, where its arrows can end.
_SHORTEST_OP = 2
#: ns. To look whether something is there takes as long, and chrome://tracing cannot show it.
_SHORTEST_WAIT = 1000
#: ns. Readers count in 64 bits; what is added to give an op its length stays below them.
_LAST = 2**62
#: A colour for each kind among those that chrome://tracing has; Perfetto makes its own of the names.
_COLOURS = {
    Kind.F: "rail_response",
    Kind.B: "rail_idle",
    Kind.W: "rail_load",
    Kind.BW: "rail_animation",
    Kind.C: "thread_state_uninterruptible",
    Kind.O: "thread_state_runnable",
    Kind.R: "yellow",
}


class _Track(NamedTuple):
    """The processes of one timeline.

    ``first``: how many processes come before its own; ``begin``: ms that all its times are shifted by; ``arrows``:
    numbers for arrows.
    """

    problem: Problem
    first: int
    name: str
    begin: float
    arrows: Iterator[int]

    def process(self, device: int) -> int:
        return _PLACES * (1 + self.first + device)

    def ns(self, time: float) -> int:
        """Nanoseconds on the clock of the file, which ends after 146 years."""
        found = round(1e6 * (time + self.begin))
        if found > _LAST:
            raise InputError("", "trace", f"its clock ends at {_LAST / 1e6:.4g} ms, expected no later op than that")
        return found


def text_of(plan: Plan, trace: Trace | None = None) -> str:
    """The JSON text of a plan, and of a run of it beside the plan: both begin at 0, the steps of a run follow."""
    problem, arrows = plan.problem, itertools.count(1)
    own = _Track(problem, 0, "plan", -float(plan.ops.start.min(initial=0.0)), arrows)
    events = [*_processes(own, with_waits=False), *_ops(own, plan.ops)]
    for device in range(problem.num_devices):
        events += _counter(own, device, "memory", *memory.curve(problem, plan.ops, device))
    if trace is not None:
        run = _Track(problem, problem.num_devices, "run", 0.0, arrows)
        events += _processes(run, with_waits=True)
        for step in trace.steps:
            events += _step(run._replace(begin=step.begin_ms), step)
    value = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"problem": problem.name}}
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _processes(track: _Track, *, with_waits: bool) -> Iterator[Event]:
    """Names, and the order on the screen: a device of the plan, the same of the run, the next device."""
    for device in range(track.problem.num_devices):
        process = track.process(device)
        stages = ", ".join(map(str, track.problem.stages_of[device]))
        name = f"{track.name}: device {device} (stage {stages})"
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        place = 2 * device + (track.first > 0)
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": place}}
        for thread, text in _THREADS.items():
            if thread != _WAITS or with_waits:
                where = {"ph": "M", "pid": process, "tid": process + thread}
                yield {**where, "name": "thread_name", "args": {"name": text}}
                yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _ops(track: _Track, ops: Ops) -> Iterator[Event]:
    """A slice an op, and an arrow for each message between devices."""
    device = semantics.device_of(track.problem, ops).tolist()
    threads = [_thread(kind) for kind in ops.kind.tolist()]
    edges = semantics.dependencies(track.problem, ops)
    pairs = zip(edges.before.tolist(), edges.after.tolist(), strict=True)
    messages = [(before, after) for before, after in pairs if device[before] != device[after]]
    spans = _spans(track, ops, list(zip(device, threads, strict=True)), messages)
    where = [{"pid": track.process(d), "tid": track.process(d) + t} for d, t in zip(device, threads, strict=True)]
    for op, place, (start, end) in zip(ops, where, spans, strict=True):
        yield {
            "ph": "X",
            **place,
            "name": op.label,
            "cat": draw.MEANING[op.kind],
            "cname": _COLOURS[op.kind],
            "ts": _us(start),
            "dur": _us(end - start),
            "args": {"stage": op.stage, "microbatch": op.microbatch},
        }
    for before, after in messages:
        arrow = {"id": next(track.arrows), "name": "message", "cat": "message"}
        sent = max(spans[before][1] - 1, spans[before][0])
        taken = max(min(spans[after][0] + 1, spans[after][1]), sent)
        yield {"ph": "s", **arrow, **where[before], "ts": _us(sent)}
        yield {"ph": "f", "bp": "e", **arrow, **where[after], "ts": _us(taken)}


def _spans(
    track: _Track, ops: Ops, lanes: list[tuple[int, int]], messages: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Start and end of each op, ns; every op has a length.

    What overlaps by no more than counts as one instant, or than the lengths given to ops without one, does not here:
    an op begins when its lane is free and its messages are there.
    """
    spans = [(track.ns(start), track.ns(end)) for start, end in zip(ops.start.tolist(), ops.end.tolist(), strict=True)]
    lengthened = sum(end - start < _SHORTEST_OP for start, end in spans)
    slack = 1 + math.ceil(1e6 * semantics.tolerance(ops)) + _SHORTEST_OP * lengthened
    senders: dict[int, list[int]] = {}
    for before, after in messages:
        senders.setdefault(after, []).append(before)
    free: dict[tuple[int, int], int] = {}
    for op in semantics.rank(ops).tolist():
        start, end = spans[op]
        ready = (free.get(lanes[op], start), *(spans[sender][1] for sender in senders.get(op, ())))
        start = max([start, *(time for time in ready if time - start <= slack)])
        spans[op] = start, max(start + _SHORTEST_OP, end)
        free[lanes[op]] = spans[op][1]
    return spans


def _thread(kind: int) -> int:
    return {Kind.O: _OUT, Kind.R: _BACK}.get(Kind(kind), _COMPUTE)


def _counter(track: _Track, device: int, name: str, times: Floats, levels: Ints) -> Iterator[Event]:
    """Bytes of a device over time: of several levels at one instant the highest, then the last."""
    at = np.array([track.ns(time) for time in times.tolist()], np.int64)
    for instant in np.unique(at).tolist():
        low, high = np.searchsorted(at, instant, "left"), np.searchsorted(at, instant, "right")
        here = levels[low:high]
        for level in dict.fromkeys((int(here.max()), int(here[-1]))):
            where = {"ph": "C", "pid": track.process(device), "name": name}
            yield {**where, "ts": _us(instant), "args": {"bytes": level}}


def _step(track: _Track, step: StepTrace) -> Iterator[Event]:
    """One step of a run: its ops, their waits, memory."""
    yield from _ops(track, step.ops)
    device = semantics.device_of(track.problem, step.ops)
    for op in np.flatnonzero(step.ops.is_compute).tolist():
        message, transfer = (round(1e6 * float(waits[op])) for waits in (step.message_wait_ms, step.memory_wait_ms))
        start = track.ns(float(step.ops.start[op]))
        for name, begin, end in (
            ("waits for memory or a reload", start - message - transfer, start - message),
            ("waits for a message", start - message, start),
        ):
            begin = max(begin, 0)
            if end - begin >= _SHORTEST_WAIT:
                process = track.process(int(device[op]))
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": process + _WAITS,
                    "name": name,
                    "cat": "wait",
                    "ts": _us(begin),
                    "dur": _us(end - begin),
                    "args": {"op": step.ops[op].label},
                }
    for number in range(track.problem.num_devices):
        yield from _counter(track, number, "memory", *step.held(track.problem, number))
        samples = step.memory[number]
        if len(samples.allocated):
            yield from _counter(track, number, "allocated by torch", samples.time, samples.allocated)


def _us(ns: int) -> float:
    """Microseconds, such that a reader who cuts off below a nanosecond finds this one."""
    time = ns / 1e3
    return time if int(time * 1e3) == ns else math.nextafter(time, math.inf)
