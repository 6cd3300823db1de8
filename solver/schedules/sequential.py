"""One microbatch at a time through the whole pipeline: the slowest schedule, and the one that needs the least memory.

A device that holds several stages keeps, drops (C) or moves away (O, R) the activations of its earlier stages while
the later ones run. What it needs at least is derived in :mod:`solver.feasibility`.
"""

from __future__ import annotations

from itertools import count

from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.timing import earliest
from solver.feasibility import resting_place, sequential_peak
from solver.schedules.errors import DoesNotFit


def sequential(problem: Problem) -> Ops:
    """One microbatch after the other; activations leave a device only where they must.

    Raises
    ------
    DoesNotFit
        Even so a device's memory is too small: no schedule fits then.
    """
    away = [_leaving(problem, d) for d in range(problem.num_devices)]
    leaves = {s: kind for stages in away for s, kind in stages.items()}
    clock = count()
    ops: list[Op] = []

    def add(kind: Kind, s: int, j: int) -> None:
        at = next(clock)
        ops.append(Op(kind, s, j, float(at), float(at + 1)))

    for j in range(problem.num_microbatches):
        for s in range(problem.num_stages):
            add(Kind.F, s, j)
            if leaves.get(s) == Kind.O:
                add(Kind.O, s, j)
        for s in reversed(range(problem.num_stages)):
            if s in leaves:
                add(Kind.R if leaves[s] == Kind.O else Kind.C, s, j)
            stage = problem.stages[s]
            if stage.bw_ms <= stage.backward_ms + stage.weight_ms:
                add(Kind.BW, s, j)
            else:
                add(Kind.B, s, j)
                add(Kind.W, s, j)
    return earliest(problem, Ops.of(ops))


def _leaving(problem: Problem, device: int) -> dict[int, Kind]:
    """The stages of a device whose activations must leave between F and B, and how: O (and R) or C.

    Starts from all of them gone and brings back what fits, the slowest to bring back first.
    """
    budget = problem.devices[device].memory_bytes
    held = problem.stages_of[device]
    rest = {s: resting_place(problem, s) for s in held}
    sizes = {s: rest[s].bytes for s in held}
    if budget is not None and sequential_peak(problem, held, sizes) > budget:
        raise DoesNotFit(f"device {device} cannot hold even one microbatch")
    leaves = {s: kind for s in held if (kind := rest[s].kind) is not None}
    for s in sorted(leaves, key=lambda s: (-rest[s].cost_ms, s)):
        stays = {**sizes, s: problem.stages[s].activation_bytes}
        if budget is None or sequential_peak(problem, held, stays) <= budget:
            sizes = stays
            del leaves[s]
    return leaves
