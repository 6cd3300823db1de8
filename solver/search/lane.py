"""The process of a ``lanes.Lane``: tasks in, better schedules and bounds out. Ends when its parent does."""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
from typing import IO

from optpipe.problem import Problem
from solver.incumbent import Incumbent, Progress
from solver.options import SolveOptions
from solver.process import Message
from solver.search.exact import solve_exactly
from solver.search.lanes import arrays_of, ops_of
from solver.search.portfolio import Portfolio
from solver.wire import read_message, write_message


class _Reporter:
    """Sends what the lane's incumbent learns."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.known: object = None
        self.incumbent: Incumbent | None = None

    def progress(self, _: Progress) -> None:
        """Send a better schedule or bound."""
        self.send(done=False)

    def send(self, *, done: bool) -> None:
        """Send the best schedule, unless the parent has it, and the bound; whether the task is done."""
        incumbent = self.incumbent
        assert incumbent is not None
        header = {"source": incumbent.source, "bound": incumbent.bound, "facts": {}, "done": done}
        if done:
            header["facts"] = incumbent.facts
        news = incumbent.ops is not None and incumbent.ops is not self.known
        self.known = incumbent.ops
        write_message(self.out, header, arrays_of(incumbent.ops) if news and incumbent.ops is not None else None)


def main() -> None:
    """Take a problem, then one task after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    # Standard output is for messages only; whatever else prints goes to standard error.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    inbox: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_receive, args=(inbox,), daemon=True).start()
    header, _ = inbox.get()
    options = SolveOptions(**{**header["options"], "time_limit": header["left"]})
    reporter = _Reporter(out)
    incumbent = Incumbent(Problem.model_validate(header["problem"]), options, header["bound"], reporter.progress)
    reporter.incumbent = incumbent
    portfolio = Portfolio(incumbent, random.Random(options.seed), lines=header["number"])
    while True:
        header, arrays = inbox.get()
        incumbent.on_progress = None
        incumbent.raise_bound(header["bound"])
        if arrays:
            incumbent.offer(ops_of(arrays), "start")
            reporter.known = incumbent.ops
        incumbent.on_progress = reporter.progress
        incumbent.facts.clear()
        if header["task"] == "milp":
            solve_exactly(incumbent, header["seconds"], threads=1)
        else:
            portfolio.round(header["seconds"])
        reporter.send(done=True)


def _receive(inbox: queue.Queue[Message]) -> None:
    """Take tasks; end at once when the parent is gone."""
    while (message := read_message(sys.stdin.buffer)) is not None:
        inbox.put(message)
    os._exit(1)


if __name__ == "__main__":
    main()
