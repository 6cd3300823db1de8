"""What a list schedule is worth to a search."""

from __future__ import annotations

from solver.list_scheduler import State
from solver.tables import Tables

#: Weights of what tells schedules of one length apart: devices that end early, and backwards that start early.
_ENDS, _BACKWARDS = 1e-4, 2e-5


def score(tab: Tables, run: State, objective: str) -> float:
    """The objective (ms), and a little for devices that end late and last backwards that start late.

    Most changes of a schedule leave its length as it is; this shows which of them lead somewhere.
    """
    last = sum(run.b_start[s * tab.m + tab.m - 1] for s in range(tab.S)) / tab.S
    return length(tab, run, objective) + _ENDS * sum(run.busy) / tab.D + _BACKWARDS * last


def length(tab: Tables, run: State, objective: str) -> float:
    """The objective in ms: the makespan (the first F starts at 0), or the span."""
    if objective == "makespan":
        return float(max(run.busy))
    first = [min(run.f_start[s * tab.m] for s in tab.stage_list[a:b]) for a, b in _rows(tab)]
    return float(max(end - start for end, start in zip(run.busy, first, strict=True)))


def _rows(tab: Tables) -> list[tuple[int, int]]:
    return [(tab.stage_ptr[d], tab.stage_ptr[d + 1]) for d in range(tab.D)]
