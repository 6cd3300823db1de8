"""Traces of runs: their file, what is made of it, and the Chrome format of plans and runs."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import main
from optpipe import files, memory, semantics
from optpipe.errors import InputError
from optpipe.interchange import chrome
from optpipe.ops import Kind
from optpipe.page import render, tables
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.trace import Samples, Trace, device_json, trace_json
from tests.random_schedules import random_problem, random_schedule


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_of(plan: Plan, *stretches: float) -> dict[str, Any]:
    """The JSON of a run whose steps are the plan, stretched; each compute op waited 0.25 ms for a message."""
    problem, steps = plan.problem, []
    for number, factor in enumerate(stretches, 1):
        devices = []
        for device in range(problem.num_devices):
            own = plan.ops.take(semantics.device_of(problem, plan.ops) == device)
            # A run knows what it moved, a plan names it only where it is a part.
            moved = semantics.moved_bytes(problem, own)
            ops = replace(own.at(own.start * factor, own.end * factor), bytes=moved)
            waited = np.where(ops.is_compute, 0.25, 0.0)
            samples = Samples(
                np.array([0.0, 1.0, 2.0]), np.array([0, 500, 400]), np.array([0, 600, 500]), np.array([7, 8, 9])
            )
            devices.append(device_json(ops, np.zeros(len(ops)), waited, samples, (500, 7, 9)))
        steps.append({"step": number, "begin_ms": 100.0 * (number - 1), "devices": devices})
    return trace_json(problem, steps)


@pytest.fixture
def run_file(tiny_plan: Plan, tmp_path: Path) -> Path:
    files.write_json(tmp_path / "run.json", run_of(tiny_plan, 3.0, 2.0, 1.5, 9.0))
    return tmp_path / "run.json"


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_trace_comes_back_as_it_was_written(tiny_plan, run_file):
    trace = Trace.read(run_file, tiny_plan.problem)
    assert [step.number for step in trace.steps] == [1, 2, 3, 4]
    step = trace.steps[1]
    assert step.begin_ms == 100.0
    assert step.peak_bytes == [500, 500] and step.message_peak_bytes == [7, 7] and step.host_peak_bytes == [9, 9]
    planned = {op.label: op for op in tiny_plan.ops}
    assert len(step.ops) == len(tiny_plan.ops)
    for op, waited in zip(step.ops, step.message_wait_ms.tolist(), strict=True):
        assert (op.start, op.end) == pytest.approx((2 * planned[op.label].start, 2 * planned[op.label].end))
        assert waited == (0.25 if op.kind < Kind.O else 0.0)


def test_the_typical_step_is_of_median_length(tiny_plan, run_file):
    assert Trace.read(run_file, tiny_plan.problem).typical.number == 2


def test_between_two_samples_the_memory_curve_is_the_most_that_was_held(tiny_plan, run_file):
    step = Trace.read(run_file, tiny_plan.problem).steps[0]
    times, levels = step.held(tiny_plan.problem, 0)
    assert times.tolist() == pytest.approx([0.0, 1.0, 2.0])
    assert levels.tolist() == [600, 500, 400]


def test_samples_come_back_sorted_with_or_without_those_of_torchs_allocator(tiny_plan, tmp_path):
    value = run_of(tiny_plan, 2.0)
    first, second = (device["memory"] for device in value["steps"][0]["devices"])
    for column in first.values():
        column.reverse()
    second["allocated_bytes"] = []
    files.write_json(tmp_path / "run.json", value)
    (step,) = Trace.read(tmp_path / "run.json", tiny_plan.problem).steps
    assert [column.tolist() for column in step.memory[0]] == [[0, 1, 2], [0, 500, 400], [0, 600, 500], [7, 8, 9]]
    assert step.memory[1].most.tolist() == [0, 600, 500] and step.memory[1].allocated.tolist() == []


def test_without_samples_it_is_what_the_ops_hold(tiny_plan, tmp_path):
    value = run_of(tiny_plan, 2.0)
    for device in value["steps"][0]["devices"]:
        device["memory"] = {"time": [], "bytes": [], "most_bytes": []}
    files.write_json(tmp_path / "run.json", value)
    step = Trace.read(tmp_path / "run.json", tiny_plan.problem).steps[0]
    assert step.held(tiny_plan.problem, 0)[1].max() == memory.peaks(tiny_plan.problem, tiny_plan.ops)[0]


def change(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    here: Any = value
    for part in way:
        here = here[part]
    here[last] = new
    return value


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("format", "optpipe-plan", "format: expected 'optpipe-trace'"),
        ("version", 2, "version: expected 1, not 2"),
        ("steps", [], "steps: expected a list with at least one step"),
        ("steps.0", 7, "steps[0].devices: expected 2 of them"),
        ("steps.0.devices", [], "steps[0].devices: expected 2 of them"),
        ("steps.0.step", "one", "steps[0].step: expected an integer"),
        ("steps.0.begin_ms", None, "steps[0].begin_ms: expected numbers, not None"),
        ("steps.0.devices.0", [], "steps[0].devices[0]: expected an object"),
        ("steps.0.devices.0.ops", {}, "steps[0].devices[0].ops: expected the lists kind, stage"),
        ("steps.0.devices.0.ops.start", [1.0], "steps[0].devices[0].ops: has lists of different lengths"),
        ("steps.0.devices.0.ops.kind.0", "Q", "which is not of this plan"),
        ("steps.0.devices.0.ops.kind.0", ["F"], "which is not of this plan"),
        ("steps.0.devices.0.ops.stage.0", 1, "F(1,0), which is not of this plan"),
        ("steps.0.devices.0.ops.microbatch.0", 4, "F(0,4), which is not of this plan"),
        ("steps.0.devices.0.ops.start.0", "soon", "expected numbers, not 'soon'"),
        ("steps.0.devices.0.ops.end.0", 1e300, "expected numbers, not 1e+300"),
        ("steps.0.devices.1.memory", {"time": [1.0], "bytes": []}, "expected the lists time, bytes, most_bytes"),
        ("steps.0.devices.1.memory.most_bytes", [1], "has lists of different lengths"),
        ("steps.0.devices.1.memory.allocated_bytes", [1], "has lists of different lengths"),
        ("steps.0.devices.1.memory.bytes.0", "all", "memory: expected numbers, not 'all'"),
        ("steps.0.devices.1.peak_bytes", None, "steps[0].devices[1].peak_bytes: expected numbers, not None"),
    ],
)
def test_what_is_no_trace_of_this_plan_is_refused_in_one_line(path, new, said, tiny_plan, tmp_path):
    files.write_json(tmp_path / "run.json", change(run_of(tiny_plan, 2.0), path, new))
    with pytest.raises(InputError) as error:
        Trace.read(tmp_path / "run.json", tiny_plan.problem)
    assert said in str(error.value)


# --- beside the plan ------------------------------------------------------------------------------------------------


def test_the_page_says_where_the_run_differed(tiny_plan, tiny_plan_file, run_file, tmp_path):
    arguments = ("export", tiny_plan_file, "--to", "html", "-o", tmp_path / "run.html", "--no-compare")
    assert invoke(*arguments, "--trace", run_file).exit_code == 0
    page = (tmp_path / "run.html").read_text()
    assert "step 2 of a run, as measured" in page
    durations, devices = tables.of_run(tiny_plan, Trace.read(run_file, tiny_plan.problem).typical)
    assert ["F of stage 0", "1 ms", "2 ms", "2 to 2 ms", "+100.0%"] in [list(row) for row in durations.rows]
    # Device 1 has four each of F, B and W of 1 ms; each waited 0.25 ms.
    assert list(devices.rows[1]) == ["device 1", "12 ms", "24 ms", "0 ms", "3 ms", "1 kB", "500 B"]
    for row in (*durations.rows, *devices.rows):
        assert all(cell in page for cell in row)


# --- Chrome's format ------------------------------------------------------------------------------------------------


#: What the description of the format asks of each phase.
FIELDS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
}


def ns(time: float) -> int:
    """As Perfetto reads microseconds: a double, cut off below a nanosecond."""
    return int(float(time) * 1000)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events, each with what its phase must have, as readers of the format want them."""
    events = json.loads(text)["traceEvents"]
    names: dict[tuple[str, int], str] = {}
    for event in events:
        assert FIELDS[event["ph"]] <= event.keys(), event
        assert type(event["pid"]) is int and event["pid"] > 0
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            of_process = event["name"] == "process_name"
            key = (event["name"], event["pid"] if of_process else event["tid"])
            assert key not in names and event["args"]["name"]
            names[key] = event["args"]["name"]
        elif event["ph"] == "C":
            assert [type(value) for value in event["args"].values()] == [int]
    used = [key[1] for key in names]
    assert len(set(used)) == len(used), "numbers of processes and threads are all different"
    for event in events:
        assert ("process_name", event["pid"]) in names
        assert "tid" not in event or (event["tid"] > 0 and ("thread_name", event["tid"]) in names)
    _check_slices(events)
    _check_arrows(events)
    return events


