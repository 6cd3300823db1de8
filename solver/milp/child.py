"""HiGHS in a process of its own, which can be ended: a time limit that holds, and better solutions as they come.

HiGHS looks at its limits now and then only (not in some parts of presolve, for one). The child sends every better
solution and bound at once, so that ending it loses nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

import numpy.typing as npt

from optpipe.ops import Floats
from solver.milp.highs import MilpResult, OnImprovement, Settings
from solver.milp.sparse import INF, Matrix
from solver.milp.wire import read_message, write_message

Message = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]

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
        self.bound, self.objective, self.nodes = -INF, INF, 0
        self.solution: Floats | None = None
        if start is not None and matrix.violation(start) <= 1e-6:
            self.solution, self.objective = start, float(matrix.cost @ start)

    def result(self) -> MilpResult:
        """Run the child to its end."""
        with tempfile.TemporaryFile() as errors:
            child = _start_child(errors)
            try:
                status, message = self._talk(child)
            finally:
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        _close(pipe)
            if status == "failed" and not message:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                message = lines[-1] if lines else "HiGHS ended early"
        return MilpResult(
            status=status,
            objective=self.objective,
            bound=self.bound,
            solution=self.solution,
            seconds=time.monotonic() - self.began,
            nodes=self.nodes,
            rows=self.matrix.num_rows,
            columns=self.matrix.num_columns,
            binaries=self.matrix.num_binaries,
            message=message,
        )

    def _talk(self, child: subprocess.Popen[bytes]) -> tuple[str, str]:
        """Send the program, take messages until the child is done or out of time; status and message."""
        assert child.stdin is not None and child.stdout is not None
        inbox: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=_receive, args=(child.stdout, inbox), daemon=True).start()
        threading.Thread(target=self._send, args=(child.stdin,), daemon=True).start()
        end = self.began + self.settings.time_limit + _GRACE
        asked = False
        while True:
            now = time.monotonic()
            if now >= end:
                return ("stopped" if asked else "time limit"), ""
            try:
                message = inbox.get(timeout=min(_POLL, end - now))
            except queue.Empty:
                if not asked and self.stop is not None and self.stop(self.bound):
                    asked, end = True, min(end, now + 2 * _GRACE)
                    _ask_to_stop(child.stdin)
                continue
            if message is None:
                return "failed", ""
            if (done := self._take(*message)) is not None:
                return done

    def _send(self, pipe: IO[bytes]) -> None:
        names = Matrix._fields
        arrays = dict(zip(names, self.matrix, strict=True))
        if self.start is not None:
            arrays["start"] = self.start
        header = asdict(self.settings) | {"began": self.began}
        with contextlib.suppress(OSError, ValueError):  # the child is gone; the inbox says so
            write_message(pipe, header, arrays)

    def _take(self, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> tuple[str, str] | None:
        """Take one message; status and message if it is the last one."""
        self.bound = max(self.bound, float(header["bound"]))
        self.nodes = int(header["nodes"])
        if "solution" in arrays and header["objective"] < self.objective + 1e-9 * abs(self.objective):
            self.objective, self.solution = float(header["objective"]), arrays["solution"]
            if self.on_improvement is not None and header["kind"] == "improved":
                seconds = time.monotonic() - self.began
                self.on_improvement(self.objective, self.bound, seconds, self.solution)
        return (str(header["status"]), str(header["message"])) if header["kind"] == "done" else None


def _start_child(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # The child finds the same modules as this process, wherever it is started.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-m", "solver.milp.worker"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=False
    )


def _receive(pipe: IO[bytes], inbox: queue.Queue[Message | None]) -> None:
    try:
        while (message := read_message(pipe)) is not None:
            inbox.put(message)
    except (OSError, ValueError):
        pass
    inbox.put(None)


def _ask_to_stop(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        write_message(pipe, {"stop": True})


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
