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

from solver.compiled import compiled
from solver.list_scheduler.rule import RECOMPUTE, Steering
from solver.list_scheduler.state import AWAY, State
from solver.tables import Tables


@compiled
def rest(tab: Tables, rule: Steering, s: int, k: int) -> int:
    """Bytes of stage ``s`` and microbatch ``k - s m`` that are sure to stay between F and B, as the rule goes."""
    if rule.treatment[k] == RECOMPUTE:
        return tab.activation[s] - tab.dropped[s] if rule.evict else tab.activation[s]
    return tab.activation[s] - tab.movable[s] if rule.evict else tab.activation[s]


@compiled
def at_rest(tab: Tables, rule: Steering, run: State, s: int, k: int) -> int:
    """The same as things stand: once they are away they count as such, once they are back they stay."""
    if run.r_start[k] >= 0 or run.c_start[k] >= 0:
        return tab.activation[s]
    if run.phase[k] == AWAY:
        return tab.activation[s] - (tab.dropped[s] if rule.treatment[k] == RECOMPUTE else tab.movable[s])
    return rest(tab, rule, s, k)


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
    if run.level[d] + amount > tab.budget[d]:
        return False
    free = tab.budget[d] - run.floor[d] - (rest(tab, rule, s, s * tab.m + j) if is_forward else amount)
    if free < 0:
        return False
    if free >= tab.whole[d]:
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
        below, peak, holds = 0, 0, 0
        for z in held_stages:
            if b_done[z] > i:
                continue
            k = z * m + i
            taking = z == s and i == j
            if taking and not is_forward:
                stays = tab.activation[z]
            elif i < f_count[z]:
                stays = at_rest(tab, rule, run, z, k)
            else:
                stays = rest(tab, rule, z, k)
            if i < f_count[z] or taking:
                holds += stays
            if below + tab.activation[z] > peak:
                peak = below + tab.activation[z]
            below += stays
        if peak - holds > free:
            return False
        free += holds
        if free >= tab.whole[d]:
            return True
    return True
