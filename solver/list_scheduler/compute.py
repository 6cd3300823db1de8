"""Choosing and starting what a free device computes next."""

from __future__ import annotations

import heapq

from optpipe.ops import Kind
from solver.compiled import compiled
from solver.list_scheduler.memory_rule import may_take, rest
from solver.list_scheduler.rule import RECOMPUTE, Steering
from solver.list_scheduler.state import ASK, AWAY, BACKWARD, FORWARD, INFINITY, RESIDENT, RETURNING, State
from solver.list_scheduler.transfers import Heap
from solver.tables import Tables

_F, _B, _W, _BW, _C = int(Kind.F), int(Kind.B), int(Kind.W), int(Kind.BW), int(Kind.C)


@compiled
def start_compute(tab: Tables, rule: Steering, run: State, heap: Heap, d: int, now: float, eps: float) -> None:
    """Start the op with the smallest key on device ``d``, or sleep until something better arrives."""
    soon = now + eps
    best, kind, stage = INFINITY, -1, -1  # the op to start: its key
    hoped, arrival = INFINITY, INFINITY  # the smallest key among those about to arrive
    after_f, after_b = (rule.alternation, 0.0) if run.last[d] == 0 else (0.0, rule.alternation)
    for x in range(tab.stage_ptr[d], tab.stage_ptr[d + 1]):
        s = tab.stage_list[x]
        base, done, ahead = s * tab.m, run.b_count[s], run.f_count[s]
        if done < ahead:
            what, key, at = _backward_head(tab, rule, run, s, base + done, soon)
            key += after_b
            if at <= soon:
                if key < best:
                    best, kind, stage = key, what, s
            elif key < hoped and at < INFINITY:
                hoped, arrival = key, at
        if ahead < tab.m and ahead - done < rule.limit[s]:
            k = base + ahead
            key, at = rule.forward_key[k] + after_f, run.f_ready[k]
            if at <= soon:
                if key < best and _forward_fits(tab, rule, run, s, ahead):
                    best, kind, stage = key, _F, s
            elif key < hoped and at < INFINITY:
                hoped, arrival = key, at
        j = run.w_next[s]
        while j < run.b_done[s] and rule.fused[base + j]:
            j += 1
        run.w_next[s] = j
        if j < run.b_done[s] and rule.weight_key[base + j] < best:
            best, kind, stage = rule.weight_key[base + j], _W, s
    if kind < 0:
        return
    if hoped < best and _worth_waiting(tab, rule, run, d, kind, stage, arrival, now, eps):
        heapq.heappush(heap, (arrival, ASK * tab.S * tab.m + d))
        return
    _start(tab, rule, run, heap, d, kind, stage, now)


@compiled
def _backward_head(tab: Tables, rule: Steering, run: State, s: int, k: int, soon: float) -> tuple[int, float, float]:
    """(kind, key, time from which it can start) of the next B or BW of stage ``s``, or of the C that it needs first.

    The time is infinite where it is not known yet, or where memory is what it waits for.
    """
    kind, key, at, phase = (_BW if rule.fused[k] else _B), rule.backward_key[k], run.b_ready[k], run.phase[k]
    if at == INFINITY or phase == RESIDENT:
        return kind, key, at
    if phase == RETURNING:
        back = run.c_start[k] + tab.forward[s] if rule.treatment[k] == RECOMPUTE else run.r_start[k] + tab.reload[s]
        return kind, key, max(at, back)
    if phase == AWAY and rule.treatment[k] == RECOMPUTE:
        at -= tab.forward[s]
        if at > soon or may_take(tab, rule, run, s, k - s * tab.m, tab.dropped[s], False):
            return _C, key, at
    return kind, key, INFINITY


@compiled
def _forward_fits(tab: Tables, rule: Steering, run: State, s: int, j: int) -> bool:
    """Whether F(s, j) fits beside what is there, the memory rule, and the reloads it must leave room for."""
    d, room = tab.device[s], 0
    if rule.reserve[s] > 0:
        held = tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]]
        oldest = True
        for z in held:
            oldest = oldest and run.b_done[z] >= j
        if not oldest:  # the oldest microbatch of a device waits for no reservation
            for z in held:
                room += _coming_reloads(tab, rule, run, z, rule.forward_key[s * tab.m + j], rule.reserve[s])
    if run.level[d] + tab.activation[s] + room > tab.budget[d]:
        return False
    return may_take(tab, rule, run, s, j, tab.activation[s], True)


@compiled
def _coming_reloads(tab: Tables, rule: Steering, run: State, z: int, key: float, most: int) -> int:
    """Bytes of the next ``most`` reloads of stage ``z``, of those with a smaller key unless all count."""
    total, base = 0, z * tab.m
    for k in range(base + run.b_count[z], base + run.f_count[z]):
        if run.phase[k] == AWAY and rule.treatment[k] != RECOMPUTE:
            if rule.reserve_all or rule.reload_key[k] < key:
                total += tab.movable[z]
            most -= 1
            if most == 0:
                break
    return total


@compiled
def _worth_waiting(
    tab: Tables, rule: Steering, run: State, d: int, kind: int, s: int, arrival: float, now: float, eps: float
) -> bool:
    length = _length(tab, kind, s)
    if arrival < now + length * rule.patience - eps:
        return True
    if rule.share_idle and kind == _W and arrival < now + length - eps:
        return run.idle[d] + arrival - now <= run.idle[tab.D] + eps
    return False


@compiled
def _length(tab: Tables, kind: int, s: int) -> float:
    if kind == _B:
        return tab.backward[s]
    if kind == _W:
        return tab.weight[s]
    return tab.fused[s] if kind == _BW else tab.forward[s]


@compiled
def _start(tab: Tables, rule: Steering, run: State, heap: Heap, d: int, kind: int, s: int, now: float) -> None:
    n, base = tab.S * tab.m, s * tab.m
    end = now + _length(tab, kind, s)
    if kind == _F:
        k = base + run.f_count[s]
        run.f_count[s] += 1
        run.f_start[k], run.phase[k], run.last[d] = now, FORWARD, 0
        run.level[d] += tab.activation[s]
        run.floor[d] += rest(tab, rule, s, k)
        if s + 1 < tab.S:
            _announce(tab, heap, run.f_ready, s + 1, k + tab.m, end + tab.comm[s])
        else:
            run.b_ready[k] = end
    elif kind == _C:
        k = base + run.b_count[s]
        run.c_start[k], run.phase[k] = now, RETURNING
        run.level[d] += tab.dropped[s]
        run.floor[d] += tab.dropped[s]
    elif kind == _W:
        k = base + run.w_next[s]
        run.w_next[s] += 1
        run.w_start[k] = now
    else:
        k = base + run.b_count[s]
        run.b_count[s] += 1
        run.b_start[k], run.phase[k], run.last[d] = now, BACKWARD, 1
        if s > 0:
            _announce(tab, heap, run.b_ready, s - 1, k - tab.m, end + tab.comm[s - 1])
    heapq.heappush(heap, (end, kind * n + k))
    if run.begun[d]:
        run.idle[d] += max(0.0, now - run.busy[d])
        run.idle[tab.D] = max(run.idle[tab.D], run.idle[d])
    run.begun[d] = 1
    run.busy[d] = end


@compiled
def _announce(tab: Tables, heap: Heap, ready: list[float], s: int, k: int, at: float) -> None:
    """Stage ``s`` knows from now on when its input ``k`` arrives, and is asked again then."""
    ready[k] = at
    heapq.heappush(heap, (at, ASK * tab.S * tab.m + tab.device[s]))
