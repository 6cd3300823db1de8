"""A plan's problem as it really is: with the times that the plan's own ops took. No torch: tests feed made-up records.

    ops of the last steps --Seen.of--> medians of one rank --gather--> those of all --problem_as_seen--> Problem

What a plan never does is not seen, so its time is scaled: a stage whose backwards were all fused and took 20% more than
planned is taken to need 20% more for B and for W, and a stage without transfers as far from planned as those of the
other stages on its device. Bytes stay the plan's: budgets and its promise are made of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime import samples
from runtime.samples import Trace


@dataclass(frozen=True)
class Seen:
    """Medians in ms.

    Attributes
    ----------
    times
        By stage and kind; of O and R what moving all of ``offloadable_bytes`` would take.
    lags
        What lies between stage s and s+1, by s; where a message was waited for.
    """

    times: Mapping[tuple[int, Kind], float]
    lags: Mapping[int, float]

    @classmethod
    def of(cls, plan: Plan, traces: Sequence[Trace], *, with_host: bool) -> Seen:
        """What one rank saw of its own ops in some steps under the plan (see ``samples.durations``)."""
        devices = [stage.device for stage in plan.problem.stages]
        whole = [stage.offloadable_bytes for stage in plan.problem.stages]
        stretched = [
            trace._replace(
                ops=tuple(
                    op._replace(end=op.start + (op.end - op.start) * whole[op.stage] / op.bytes) if op.bytes else op
                    for op in trace.ops
                    if op.kind < Kind.O or op.bytes
                )
            )
            for trace in traces
        ]
        found = samples.durations(stretched, devices, with_host=with_host)
        times = {key: statistics.median(values) for key, values in found.items()}
        for s, _ in (key for key in found if key[1] == Kind.C):
            # One time stands for both in a problem: that of all of them together is right.
            counts = {kind: len(found.get((s, kind), ())) for kind in (Kind.F, Kind.C)}
            times[s, Kind.F] = sum(times[s, kind] * n for kind, n in counts.items() if n) / sum(counts.values())
        return cls(times, {})

    @classmethod
    def together(cls, parts: Iterable[Seen], lags: Mapping[int, float]) -> Seen:
        """What all ranks saw. Ranks that run the same stage, such as replicas, wait for the slowest."""
        times: defaultdict[tuple[int, Kind], float] = defaultdict(float)
        for part in parts:
            for key, value in part.times.items():
                times[key] = max(times[key], value)
        return cls(dict(times), lags)

    def with_times(self, times: Mapping[tuple[int, Kind], float]) -> Seen:
        """With what was found in another way."""
        return replace(self, times={**self.times, **times})

    def to_json(self) -> list[Any]:
        """The times as JSON."""
        return [[stage, int(kind), value] for (stage, kind), value in self.times.items()]

    @classmethod
    def from_json(cls, value: list[Any]) -> Seen:
        return cls({(stage, Kind(kind)): time for stage, kind, time in value}, {})


def problem_as_seen(problem: Problem, seen: Seen) -> Problem:
    """The problem with the times that were seen; what was not seen is scaled, or stays.

    Parameters
    ----------
    problem
        Of the plan that ran.
    seen
        Of all ranks.
    """
    links = _links_as_seen(problem, seen.times)
    written = problem.to_json()["stages"]
    stages = [{**written[s], **_times_as_seen(problem, s, seen.times, links)} for s in range(problem.num_stages)]
    lags = tuple(seen.lags.get(s, planned) for s, planned in enumerate(problem.comm_ms))
    return problem.changed(stages=tuple(stages), comm_ms=lags)


def _links_as_seen(problem: Problem, times: Mapping[tuple[int, Kind], float]) -> list[float]:
    """By device, what transfers took over what was planned, of both ways; 1 where none was seen."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for (s, kind), took in times.items():
        stage = problem.stages[s]
        planned = {Kind.O: stage.offload_ms, Kind.R: stage.reload_ms}.get(kind, 0.0)
        if planned > 0:
            found[stage.device].append(took / planned)
    return [statistics.median(found.get(device, [1.0])) for device in range(problem.num_devices)]


def _times_as_seen(
    problem: Problem, number: int, times: Mapping[tuple[int, Kind], float], links: Sequence[float]
) -> dict[str, float]:
    """The times of a stage, by their keys."""
    stage = problem.stages[number]
    link = links[stage.device]
    planned = {
        Kind.F: stage.forward_ms,
        Kind.B: stage.backward_ms,
        Kind.W: stage.weight_ms,
        Kind.BW: stage.bw_ms,
        Kind.O: stage.offload_ms * link,
        Kind.R: stage.reload_ms * link,
    }
    real = {kind: times[number, kind] for kind in planned if (number, kind) in times}
    split, fused = (Kind.B, Kind.W), (Kind.BW,)
    for kinds, others in ((split, fused), (fused, split)):
        if not any(kind in real for kind in kinds) and all(kind in real for kind in others):
            before = sum(planned[kind] for kind in others)
            scale = sum(real[kind] for kind in others) / before if before > 0 else 1.0
            real |= {kind: planned[kind] * scale for kind in kinds}
    now = planned | real
    value = {"forward_ms": now[Kind.F], "backward_ms": now[Kind.B], "weight_ms": now[Kind.W]}
    if Kind.BW in real or stage.fused_backward_ms is not None:
        value["fused_backward_ms"] = now[Kind.BW]
    if problem.can_offload(number):
        value |= {"offload_ms": now[Kind.O], "reload_ms": now[Kind.R]}
    return value
