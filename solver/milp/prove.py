"""Lower bounds from the relaxation on HiGHS: of some devices first, of all of them where that gets anywhere.

Every schedule obeys the rows of the relaxation (see ``fluid``), so its optimum is a lower bound; and so it is without
the rows that say that a device does one op at a time and has a budget. What is left of such a device is the way
through it: its ops in the order of their data and of their microbatches. So the program of a few neighbouring devices
is small, and says what the bounds of single devices miss: a device without memory for what the next one asks for makes
that one wait. Blocks of neighbours grow, and each one starts from what is proven already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from optpipe.problem import Problem
from solver.milp import child, highs
from solver.milp.formulation import Options, estimated_bits, formulate
from solver.milp.highs import MilpResult, Settings
from solver.milp.precedence import Contradiction
from solver.milp.sparse import INF

#: Values that differ by less, relative, count as one.
_SAME = 1e-9
#: Order bits of a program for each second that it may take, and at most; ops of all devices that it may have.
_BITS_A_SECOND, _MOST_BITS, _MOST_OPS = 2_000, 40_000, 20_000
#: Seconds below which no program is started.
_LEAST = 0.2


class Proof(NamedTuple):
    """A proven lower bound of the objective in ms (None: nothing was proven), whether no more time would raise it, and
    what there is to report of the program that proved most."""

    bound: float | None
    exhausted: bool
    facts: dict[str, Any]


def prove(
    problem: Problem,
    objective: str = "makespan",
    upper: float | None = None,
    seconds: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    *,
    lower: float = 0.0,
) -> float | None:
    """A lower bound of the objective of every schedule of a problem, ms; None where nothing above ``lower`` is proven.

    Parameters
    ----------
    objective
        ``makespan`` or ``span``.
    upper
        The objective of a valid schedule, ms: the proof ends where it is reached. The closer, the smaller the programs.
    seconds, threads, seed
        What HiGHS may take; it runs in a process of its own, so that the limit holds.
    lower
        A proven bound, ms (of ``solver.bounds``).
    """
    options = Options(objective="span" if objective == "span" else "makespan")
    settings = Settings(threads=threads, seed=seed, time_limit=seconds)
    return prove_by_blocks(problem, options, settings, upper, lower).bound


def prove_by_blocks(
    problem: Problem,
    options: Options,
    settings: Settings,
    upper: float | None,
    lower: float,
    *,
    in_child: bool = True,
) -> Proof:
    """``prove`` with the families of rows and the settings given (its gap: at which the proof may end)."""
    return _Blocks(problem, options, settings, upper, lower, in_child).proof()


class _Blocks:
    """One proof: what it has found so far."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        settings: Settings,
        upper: float | None,
        lower: float,
        in_child: bool,
    ) -> None:
        self.problem, self.settings, self.upper, self.in_child = problem, settings, upper, in_child
        self.options = replace(options, relaxed=True, fuse=True)
        self.bound, self.proven = lower, False
        self.end = time.monotonic() + settings.time_limit
        self.exhausted = False
        self.facts: dict[str, Any] = {}

    def proof(self) -> Proof:
        """Go through the blocks."""
        problem = self.problem
        bits = estimated_bits(problem, offload=False) / problem.num_devices
        ops = 3 * problem.num_stages * problem.num_microbatches
        sizes = list(block_sizes(problem.num_devices))
        for place, (size, blocks) in enumerate(sizes):
            if ops > _MOST_OPS or size * bits > _MOST_BITS:
                break
            # Every size gets the same part of the time that is left, and every block of a size.
            end = time.monotonic() + (self.end - time.monotonic()) / (len(sizes) - place)
            for number, block in enumerate(blocks):
                seconds = (end - time.monotonic()) / (len(blocks) - number)
                if seconds < _LEAST or size * bits > _BITS_A_SECOND * seconds or self._enough(self.bound):
                    break
                self._solve(block, seconds)
        return Proof(self.bound if self.proven else None, self.exhausted, self.facts)

    def _enough(self, bound: float) -> bool:
        return self.upper is not None and bound >= self.upper * (1 - self.settings.gap - _SAME)

    def _solve(self, block: tuple[int, ...], seconds: float) -> None:
        """Bound the objective by the program of one block."""
        began = time.monotonic()
        everyone = len(block) == self.problem.num_devices
        options = replace(self.options, devices=None if everyone else block)
        try:
            program = formulate(self.problem, options, upper=self.upper, lower=self.bound)
        except Contradiction:
            # Nothing is shorter than the schedule that is known; how much of that is rounding is not known.
            return
        seconds -= time.monotonic() - began
        if seconds <= 0:
            return
        solve = child.solve if self.in_child else highs.solve
        result = solve(program.matrix, replace(self.settings, gap=0.0, time_limit=seconds), stop=self._enough)
        self.exhausted |= everyone and result.status == "optimal"
        self._take(result, block)

    def _take(self, result: MilpResult, block: tuple[int, ...]) -> None:
        """Keep what a program proves. (That it has no solution says only that nothing is shorter than ``upper``.)"""
        bound = -INF if result.status == "infeasible" else result.bound
        if self.upper is not None:
            bound = min(bound, self.upper)
        more = self.bound * (1 + _SAME) < bound < INF
        if more:
            self.bound, self.proven = bound, True
        if more or not self.facts:
            self.facts = {"devices": list(block), **result.facts()}


def block_sizes(devices: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Blocks of 2, 4, 8 ... neighbours, each half over the one before; all devices at last."""
    size = 2
    while size < devices:
        step = size // 2
        starts = range(0, devices - size + step, step)
        yield size, [tuple(range(min(s, devices - size), min(s, devices - size) + size)) for s in starts]
        size *= 2
    yield devices, [tuple(range(devices))]
