"""Traces as Perfetto itself takes them: what its importer finds in the files is what the plan and the run hold."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from optpipe import files, memory
from optpipe.draw import MEANING
from optpipe.interchange import chrome
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.trace import StepTrace, Trace
from tests.conftest import TINY_ORDER, plan_in_order
from tests.perfetto import Answers, ask, needs_perfetto
from tests.random_schedules import random_problem, random_schedule
from tests.test_trace import messages_of, ns, run_of, some_without_length

QUERIES = {
    "faults": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    "counts": "select (select count(*) from slice), (select count(*) from flow), (select count(*) from counter)",
    "slices": """
        select pid, thread.name, slice.name, slice.category, ts, dur, depth,
               extract_arg(slice.arg_set_id, 'args.stage'), extract_arg(slice.arg_set_id, 'args.microbatch')
        from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)
    """,
    "flows": """
        select a.name, pa.pid, a.ts, b.name, pb.pid, b.ts
        from flow join slice a on slice_out = a.id join slice b on slice_in = b.id
        join thread_track ta on a.track_id = ta.id join thread ua on ta.utid = ua.utid
        join process pa on ua.upid = pa.upid
        join thread_track tb on b.track_id = tb.id join thread ub on tb.utid = ub.utid
        join process pb on ub.upid = pb.upid
    """,
    "counters": """
        select pid, process_counter_track.name, ts, value
        from counter join process_counter_track on track_id = process_counter_track.id join process using (upid)
    """,
    "processes": "select pid, name, extract_arg(arg_set_id, 'process_sort_index_hint') from process where pid > 0",
    "threads": "select tid, name from thread where tid != 0 and name is not null",
}


class Opened(NamedTuple):
    """What Perfetto answers about a file of a plan, and of steps of a run if there are any."""

    plan: Plan
    steps: list[StepTrace]
    events: list[dict[str, Any]]
    answers: Answers

    def device(self, process: int) -> str:
        """Such as ``plan: device 0``."""
        names = {number: name for number, name, _ in self.answers["processes"]}
        return names[process].split(" (")[0]

    def ops(self) -> Iterator[tuple[tuple[Any, ...], tuple[int, int]]]:
        """Device, thread, label, meaning, stage and microbatch of each op; its start and end in ns."""
        timelines = [("plan", self.plan.ops, -float(self.plan.ops.start.min()))]
        timelines += [("run", step.ops, step.begin_ms) for step in self.steps]
        threads = {Kind.O: "offload (d2h)", Kind.R: "reload (h2d)"}
        for timeline, ops, begin in timelines:
            for op in ops:
                device = f"{timeline}: device {self.plan.problem.stages[op.stage].device}"
                place = (device, threads.get(op.kind, "compute"), op.label, MEANING[op.kind], op.stage, op.microbatch)
                yield place, (round(1e6 * (op.start + begin)), round(1e6 * (op.end + begin)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Ops of all kinds, several stages a device, a stage whose ops take no time, and times that are no fractions."""
    rng = random.Random(5)
    problem = some_without_length(random_problem(rng, devices=3, stages_per_device=2, microbatches=5, kind="v"), rng)
    ops = random_schedule(problem, rng)
    assert {*ops.kind.tolist()} == {*Kind} and (ops.start == ops.end).any()
    return Plan(problem, ops.at(math.pi * ops.start, math.pi * ops.end))


@pytest.fixture(scope="module")
def ran(tiny_problem: Problem) -> Plan:
    """A plan with an offload, that there is a run of."""
    return plan_in_order(tiny_problem, TINY_ORDER)


