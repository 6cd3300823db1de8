"""Large-neighbourhood search: HiGHS solves the MILP in which only the ops of a window may change their order.

Everything outside the window keeps its order and enters exactly, as heads and tails of the ops inside. A window is a
stretch of time on all devices, a longer one on a few neighbouring devices, or a few microbatches on all devices. How
wide it is follows from how hard the last ones of its kind were.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from optpipe.ops import Bools, Floats
from optpipe.problem import Problem
from solver.incumbent import SAME
from solver.incumbent import Incumbent as Best
from solver.milp import highs
from solver.milp.extract import schedule
from solver.milp.formulation import Options, formulate, free_window
from solver.milp.highs import Settings
from solver.milp.incumbent import Incumbent, incumbent
from solver.milp.precedence import Contradiction
from solver.milp.table import op_table
from solver.search.parts import as_parts, as_whole

#: Nodes of one window's search tree. Effort is counted, not timed, so that the same seed gives the same schedule.
_NODES = 20
#: Simplex iterations in which a window is solved that may be wider, and that should have been narrower.
_EASY, _HARD = 300, 3_000
#: Order bits and decisions that a window may have, and where what moves is free; with more it is narrowed first.
_MOST_BINARIES, _MOST_WITH_PARTS = 400, 250
#: Relative: what a schedule may lose by moving whole bytes.
_ROUND = 1e-6
#: Of the objective: what the sum of all starts in a window may weigh, so that schedules of one length differ.
_TIDY = 1e-3


@dataclass
class _Shape:
    """A kind of window: ``part`` of the makespan that it spans, devices and microbatches in it (None: all)."""

    part: float
    devices: int | None = None
    microbatches: float | None = None

    def resize(self, factor: float) -> None:
        if self.microbatches is None:
            self.part = min(1.0, max(0.02, self.part * factor))
        else:
            self.microbatches = max(1.0, self.microbatches * factor)


def search_windows(best: Best, rng: random.Random, *, windows: int, seconds: float, parts: bool) -> None:
    """Solve windows of the best schedule, one after the other; better ones are offered to ``best``.

    Parameters
    ----------
    best
        Holds a schedule without recomputation; unless ``parts``, one whose transfers of one stage move the same amount.
        Others are left alone.
    windows
        How many to solve at most.
    seconds
        Time to spend at most; also ends when ``best`` is at the bound.
    parts
        How much the transfers in a window move is free too.
    """
    end = best.seconds + seconds
    objective = best.options.objective
    same = _ROUND if parts else SAME
    shapes = [_Shape(0.15), _Shape(0.4, devices=3), _Shape(1.0, microbatches=2)]
    if best.ops is None:
        return
    whole = (best.problem, best.ops) if parts else as_whole(best.problem, best.ops)
    if whole is None:
        return
    problem, present = whole
    for number in range(windows):
        left = end - best.seconds
        if best.at_bound or left <= 0.05:
            return
        found = incumbent(problem, op_table(problem, offload=True, fuse=True), present, parts=parts)
        if found is None:
            return
        shape = shapes[number % len(shapes)]
        free = _window(problem, found, shape, rng)
        try:
            program = formulate(
                problem,
                Options(objective=objective, parts=parts),
                upper=found.objective[objective] * (1 + same),
                lower=best.bound,
                known=found,
                free=free,
            )
        except Contradiction:
            continue
        if program.matrix.num_binaries > (_MOST_WITH_PARTS if parts else _MOST_BINARIES):
            shape.resize(0.7)
            continue
        if program.matrix.num_binaries == 0:
            shape.resize(1.5)
            continue
        matrix = program.matrix._replace(cost=_tidied(program.matrix.cost, program.start, free, best.value, rng))
        settings = Settings(time_limit=left, gap=1e-4, threads=1, seed=rng.getrandbits(30), nodes=_NODES)
        result = highs.solve(matrix, settings, start=program.vector(found))
        hard = result.iterations > _HARD or result.status != "optimal"
        shape.resize(0.8 if hard else 1.3 if result.iterations < _EASY else 1.0)
        if result.solution is None:
            continue
        ops = schedule(program, result.solution)
        if ops is not None and best.objective(ops) <= best.value * (1 + same):
            present = ops
            best.offer(ops if parts else as_parts(best.problem, problem, ops), "windows")


def _window(problem: Problem, found: Incumbent, shape: _Shape, rng: random.Random) -> Bools:
    """What a window of this shape frees, at a random place."""
    length = float(found.end.max())
    width = shape.part * length
    begin = 0.0
    if shape.part < 1.0:  # the ends, where schedules lose most, as often as all that is between
        begin = rng.choice([0.0, length - width, *(rng.uniform(-0.5 * width, length - 0.5 * width) for _ in range(2))])
    devices = microbatches = None
    if shape.devices is not None:
        first = rng.randrange(max(1, problem.num_devices - shape.devices + 1))
        devices = range(first, min(problem.num_devices, first + shape.devices))
    if shape.microbatches is not None:
        count = round(shape.microbatches)
        first = rng.randrange(max(1, problem.num_microbatches - count + 1))
        microbatches = range(first, min(problem.num_microbatches, first + count))
    return free_window(found, problem, begin, begin + width, devices=devices, microbatches=microbatches)


def _tidied(cost: Floats, start: np.ndarray, free: Bools, value: float, rng: random.Random) -> Floats:
    """The costs, with small random ones on the starts of the free ops: among equals they pull them forward."""
    weighed = cost.copy()
    ops = np.flatnonzero(free)
    noise = np.random.default_rng(rng.getrandbits(32)).random(len(ops))
    weighed[start[ops]] += _TIDY * noise / max(1, len(ops))
    return weighed
