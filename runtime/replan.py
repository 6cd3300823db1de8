"""Solving again beside the training: a better plan for the times that were measured takes over between two steps.

    steps, idle links --(drift)--> problem as seen, schedule so far --> optpipe solve, a process of its own --> plan

All ranks have a ``Replanner`` and take its decisions alike, from what all of them know; only rank 0 has a solver, and
whether that is done travels with the figures that ranks exchange after each step anyway. What may change is the order
and the offloads: the numbers of a run are those of any other plan.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optpipe import metrics
from optpipe.config import ReplanConfig
from optpipe.errors import InputError, RunFailed
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.semantics import makespan
from optpipe.timing import earliest
from runtime import checks, gather, host_memory, idle_links, samples
from runtime.drift import Seen, problem_as_seen
from runtime.host_memory import HostPool
from runtime.idle_links import Measure
from runtime.metrics_log import Replanned
from runtime.result import StepResult
from runtime.samples import Sample, Trace
from runtime.solving import Solving
from runtime.tracing import clock_offset

#: Steps that medians are taken of at most, and steps behind a change of plan that do not count.
WINDOW, SETTLING = 10, 2


class Replanner:
    """One rank's part in it.

    Parameters
    ----------
    wanted
        When, and for what.
    plan
        That the run begins with.
    ranks
        The global rank of each device, in the pipeline of this rank.
    is_chief
        Whether this is rank 0.
    with_host
        The host's work belongs to the times of ops: on CPU devices.
    measure
        Copies over this rank's host link, where the plan leaves it idle.
    runs
        How often the plan runs in a step.
    file
        Where rank 0 keeps the plan that is in force since one took over; None: nowhere.
    """

    def __init__(
        self,
        wanted: ReplanConfig,
        plan: Plan,
        ranks: Sequence[int],
        *,
        is_chief: bool,
        with_host: bool,
        measure: Measure,
        runs: int = 1,
        file: str | Path | None = None,
    ) -> None:
        self._runs = runs
        self._wanted, self._plan, self._ranks, self._file = wanted, plan, ranks, file
        self._is_chief, self._with_host, self._measure = is_chief, with_host, measure
        self._every = wanted.every
        self._solving = False
        self._solver: Solving | None = None
        # Of the plan so far, as the solver was asked: at the times that it was given, and as measured.
        self._now_ms = self._measured_ms = 0.0
        self._untold: Replanned | None = None
        self._begin(plan)

    def _begin(self, plan: Plan, before: Plan | None = None, before_ms: float = 0.0) -> None:
        """A plan takes over, on probation where there is one to go back to, whose steps took ``before_ms``."""
        self._plan, self._before, self._before_ms = plan, before, before_ms
        self._steps: deque[tuple[StepResult, float]] = deque(maxlen=WINDOW)
        self._count = 0

    @property
    def plan(self) -> Plan:
        """The one of the next step."""
        return self._plan

    def room(self) -> HostPool | None:
        """Host memory for the plan that takes over, on this rank; all call it, once that of the plan before is free.
        None on all of them where one has too little: then the plan before goes on.

        Raises
        ------
        RunFailed
            There is no plan before.
        """
        pool, fault = None, ""
        try:
            pool = host_memory.reserved(self._plan, checks.own_device(self._ranks), pinned=not self._with_host)
        except (MemoryError, RuntimeError) as error:  # torch's own is the latter
            fault = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if all(row[0] for row in gather.numbers([float(pool is not None)])):
            return pool
        if pool is not None:
            pool.free()
        if self._before is None:
            raise RunFailed(f"host memory for the plan's offloads: {fault or 'another rank has too little'}")
        before, before_ms, after_ms = self._before, self._before_ms, makespan(self._plan.ops) * self._runs
        self._every *= 2
        self._begin(before)
        message = self._keep(before) if self._is_chief else ""
        self._untold = self._promise("no room", before_ms, after_ms, before, message)
        return None

    @property
    def answered(self) -> bool:
        """Whether the solver is done: for rank 0 to tell, with the other figures of a step."""
        return self._solver is not None and self._solver.is_done

    def after(self, result: StepResult, pipeline_ms: float, answered: bool) -> tuple[Plan | None, Replanned | None]:
        """What follows from a step; all ranks call it, and get the same but for the message, which is the chief's.

        Parameters
        ----------
        result
            This rank's.
        pipeline_ms
            How long the schedule took on the slowest rank; the same on all ranks.
        answered
            What rank 0 said.

        Returns
        -------
        tuple[Plan | None, Replanned | None]
            The plan of the next step, if it is another one; what there is to report.
        """
        self._steps.append((result, pipeline_ms))
        self._count += 1
        if self._untold is not None:
            untold, self._untold = self._untold, None
            return None, untold
        if answered:
            return self._take_answer()
        if self._before is not None:
            return self._judge() if self._count >= SETTLING + WINDOW else (None, None)
        if not self._solving and self._count % self._every == 0 and self._count > SETTLING:
            self._ask()
            return None, Replanned("asked", self._measured_ms)
        return None, None

    def close(self) -> None:
        """End the solver."""
        if self._solver is not None:
            self._solver.close()
            self._solver = None

    def _ask(self) -> None:
        """Start a solver with what all ranks saw; all of them call it."""
        seen = self._seen()
        self._solving = True
        self._measured_ms = self._median_ms()  # before there is a solver beside
        if self._is_chief:
            problem = problem_as_seen(self._plan.problem, seen)
            ops = earliest(problem, self._plan.ops)
            self._now_ms = makespan(ops) * self._runs
            self._solver = Solving(
                Plan(problem, ops, None, {"method": "replan"}, self._plan.training, self._plan.extra), self._wanted
            )

    def _seen(self) -> Seen:
        """Medians of all ranks over the last steps. The ops of the last step go round too, on one clock: what lies
        between ranks is nothing that one of them sees."""
        last = self._steps[-1][0]
        offset_ms = (last.origin + clock_offset()) * 1e3
        traces = [Trace(tuple(map(Sample.of, result.ops)), result.step_ms) for result, _ in self._settled()]
        mine = Seen.of(self._plan, traces, with_host=self._with_host)
        mine = mine.with_times(idle_links.times(self._plan, checks.own_device(self._ranks), self._measure))
        ops = [Sample.of(op) for op in _first_run(last)]
        rows = gather.objects({"times": mine.to_json(), "ops": ops, "origin_ms": offset_ms})
        begin = min(row["origin_ms"] for row in rows)
        ran = [
            sample._replace(start=sample.start + later, end=sample.end + later)
            for row in (rows[rank] for rank in self._ranks)
            for later in [row["origin_ms"] - begin]
            for sample in (Sample(Kind(kind), *rest) for kind, *rest in row["ops"])
        ]
        lags = samples.message_lags([Trace(tuple(ran), 0.0)], [stage.device for stage in self._plan.problem.stages])
        medians = {boundary: max(0.0, statistics.median(found)) for boundary, found in lags.items()}
        return Seen.together([Seen.from_json(row["times"]) for row in rows], medians)

    def _settled(self) -> list[tuple[StepResult, float]]:
        """The steps that count of those since the plan took over; the last one if there is no other."""
        unsettled = max(0, SETTLING - (self._count - len(self._steps)))
        return list(self._steps)[unsettled:] or [self._steps[-1]]

    def _median_ms(self) -> float:
        return statistics.median(pipeline_ms for _, pipeline_ms in self._settled())

    def _take_answer(self) -> tuple[Plan | None, Replanned | None]:
        """Rank 0 decides, and tells the others."""
        self._solving = False
        plan, said = self._decide() if self._is_chief else (None, None)
        told = gather.objects({"plan": plan and plan.to_json(), "said": said and asdict(said)})[0]
        said = Replanned(**told["said"])
        if told["plan"] is None:
            self._begin(self._plan)  # steps beside a solver are no guide
            return None, said
        self._begin(plan or Plan.from_json(told["plan"], "the solver's plan"), self._plan, self._measured_ms)
        return self._plan, said

    def _decide(self) -> tuple[Plan | None, Replanned]:
        """The solver's plan, if it is worth it."""
        assert self._solver is not None
        plan, fault = self._solver.result()
        self.close()
        if plan is None:
            return None, Replanned("failed", self._now_ms, message=fault)
        new_ms = makespan(plan.ops) * self._runs
        if new_ms > self._now_ms * (1.0 - self._wanted.gain) or new_ms >= self._now_ms:
            return None, Replanned("none better", self._now_ms, new_ms)
        return plan, self._promise("taken", self._now_ms, new_ms, plan, self._keep(plan))

    def _keep(self, plan: Plan) -> str:
        """Write the plan of the steps to come, for other runs to begin with; what there is to say of that. A run does
        not end for it."""
        if self._file is None:
            return ""
        try:
            plan.write(self._file)
        except InputError as error:
            return str(error)
        return f"written to {self._file}"

    def _judge(self) -> tuple[Plan | None, Replanned | None]:
        """Whether the plan on probation was the faster one. If not, what is measured is no guide here: it is asked half
        as often from now on."""
        before, before_ms, now_ms = self._before, self._before_ms, self._median_ms()
        assert before is not None
        if now_ms <= before_ms:
            self._before = None
            return None, Replanned("confirmed", before_ms, now_ms)
        self._every *= 2
        self._begin(before)
        message = self._keep(before) if self._is_chief else ""
        return before, self._promise("given back", before_ms, now_ms, before, message)

    def _promise(self, outcome: str, before_ms: float, after_ms: float, plan: Plan, message: str) -> Replanned:
        """What is to be told of a change of plans: with what the next one promises."""
        planned = metrics.measure(plan.problem, plan.ops)
        return Replanned(outcome, before_ms, after_ms, message, planned.makespan_ms * self._runs, planned.peak_bytes)


def _first_run(result: StepResult) -> list[Any]:
    """The compute ops of a step, of several runs of the plan those of the first."""
    found: dict[tuple[Kind, int, int], Any] = {}
    for op in result.ops:
        if op.kind < Kind.O:
            found.setdefault((op.kind, op.stage, op.microbatch), op)
    return list(found.values())
