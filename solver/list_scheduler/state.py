"""Where a list schedule stands: what has started, what is where, and when each resource is free again."""

from __future__ import annotations

from typing import NamedTuple

from solver.tables import Tables

INFINITY = float("inf")

#: Phases of one microbatch's activations of one stage.
UNBORN, FORWARD, RESIDENT, LEAVING, AWAY, RETURNING, BACKWARD = range(7)

#: Event codes: ``kind * S m + stage * m + microbatch`` for the end of an op, ``ASK * S m + device`` for 'look again'.
ASK = 7


class State(NamedTuple):
    """Mutable columns of a run of the list scheduler.

    Attributes
    ----------
    f_start, b_start, w_start, o_start, r_start, c_start
        (S m): start times in ms; -1 where the op has not started. A BW starts in ``b_start``.
    phase
        (S m): where the activations are.
    f_ready, b_ready
        (S m): when the input of F or the gradient for B arrives; infinite as long as nobody knows.
    f_count, b_count, b_done, w_next, o_next
        (S): F's and B's started, B's ended, next W, no microbatch before this one is to be offloaded any more.
    busy, channel_busy
        (D), (C): free from this time on.
    level, floor
        (D): bytes in use; bytes in use once every pending W has run.
    last
        (D): 0 where the last F or B was an F, else 1.
    idle
        (D + 1): idle time since the device's first op; the largest of them.
    begun
        (D): 1 once the device has run something.
    """

    f_start: list[float]
    b_start: list[float]
    w_start: list[float]
    o_start: list[float]
    r_start: list[float]
    c_start: list[float]
    phase: list[int]
    f_ready: list[float]
    b_ready: list[float]
    f_count: list[int]
    b_count: list[int]
    b_done: list[int]
    w_next: list[int]
    o_next: list[int]
    busy: list[float]
    channel_busy: list[float]
    level: list[int]
    floor: list[int]
    last: list[int]
    idle: list[float]
    begun: list[int]


def fresh(tab: Tables) -> State:
    """Nothing has started; the inputs of stage 0 are there."""
    n, S, D = tab.S * tab.m, tab.S, tab.D
    return State(
        f_start=[-1.0] * n,
        b_start=[-1.0] * n,
        w_start=[-1.0] * n,
        o_start=[-1.0] * n,
        r_start=[-1.0] * n,
        c_start=[-1.0] * n,
        phase=[UNBORN] * n,
        f_ready=[0.0] * tab.m + [INFINITY] * (n - tab.m),
        b_ready=[INFINITY] * n,
        f_count=[0] * S,
        b_count=[0] * S,
        b_done=[0] * S,
        w_next=[0] * S,
        o_next=[0] * S,
        busy=[0.0] * D,
        channel_busy=[0.0] * tab.C,
        level=[0] * D,
        floor=[0] * D,
        last=[1] * D,
        idle=[0.0] * (D + 1),
        begun=[0] * D,
    )
