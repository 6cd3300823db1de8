"""Schedules without a backward, for a loss on held-out data: microbatches flow through the stages.

    device 0   F(0,0) F(0,1) F(0,2) F(0,3)
    device 1          F(1,0) F(1,1) F(1,2) F(1,3)

A list schedule by the stages' forward times: what can start first does, and of several the stage that is furthest along
the model, so that little waits between stages. A sender may be a bounded number of messages ahead, as in a run, so that
the order which comes out can be run without a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from optpipe.ops import Kind
from optpipe.problem import Problem
from runtime.program import RECEIVE_AHEAD, UNSENT, Compute, Link, Message, Program, Receives, unsent_bytes

#: (stage, microbatch)
_Pair = tuple[int, int]


def build(problem: Problem, device: int, boundary_bytes: Sequence[int]) -> Program:
    """The program of one device.

    Parameters
    ----------
    problem
        Stages, their devices and times, and the number of microbatches.
    device
        Which.
    boundary_bytes
        Bytes of what stage s hands to s+1; S - 1 entries.
    """
    order = forwards(problem)
    traffic: defaultdict[Link, list[Message]] = defaultdict(list)
    for stage, microbatch in order:
        if (link := _link(problem, stage)) is not None:
            traffic[link].append(Message(False, stage + 1, microbatch))
    settled = {link: tuple(messages) for link, messages in traffic.items()}
    receives = Receives(problem, device, settled, boundary_bytes)
    mine = [pair for pair in order if problem.stages[pair[0]].device == device]
    items = tuple(_item(problem, number, pair, receives) for number, pair in enumerate(mine))
    return Program(
        device,
        items,
        frozenset(),
        frozenset(),
        {},
        tuple(sorted(settled)),
        False,
        receives.most_bytes,
        receives.most_bytes + unsent_bytes(device, settled, boundary_bytes, gradients=False),
    )


def _item(problem: Problem, number: int, pair: _Pair, receives: Receives) -> Compute:
    stage, microbatch = pair
    takes = Message(False, stage, microbatch) if stage else None
    gives = Message(False, stage + 1, microbatch) if stage + 1 < problem.num_stages else None
    return Compute(number, Kind.F, stage, microbatch, takes, gives, (), *receives.around(takes))


def _link(problem: Problem, stage: int) -> Link | None:
    """How the output of a stage travels; None: it stays, or there is none."""
    if stage + 1 == problem.num_stages:
        return None
    sender, receiver = problem.stages[stage].device, problem.stages[stage + 1].device
    return None if sender == receiver else Link(sender, receiver, False)


def forwards(problem: Problem) -> list[_Pair]:
    """All forwards as (stage, microbatch), by start."""
    order = _Flow(problem).run()
    if order is None:  # every sender too far ahead of its receiver: one microbatch after the other always goes
        return [(stage, microbatch) for microbatch in range(problem.num_microbatches) for stage in _all(problem)]
    return order


def _all(problem: Problem) -> range:
    return range(problem.num_stages)


class _Flow:
    """The list schedule, and how far each link is."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.next = [0] * problem.num_stages  # the microbatch that each stage takes next
        self.end: dict[_Pair, float] = {}
        self.free = [0.0] * problem.num_devices
        self.sent: defaultdict[Link, list[Message]] = defaultdict(list)
        self.posted: defaultdict[Link, int] = defaultdict(lambda: RECEIVE_AHEAD)
        self.used: defaultdict[Link, int] = defaultdict(int)

    def run(self) -> list[_Pair] | None:
        """The order; None where nothing can go on."""
        order: list[tuple[float, int, _Pair]] = []
        for number in range(self.problem.num_stages * self.problem.num_microbatches):
            candidates = [found for stage in _all(self.problem) if (found := self._candidate(stage)) is not None]
            if not candidates:
                return None
            start, stage = min(candidates, key=lambda found: (found[0], -found[1]))
            order.append((start, number, (stage, self.next[stage])))
            self._place(stage, start)
        return [pair for _, _, pair in order]

    def _candidate(self, stage: int) -> tuple[float, int] | None:
        """When the next forward of a stage can start, if its input is made and its output may be sent."""
        microbatch, problem = self.next[stage], self.problem
        if microbatch == problem.num_microbatches:
            return None
        ready = 0.0
        if stage:
            if (stage - 1, microbatch) not in self.end:
                return None
            apart = problem.stages[stage - 1].device != problem.stages[stage].device
            ready = self.end[stage - 1, microbatch] + (problem.comm_ms[stage - 1] if apart else 0.0)
        link = _link(problem, stage)
        if link is not None and len(self.sent[link]) - UNSENT >= self.posted[link]:
            return None
        return max(ready, self.free[problem.stages[stage].device]), stage

    def _place(self, stage: int, start: float) -> None:
        microbatch, problem = self.next[stage], self.problem
        self.next[stage] += 1
        self.end[stage, microbatch] = start + problem.stages[stage].forward_ms
        self.free[problem.stages[stage].device] = self.end[stage, microbatch]
        if stage and (link := _link(problem, stage - 1)) is not None:
            # As ``program.Receives`` posts them.
            place = self.sent[link].index(Message(False, stage, microbatch))
            self.used[link] += 1
            self.posted[link] = max(self.posted[link], place + 1, self.used[link] + RECEIVE_AHEAD)
        if (link := _link(problem, stage)) is not None:
            self.sent[link].append(Message(False, stage + 1, microbatch))
