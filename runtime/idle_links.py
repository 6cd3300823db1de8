"""Host links that a plan leaves idle, measured by copies between two steps, where activations leave room for them.

plan -> rounds of devices that do not share a channel -> copies -> ms of O and R of their stages
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from optpipe.ops import Kind
from optpipe.plan import Plan
from runtime.links import COPY_BYTES, HostLink, HostLinks

#: Whether this rank copies (all ranks of a round are called), and how many bytes at a time.
Measure = Callable[[bool, int], HostLink | None]
#: Copies of which the median is taken.
REPEATS = 3


def measured_on(device: torch.device, bandwidth: tuple[float | None, float | None]) -> Measure:
    """Copies of a device as its executor makes them.

    Parameters
    ----------
    device
        This rank's.
    bandwidth
        The pace of a CPU device's copies there and back, bytes per s.
    """

    def measure(taking_part: bool, nbytes: int) -> HostLink | None:
        host = HostLinks(device, bandwidth, nbytes)
        try:
            return host.measure(taking_part, REPEATS)
        finally:
            host.close()

    return measure


def rounds(plan: Plan) -> list[list[int]]:
    """The devices that could offload and never do, in rounds: those that share a channel copy one after the other."""
    problem = plan.problem
    busy = {problem.stages[op.stage].device for op in plan.ops if op.kind >= Kind.O and op.bytes != 0}
    idle = sorted({stage.device for s, stage in enumerate(problem.stages) if problem.can_offload(s)} - busy)
    found: list[list[int]] = []
    carried_by: list[set[int]] = []
    for device in idle:
        channels = {c for way in ("d2h", "h2d") for c in problem.channels_of[device, way]}
        number = next((n for n, taken in enumerate(carried_by) if not taken & channels), len(found))
        if number == len(found):
            found.append([])
            carried_by.append(set())
        found[number].append(device)
        carried_by[number] |= channels
    return found


def times(plan: Plan, own: int, measure: Measure) -> dict[tuple[int, Kind], float]:
    """What moving all of ``offloadable_bytes`` would take, ms, by stage and kind (O, R); of this rank's device, where
    its link is idle. All ranks call it.

    Parameters
    ----------
    own
        The device of this rank.
    measure
        Called once a round.
    """
    found: dict[tuple[int, Kind], float] = {}
    problem = plan.problem
    stages = [s for s in problem.stages_of[own] if problem.can_offload(s)]
    nbytes = min(COPY_BYTES, max((problem.stages[s].offloadable_bytes for s in stages), default=1))
    for devices in rounds(plan):
        link = measure(own in devices, nbytes)
        if link is not None:
            for s in stages:
                size = problem.stages[s].offloadable_bytes
                found |= {(s, Kind.O): size / link.d2h * 1e3, (s, Kind.R): size / link.h2d * 1e3}
    return found
