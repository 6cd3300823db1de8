"""The memory rule that never dead-ends: take memory only if the microbatches can still finish, oldest first.

It is Dijkstra's banker's check with the microbatches of a device as the clients, served in the order of their age. A
client has a stage's activations *at rest* between F and B: what an offload has left or will leave (under ``evict`` of
any stage that can be offloaded), the checkpoint of a recomputation, else all of them; all of them too once they have
come back. To finish, it runs what is left of its stages one after the other, each with all of its activations beside
the earlier ones at rest, so it *needs* at most

    the maximum over its unfinished stages z of  (activation of z + rest of stages before z)  -  what it has at rest.

If the oldest unfinished microbatch can get that out of what is free when everything is at rest, it can finish, and what
it had at rest is free for the next one. As long as every taking keeps that true, the globally oldest microbatch can
always go on: no run gets stuck, whatever was offloaded. Contexts that wait for their W are no hindrance, since a W
needs nothing and frees. What is at rest only on paper is moved when the oldest microbatch waits for memory
(``transfers``).

With ``evict`` that works down to the smallest budgets for which there is any schedule (``solver.feasibility``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from solver.compiled import compiled
from solver.list_scheduler.records import AWAY, Cell, DeviceRow, Frame, StageRow
from solver.list_scheduler.rule import RECOMPUTE


@compiled
def rest(frame: Frame, stage: StageRow, cell: Cell) -> int:
    """Bytes that are sure to stay between F and B, as the rule goes."""
    if not frame.evict:
        return stage.activation
    if cell.treatment == RECOMPUTE:
        return stage.activation - stage.dropped
    return stage.activation - cell.movable


@compiled
def at_rest(frame: Frame, stage: StageRow, cell: Cell) -> int:
    """The same as things stand: once they are away they count as such, once they are back they stay."""
    if cell.r_start >= 0 or cell.c_start >= 0:
        return stage.activation
    if cell.phase == AWAY:
        return stage.activation - (stage.dropped if cell.treatment == RECOMPUTE else cell.movable)
    return rest(frame, stage, cell)


@compiled
def may_take(
    frame: Frame,
    cells: Sequence[Cell],
    stages: Sequence[StageRow],
    device: DeviceRow,
    lists: Any,
    s: int,
    j: int,
    amount: int,
    is_forward: bool,
) -> bool:
    """Whether stage ``s`` of the device may take ``amount`` bytes for the F (or else the R or C) of microbatch ``j``.

    Parameters
    ----------
    frame, cells, stages, device, lists
        Where the schedule stands.
    s, j
        Stage and microbatch.
    amount
        Bytes.
    is_forward
        True for an F; False for an R or a C.
    """
    if device.level + amount > device.budget:
        return False
    m = frame.m
    taken = rest(frame, stages[s], cells[s * m + j]) if is_forward else amount
    free = device.budget - device.floor - taken
    if free < 0:
        return False
    if free >= device.whole:
        return True
    oldest, newest = m, 0
    for x in range(device.stages, device.stages_end):
        z = lists[x]
        oldest = min(oldest, stages[z].b_done)
        started = stages[z].f_count + 1 if is_forward and z == s else stages[z].f_count
        newest = max(newest, started)
    for i in range(oldest, newest):
        below, peak, holds = 0, 0, 0
        for x in range(device.stages, device.stages_end):
            z = lists[x]
            stage = stages[z]
            if stage.b_done > i:
                continue
            cell = cells[z * m + i]
            taking = z == s and i == j
            if taking and not is_forward:
                stays = stage.activation
            elif i < stage.f_count:
                stays = at_rest(frame, stage, cell)
            else:
                stays = rest(frame, stage, cell)
            if i < stage.f_count or taking:
                holds += stays
            peak = max(peak, below + stage.activation)
            below += stays
        if peak - holds > free:
            return False
        free += holds
        if free >= device.whole:
            return True
    return True
