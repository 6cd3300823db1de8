"""The memory rule that never dead-ends: take memory only if the microbatches can still finish, oldest first.

It is Dijkstra's banker's check with the microbatches of a device as the clients, served in the order of their age.
A client *needs* what its forwards still take and what it has away, and gives back what it *holds*. If the oldest
unfinished microbatch can get all it needs out of what is free, it can finish, and what it held is free for the next
one. As long as every taking keeps that true, the globally oldest microbatch can always go on: no run gets stuck,
whatever was offloaded. Contexts that wait for their W are no hindrance, since a W needs nothing and frees.

It asks for the activations of all stages of a device to fit at once for one microbatch.
"""

from __future__ import annotations

from solver.compiled import compiled
from solver.list_scheduler.rule import RECOMPUTE, Steering
from solver.list_scheduler.state import AWAY, State
from solver.tables import Tables


@compiled
def may_take(tab: Tables, rule: Steering, run: State, s: int, j: int, amount: int, is_forward: bool) -> bool:
    """Whether stage ``s`` may take ``amount`` bytes for the F (or else the R or C) of microbatch ``j`` now.

    Parameters
    ----------
    tab, rule, run
        The problem, the rule and where the schedule stands.
    s, j
        Stage and microbatch.
    amount
        Bytes.
    is_forward
        True for an F; False for an R or a C.
    """
    d = tab.device[s]
    free = tab.budget[d] - run.floor[d] - amount
    if free < 0 or run.level[d] + amount > tab.budget[d]:
        return False
    whole = tab.whole[d]
    if free >= whole:
        return True
    held_stages = tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]]
    m, f_count, b_done = tab.m, run.f_count, run.b_done
    oldest, newest = m, 0
    for z in held_stages:
        if b_done[z] < oldest:
            oldest = b_done[z]
        started = f_count[z] + 1 if is_forward and z == s else f_count[z]
        if started > newest:
            newest = started
    for i in range(oldest, newest):
        need, holds = 0, 0
        for z in held_stages:
            taking = z == s and i == j
            if i >= f_count[z] and not (taking and is_forward):
                need += tab.activation[z]
            elif b_done[z] <= i:
                holds += tab.activation[z]
                k = z * m + i
                if run.phase[k] == AWAY and not (taking and not is_forward):
                    away = tab.dropped[z] if rule.treatment[k] == RECOMPUTE else tab.movable[z]
                    need += away
                    holds -= away
        if need > free:
            return False
        free += holds
        if free >= whole:
            return True
    return True
