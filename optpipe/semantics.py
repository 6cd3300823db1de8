"""What each op of a schedule needs and does. The one place that knows it: timing, memory, verification, replay and
the executor all derive from here.

Instants closer than ``tolerance`` count as one; at one instant frees come before takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.ops import NUM_KINDS, Bools, Floats, Ints, Kind, Ops
from optpipe.problem import Direction, Problem

#: Of the makespan: instants that are closer count as one,
TOLERANCE = 1e-6
#: unless some op is that short: then it is this part of the shortest one, lest an op's start and end be one instant,
_OF_SHORTEST = 0.25
#: but never below what rounding makes of a sum of times, of the makespan.
_ROUNDING = 1e-12

# Among ops of one instant without a duration: the order in which a microbatch goes through them.
_PHASE = np.array([{"F": 0, "O": 1, "R": 2, "C": 2, "B": 3, "BW": 3, "W": 4}[kind.name] for kind in Kind])
_DIRECTION: dict[Kind, Direction] = {Kind.O: "d2h", Kind.R: "h2d"}


class Edges(NamedTuple):
    """``after`` may start ``lag`` ms after the end of ``before`` at the earliest. Arrays of equal length."""

    before: Ints
    after: Ints
    lag: Floats


class Lane(NamedTuple):
    """Something that does one op at a time, and its ops (indices) in order."""

    name: str
    ops: Ints


class MemoryEvents(NamedTuple):
    """Changes of memory levels, in no order. ``delta`` bytes: positive for a take, negative for a free."""

    device: Ints
    time: Floats
    delta: Ints
    op: Ints


@dataclass(frozen=True)
class DeviceOrder:
    """What one device does, in the plan's order; entries are op indices.

    ``waits[i]``: ops in other lanes of the device that free memory and precede taker ``i`` in the plan. Lanes are
    FIFO, so only the last such op of each lane is listed.
    """

    compute: list[int]
    offloads: list[int]
    reloads: list[int]
    waits: dict[int, tuple[int, ...]]


def tolerance(ops: Ops) -> float:
    """The time (ms) below which two instants of this schedule count as one."""
    return tolerance_of(ops.start, ops.end) if len(ops) else 0.0


def tolerance_of(start: Floats, end: Floats) -> float:
    """The same from starts and ends: float64 (n,), ms, at least one of each."""
    length = float(end.max() - start.min())
    if not length:
        return 0.0
    took = end - start
    shortest = float(took.min(where=took > 2.0 * _ROUNDING * length, initial=length))
    return min(TOLERANCE * length, max(_OF_SHORTEST * shortest, _ROUNDING * length))


def makespan(ops: Ops) -> float:
    """First start to last end, ms; 0 without ops."""
    return float(ops.end.max() - ops.start.min()) if len(ops) else 0.0


def device_of(problem: Problem, ops: Ops) -> Ints:
    """int64 (n,): the device of each op."""
    return np.array([stage.device for stage in problem.stages], np.int64)[ops.stage]


def op_table(problem: Problem, ops: Ops) -> Ints:
    """int64 (kinds, stages, microbatches): the index of each op, -1 where there is none (the last one of several)."""
    table = np.full((NUM_KINDS, problem.num_stages, problem.num_microbatches), -1, np.int64)
    table[ops.kind, ops.stage, ops.microbatch] = np.arange(len(ops))
    return table


def moved_bytes(problem: Problem, ops: Ops) -> Ints:
    """int64 (n,): bytes that each transfer moves (a whole one: ``offloadable_bytes``); 0 for compute ops."""
    whole = np.array([stage.offloadable_bytes for stage in problem.stages], np.int64)[ops.stage]
    return np.where(ops.is_compute, 0, np.where(ops.bytes >= 0, ops.bytes, whole))


def durations(problem: Problem, ops: Ops) -> Floats:
    """float64 (n,): how long each op takes, ms; a partial transfer in proportion to its bytes."""
    by_kind = np.array(
        [
            [s.forward_ms, s.backward_ms, s.weight_ms, s.bw_ms, s.forward_ms, s.offload_ms, s.reload_ms]
            for s in problem.stages
        ]
    )
    time = by_kind[ops.stage, ops.kind]
    whole = np.array([stage.offloadable_bytes for stage in problem.stages], np.float64)[ops.stage]
    part = (ops.bytes >= 0) & ~ops.is_compute & (whole > 0)
    share = np.divide(ops.bytes, whole, out=np.ones_like(time), where=part)
    return np.asarray(time * share)


def dependencies(problem: Problem, ops: Ops) -> Edges:
    """What each op comes after by its data: the column 'after' of the design's op table.

    Edges exist only between ops that are there: a missing op is the verifier's business.
    """
    table = op_table(problem, ops)
    comm = np.array(problem.comm_ms, np.float64)
    parts: list[tuple[Ints, Ints, Floats]] = []

    def link(before: Ints, after: Ints, lag: Floats | None = None) -> None:
        there = (before >= 0) & (after >= 0)
        zero = np.zeros(before.shape) if lag is None else np.broadcast_to(lag, before.shape)
        parts.append((before[there], after[there], zero[there]))

    forward, weight, offload, reload_ = table[Kind.F], table[Kind.W], table[Kind.O], table[Kind.R]
    link(forward[:-1], forward[1:], comm[:, None])
    link(forward, offload)
    link(forward, table[Kind.C])
    link(offload, reload_)
    for kind in (Kind.B, Kind.BW):
        backward = table[kind]
        link(forward, backward)
        link(reload_, backward)
        link(table[Kind.C], backward)
        for above in (Kind.B, Kind.BW):
            link(table[above][1:], backward[:-1], comm[:, None])
        link(backward, weight)
    return Edges(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def rank(ops: Ops) -> Ints:
    """int64 (n,): the ops (indices) in the plan's order.

    By start, then end, so that every dependency of a valid plan points forwards. Of ops without a duration at one
    instant, each microbatch's go in the order in which it passes them, and else those that free memory come first.
    """
    grid = tolerance(ops) or 1.0
    forward = (ops.kind == Kind.F) | (ops.kind == Kind.O)
    start, end = np.round(ops.start / grid), np.round(ops.end / grid)
    order = np.lexsort(
        (_PHASE[ops.kind], np.where(forward, ops.stage, -ops.stage), ~forward, ops.microbatch, end, start)
    )
    instants = np.where(start == end, start, np.nan)[order]
    together = np.concatenate([[False], instants[1:] == instants[:-1], [False]])
    for first, last in np.flatnonzero(together[1:] != together[:-1]).reshape(-1, 2).tolist():
        order[first : last + 1] = _frees_first(ops, order[first : last + 1].tolist())
    return order


def _frees_first(ops: Ops, group: list[int]) -> list[int]:
    """Ops by microbatch, each one's in their order: the same orders, what frees memory as early as it can be."""
    takes = np.isin(ops.kind[group], (Kind.F, Kind.C, Kind.R)).tolist()
    rows: dict[int, deque[tuple[int, bool]]] = {}
    for op, microbatch, taking in zip(group, ops.microbatch[group].tolist(), takes, strict=True):
        rows.setdefault(microbatch, deque()).append((op, taking))
    found: list[int] = []
    for row in rows.values():
        while row and not row[0][1]:
            found.append(row.popleft()[0])
    for row in rows.values():
        # A taker, then what it lets free.
        while row:
            found.append(row.popleft()[0])
            while row and not row[0][1]:
                found.append(row.popleft()[0])
    return found


