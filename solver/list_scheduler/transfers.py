"""Starting offloads and reloads on idle channels."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from optpipe.ops import Kind
from solver.compiled import compiled
from solver.list_scheduler.memory_rule import may_take
from solver.list_scheduler.records import AWAY, INFINITY, LEAVING, RESIDENT, RETURNING, Cell, DeviceRow, Frame, StageRow
from solver.list_scheduler.rule import OFFLOAD, ON_DEMAND, RECOMPUTE

#: Events: (time, what), where what is ``kind * S m + stage * m + microbatch`` for the end of an op,
#: ``ASK * S m + device`` for 'look again'.
Heap = list[tuple[float, int]]
ASK = 7

_O, _R = int(Kind.O), int(Kind.R)

#: How many of the newest microbatches are looked at for an offload under ``newest_first``.
_NEWEST = 3


@compiled
def start_transfers(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    devices: Sequence[DeviceRow],
    lists: Any,
    channels: Any,
    heap: Heap,
    movers: list[int],
    now: float,
) -> None:
    """Start every transfer of the devices ``movers`` whose channels are idle, whose turn it is and, for a reload, that
    fits.

    Where the oldest microbatch of a device waits for memory, and ``evict`` is on, others leave for it.
    """
    soon = now + frame.eps
    for reloading in (True, False) if frame.reload_first else (False, True):
        found = [(0.0, 0, 0) for _ in range(0)]
        for d in movers:
            device = devices[d]
            if not _channels_idle(device, lists, channels, reloading, soon):
                continue
            if reloading:
                choice = _next_reload(frame, cells, stages, device, lists, heap, d, now)
            else:
                choice = _next_offload(frame, cells, stages, device, lists)
                if choice[1] < 0 and frame.evict and oldest_is_stuck(frame, cells, stages, device, lists, soon):
                    choice = _evicted(frame, cells, stages, device, lists)
            if choice[1] >= 0:
                found.append(choice)
        if len(found) > 1:
            found.sort()  # where devices share a channel, the smallest key goes first
        for _, s, j in found:
            device = devices[stages[s].device]
            if _channels_idle(device, lists, channels, reloading, soon):
                _start(frame, cells[s * frame.m + j], device, lists, channels, heap, s, j, reloading, now)


@compiled
def _channels_idle(device: DeviceRow, lists: Any, channels: Any, reloading: bool, now: float) -> bool:
    first = device.homeward if reloading else device.outward
    last = device.homeward_end if reloading else device.outward_end
    if first == last:
        return False
    idle = True
    for x in range(first, last):
        idle = idle and channels[lists[x]] <= now
    return idle


@compiled
def _start(
    frame: Frame,
    cell: Cell,
    device: DeviceRow,
    lists: Any,
    channels: Any,
    heap: Heap,
    s: int,
    j: int,
    reloading: bool,
    now: float,
) -> None:
    if reloading:
        kind, end, first, last = _R, now + cell.reload, device.homeward, device.homeward_end
        cell.r_start, cell.phase = now, RETURNING
        device.level += cell.movable
        device.floor += cell.movable
    else:
        kind, end, first, last = _O, now + cell.offload, device.outward, device.outward_end
        cell.o_start, cell.phase = now, LEAVING
    for x in range(first, last):
        channels[lists[x]] = end
    heapq.heappush(heap, (end, kind * frame.n + s * frame.m + j))


@compiled
def _next_reload(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    device: DeviceRow,
    lists: Any,
    heap: Heap,
    d: int,
    now: float,
) -> tuple[float, int, int]:
    """(key, stage, microbatch) of the reload to start on device ``d``; stage -1: none. One too early wakes it later."""
    best, choice = INFINITY, (INFINITY, -1, -1)
    for x in range(device.stages, device.stages_end):
        s = lists[x]
        stage = stages[s]
        if stage.movable <= 0:
            continue
        base, j = s * frame.m, stage.b_count
        end = min(stage.f_count, j + stage.prefetch + 1)
        while j < end and (cells[base + j].phase != AWAY or cells[base + j].treatment == RECOMPUTE):
            j += 1
        if j >= end:
            continue
        cell = cells[base + j]
        if frame.reload_late and cell.b_ready == INFINITY:
            continue
        key = cell.reload_key
        earliest = key - frame.reload_lead
        if earliest > now + frame.eps and (j > stage.b_count or cell.b_ready == INFINITY):
            heapq.heappush(heap, (earliest, ASK * frame.n + d))
        elif key < best and may_take(frame, cells, stages, device, lists, s, j, cell.movable, False):
            best, choice = key, (key, s, j)
    return choice


@compiled
def _next_offload(
    frame: Frame, cells: Sequence[Cell], stages: Sequence[StageRow], device: DeviceRow, lists: Any
) -> tuple[float, int, int]:
    """(start of F, stage, microbatch) of the offload to start on the device; stage -1: none."""
    best, choice = INFINITY, (INFINITY, -1, -1)
    for x in range(device.stages, device.stages_end):
        s = lists[x]
        stage = stages[s]
        if stage.movable <= 0:
            continue
        base, done = s * frame.m, stage.b_count
        if frame.newest_first:
            order = range(stage.f_count - 1, max(done, stage.f_count - _NEWEST) - 1, -1)
        else:
            order = range(done, stage.f_count, 1)
        for j in order:
            cell = cells[base + j]
            if cell.phase == RESIDENT and cell.r_start < 0 and cell.movable > 0:
                treatment = cell.treatment
                if treatment == OFFLOAD or (treatment == ON_DEMAND and j - done >= stage.threshold):
                    if cell.f_start < best:
                        best, choice = cell.f_start, (cell.f_start, s, j)
                    break
    return choice


@compiled
def oldest_is_stuck(
    frame: Frame, cells: Sequence[Cell], stages: Sequence[StageRow], device: DeviceRow, lists: Any, soon: float
) -> bool:
    """Whether the oldest unfinished microbatch of a device could go on but for memory."""
    room = device.budget - device.level
    oldest = frame.m
    for x in range(device.stages, device.stages_end):
        oldest = min(oldest, stages[lists[x]].b_done)
    if oldest == frame.m:
        return False
    for x in range(device.stages, device.stages_end):
        s = lists[x]
        stage, cell = stages[s], cells[s * frame.m + oldest]
        if stage.f_count == oldest and cell.f_ready <= soon and stage.activation > room:
            return True
        if stage.b_count == oldest < stage.f_count and cell.phase == AWAY and cell.b_ready < INFINITY:
            away = stage.dropped if cell.treatment == RECOMPUTE else cell.movable
            if away > room:
                return True
    return False


@compiled
def _evicted(
    frame: Frame, cells: Sequence[Cell], stages: Sequence[StageRow], device: DeviceRow, lists: Any
) -> tuple[float, int, int]:
    """(0, stage, microbatch) of the activations that are needed last of those that can leave; stage -1: none can."""
    found, newest = -1, -1
    for x in range(device.stages, device.stages_end):
        s = lists[x]
        stage = stages[s]
        if stage.movable <= 0:
            continue
        for j in range(stage.f_count - 1, stage.b_count - 1, -1):
            cell = cells[s * frame.m + j]
            if cell.phase == RESIDENT and cell.r_start < 0 and cell.c_start < 0 and cell.movable > 0:
                next_backward = j == stage.b_count and cell.b_ready < INFINITY
                if cell.treatment != RECOMPUTE and not next_backward and j > newest:
                    found, newest = s, j
                    break
    return (0.0 if found >= 0 else INFINITY), found, newest
