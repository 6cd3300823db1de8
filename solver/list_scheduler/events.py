"""The event loop of the list scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop
from typing import Any

from optpipe.ops import Kind
from solver.compiled import compiled
from solver.list_scheduler.compute import start_compute
from solver.list_scheduler.memory_rule import at_rest
from solver.list_scheduler.records import (
    AWAY,
    RESIDENT,
    Cell,
    DeviceRow,
    Frame,
    StageRow,
    State,
    fresh,
    moved_by,
    outcome,
)
from solver.list_scheduler.rule import RECOMPUTE, Rule
from solver.list_scheduler.transfers import ASK, start_transfers
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
    records = fresh(tab, rule, eps)
    _loop(*records)
    state = outcome(records)
    if min(state.b_start) < 0:
        raise AssertionError("the memory rule let a list schedule run into a dead end")
    return state


def _holds_one(tab: Tables, rule: Rule, d: int) -> bool:
    """Whether each microbatch by itself can pass the device's stages."""
    if tab.whole[d] <= tab.budget[d]:
        return True
    moved = moved_by(tab, rule)["movable"].tolist()
    below = 0
    for s in tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]]:
        if below + tab.activation[s] > tab.budget[d]:
            return False
        row = slice(s * tab.m, (s + 1) * tab.m)
        leaves = moved[row] if rule.evict else [0] * tab.m
        both = zip(rule.treatment[row], leaves, strict=True)
        below += tab.activation[s] - min(tab.dropped[s] if how == RECOMPUTE else most for how, most in both)
    return True


@compiled
def _loop(
    frames: Sequence[Frame],
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    devices: Sequence[DeviceRow],
    lists: Any,
    channels: Any,
) -> None:
    """Until nothing happens any more."""
    frame = frames[0]
    n, eps = frame.n, frame.eps
    heap = [(0.0, ASK * n + d) for d in range(len(devices))]
    asked, movers = [0 for _ in range(0)], [0 for _ in range(0)]
    while len(heap) > 0:
        now = heap[0][0]
        asked.clear()
        movers.clear()
        while len(heap) > 0 and heap[0][0] <= now + eps:
            kind, k = divmod(heappop(heap)[1], n)
            if kind == ASK:
                if not devices[k].awake:
                    devices[k].awake = 1
                    asked.append(k)
            else:
                _finish(frame, cells[k], stages, devices, lists, kind, k // frame.m, asked)
        if len(asked) > 1:
            asked.sort()
        for d in asked:
            devices[d].awake = 0
            if devices[d].moves:
                movers.append(d)
        if len(movers) > 0:
            start_transfers(frame, cells, stages, devices, lists, channels, heap, movers, now)
        for d in asked:
            if devices[d].busy <= now + eps:
                start_compute(frame, cells, stages, devices, lists, heap, d, now)


@compiled
def _finish(
    frame: Frame,
    cell: Cell,
    stages: Sequence[StageRow],
    devices: Sequence[DeviceRow],
    lists: Any,
    kind: int,
    s: int,
    asked: list[int],
) -> None:
    """Book the end of an op: memory that it gives back, where the activations are now, whom to ask again."""
    stage = stages[s]
    device = devices[stage.device]
    freed, before, after = 0, at_rest(frame, stage, cell), 0
    if kind == _F:
        cell.phase = RESIDENT
        if cell.treatment == RECOMPUTE:
            cell.phase = AWAY
            freed = stage.dropped
    elif kind == _B:
        stage.b_done += 1
        freed = stage.activation - stage.context
    elif kind == _BW:
        stage.b_done += 1
        freed = stage.activation
    elif kind == _W:
        freed = stage.context
    elif kind == _O:
        cell.phase = AWAY
        freed = cell.movable
    else:  # C, R
        cell.phase = RESIDENT
    if kind == _W:
        before = 0
    elif kind not in (_B, _BW):
        after = at_rest(frame, stage, cell)
    device.level -= freed
    device.floor -= before - after
    if kind in (_O, _R):
        for x in range(device.peers, device.peers_end):
            peer = lists[x]
            if not devices[peer].awake:
                devices[peer].awake = 1
                asked.append(peer)
    elif not device.awake:
        device.awake = 1
        asked.append(stage.device)
