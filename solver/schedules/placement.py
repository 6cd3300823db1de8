"""Which placement a problem has: what schedules that are made for one ask first."""

from __future__ import annotations

from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply


def v_positions(problem: Problem) -> int:
    """The number of devices, if stages go down the devices and back up again: stage i and stage 2 D - 1 - i together.

    Raises
    ------
    DoesNotApply
        Another placement.
    """
    D, places = problem.num_devices, [stage.device for stage in problem.stages]
    if len(places) != 2 * D or len(set(places[:D])) != D or places != places[:D] + places[:D][::-1]:
        raise DoesNotApply("needs two stages a device in V placement")
    return D


def looped_chunks(problem: Problem) -> int:
    """Stages a device, if stages go round the devices always in the same order.

    Raises
    ------
    DoesNotApply
        Another placement.
    """
    D, places = problem.num_devices, [stage.device for stage in problem.stages]
    if len(places) % D or len(set(places[:D])) != D or places != places[:D] * (len(places) // D):
        raise DoesNotApply("needs stages that go round the devices in one order (interleaved placement)")
    return len(places) // D
