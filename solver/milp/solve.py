"""The MILP from a known schedule: formulate, solve, keep what is valid; and the bound that it proves.

Where the program describes every schedule that can be best, its own bound is one of the problem. Where it leaves some
out (``Formulation.excludes``), smaller ones, of the relaxation (see ``prove``), prove the bound: they are given a part
of the time first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from optpipe import metrics, semantics
from optpipe.ops import Floats, Ops
from optpipe.problem import Problem
from solver.milp import child, highs, pulp_backend
from solver.milp.extract import schedule
from solver.milp.formulation import Formulation, Options, estimated_bits, excluded, formulate
from solver.milp.highs import MilpResult, OnImprovement, Settings
from solver.milp.precedence import Contradiction
from solver.milp.prove import prove_by_blocks
from solver.milp.sparse import INF

#: Of the time: what the relaxation may take before the program of schedules.
_BOUND_PART = 0.25
#: A program with more bits than this, or than this for each second there is, is not even built.
_MOST_BITS, _BITS_A_SECOND = 1_000_000, 20_000
#: Values that differ by less, relative, count as one.
_SAME = 1e-9


class Found(NamedTuple):
    """The best valid schedule (None: none was found), a proven bound of the problem's objective in ms (None: nothing
    was proven), and what there is to report."""

    ops: Ops | None
    bound: float | None
    facts: dict[str, Any]


def solve_milp(
    problem: Problem,
    start: Ops | None,
    *,
    objective: str = "makespan",
    time_limit: float = 300.0,
    gap: float = 0.05,
    threads: int = 1,
    seed: int = 0,
    lower_bound: float = 0.0,
    on_improvement: Callable[[Ops], None] | None = None,
    backend: str = "highs",
    options: Options | None = None,
) -> Found:
    """Solve the program of a problem from a known schedule.

    Parameters
    ----------
    start
        A valid schedule: it bounds the times, and the solver starts from it. None: none is known.
    time_limit, gap, threads, seed
        Of the solver: seconds for everything; a relative gap.
    lower_bound
        A proven bound of the objective, ms.
    on_improvement
        Called with each better schedule while the solver runs.
    backend
        ``highs``: HiGHS in a process of its own, so that the limit holds; ``highs-here``: in this one, for small
        programs; else the name of a solver that PuLP finds.
    options
        Families of valid rows; its objective does not count.

    Raises
    ------
    InputError
        The backend is unknown.
    """
    wanted = replace(options or Options(), objective="span" if objective == "span" else "makespan")
    settings = Settings(gap=gap, threads=threads, seed=seed)
    run = _Run(problem, wanted, settings, backend, time.monotonic() + time_limit, lower_bound)
    return run.found(start, on_improvement)


class _Run:
    """One call of ``solve_milp``."""

    def __init__(
        self, problem: Problem, options: Options, settings: Settings, backend: str, end: float, bound: float
    ) -> None:
        self.problem, self.options, self.settings = problem, options, settings
        self.backend, self.end, self.bound = backend, end, bound
        self.proven: float | None = None
        #: Whether no more time would let the relaxation prove more.
        self.exhausted = False
        self.facts: dict[str, Any] = {}

    def found(self, start: Ops | None, on_improvement: Callable[[Ops], None] | None) -> Found:
        """Formulate and solve."""
        if (bits := estimated_bits(self.problem)) > min(_MOST_BITS, _BITS_A_SECOND * max(1.0, self._left())):
            return Found(None, None, {"status": "too large", "binaries": bits})
        best = None if start is None else self._value(start)
        leaves_out = excluded(self.problem, self.options)
        if leaves_out:
            self.facts["leaves_out"] = leaves_out
            self._prove(best, _BOUND_PART)
        if self._good(best):
            return Found(start, self._capped(best), {"status": "within gap", **self.facts})
        ops = self._solve(start, best, on_improvement, proves=not leaves_out)
        if ops is not None:
            best = self._value(ops) if best is None else min(best, self._value(ops))
        if leaves_out and not self._good(best):
            self._prove(best, 1.0)
        return Found(ops, self._capped(best), self.facts)

    def _value(self, ops: Ops) -> float:
        return metrics.span(self.problem, ops) if self.options.objective == "span" else semantics.makespan(ops)

    def _left(self) -> float:
        return self.end - time.monotonic()

    def _good(self, value: float | None) -> bool:
        return value is not None and self.bound >= value * (1 - self.settings.gap - _SAME)

    def _capped(self, value: float | None) -> float | None:
        """What was proven; where rounding takes it beyond a schedule's value, that."""
        return self.proven if self.proven is None or value is None else min(self.proven, value)

    def _prove(self, upper: float | None, part: float) -> None:
        """Bound the objective of every schedule of the problem, in a part of the time that is left."""
        seconds = part * self._left()
        if self.exhausted or seconds <= 0:
            return
        settings = replace(self.settings, time_limit=seconds)
        in_child = self.backend != "highs-here"
        proof = prove_by_blocks(self.problem, self.options, settings, upper, self.bound, in_child=in_child)
        self.exhausted |= proof.exhausted
        self._raise_bound(proof.bound)
        if proof.facts:
            self.facts["relaxation"] = proof.facts

    def _solve(
        self, start: Ops | None, upper: float | None, on_improvement: Callable[[Ops], None] | None, *, proves: bool
    ) -> Ops | None:
        """The best schedule of the program."""
        try:
            program = formulate(self.problem, self.options, upper=upper, lower=self.bound)
        except Contradiction:
            self.facts["status"] = "nothing shorter"
            return None

        def improved(_: float, __: float, ___: float, x: Floats) -> None:
            if on_improvement is not None and (ops := schedule(program, x)) is not None:
                on_improvement(ops)

        vector = None if start is None else program.vector_of(start)
        result = self._run(program, replace(self.settings, time_limit=max(0.0, self._left())), vector, improved)
        if proves:
            self._take_bound(result)
        self.facts |= result.facts()
        return None if result.solution is None else schedule(program, result.solution)

    def _run(
        self, program: Formulation, settings: Settings, vector: Floats | None, improved: OnImprovement
    ) -> MilpResult:
        if self.backend == "highs":
            return child.solve(program.matrix, settings, start=vector, on_improvement=improved)
        if self.backend == "highs-here":
            return highs.solve(program.matrix, settings, start=vector, on_improvement=improved)
        return pulp_backend.solve(program, self.backend, settings, vector)

    def _take_bound(self, result: MilpResult) -> None:
        """Keep what a program that holds for every schedule proves. (That it has no solution only says that nothing is
        shorter than what is known.)"""
        if result.status != "infeasible" and 0 < result.bound < INF:
            self._raise_bound(result.bound)

    def _raise_bound(self, bound: float | None) -> None:
        if bound is not None:
            self.proven = max(bound, self.proven or 0.0)
            self.bound = max(self.bound, self.proven)