@pytest.fixture(scope="module")
def run(ran: Plan, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("run") / "run.json"
    files.write_json(path, run_of(ran, 2.5, math.e))
    return Trace.read(path, ran.problem)


@pytest.fixture(scope="module")
def opened(plan: Plan, ran: Plan, run: Trace, tmp_path_factory: pytest.TempPathFactory) -> list[Opened]:
    """A plan, and a plan with its run: one browser opens both."""
    held: list[tuple[Plan, list[StepTrace]]] = [(plan, []), (ran, run.steps)]
    texts = [chrome.text_of(plan), chrome.text_of(ran, run)]
    answers = ask(texts, QUERIES, tmp_path_factory.mktemp("perfetto"))
    return [
        Opened(plan, steps, json.loads(text)["traceEvents"], answer)
        for (plan, steps), text, answer in zip(held, texts, answers, strict=True)
    ]


@needs_perfetto
def test_perfetto_takes_all_that_the_files_hold(opened):
    for file in opened:
        events, answers = file.events, file.answers
        assert answers["faults"] == []
        phases = [event["ph"] for event in events]
        assert answers["counts"] == [[phases.count("X"), phases.count("s"), phases.count("C")]]
        names = {
            kind: {event[number]: event["args"]["name"] for event in events if event["name"] == kind}
            for kind, number in (("process_name", "pid"), ("thread_name", "tid"))
        }
        assert {pid: name for pid, name, _ in answers["processes"]} == names["process_name"]
        assert dict(answers["threads"]) == names["thread_name"]
        held = sorted(
            (event["pid"], names["thread_name"][event["tid"]], event["name"], ns(event["ts"]), ns(event["dur"]), 0)
            for event in events
            if event["ph"] == "X"
        )
        # At depth 0: none is inside of another.
        assert sorted((*row[:3], *row[4:7]) for row in answers["slices"]) == held
        counted = [(e["pid"], f"{e['name']} bytes", ns(e["ts"]), e["args"]["bytes"]) for e in events if e["ph"] == "C"]
        assert sorted(map(tuple, answers["counters"])) == sorted(counted)


@needs_perfetto
def test_processes_are_in_order_where_perfetto_has_one(opened):
    """Up to version 52 it has none: ``process_sort_index`` means nothing to it."""
    for file in opened:
        order = {e["pid"]: e["args"]["sort_index"] for e in file.events if e["name"] == "process_sort_index"}
        assert all(place in (None, order[pid]) for pid, _, place in file.answers["processes"])


@needs_perfetto
def test_slices_are_the_ops_at_their_times(opened):
    for file in opened:
        places, times = zip(*sorted(file.ops()), strict=True)
        found = sorted(
            ((file.device(pid), thread, name, meaning, stage, microbatch), (ts, ts + dur))
            for pid, thread, name, meaning, ts, dur, _, stage, microbatch in file.answers["slices"]
            if thread != "waits"
        )
        assert tuple(place for place, _ in found) == places
        # What has no length is given one of 2 ns, and those behind it begin later by as much.
        short = sum(start == end for start, end in times)
        assert np.allclose([time for _, time in found], times, rtol=0, atol=1 + 2 * short)


@needs_perfetto
def test_flows_are_the_messages(opened):
    for file in opened:
        flows, timelines = file.answers["flows"], 1 + len(file.steps)
        arrows = sorted((before, after) for before, _, _, after, _, _ in flows)
        assert arrows == sorted(timelines * messages_of(file.plan))
        assert all(sent < taken and source != target for _, source, sent, _, target, taken in flows)


@needs_perfetto
def test_counters_have_the_peaks(opened):
    for file in opened:
        levels: dict[str, list[float]] = {}
        for pid, name, _, level in file.answers["counters"]:
            if name == "memory bytes":
                levels.setdefault(file.device(pid), []).append(level)
        problem = file.plan.problem
        most = {f"plan: device {d}": peak for d, peak in enumerate(memory.peaks(problem, file.plan.ops))}
        for device in range(problem.num_devices) if file.steps else []:
            most[f"run: device {device}"] = max(int(step.held(problem, device)[1].max()) for step in file.steps)
        assert {device: max(found) for device, found in levels.items()} == most


@needs_perfetto
def test_waits_end_where_their_ops_begin(opened):
    file = opened[1]
    begins = {(pid, ts) for pid, thread, _, _, ts, *_ in file.answers["slices"] if thread == "compute"}
    waits = [row for row in file.answers["slices"] if row[1] == "waits"]
    # The very first op's would begin before the clock does.
    assert len(waits) == sum(int(step.ops.is_compute.sum()) for step in file.steps) - 1
    assert all(dur == 250_000 and (pid, ts + dur) in begins for pid, _, _, _, ts, dur, *_ in waits)
