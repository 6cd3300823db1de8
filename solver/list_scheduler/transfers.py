"""Starting offloads and reloads on idle channels."""

from __future__ import annotations

import heapq

from optpipe.ops import Kind
from solver.compiled import compiled
from solver.list_scheduler.memory_rule import may_take
from solver.list_scheduler.rule import OFFLOAD, ON_DEMAND, RECOMPUTE, Steering
from solver.list_scheduler.state import ASK, AWAY, INFINITY, LEAVING, RESIDENT, RETURNING, State
from solver.tables import Tables

Heap = list[tuple[float, int]]

_O, _R = int(Kind.O), int(Kind.R)

#: How many of the newest microbatches are looked at for an offload under ``newest_first``.
_NEWEST = 3


@compiled
def start_transfers(
    tab: Tables, rule: Steering, run: State, heap: Heap, devices: list[int], now: float, eps: float
) -> None:
    """Start every transfer of ``devices`` whose channels are idle, whose turn it is and, for a reload, that fits.

    Where the oldest microbatch of a device waits for memory, and ``evict`` is on, others leave for it.
    """
    for reloading in (True, False) if rule.reload_first else (False, True):
        found = []
        for d in devices:
            if not _channels_idle(tab, run, 2 * d + reloading, now + eps):
                continue
            if reloading:
                choice = _next_reload(tab, rule, run, heap, d, now, eps)
            else:
                choice = _next_offload(tab, rule, run, d)
                if choice[1] < 0 and rule.evict and oldest_is_stuck(tab, rule, run, d, now + eps):
                    choice = _evicted(tab, rule, run, d)
            if choice[1] >= 0:
                found.append(choice)
        if len(found) > 1:
            found.sort()  # where devices share a channel, the smallest key goes first
        for _, s, j in found:
            if _channels_idle(tab, run, 2 * tab.device[s] + reloading, now + eps):
                _start(tab, run, heap, s, j, reloading, now)


@compiled
def _channels_idle(tab: Tables, run: State, lane: int, now: float) -> bool:
    first, last = tab.lane_ptr[lane], tab.lane_ptr[lane + 1]
    if first == last:
        return False
    idle = True
    for c in range(first, last):
        idle = idle and run.channel_busy[tab.lane_list[c]] <= now
    return idle


@compiled
def _start(tab: Tables, run: State, heap: Heap, s: int, j: int, reloading: bool, now: float) -> None:
    d, k = tab.device[s], s * tab.m + j
    kind, length = (_R, tab.reload[s]) if reloading else (_O, tab.offload[s])
    end = now + length
    lane = 2 * d + reloading
    for c in range(tab.lane_ptr[lane], tab.lane_ptr[lane + 1]):
        run.channel_busy[tab.lane_list[c]] = end
    if reloading:
        run.r_start[k], run.phase[k] = now, RETURNING
        run.level[d] += tab.movable[s]
        run.floor[d] += tab.movable[s]
    else:
        run.o_start[k], run.phase[k] = now, LEAVING
    heapq.heappush(heap, (end, kind * tab.S * tab.m + k))


@compiled
def _next_reload(
    tab: Tables, rule: Steering, run: State, heap: Heap, d: int, now: float, eps: float
) -> tuple[float, int, int]:
    """(key, stage, microbatch) of the reload to start on device ``d``; stage -1: none. One too early wakes it later."""
    best, choice = INFINITY, (INFINITY, -1, -1)
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        s = tab.stage_list[x]
        if tab.movable[s] <= 0:
            continue
        base, j = s * tab.m, run.b_count[s]
        end = min(run.f_count[s], j + rule.prefetch[s] + 1)
        while j < end and (run.phase[base + j] != AWAY or rule.treatment[base + j] == RECOMPUTE):
            j += 1
        if j >= end:
            continue
        key = rule.reload_key[base + j]
        earliest = key - rule.reload_lead
        if earliest > now + eps and (j > run.b_count[s] or run.b_ready[base + j] == INFINITY):
            heapq.heappush(heap, (earliest, ASK * tab.S * tab.m + d))
        elif key < best and may_take(tab, rule, run, s, j, tab.movable[s], False):
            best, choice = key, (key, s, j)
    return choice


@compiled
def _next_offload(tab: Tables, rule: Steering, run: State, d: int) -> tuple[float, int, int]:
    """(start of F, stage, microbatch) of the offload to start on device ``d``; stage -1: none."""
    best, choice = INFINITY, (INFINITY, -1, -1)
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        s = tab.stage_list[x]
        if tab.movable[s] <= 0:
            continue
        base, done = s * tab.m, run.b_count[s]
        if rule.newest_first:
            order = range(run.f_count[s] - 1, max(done, run.f_count[s] - _NEWEST) - 1, -1)
        else:
            order = range(done, run.f_count[s])
        for j in order:
            k = base + j
            if run.phase[k] == RESIDENT and run.r_start[k] < 0:
                treatment = rule.treatment[k]
                if treatment == OFFLOAD or (treatment == ON_DEMAND and j - done >= rule.threshold[s]):
                    if run.f_start[k] < best:
                        best, choice = run.f_start[k], (run.f_start[k], s, j)
                    break
    return choice


@compiled
def oldest_is_stuck(tab: Tables, rule: Steering, run: State, d: int, soon: float) -> bool:
    """Whether the oldest unfinished microbatch of a device could go on but for memory."""
    room = tab.budget[d] - run.level[d]
    oldest = tab.m
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        oldest = min(oldest, run.b_done[tab.stage_list[x]])
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        s = tab.stage_list[x]
        k = s * tab.m + oldest
        if oldest < tab.m and run.f_count[s] == oldest and run.f_ready[k] <= soon and tab.activation[s] > room:
            return True
        if run.b_count[s] == oldest < run.f_count[s] and run.phase[k] == AWAY and run.b_ready[k] < INFINITY:
            away = tab.dropped[s] if rule.treatment[k] == RECOMPUTE else tab.movable[s]
            if away > room:
                return True
    return False


@compiled
def _evicted(tab: Tables, rule: Steering, run: State, d: int) -> tuple[float, int, int]:
    """(0, stage, microbatch) of the activations that are needed last of those that can leave; stage -1: none can."""
    stage, newest = -1, -1
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        s = tab.stage_list[x]
        if tab.movable[s] <= 0:
            continue
        for j in range(run.f_count[s] - 1, run.b_count[s] - 1, -1):
            k = s * tab.m + j
            if run.phase[k] == RESIDENT and run.r_start[k] < 0 and run.c_start[k] < 0:
                next_backward = j == run.b_count[s] and run.b_ready[k] < INFINITY
                if rule.treatment[k] != RECOMPUTE and not next_backward and j > newest:
                    stage, newest = s, j
                    break
    return (0.0 if stage >= 0 else INFINITY), stage, newest