def lanes_of(events: list[dict[str, Any]]) -> dict[int, list[tuple[int, int, str]]]:
    """Per thread: begin, end (ns) and name of its slices, in order."""
    lanes: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(
                (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]), event["name"])
            )
    return {tid: sorted(slices) for tid, slices in lanes.items()}


def _check_slices(events: list[dict[str, Any]]) -> None:
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    for slices in lanes_of(events).values():
        for (begin, end, _), (following, _, _) in itertools.pairwise(slices):
            assert begin < end <= following


def _check_arrows(events: list[dict[str, Any]]) -> None:
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert type(event["id"]) is int and event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    for key, begin in ends["s"].items():
        assert begin["ts"] <= ends["f"][key]["ts"] and begin["pid"] != ends["f"][key]["pid"]
        assert {begin["cat"], begin["name"]} == {ends["f"][key]["cat"], ends["f"][key]["name"]}


def arrows_of(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The slices at both ends of each arrow; the ends of an arrow are inside, where all readers see the same slice."""
    lanes, found = lanes_of(events), {}
    for event in events:
        if event["ph"] in "sf":
            inside = [name for begin, end, name in lanes[event["tid"]] if begin < ns(event["ts"]) < end]
            assert len(inside) == 1, event
            found.setdefault(event["id"], []).append(inside[0])
    return sorted(map(tuple, found.values()))


def messages_of(plan: Plan) -> list[tuple[str, str]]:
    edges, device = semantics.dependencies(plan.problem, plan.ops), semantics.device_of(plan.problem, plan.ops)
    pairs = zip(edges.before.tolist(), edges.after.tolist(), strict=True)
    return sorted((plan.ops[a].label, plan.ops[b].label) for a, b in pairs if device[a] != device[b])


def test_every_op_is_a_slice_in_microseconds(tiny_plan):
    events = events_of(chrome.text_of(tiny_plan))
    found = {event["name"]: event for event in events if event["ph"] == "X"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(found) == len(tiny_plan.ops)
    for op in tiny_plan.ops:
        event = found[op.label]
        assert (event["ts"], event["dur"]) == pytest.approx((1e3 * op.start, 1e3 * (op.end - op.start)), abs=2e-3)
        device = tiny_plan.problem.stages[op.stage].device
        assert processes[event["pid"]] == f"plan: device {device} (stage {op.stage})"
        assert threads[event["tid"]] == {Kind.O: "offload (d2h)", Kind.R: "reload (h2d)"}.get(op.kind, "compute")


def test_arrows_lead_from_op_to_op_across_devices(tiny_plan):
    arrows = arrows_of(events_of(chrome.text_of(tiny_plan)))
    assert arrows == messages_of(tiny_plan)
    assert len(arrows) == 2 * tiny_plan.problem.num_microbatches


def some_without_length(problem: Problem, rng: random.Random) -> Problem:
    """The problem with stages, neighbours often, whose ops and messages take no time."""
    value = problem.model_dump()
    for stage in value["stages"]:
        if rng.random() < 0.5:
            stage.update({key: 0.0 for key in stage if key.endswith("_ms") and stage[key] is not None})
    value["comm_ms"] = [time if rng.random() < 0.5 else 0.0 for time in value["comm_ms"]]
    return Problem.model_validate(value)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.booleans())
@settings(max_examples=40)
def test_any_plan_is_what_readers_of_the_format_take(seed, factor, some_without):
    """Whatever its times are: such that are no fractions of a microsecond, or meet within the tolerance, or none."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    if some_without:
        problem = some_without_length(problem, rng)
    ops = random_schedule(problem, rng)
    noise = np.array([rng.uniform(-0.4, 0.4) for _ in range(len(ops))]) * semantics.tolerance(ops)
    if (ops.start == ops.end).any():
        noise[:] = 0.0  # it would put such an op inside of another
    plan = Plan(problem, ops.at(factor * (ops.start + noise), factor * (ops.end + noise)))
    events = events_of(chrome.text_of(plan))
    assert sum(event["ph"] == "X" for event in events) == len(ops)
    assert arrows_of(events) == messages_of(plan)
    for device in range(problem.num_devices):
        assert (np.diff(memory.curve(problem, plan.ops, device)[0]) >= 0).all()


def test_a_plan_of_centuries_is_refused(tiny_plan, tmp_path):
    ops = tiny_plan.ops
    Plan(tiny_plan.problem, ops.at(ops.start * 1e12, ops.end * 1e12)).write(tmp_path / "long.json")
    result = invoke("export", tmp_path / "long.json", "--to", "trace", "-o", tmp_path / "trace.json")
    assert result.exit_code == 2
    assert result.stderr == "Error: trace: its clock ends at 4.612e+12 ms, expected no later op than that\n"


def test_memory_is_a_counter_with_the_plans_peak(tiny_plan):
    events = events_of(chrome.text_of(tiny_plan))
    counters: dict[int, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["pid"], []).append(event["args"]["bytes"])
    assert [max(levels) for levels in counters.values()] == memory.peaks(tiny_plan.problem, tiny_plan.ops)
    assert all(levels[-1] == 0 for levels in counters.values())


def test_a_run_stands_below_its_plan_with_its_waits(tiny_plan, tiny_plan_file, run_file, tmp_path):
    arguments = ("export", tiny_plan_file, "--to", "trace", "-o", tmp_path / "out.json", "--trace", run_file)
    assert invoke(*arguments).exit_code == 0
    events = events_of((tmp_path / "out.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        "plan: device 0 (stage 0)",
        "plan: device 1 (stage 1)",
        "run: device 0 (stage 0)",
        "run: device 1 (stage 1)",
    ]
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    on_screen = [names[pid].split(" (")[0] for pid in sorted(order, key=order.__getitem__)]
    assert on_screen == ["plan: device 0", "run: device 0", "plan: device 1", "run: device 1"]
    run = [event for event in events if event["ph"] == "X" and names[event["pid"]].startswith("run")]
    # The very first op's wait would begin before the clock does.
    assert len(run) == 4 * (len(tiny_plan.ops) + int(tiny_plan.ops.is_compute.sum())) - 1
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    waits = [event for event in run if threads[event["tid"]] == "waits"]
    assert all(event["dur"] == pytest.approx(250) for event in waits)
    starts = {(event["pid"], round(event["ts"])) for event in run if threads[event["tid"]] == "compute"}
    assert all((event["pid"], round(event["ts"] + 250)) in starts for event in waits)
    counters = {(event["name"], names[event["pid"]][:4]) for event in events if event["ph"] == "C"}
    assert counters == {("memory", "plan"), ("memory", "run:"), ("allocated by torch", "run:")}
    # Steps follow each other on one clock.
    first = [event["ts"] for event in run if event["name"] == "F(0,0)"]
    assert arrows_of(events) == sorted(5 * messages_of(tiny_plan))
    assert first == [0.0, 100_000.0, 200_000.0, 300_000.0]


def test_a_run_is_drawn_without_a_fault(tiny_plan, run_file, tmp_path):
    from tests import browser

    if browser.CHROMIUM is None:
        pytest.skip("no Chromium here")
    page = render(tiny_plan, trace=Trace.read(run_file, tiny_plan.problem))
    script = """
    const [plan, run] = report.panes;
    const op = run.chart.index.get(plan.chart.key(3)), box = run.chart.box(op, report.state.view, run.width, 0);
    const place = run.scroll.getBoundingClientRect();
    report.hover(run, {clientX: place.left + 1 + box.x + 2, clientY: place.top + 1 + box.y + 3});
    return {told: document.getElementById("tip").innerText, key: plan.chart.label(3)};
    """
    answer = browser.ask(page, script, tmp_path)
    assert answer["faults"] == []
    assert answer["told"].startswith(answer["key"])
    assert "plan: " in answer["told"]
