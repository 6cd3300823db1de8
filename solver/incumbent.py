"""The best schedule known while a search goes on, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from optpipe import metrics, semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.options import SolveOptions

#: Two objectives closer than this, relatively, are one.
SAME = 1e-9


@dataclass(frozen=True)
class Progress:
    """What a search says on its way: the best objective and the bound (ms), what runs, and since when (s)."""

    seconds: float
    best: float
    bound: float
    source: str

    @property
    def gap(self) -> float:
        """(best - bound) / bound."""
        return self.best / self.bound - 1.0 if self.bound > 0 else 0.0


@dataclass
class Incumbent:
    """The best verified schedule of one search, the best proven bound, and the clock.

    Attributes
    ----------
    problem, options
        What is solved, and how.
    bound
        The best proven lower bound of the objective, ms.
    ops, value
        The best schedule and its objective, ms; None and infinite as long as there is none.
    source
        Which part of the solver found it.
    facts
        What parts of the solver report of themselves.
    parent
        Another incumbent, which is offered what this one takes.
    """

    problem: Problem
    options: SolveOptions
    bound: float
    on_progress: Callable[[Progress], None] | None = None
    ops: Ops | None = None
    value: float = float("inf")
    source: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
    parent: Incumbent | None = None
    _offloaded: int = 0
    _peak: int = 0

    def line(self, ops: Ops | None) -> Incumbent:
        """Another incumbent on the same clock that begins with this schedule and offers here what it takes."""
        found = Incumbent(self.problem, self.options, self.bound, begin=self.begin, facts=self.facts)
        found.offer(ops, self.source)
        found.parent = self
        return found

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        """Seconds until the time limit."""
        return self.options.time_limit - self.seconds

    @property
    def at_bound(self) -> bool:
        """Whether the best schedule is proven optimal."""
        return self.value <= self.bound * (1 + SAME)

    @property
    def good_enough(self) -> bool:
        """Whether the best schedule is within the gap that was asked for."""
        return self.value <= self.bound * (1 + max(self.options.gap, SAME))

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to do: good enough, or out of time."""
        return self.good_enough or self.left <= 0

    def objective(self, ops: Ops) -> float:
        """The objective of a schedule, ms."""
        return metrics.span(self.problem, ops) if self.options.objective == "span" else semantics.makespan(ops)

    def offer(self, ops: Ops | None, source: str) -> bool:
        """Take a schedule that is valid and better than the best one: shorter, or as long with fewer offloaded bytes,
        or these alike and with a lower peak. Whether it was taken."""
        if ops is None:
            return False
        value = self.objective(ops)
        if value > self.value * (1 + SAME) or verify(self.problem, ops):
            return False
        judged = metrics.measure(self.problem, ops)
        offloaded, peak = sum(judged.offloaded_bytes), max(judged.peak_bytes)
        if value >= self.value * (1 - SAME) and (offloaded, peak) >= (self._offloaded, self._peak):
            return False
        self.ops, self.value, self.source = ops, value, source
        self._offloaded, self._peak = offloaded, peak
        self.report()
        if self.parent is not None:
            self.parent.offer(ops, source)
        return True

    def taker(self, source: str) -> Callable[[Ops], None]:
        """A callback that offers what a search finds."""

        def take(ops: Ops) -> None:
            self.offer(ops, source)

        return take

    def raise_bound(self, bound: float) -> None:
        """A proven lower bound of the objective, ms."""
        if bound > self.bound:
            self.bound = min(bound, self.value)
            self.report()

    def report(self) -> None:
        """Tell whoever listens."""
        if self.on_progress is not None:
            self.on_progress(Progress(self.seconds, self.value, self.bound, self.source))
