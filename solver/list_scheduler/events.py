"""The event loop of the list scheduler."""

from __future__ import annotations

from heapq import heappop

from optpipe.ops import Kind
from solver.list_scheduler.compute import start_compute
from solver.list_scheduler.rule import RECOMPUTE, Rule
from solver.list_scheduler.state import ASK, AWAY, RESIDENT, State, fresh
from solver.list_scheduler.transfers import Heap, start_transfers
from solver.tables import Tables

#: Instants closer than this, as a part of the longest op, are one.
_EPS = 1e-9


def run(tab: Tables, rule: Rule) -> State | None:
    """List-schedule a problem.

    At each instant at which something ends or arrives: first what ended gives its memory back, then reloads and
    offloads start on idle channels, then each idle device starts the op with the smallest key.

    Returns
    -------
    State
        Start times; None where some device cannot hold one microbatch's activations of all its stages at once.
    """
    if any(whole > budget for whole, budget in zip(tab.whole, tab.budget, strict=True)):
        return None
    n, state = tab.S * tab.m, fresh(tab)
    eps = _EPS * max(map(max, (tab.forward, tab.backward, tab.weight, tab.fused, tab.offload, tab.reload)))
    moves = [False] * tab.D
    for s in range(tab.S):
        moves[tab.device[s]] |= tab.movable[s] > 0
    heap: Heap = [(0.0, ASK * n + d) for d in range(tab.D)]
    while heap:
        now = heap[0][0]
        awake: list[int] = []
        while heap and heap[0][0] <= now + eps:
            kind, k = divmod(heappop(heap)[1], n)
            if kind == ASK:
                awake.append(k)
            else:
                _finish(tab, rule, state, kind, k, awake)
        devices = sorted(set(awake)) if len(awake) > 1 else awake
        movers = [d for d in devices if moves[d]]
        if movers:
            start_transfers(tab, rule, state, heap, movers, now, eps)
        for d in devices:
            if state.busy[d] <= now + eps:
                start_compute(tab, rule, state, heap, d, now, eps)
    if any(start < 0 for start in state.b_start):
        raise AssertionError("the memory rule let a list schedule run into a dead end")
    return state


def _finish(tab: Tables, rule: Rule, state: State, kind: int, k: int, awake: list[int]) -> None:
    """Book the end of an op: memory that it gives back, where the activations are now, whom to ask again."""
    s = k // tab.m
    d = tab.device[s]
    freed = lowered = 0
    if kind == Kind.F:
        state.phase[k] = RESIDENT
        if rule.treatment[k] == RECOMPUTE:
            state.phase[k] = AWAY
            freed = lowered = tab.dropped[s]
    elif kind == Kind.B:
        state.b_done[s] += 1
        freed, lowered = tab.activation[s] - tab.context[s], tab.activation[s]
    elif kind == Kind.BW:
        state.b_done[s] += 1
        freed = lowered = tab.activation[s]
    elif kind == Kind.W:
        freed = tab.context[s]
    elif kind == Kind.O:
        state.phase[k] = AWAY
        freed = lowered = tab.movable[s]
    else:  # C, R
        state.phase[k] = RESIDENT
    state.level[d] -= freed
    state.floor[d] -= lowered
    if kind == Kind.O or kind == Kind.R:
        awake.extend(tab.peer_list[tab.peer_ptr[d] : tab.peer_ptr[d + 1]])
    else:
        awake.append(d)
