"""The event loop of the list scheduler."""

from __future__ import annotations

from heapq import heappop
from typing import Any

from optpipe.ops import Kind
from solver.compiled import COMPILED, column, compiled
from solver.list_scheduler.compute import start_compute
from solver.list_scheduler.memory_rule import at_rest
from solver.list_scheduler.rule import RECOMPUTE, Rule, Steering
from solver.list_scheduler.state import ASK, AWAY, RESIDENT, State, fresh
from solver.list_scheduler.transfers import start_transfers
from solver.tables import Tables

#: Instants closer than this, as a part of the longest op, are one.
_EPS = 1e-9
_F, _B, _W, _BW, _O, _R = (int(kind) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.O, Kind.R))


def run(tab: Tables, rule: Rule) -> State | None:
    """List-schedule a problem.

    At each instant at which something ends or arrives: first what ended gives its memory back, then reloads and
    offloads start on idle channels, then each idle device starts the op with the smallest key.

    Returns
    -------
    State
        Start times; None where some device cannot hold even one microbatch, treated as the rule says.
    """
    if not all(_holds_one(tab, rule, d) for d in range(tab.D)):
        return None
    eps = _EPS * max(map(max, (tab.forward, tab.backward, tab.weight, tab.fused, tab.offload, tab.reload)))
    moves = [0] * tab.D
    for s in range(tab.S):
        moves[tab.device[s]] |= tab.movable[s] > 0
    state = fresh(tab)
    _loop(_columns(tab), rule.steering(), state, column(moves, int), eps)
    if min(state.b_start) < 0:
        raise AssertionError("the memory rule let a list schedule run into a dead end")
    return state


def _holds_one(tab: Tables, rule: Rule, d: int) -> bool:
    """Whether each microbatch by itself can pass the device's stages."""
    if tab.whole[d] <= tab.budget[d]:
        return True
    below = 0
    for s in tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]]:
        if below + tab.activation[s] > tab.budget[d]:
            return False
        row = rule.treatment[s * tab.m : (s + 1) * tab.m]
        moved = tab.movable[s] if rule.evict else 0
        below += tab.activation[s] - min(tab.dropped[s] if treatment == RECOMPUTE else moved for treatment in row)
    return True


def _columns(tab: Tables) -> Tables:
    """The tables as the compiled loop reads them."""
    if not COMPILED:
        return tab
    floats = {"forward", "backward", "weight", "fused", "offload", "reload", "comm"}
    return tab._replace(
        **{
            name: column(value, float if name in floats else int)
            for name, value in zip(Tables._fields, tab, strict=True)
            if isinstance(value, list)
        }
    )


@compiled
def _loop(tab: Tables, rule: Steering, state: State, moves: Any, eps: float) -> None:
    """Until nothing happens any more."""
    n = tab.S * tab.m
    heap = [(0.0, ASK * n + d) for d in range(tab.D)]
    while len(heap) > 0:
        now = heap[0][0]
        awake = [0 for _ in range(0)]
        while len(heap) > 0 and heap[0][0] <= now + eps:
            kind, k = divmod(heappop(heap)[1], n)
            if kind == ASK:
                awake.append(k)
            else:
                _finish(tab, rule, state, kind, k, awake)
        devices = sorted(set(awake)) if len(awake) > 1 else awake
        movers = [d for d in devices if moves[d]]
        if len(movers) > 0:
            start_transfers(tab, rule, state, heap, movers, now, eps)
        for d in devices:
            if state.busy[d] <= now + eps:
                start_compute(tab, rule, state, heap, d, now, eps)


@compiled
def _finish(tab: Tables, rule: Steering, state: State, kind: int, k: int, awake: list[int]) -> None:
    """Book the end of an op: memory that it gives back, where the activations are now, whom to ask again."""
    s = k // tab.m
    d = tab.device[s]
    freed, before, after = 0, at_rest(tab, rule, state, s, k), 0
    if kind == _F:
        state.phase[k] = RESIDENT
        if rule.treatment[k] == RECOMPUTE:
            state.phase[k] = AWAY
            freed = tab.dropped[s]
    elif kind == _B:
        state.b_done[s] += 1
        freed = tab.activation[s] - tab.context[s]
    elif kind == _BW:
        state.b_done[s] += 1
        freed = tab.activation[s]
    elif kind == _W:
        freed = tab.context[s]
    elif kind == _O:
        state.phase[k] = AWAY
        freed = tab.movable[s]
    else:  # C, R
        state.phase[k] = RESIDENT
    if kind == _W:
        before = 0
    elif kind not in (_B, _BW):
        after = at_rest(tab, rule, state, s, k)
    state.level[d] -= freed
    state.floor[d] -= before - after
    if kind in (_O, _R):
        for x in range(tab.peer_ptr[d], tab.peer_ptr[d + 1]):
            awake.append(tab.peer_list[x])
    else:
        awake.append(d)
