"""Interleaved 1F1B (Megatron-LM, arXiv:2104.04473): 1F1B on stages that go round the devices several times.

Microbatches go in groups of as many as there are devices: a group runs on one chunk (stage of a device) after the
other, backwards in reverse. A device runs forwards until the first backward can reach it without a gap,

    2 (D - 1 - d) + (chunks - 1) * group        forwards on device d,

then one forward and one backward in turn. The bubble is that of 1F1B divided by the chunks. Where microbatches are no
multiple of the devices, either the last group is smaller or all groups are about equal, whichever is shorter, with as
many more forwards ahead as it takes for no device to wait for another in a circle.

    2 devices, 2 chunks (A, B), 4 microbatches
    device 0  A0 A1 B0 B1 A2 b0 A3 b1 B2 a0 B3 a1 b2 b3 a2 a3
    device 1     A0 A1 B0 b0 B1 b1 A2 a0 A3 a1 B2 b2 B3 b3 a2 a3
"""

from __future__ import annotations

from optpipe import semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import looped_chunks


def interleaved(problem: Problem) -> Ops:
    """Interleaved 1F1B with fused backwards (BW), for any number of chunks and microbatches.

    Raises
    ------
    DoesNotApply
        Stages do not go round the devices several times in one order.
    """
    chunks, D, m = looped_chunks(problem), problem.num_devices, problem.num_microbatches
    if chunks < 2:
        raise DoesNotApply("needs several stages a device (with one, 1F1B is what applies)")
    full = [range(j, min(j + D, m)) for j in range(0, m, D)]
    if m % D == 0:
        return _without_circle(problem, chunks, full)
    count = len(full)
    even = [range(m * k // count, m * (k + 1) // count) for k in range(count)]
    return min((_without_circle(problem, chunks, groups) for groups in (full, even)), key=semantics.makespan)


def _without_circle(problem: Problem, chunks: int, groups: list[range]) -> Ops:
    """The schedule with the fewest more forwards ahead than the gapless first backward asks for."""
    for extra in range(chunks * problem.num_microbatches + 1):
        try:
            return in_order(problem, _orders(problem, chunks, groups, extra))
        except ValueError:
            # A short group reaches its next chunk before the devices further on have come that far.
            continue
    raise AssertionError("with all forwards first there is no circle")


def _orders(problem: Problem, chunks: int, groups: list[range], extra: int) -> list[list[Step]]:
    D = problem.num_devices
    orders: list[list[Step]] = [[] for _ in range(D)]
    for d in range(D):
        forwards = [Step(Kind.F, c * D + d, j) for group in groups for c in range(chunks) for j in group]
        backwards = [Step(Kind.BW, c * D + d, j) for group in groups for c in reversed(range(chunks)) for j in group]
        ahead = min(len(forwards), 2 * (D - 1 - d) + (chunks - 1) * len(groups[0]) + extra)
        steps = forwards[:ahead]
        for k, backward in enumerate(backwards):
            if ahead + k < len(forwards):
                steps.append(forwards[ahead + k])
            steps.append(backward)
        orders[problem.stages[d].device] = steps
    return orders