def lane_keys(problem: Problem, ops: Ops) -> Ints:
    """int64 (n,): 0 for a compute op; for a transfer 1 + the first of its channels. Sorts a device's ops by lane."""
    key = np.zeros(len(ops), np.int64)
    device = device_of(problem, ops)
    for (number, direction), channels in problem.channels_of.items():
        kind = Kind.O if direction == "d2h" else Kind.R
        lane = 1 + (channels[0] if channels else len(problem.channels) + (direction == "h2d"))
        key[(ops.kind == kind) & (device == number)] = lane
    return key


def compute_lanes(problem: Problem, ops: Ops, order: Ints | None = None) -> list[Lane]:
    """One lane a device: its compute ops in the plan's order."""
    order = rank(ops) if order is None else order
    device = device_of(problem, ops)[order]
    compute = ops.is_compute[order]
    return [Lane(f"device {d} compute", order[compute & (device == d)]) for d in range(problem.num_devices)]


def channel_lanes(problem: Problem, ops: Ops, order: Ints | None = None, *, across_devices: bool = True) -> list[Lane]:
    """One lane a channel: its transfers in the plan's order.

    ``across_devices`` False: a channel that several devices share becomes one lane for each of them, since a run
    keeps the order of a device's own transfers only. A direction that no channel carries is a lane of its own.
    """
    order = rank(ops) if order is None else order
    device, kind = device_of(problem, ops)[order], ops.kind[order]

    def carried(transfers: list[tuple[int, Direction]]) -> Ints:
        mask: Bools = np.zeros(len(order), np.bool_)
        for number, direction in transfers:
            mask |= (device == number) & (kind == (Kind.O if direction == "d2h" else Kind.R))
        return order[mask]

    lanes = []
    for channel in problem.channels:
        pairs: list[tuple[int, Direction]] = [(t.device, t.direction) for t in channel.transfers]
        if across_devices:
            lanes.append(Lane(f"channel {channel.name}", carried(pairs)))
            continue
        for number in sorted({device for device, _ in pairs}):
            lanes.append(Lane(f"channel {channel.name}", carried([p for p in pairs if p[0] == number])))
    for pair, channels in problem.channels_of.items():
        if not channels:
            lanes.append(Lane(f"device {pair[0]} {pair[1]}", carried([pair])))
    return lanes


