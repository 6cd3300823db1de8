"""More processes on the same search: rounds of it under other seeds, and the MILP beside it.

A round does a fixed amount of work in every lane and ends when all of them are done, so with the same seed, as many
lanes and no time pressure the schedule is the same. Where time runs out, the best that a lane has sent by then counts.
"""

from __future__ import annotations

import queue
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from optpipe.ops import Ops
from solver.incumbent import Incumbent
from solver.process import Process

#: Seconds between looks at a lane that is waited for.
_POLL = 0.05


class Lane:
    """A process that searches on the same problem (``solver.search.lane``)."""

    def __init__(self, incumbent: Incumbent, number: int) -> None:
        self.incumbent = incumbent
        self.busy = False
        self._latest: tuple[Ops, str] | None = None
        self._process = Process("solver.search.lane")
        options = asdict(incumbent.options) | {"seed": incumbent.options.seed + number, "cache": False}
        problem = incumbent.problem.to_json()
        header = {"problem": problem, "options": options, "left": incumbent.left, "bound": incumbent.bound}
        self._process.send(header | {"number": number})

    def begin(self, task: str, seconds: float) -> None:
        """Have it do something from the best schedule known on: ``round`` (of the portfolio) or ``milp``."""
        ops = self.incumbent.ops
        header = {"task": task, "seconds": seconds, "bound": self.incumbent.bound}
        self._process.send(header, {} if ops is None else arrays_of(ops))
        self.busy = True

    def wait(self, seconds: float) -> bool:
        """Take what it finds until it is done, at most for so long; whether it is done. Bounds count at once, schedules
        when it is done."""
        end = self.incumbent.seconds + seconds
        while self.busy:
            try:
                message = self._process.receive(max(0.0, min(_POLL, end - self.incumbent.seconds)))
            except queue.Empty:
                if self.incumbent.seconds >= end:
                    return False
                continue
            if message is None:  # it has broken down; the search goes on without it
                self.incumbent.facts["lost_lanes"] = self.incumbent.facts.get("lost_lanes", 0) + 1
                self.busy = False
            else:
                self._take(*message)
        self.offer()
        return True

    def offer(self) -> None:
        """Offer the best schedule that it has sent."""
        if self._latest is not None:
            self.incumbent.offer(*self._latest)
            self._latest = None

    def close(self) -> None:
        """End it."""
        self._process.close()

    def _take(self, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        if arrays:
            self._latest = ops_of(arrays), header["source"]
        self.incumbent.raise_bound(header["bound"])
        self.incumbent.facts |= header["facts"]
        self.busy = not header["done"]


class Lanes:
    """All lanes of one search; as a context manager it ends them."""

    def __init__(self, incumbent: Incumbent, count: int) -> None:
        self.incumbent = incumbent
        self.lanes = [Lane(incumbent, number + 1) for number in range(count)]

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self.lanes:
            lane.close()

    @property
    def idle(self) -> list[Lane]:
        """The lanes that do nothing."""
        return [lane for lane in self.lanes if not lane.busy]

    def begin(self, task: str, seconds: float) -> list[Lane]:
        """Have every idle lane do something; these lanes."""
        lanes = self.idle
        for lane in lanes:
            lane.begin(task, seconds)
        return lanes


def join(lanes: list[Lane], incumbent: Incumbent) -> None:
    """Wait for lanes as long as there is time, then take what there is."""
    for lane in lanes:
        if not lane.wait(max(0.0, incumbent.left)):
            lane.offer()


def arrays_of(ops: Ops) -> dict[str, npt.NDArray[Any]]:
    """A schedule as the arrays of a message."""
    return {name: getattr(ops, name) for name in ("kind", "stage", "microbatch", "start", "end", "bytes")}


def ops_of(arrays: dict[str, npt.NDArray[Any]]) -> Ops:
    """The schedule of a message."""
    return Ops.columns(
        arrays["kind"], arrays["stage"], arrays["microbatch"], arrays["start"], arrays["end"], arrays["bytes"]
    )
