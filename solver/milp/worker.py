"""The child of ``child.solve``: one program in, better solutions and bounds out. Ends when its parent does."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import IO, Any

from optpipe.ops import Floats
from solver.milp import highs
from solver.milp.sparse import Matrix
from solver.wire import read_message, write_message

#: Seconds between two reports of the bound.
_EVERY = 0.2


class _Reporter:
    """Sends what HiGHS finds."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.asked = threading.Event()
        self.last = 0.0

    def improved(self, objective: float, bound: float, seconds: float, x: Floats) -> None:
        """Send a better solution."""
        self._send("improved", {"objective": objective, "bound": bound}, {"solution": x})

    def stop(self, bound: float) -> bool:
        """Send the bound now and then; whether the parent wants an end."""
        now = time.monotonic()
        if now - self.last >= _EVERY:
            self.last = now
            self._send("bound", {"bound": bound})
        return self.asked.is_set()

    def done(self, result: highs.MilpResult) -> None:
        """Send the result."""
        header: dict[str, Any] = {"objective": result.objective, "bound": result.bound, "nodes": result.nodes}
        header |= {"status": result.status, "message": result.message, "lazy_rows": result.lazy_rows}
        self._send("done", header, {} if result.solution is None else {"solution": result.solution})

    def _send(self, kind: str, header: dict[str, Any], arrays: dict[str, Floats] | None = None) -> None:
        write_message(self.out, {"kind": kind, "nodes": 0, **header}, arrays)


def main() -> None:
    """Read a program from standard input, solve it, report on standard output."""
    # Standard output is for messages only; whatever else prints goes to standard error.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    message = read_message(sys.stdin.buffer)
    if message is None:
        return
    header, arrays = message
    start = arrays.pop("start", None)
    began = header.pop("began")
    reporter = _Reporter(out)
    threading.Thread(target=_watch, args=(reporter,), daemon=True).start()
    settings = highs.Settings(**header)
    left = settings.time_limit - (time.monotonic() - began)
    settings = highs.Settings(**{**header, "time_limit": max(0.0, left)})
    matrix = Matrix.of_arrays(arrays)
    reporter.done(highs.solve(matrix, settings, start=start, on_improvement=reporter.improved, stop=reporter.stop))


def _watch(reporter: _Reporter) -> None:
    """Take the wish to stop; end at once when the parent is gone."""
    while read_message(sys.stdin.buffer) is not None:
        reporter.asked.set()
    os._exit(1)


if __name__ == "__main__":
    main()