def memory_events(problem: Problem, ops: Ops) -> MemoryEvents:
    """Every take and free of memory: the column 'memory' of the design's op table."""
    column = {
        name: np.array([getattr(stage, name) or 0 for stage in problem.stages], np.int64)[ops.stage]
        for name in ("activation_bytes", "weight_context_bytes", "checkpoint_bytes")
    }
    activation, context = column["activation_bytes"], column["weight_context_bytes"]
    dropped = activation - column["checkpoint_bytes"]
    recomputed = _is_recomputed(problem, ops)
    moved = moved_bytes(problem, ops)
    device = device_of(problem, ops)
    parts: list[tuple[Ints, Floats, Ints, Ints]] = []

    def change(where: Bools, time: Floats, delta: Ints) -> None:
        index = np.flatnonzero(where)
        parts.append((device[index], time[index], delta[index], index))

    kind = ops.kind
    change(kind == Kind.F, ops.start, activation)
    change((kind == Kind.F) & recomputed, ops.end, -dropped)
    change(kind == Kind.C, ops.start, dropped)
    change(kind == Kind.B, ops.end, context - activation)
    change(kind == Kind.W, ops.end, -context)
    change(kind == Kind.BW, ops.end, -activation)
    change(kind == Kind.O, ops.end, -moved)
    change(kind == Kind.R, ops.start, moved)
    return MemoryEvents(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _is_recomputed(problem: Problem, ops: Ops) -> Bools:
    """bool (n,): the op's (stage, microbatch) has a C."""
    again = np.zeros((problem.num_stages, problem.num_microbatches), np.bool_)
    mask = ops.kind == Kind.C
    again[ops.stage[mask], ops.microbatch[mask]] = True
    return again[ops.stage, ops.microbatch]


def memory_waits(problem: Problem, ops: Ops, order: Ints | None = None) -> Edges:
    """The rule that makes a plan memory-safe under any timing, as edges between lanes.

    An op that takes memory (F, C, R at start) waits for every op of its device that frees memory and precedes it in
    the plan. Frees in the taker's own lane precede it anyhow, and lanes are FIFO: an edge from the last offload that
    ends by the taker's start, and for a reload one from the last compute op that frees by then.
    """
    order = rank(ops) if order is None else order
    slack = tolerance(ops)
    position = np.empty(len(ops), np.int64)
    position[order] = np.arange(len(ops))
    device = device_of(problem, ops)[order]
    kind = ops.kind[order]
    computes = np.isin(kind, (Kind.B, Kind.W, Kind.BW)) | ((kind == Kind.F) & _is_recomputed(problem, ops)[order])
    before: list[Ints] = []
    after: list[Ints] = []

    def wait(takers: Ints, freers: Ints) -> None:
        if not len(takers) or not len(freers):
            return
        ends = np.maximum.accumulate(ops.end[freers])
        count = np.searchsorted(ends, ops.start[takers] + slack, side="right")
        # Of ops without a duration at the taker's instant some may come after it.
        count = np.minimum(count, np.searchsorted(position[freers], position[takers]))
        before.append(freers[count[count > 0] - 1])
        after.append(takers[count > 0])

    for number in range(problem.num_devices):
        own = device == number
        offloads = order[own & (kind == Kind.O)]
        reloads = order[own & (kind == Kind.R)]
        wait(order[own & ((kind == Kind.F) | (kind == Kind.C))], offloads)
        wait(reloads, offloads)
        wait(reloads, order[own & computes])
    if not before:
        nothing = np.zeros(0, np.int64)
        return Edges(nothing, nothing, np.zeros(0))
    first = np.concatenate(before)
    return Edges(first, np.concatenate(after), np.zeros(len(first)))


def device_orders(problem: Problem, ops: Ops) -> list[DeviceOrder]:
    """What each device does and waits for, in the plan's order: what an executor replays."""
    order = rank(ops)
    device, kind = device_of(problem, ops)[order], ops.kind[order]
    waits: dict[int, list[int]] = {}
    edges = memory_waits(problem, ops, order)
    for first, second in zip(edges.before.tolist(), edges.after.tolist(), strict=True):
        waits.setdefault(second, []).append(first)
    found = []
    for number in range(problem.num_devices):
        own = device == number
        compute, offloads, reloads = (
            order[own & mask].tolist() for mask in (kind < Kind.O, kind == Kind.O, kind == Kind.R)
        )
        mine = {i: tuple(waits[i]) for i in (*compute, *offloads, *reloads) if i in waits}
        found.append(DeviceOrder(compute, offloads, reloads, mine))
    return found
