"""Choosing and starting what a free device computes next."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from optpipe.ops import Kind
from solver.compiled import compiled
from solver.list_scheduler.memory_rule import may_take, rest
from solver.list_scheduler.records import (
    AWAY,
    BACKWARD,
    FORWARD,
    INFINITY,
    RESIDENT,
    RETURNING,
    Cell,
    DeviceRow,
    Frame,
    StageRow,
)
from solver.list_scheduler.rule import RECOMPUTE
from solver.list_scheduler.transfers import ASK, Heap

_F, _B, _W, _BW, _C = int(Kind.F), int(Kind.B), int(Kind.W), int(Kind.BW), int(Kind.C)


@compiled
def start_compute(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    devices: Sequence[DeviceRow],
    lists: Any,
    heap: Heap,
    d: int,
    now: float,
) -> None:
    """Start the op with the smallest key on device ``d``, or sleep until something better arrives."""
    soon, device = now + frame.eps, devices[d]
    best, kind, chosen = INFINITY, -1, -1  # the op to start: its key
    hoped, arrival = INFINITY, INFINITY  # the smallest key among those about to arrive
    after_f, after_b = 0.0, 0.0
    if device.backward_last:
        after_b = frame.alternation
    else:
        after_f = frame.alternation
    for x in range(device.stages, device.stages_end):
        s = lists[x]
        stage = stages[s]
        base, done, ahead = s * frame.m, stage.b_count, stage.f_count
        if done < ahead:
            what, key, at = _backward_head(frame, cells, stages, device, lists, s, base + done, soon)
            key += after_b
            if at <= soon:
                if key < best:
                    best, kind, chosen = key, what, s
            elif key < hoped and at < INFINITY:
                hoped, arrival = key, at
        if ahead < frame.m and ahead - done < stage.limit:
            key, at = cells[base + ahead].forward_key + after_f, cells[base + ahead].f_ready
            if at <= soon:
                if key < best and _forward_fits(frame, cells, stages, device, lists, s, ahead):
                    best, kind, chosen = key, _F, s
            elif key < hoped and at < INFINITY:
                hoped, arrival = key, at
        j = stage.w_next
        while j < stage.b_done and cells[base + j].fused:
            j += 1
        stage.w_next = j
        if j < stage.b_done and cells[base + j].weight_key < best:
            best, kind, chosen = cells[base + j].weight_key, _W, s
    if kind < 0:
        return
    length = _length(stages[chosen], kind)
    if hoped < best and _worth_waiting(frame, device, kind, length, arrival, now):
        heapq.heappush(heap, (arrival, ASK * frame.n + d))
        return
    _start(frame, cells, stages, device, heap, kind, chosen, now, now + length)


@compiled
def _backward_head(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    device: DeviceRow,
    lists: Any,
    s: int,
    k: int,
    soon: float,
) -> tuple[int, float, float]:
    """(kind, key, time from which it can start) of the next B or BW of stage ``s``, or of the C that it needs first.

    The time is infinite where it is not known yet, or where memory is what it waits for.
    """
    stage, cell = stages[s], cells[k]
    kind, key, at, phase = (_BW if cell.fused else _B), cell.backward_key, cell.b_ready, cell.phase
    if at == INFINITY or phase == RESIDENT:
        return kind, key, at
    if phase == RETURNING:
        back = cell.c_start + stage.forward if cell.treatment == RECOMPUTE else cell.r_start + cell.reload
        return kind, key, max(at, back)
    if phase == AWAY and cell.treatment == RECOMPUTE:
        at -= stage.forward
        j = k - s * frame.m
        if at > soon or may_take(frame, cells, stages, device, lists, s, j, stage.dropped, False):
            return _C, key, at
    return kind, key, INFINITY


@compiled
def _forward_fits(
    frame: Frame, cells: Sequence[Cell], stages: Sequence[StageRow], device: DeviceRow, lists: Any, s: int, j: int
) -> bool:
    """Whether F(s, j) fits beside what is there, the memory rule, and the reloads it must leave room for."""
    stage, room = stages[s], 0
    if stage.reserve > 0:
        oldest = True
        for x in range(device.stages, device.stages_end):
            oldest = oldest and stages[lists[x]].b_done >= j
        if not oldest:  # the oldest microbatch of a device waits for no reservation
            key = cells[s * frame.m + j].forward_key
            for x in range(device.stages, device.stages_end):
                room += _coming_reloads(frame, cells, stages[lists[x]], lists[x], key, stage.reserve)
    if device.level + stage.activation + room > device.budget:
        return False
    return may_take(frame, cells, stages, device, lists, s, j, stage.activation, True)


@compiled
def _coming_reloads(frame: Frame, cells: Sequence[Cell], stage: StageRow, z: int, key: float, most: int) -> int:
    """Bytes of the next ``most`` reloads of stage ``z``, of those with a smaller key unless all count."""
    total, base = 0, z * frame.m
    for k in range(base + stage.b_count, base + stage.f_count):
        cell = cells[k]
        if cell.phase == AWAY and cell.treatment != RECOMPUTE:
            if frame.reserve_all or cell.reload_key < key:
                total += cell.movable
            most -= 1
            if most == 0:
                break
    return total


@compiled
def _worth_waiting(frame: Frame, device: DeviceRow, kind: int, length: float, arrival: float, now: float) -> bool:
    if arrival < now + length * frame.patience - frame.eps:
        return True
    if frame.share_idle and kind == _W and arrival < now + length - frame.eps:
        return device.idle + arrival - now <= frame.idle + frame.eps
    return False


@compiled
def _length(stage: StageRow, kind: int) -> float:
    if kind == _B:
        return stage.backward
    if kind == _W:
        return stage.weight
    return stage.fused if kind == _BW else stage.forward


@compiled
def _start(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    device: DeviceRow,
    heap: Heap,
    kind: int,
    s: int,
    now: float,
    end: float,
) -> None:
    stage, base = stages[s], s * frame.m
    if kind == _F:
        k = base + stage.f_count
        cell = cells[k]
        stage.f_count += 1
        cell.f_start, cell.phase, device.backward_last = now, FORWARD, 0
        device.level += stage.activation
        device.floor += rest(frame, stage, cell)
        if s + 1 < frame.S:
            cells[k + frame.m].f_ready = end + stage.comm
            # The next stage knows from now on when its input arrives, and is asked again then.
            heapq.heappush(heap, (end + stage.comm, ASK * frame.n + stages[s + 1].device))
        else:
            cell.b_ready = end
    elif kind == _C:
        k = base + stage.b_count
        cells[k].c_start, cells[k].phase = now, RETURNING
        device.level += stage.dropped
        device.floor += stage.dropped
    elif kind == _W:
        k = base + stage.w_next
        stage.w_next += 1
        cells[k].w_start = now
    else:
        k = base + stage.b_count
        stage.b_count += 1
        cells[k].b_start, cells[k].phase, device.backward_last = now, BACKWARD, 1
        if s > 0:
            before = stages[s - 1]
            cells[k - frame.m].b_ready = end + before.comm
            heapq.heappush(heap, (end + before.comm, ASK * frame.n + before.device))
            if frame.reload_late:
                heapq.heappush(heap, (now, ASK * frame.n + before.device))
    heapq.heappush(heap, (end, kind * frame.n + k))
    if device.begun:
        device.idle += max(0.0, now - device.busy)
        frame.idle = max(frame.idle, device.idle)
    device.begun = 1
    device.busy = end
