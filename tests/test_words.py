"""A plan in words: what is said is so, and something is said of any ops whatever."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cli import main
from optpipe import memory, metrics
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.report import size_text
from optpipe.waits import gaps
from optpipe.words import explain
from tests.conftest import plan_in_order
from tests.random_schedules import fitted, random_problem, random_schedule, schedules
from tests.test_draw import without_length


def test_what_is_said_of_a_plan_that_a_person_can_follow(tiny_plan):
    bubbles, parts, pause, fullest, chain = explain(tiny_plan)
    assert bubbles == "Bubbles: devices idle 15% of the time, each of them: 2.2 ms of 14.2 ms."
    assert parts == (
        "Of that, 50% is 3 pauses in between, 25% is warm-up (device 1 gets its first microbatch at 1.1 ms), "
        "25% is cool-down (device 1 is done at 13.1 ms)."
    )
    assert pause == (
        "The longest pause: device 0 idles from 11.2 to 12.2 ms, until B(0,3), the backward of microbatch 3 on stage "
        "0, which waits for its gradient, from B(1,3) on device 1."
    )
    assert fullest == (
        "Memory: fullest on device 0 with 2 kB (100% of its 2 kB), at 1 ms when F(0,1) starts. It then holds "
        "activations of 2 microbatches (0-1) on stage 0."
    )
    assert chain.startswith("What decides the makespan: a chain of ")
    shares = [int(share) for share in re.findall(r"(\d+)%", chain)]
    assert 97 <= sum(shares) <= 101


def test_long_times_are_written_out(tiny_plan):
    long = Plan(tiny_plan.problem, tiny_plan.ops.at(tiny_plan.ops.start * 1e4, tiny_plan.ops.end * 1e4))
    assert "22,000 ms of 142,000 ms" in explain(long)[0]
    assert not re.search(r"\de\+", " ".join(explain(long)))


@given(st.integers(0, 2**32))
def test_figures_are_those_of_the_plan(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    plan = Plan(fitted(problem, ops), ops)
    text = " ".join(explain(plan))
    peaks = memory.peaks(problem, ops)
    device = int(re.search(r"fullest on device (\d+) with ([\d.]+ \w+)", text).group(1))
    assert f"fullest on device {device} with {size_text(peaks[device])} (100% of its" in text
    bubble = 100 * metrics.measure(problem, ops).bubble_ratio
    if gaps(problem, ops):
        assert float(re.search(r"devices idle ([\d.]+)%", text).group(1)) == pytest.approx(bubble, abs=0.6)
        parts = [float(part) for part in re.findall(r"([\d.]+)% is (?:warm-up|cool-down|\d+ pauses?)", text)]
        assert 85 <= sum(parts) <= 102
    else:
        assert "Bubbles: none" in text


@given(schedules(), st.randoms())
def test_the_microbatches_held_at_the_peak_are_those_that_make_it_up(case, rng):
    problem, ops = case
    plan = Plan(problem, ops)
    line = next(line for line in explain(plan) if line.startswith("Memory: "))
    pattern = r"(\d+) microbatch(?:es)? \([^)]*\) on stage (\d+)(?:, (\d+) of them checkpoints only)?"
    most = 0
    for count, number, checkpoints in re.findall(pattern, line):
        stage, few = problem.stages[int(number)], int(checkpoints or 0)
        most += (int(count) - few) * stage.activation_bytes + few * (stage.checkpoint_bytes or 0)
    device = int(re.search(r"device (\d+)", line).group(1))
    assert memory.peaks(problem, ops)[device] <= most


def test_checkpoints_are_told_from_activations(tiny_problem):
    stages = [{**stage, "checkpoint_bytes": 10} for stage in tiny_problem.to_json()["stages"]]
    problem = tiny_problem.changed(num_microbatches=2, stages=stages)
    orders = "F(0,0) F(0,1) F(1,0) C(1,0) BW(1,0) F(1,1) BW(1,1) C(0,1) BW(0,1) C(0,0) BW(0,0)"
    line = next(line for line in explain(plan_in_order(problem, orders)) if line.startswith("Memory: "))
    assert "2 microbatches (0-1) on stage 0, 1 of them checkpoints only" in line


@given(schedules(), st.randoms())
def test_something_is_said_of_ops_that_make_no_plan(case, rng):
    problem, ops = case
    kept = np.array([i for i in range(len(ops)) if rng.random() < 0.6], np.int64)
    shifted = ops.start + np.array([rng.choice([0.0, 0.0, -3.0, 5.0]) for _ in range(len(ops))])
    broken = ops.at(shifted, shifted + 1.0).take(kept)
    assert all(explain(Plan(problem, broken)))


def test_a_plan_without_length_is_shown(tiny_problem, tmp_path):
    plan = without_length(tiny_problem)
    assert plan.makespan_ms == 0
    plan.write(tmp_path / "plan.json")
    result = CliRunner().invoke(main, ["show", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "No chart: nothing takes any time." in result.stdout
    assert "What decides the makespan: nothing, no op takes any time." in result.stdout


def test_nothing_is_said_of_nothing(tiny_problem):
    assert explain(Plan(tiny_problem, Ops.of([]))) == ["The plan is empty."]


def show(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["show", *(str(argument) for argument in arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("width", [20, 60, 100])
def test_show_tells_it_within_the_width(width, tiny_plan, tiny_plan_file):
    lines = show(tiny_plan_file, "--width", width).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("- Bubbles:"))
    told = " ".join(line.strip() for line in lines[start:])
    assert told == " ".join(f"- {line}" for line in explain(tiny_plan))
    assert all(len(line) <= width for line in lines[2:])


def test_show_of_a_part_draws_it_and_says_nothing_of_the_rest(tiny_plan_file):
    for part in (["--device", 0], ["--stage", 1], ["--from", 2], ["--to", 5]):
        assert "Bubbles" not in show(tiny_plan_file, *part)
        assert "mem" in show(tiny_plan_file, *part)


def test_show_in_a_pipe_has_no_escapes(tiny_plan_file):
    assert "\x1b" not in show(tiny_plan_file)
    assert show(tiny_plan_file, "--ascii").isascii()
