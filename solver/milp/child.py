"""HiGHS in a process of its own, so that a time limit is a limit.

HiGHS looks at its clock between steps, and some steps (presolve, a large LP) take much longer than asked for. Here the
parent ends the child when the time is over, and keeps the best solution and bound that it has sent until then.

    parent  --matrix, settings, start-->  child (python -m solver.milp.child)
            <--improved, bound, ..., result--
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

from optpipe.ops import Floats
from solver.milp import highs
from solver.milp.highs import MilpResult, OnImprovement, Settings
from solver.milp.sparse import INF, Matrix
from solver.milp.wire import read_message, write_message

#: Seconds beyond the time limit that HiGHS gets to end by itself.
GRACE = 1.0
#: Seconds between two reports of the bound.
_BOUND_EVERY = 0.5

_Message = tuple[dict[str, Any], dict[str, Any]]


def solve(
    matrix: Matrix,
    settings: Settings,
    *,
    start: Floats | None = None,
    on_improvement: OnImprovement | None = None,
) -> MilpResult:
    """As ``highs.solve``, in a child process that is ended ``GRACE`` seconds after the time limit.

    Ctrl-C in the parent ends the child and goes on.
    """
    began = time.monotonic()
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    child = subprocess.Popen(
        [sys.executable, "-m", "solver.milp.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdin is not None and child.stdout is not None
    messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_all, args=(child.stdout, messages), daemon=True)
    reader.start()
    best = _Best(matrix)
    try:
        # The pipe's other end stays open: the child ends when it closes, that is, when this process is gone.
        _send(child.stdin, matrix, settings, start)
        deadline = began + settings.time_limit + GRACE
        while True:
            try:
                message = messages.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return best.result("time limit", time.monotonic() - began)
            if message is None:
                return best.result("failed", time.monotonic() - began, f"the solver ended with status {child.wait()}")
            header, arrays = message
            if header["kind"] == "result":
                return MilpResult(**header["result"], solution=arrays.get("x"))
            best.take(header, arrays.get("x"))
            if header["kind"] == "improved" and on_improvement is not None:
                on_improvement(header["objective"], best.bound, time.monotonic() - began, arrays["x"])
    except BrokenPipeError:
        return best.result("failed", time.monotonic() - began, f"the solver ended with status {child.wait()}")
    finally:
        child.kill()
        child.wait()
        reader.join()
        child.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what was still buffered has no reader any more
            child.stdin.close()


class _Best:
    """What the child has sent so far."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.objective, self.bound = INF, -INF
        self.solution: Floats | None = None

    def take(self, header: dict[str, Any], x: Floats | None) -> None:
        self.bound = max(self.bound, header["bound"])
        if x is not None and header["objective"] < self.objective:
            self.objective, self.solution = header["objective"], x

    def result(self, status: str, seconds: float, message: str = "") -> MilpResult:
        return MilpResult(
            status=status,
            objective=self.objective,
            bound=self.bound,
            solution=self.solution,
            seconds=seconds,
            nodes=0,
            rows=self.matrix.num_rows,
            columns=self.matrix.num_columns,
            binaries=self.matrix.num_binaries,
            message=message,
        )


def _read_all(stream: IO[bytes], messages: queue.SimpleQueue[_Message | None]) -> None:
    try:
        while (message := read_message(stream)) is not None:
            messages.put(message)
    finally:
        messages.put(None)


def _send(stream: IO[bytes], matrix: Matrix, settings: Settings, start: Floats | None) -> None:
    arrays = dict(matrix._asdict())
    if start is not None:
        arrays["start"] = start
    write_message(stream, {"settings": dataclasses.asdict(settings)}, arrays)


def main() -> None:
    """The child: reads one program from standard input, writes what it finds to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the child
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not come between the messages
    message = read_message(sys.stdin.buffer)
    if message is None:
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    header, arrays = message
    start = arrays.pop("start", None)
    told = [0.0]

    def improved(objective: float, bound: float, _: float, x: Floats) -> None:
        write_message(out, {"kind": "improved", "objective": objective, "bound": bound}, {"x": x})

    def report(bound: float) -> bool:
        if time.monotonic() - told[0] > _BOUND_EVERY and bound > -INF:
            told[0] = time.monotonic()
            write_message(out, {"kind": "bound", "bound": bound})
        return False

    result = highs.solve(
        Matrix(**arrays), Settings(**header["settings"]), start=start, on_improvement=improved, stop=report
    )
    facts = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "solution"}
    solution = {} if result.solution is None else {"x": np.asarray(result.solution, np.float64)}
    write_message(out, {"kind": "result", "result": facts}, solution)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at the end of the stream only
    os._exit(1)


if __name__ == "__main__":
    main()
