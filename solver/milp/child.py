"""HiGHS in a process of its own, which can be ended: a time limit that holds, and better solutions as they come.

HiGHS looks at its limits now and then only (not in some parts of presolve, for one). The child sends every better
solution and bound at once, so that ending it loses nothing.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from optpipe.ops import Floats
from solver.milp.highs import MilpResult, OnImprovement, Settings
from solver.milp.sparse import INF, Matrix
from solver.process import Process

#: Seconds: how long the child may take to end by itself after its limit, and how often the parent looks around.
_GRACE, _POLL = 0.3, 0.05


def solve(
    matrix: Matrix,
    settings: Settings | None = None,
    *,
    start: Floats | None = None,
    on_improvement: OnImprovement | None = None,
    stop: Callable[[float], bool] | None = None,
) -> MilpResult:
    """Solve a program in a child process. As ``highs.solve``, but the time limit holds: from the call to the return.

    Parameters
    ----------
    start
        A vector to start from. If it is feasible and nothing better is found, it is the solution.
    on_improvement, stop
        Called in this thread, while the child runs.
    """
    settings = settings or Settings()
    return _Run(matrix, settings, start, on_improvement, stop).result()


class _Run:
    """One child and what it has said so far."""

    def __init__(
        self,
        matrix: Matrix,
        settings: Settings,
        start: Floats | None,
        on_improvement: OnImprovement | None,
        stop: Callable[[float], bool] | None,
    ) -> None:
        self.matrix, self.settings, self.start = matrix, settings, start
        self.on_improvement, self.stop = on_improvement, stop
        self.began = time.monotonic()
        self.bound, self.objective, self.nodes, self.lazy_rows = -INF, INF, 0, 0
        self.solution: Floats | None = None
        if start is not None and matrix.violation(start) <= 1e-6:
            self.solution, self.objective = start, float(matrix.cost @ start)

    def result(self) -> MilpResult:
        """Run the child to its end."""
        child = Process("solver.milp.worker")
        last_words = ""
        try:
            status, message = self._talk(child)
        finally:
            last_words = child.close()
        if status == "failed" and not message:
            message = last_words or "HiGHS ended early"
        return MilpResult(
            status=status,
            objective=self.objective,
            bound=self.bound,
            solution=self.solution,
            seconds=time.monotonic() - self.began,
            nodes=self.nodes,
            rows=self.matrix.num_rows + self.lazy_rows,
            columns=self.matrix.num_columns,
            binaries=self.matrix.num_binaries,
            message=message,
            lazy_rows=self.lazy_rows,
        )

    def _talk(self, child: Process) -> tuple[str, str]:
        """Send the program, take messages until the child is done or out of time; status and message."""
        arrays = self.matrix.arrays()
        if self.start is not None:
            arrays["start"] = self.start
        child.send(asdict(self.settings) | {"began": self.began}, arrays)
        end = self.began + self.settings.time_limit + _GRACE
        asked = False
        while True:
            now = time.monotonic()
            if now >= end:
                return ("stopped" if asked else "time limit"), ""
            try:
                message = child.receive(min(_POLL, end - now))
            except queue.Empty:
                if not asked and self.stop is not None and self.stop(self.bound):
                    asked, end = True, min(end, now + 2 * _GRACE)
                    child.send({"stop": True})
                continue
            if message is None:
                return "failed", ""
            if (done := self._take(*message)) is not None:
                return done

    def _take(self, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> tuple[str, str] | None:
        """Take one message; status and message if it is the last one."""
        self.bound = max(self.bound, float(header["bound"]))
        self.nodes = int(header["nodes"])
        self.lazy_rows = int(header.get("lazy_rows", 0))
        if "solution" in arrays and header["objective"] < self.objective + 1e-9 * abs(self.objective):
            self.objective, self.solution = float(header["objective"]), arrays["solution"]
            if self.on_improvement is not None and header["kind"] == "improved":
                seconds = time.monotonic() - self.began
                self.on_improvement(self.objective, self.bound, seconds, self.solution)
        return (str(header["status"]), str(header["message"])) if header["kind"] == "done" else None
