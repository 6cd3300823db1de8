"""What links can carry at most: whether any transfers could make a schedule fit the memory."""

from __future__ import annotations

import numpy as np

from optpipe import memory
from optpipe.ops import Floats, Kind, Ops
from optpipe.problem import Channel, Direction, Problem
from solver.tables import NO_LIMIT

#: Relative to the makespan: instants that are closer count as one.
_EPS = 1e-6


def links_carry(problem: Problem, base: Ops) -> bool:
    """Whether each channel has the time for what must be away; where not, no whole transfers make the schedule fit.

    What a device holds above its budget at an instant has left by then, one transfer after the other since the first
    forward ended, and is back, likewise, before the last backward starts.

    Parameters
    ----------
    problem
        The problem.
    base
        A schedule without transfers, whose compute ops stay where they are.
    """
    above = [_Above(problem, base, d) for d in range(problem.num_devices)]
    if any(device.moves == 0 and device.most > 0 for device in above):
        return False
    far = _EPS * float(base.end.max(initial=0.0))
    return all(_carries(channel, direction, above, far) for channel in problem.channels for direction in ("d2h", "h2d"))


class _Above:
    """What one device holds above its budget, and the least time that it takes to move it.

    Attributes
    ----------
    times, levels
        From each of these instants in ms on, bytes above the budget.
    moves
        Bytes that a transfer moves at most; 0: none can.
    shortest
        Of each direction, the least time of a transfer in ms.
    within
        The end of the first forward, and the start of the last backward, ms.
    """

    def __init__(self, problem: Problem, base: Ops, d: int) -> None:
        budget = problem.devices[d].memory_bytes
        self.times, held = memory.curve(problem, base, d)
        self.levels = np.maximum(held - (NO_LIMIT if budget is None else budget), 0)
        self.most = int(self.levels.max(initial=0))
        movable = [s for s in problem.stages_of[d] if problem.can_offload(s)]
        stages = [problem.stages[s] for s in movable]
        self.moves = max((stage.offloadable_bytes for stage in stages), default=0)
        self.shortest: dict[Direction, float] = {
            "d2h": min((stage.offload_ms for stage in stages), default=0.0),
            "h2d": min((stage.reload_ms for stage in stages), default=0.0),
        }
        mine = np.isin(base.stage, movable)
        forwards, backwards = mine & (base.kind == Kind.F), mine & np.isin(base.kind, (Kind.B, Kind.BW))
        self.within = float(base.end[forwards].min(initial=np.inf)), float(base.start[backwards].max(initial=0.0))

    def busy(self, instants: Floats, direction: Direction) -> Floats:
        """The ms of transfers that must be over by each instant (d2h), or still to come then (h2d)."""
        at = np.searchsorted(self.times, instants, side="right" if direction == "d2h" else "left") - 1
        bytes_ = np.where(at >= 0, self.levels[at], 0)
        return np.asarray(np.ceil(bytes_ / max(self.moves, 1)) * self.shortest[direction])


def _carries(channel: Channel, direction: Direction, above: list[_Above], far: float) -> bool:
    devices = [above[t.device] for t in channel.transfers if t.direction == direction]
    devices = [device for device in devices if device.most > 0]
    if not devices:
        return True
    instants = np.unique(np.concatenate([device.times for device in devices]))
    busy = np.sum([device.busy(instants, direction) for device in devices], axis=0)
    if direction == "d2h":
        free = instants - min(device.within[0] for device in devices)
    else:
        free = max(device.within[1] for device in devices) - instants
    return not bool(((busy > 0) & (busy > free + far)).any())
