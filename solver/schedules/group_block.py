"""The building block of PipeOffload (arXiv:2503.01328): interleaved 1F1B in groups that follow each other closely.

A group of ``g`` microbatches runs on one chunk after the other, ``lag`` groups later on each: later chunks of older
groups and earlier chunks of newer ones take turns. With ``g * lag`` = D this is interleaved 1F1B; about D / 2 is the
least that lets no device wait where F and B take as long, and holds about half as much. The times of a block, in units
of one op, for C chunks on device d and microbatch r of group q:

    F of chunk c            3 g (C q + lag c + c // (C / gcd(C, lag))) + 3 r + d
    B of chunk C - 1 - c    the same, counted from the end of the first F of the last chunk and of the way to the last
                            device and back, 3 (D - 1 - d)
    W                       right after its B

The division keeps chunks apart that would fall on the same units. Only the order of the block matters: each op then
runs as early as it can.
"""

from __future__ import annotations

from math import gcd

from optpipe.ops import Kind
from optpipe.problem import Problem
from solver.schedules.orders import Step

#: Units between microbatches: one F, one B, one W.
PERIOD = 3


def lags(D: int, group: int) -> list[int]:
    """Groups between a group's start on one chunk and on the next: what about half of the devices take, and what all
    of them take."""
    return sorted({-(-((D + 1) // 2) // group), -(-D // group)})


def timed_block(problem: Problem, chunks: int, group: int, lag: int) -> list[list[tuple[int, Step]]]:
    """Per device its F's and B's by time, in units, for stages that go round the devices ``chunks`` times.

    Parameters
    ----------
    problem
        The problem. Its last group need not be full.
    chunks
        Stages a device.
    group
        Microbatches of a group.
    lag
        Groups between a group's start on one chunk and on the next.
    """
    D = problem.num_devices
    apart = chunks // gcd(chunks, lag)
    later = [PERIOD * group * (lag * c + c // apart) for c in range(chunks)]
    rows: list[list[tuple[int, Step]]] = [[] for _ in range(D)]
    for d in range(D):
        row = rows[problem.stages[d].device]
        first_backward = later[-1] + d + 1 + PERIOD * (D - 1 - d)
        for j in range(problem.num_microbatches):
            at = PERIOD * (group * chunks * (j // group) + j % group)
            for c in range(chunks):
                row.append((at + later[c] + d, Step(Kind.F, c * D + d, j)))
                row.append((at + later[chunks - 1 - c] + first_backward, Step(Kind.B, c * D + d, j)))
        row.sort()
    return rows
