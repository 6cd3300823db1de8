"""Where a list schedule stands: what has started, what is where, and when each resource is free again."""

from __future__ import annotations

from typing import Any, NamedTuple

from solver.compiled import column
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
    f_count, b_count, b_done, w_next
        (S): F's and B's started, B's ended, next W.
    busy, channel_busy
        (D), (C): free from this time on.
    level, floor
        (D): bytes in use; bytes in use once every pending W has run and all is at rest (see ``memory_rule``).
    last
        (D): 0 where the last F or B was an F, else 1.
    idle
        (D + 1): idle time since the device's first op; the largest of them.
    begun
        (D): 1 once the device has run something.
    """

    f_start: Any
    b_start: Any
    w_start: Any
    o_start: Any
    r_start: Any
    c_start: Any
    phase: Any
    f_ready: Any
    b_ready: Any
    f_count: Any
    b_count: Any
    b_done: Any
    w_next: Any
    busy: Any
    channel_busy: Any
    level: Any
    floor: Any
    last: Any
    idle: Any
    begun: Any


def fresh(tab: Tables) -> State:
    """Nothing has started; the inputs of stage 0 are there. Columns as of ``compiled.column``."""
    n, S, D = tab.S * tab.m, tab.S, tab.D
    counts = {"phase": n, "f_count": S, "b_count": S, "b_done": S, "w_next": S, "level": D, "floor": D}
    columns = {name: column([0] * count, int) for name, count in counts.items()}
    columns |= {name: column([-1.0] * n, float) for name in State._fields if name.endswith("_start")}
    return State(
        **columns,
        f_ready=column([0.0] * tab.m + [INFINITY] * (n - tab.m), float),
        b_ready=column([INFINITY] * n, float),
        busy=column([0.0] * D, float),
        channel_busy=column([0.0] * tab.C, float),
        last=column([1] * D, int),
        idle=column([0.0] * (D + 1), float),
        begun=column([0] * D, int),
    )
