"""Solving again beside the training: when, what is made of the answer, and that no number of a run changes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from optpipe import semantics
from optpipe.config import ReplanConfig
from optpipe.errors import RunFailed
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify_plan
from runtime import host_memory, launch, replan, solving
from runtime.metrics_log import Replanned, Step
from runtime.replan import SETTLING, WINDOW, Replanner
from runtime.result import OpRecord, StepResult
from runtime.solving import Solving
from runtime.tracing import STEPS
from solver.solve import solve
from tests import replanning
from tests.test_pipeline import measured
from tests.test_train import config_of, plan_of

EVERY = 4
WANTED = ReplanConfig(every=EVERY, gain=0.1, time_limit_s=5.0)


def problem(m: int = 6) -> Problem:
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    return Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": d, **stage} for d in range(2)],
            "comm_ms": [0.0],
        }
    )


def slow_plan() -> Plan:
    """One microbatch after the other."""
    return solve(problem(), method="sequential")


def step_of(plan: Plan, factor: float = 1.0) -> StepResult:
    """A step under a plan whose ops take so many times what it says, as one rank that has all of its devices."""
    ops = earliest(plan.problem, plan.ops)
    records = [OpRecord(op.kind, op.stage, op.microbatch, op.start * factor, op.end * factor) for op in ops]
    return StepResult(1.0, 0, 0, 0, tuple(records), 0.0, semantics.makespan(ops) * factor)


class Answers:
    """In place of a solver: it is asked, and at once it has an answer."""

    def __init__(self, answer: Callable[[Plan], tuple[Plan | None, str]]) -> None:
        self.answer, self.asked, self.open = answer, [], 0

    def __call__(self, start: Plan, wanted: ReplanConfig) -> Answers:
        self.asked.append(start)
        self.open += 1
        return self

    is_done = True

    def result(self) -> tuple[Plan | None, str]:
        return self.answer(self.asked[-1])

    def close(self) -> None:
        self.open -= 1


def better(start: Plan) -> tuple[Plan, str]:
    return solve(start.problem, method="1f1b"), ""


@pytest.fixture
def asked_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    def use(answer: Callable[[Plan], tuple[Plan | None, str]]) -> Answers:
        answers = Answers(answer)
        monkeypatch.setattr(replan, "Solving", answers)
        return answers

    return use


def of_alone(plan: Plan, **options: Any) -> Replanner:
    options = {"measure": lambda taking_part, nbytes: None, **options}
    return Replanner(WANTED, plan, [0], is_chief=True, with_host=False, **options)


def run(
    replanner: Replanner, plan: Plan, steps: int, factor: float = 1.0
) -> list[tuple[Plan | None, Replanned | None]]:
    """Steps under a plan, and what follows from each."""
    return [replanner.after(step := step_of(plan, factor), step.step_ms, replanner.answered) for _ in range(steps)]


def test_every_so_many_steps_a_solver_gets_the_problem_as_seen_and_the_schedule_so_far(asked_by):
    answers, plan = asked_by(lambda start: (start, "")), slow_plan()
    replanner = of_alone(plan)
    assert run(replanner, plan, EVERY - 1, 1.5) == [(None, None)] * (EVERY - 1) and not answers.asked
    ((none, said),) = run(replanner, plan, 1, 1.5)
    assert none is None and said is not None and said.outcome == "asked"
    assert said.before_ms == pytest.approx(1.5 * plan.makespan_ms) and "again" in said.line()
    (start,) = answers.asked
    assert not verify_plan(start)
    assert [s.forward_ms for s in start.problem.stages] == pytest.approx([1.5, 1.5])
    assert semantics.makespan(start.ops) == pytest.approx(1.5 * plan.makespan_ms)
    # What comes back is no better: the plan stays, and after as many steps it is asked again.
    ((none, said),) = run(replanner, plan, 1, 1.5)
    assert none is None and said is not None and said.outcome == "none better" and answers.open == 0
    assert said.before_ms == pytest.approx(said.after_ms) == pytest.approx(1.5 * plan.makespan_ms)
    *before, last = run(replanner, plan, EVERY, 3.0)
    assert before == [(None, None)] * (EVERY - 1) and last[1] is not None and last[1].outcome == "asked"
    assert len(answers.asked) == 2
    # What was measured beside the solver is no part of it.
    assert [s.forward_ms for s in answers.asked[-1].problem.stages] == pytest.approx([3.0, 3.0])


def test_nothing_is_asked_before_steps_count(asked_by):
    answers, plan = asked_by(lambda start: (start, "")), slow_plan()
    replanner = Replanner(
        ReplanConfig(every=1), plan, [0], is_chief=True, with_host=False, measure=lambda taking_part, nbytes: None
    )
    run(replanner, plan, SETTLING, 5.0)
    assert not answers.asked
    run(replanner, plan, 1)
    (start,) = answers.asked
    assert [s.forward_ms for s in start.problem.stages] == pytest.approx([1.0, 1.0])


def test_a_better_plan_takes_over_and_stays_where_it_proves_to_be_faster(asked_by, tmp_path):
    asked_by(better)
    plan, file = slow_plan(), tmp_path / "new.json"
    replanner = of_alone(plan, file=file)
    run(replanner, plan, EVERY)
    ((new, said),) = run(replanner, plan, 1)
    assert new is not None and said is not None and said.outcome == "taken" and str(file) in said.line()
    assert said.after_ms == said.planned_ms == pytest.approx(new.makespan_ms) and said.before_ms == plan.makespan_ms
    assert not verify_plan(Plan.read(file)) and said.planned_peak_bytes == [20, 10]
    *on_probation, last = run(replanner, new, SETTLING + WINDOW)
    assert all(pair == (None, None) for pair in on_probation)
    assert last[0] is None and last[1] is not None and last[1].outcome == "confirmed"
    assert (last[1].before_ms, last[1].after_ms) == pytest.approx((plan.makespan_ms, new.makespan_ms))


def test_a_plan_that_proves_to_be_slower_gives_way_and_is_asked_for_half_as_often(asked_by, tmp_path):
    answers = asked_by(better)
    plan, file = slow_plan(), tmp_path / "new.json"
    replanner = of_alone(plan, file=file)
    run(replanner, plan, EVERY)
    ((new, _),) = run(replanner, plan, 1)
    assert new is not None and Plan.read(file).to_json() == new.to_json()
    back, said = run(replanner, new, SETTLING + WINDOW, factor=3.0)[-1]
    assert back is plan and said is not None and said.outcome == "given back"
    assert said.after_ms == pytest.approx(3 * new.makespan_ms) and said.planned_ms == plan.makespan_ms
    assert Plan.read(file).to_json() == plan.to_json(), "what is kept is the plan in force"
    assert run(replanner, plan, 2 * EVERY - 1) == [(None, None)] * (2 * EVERY - 1) and len(answers.asked) == 1
    assert run(replanner, plan, 1)[0][0] is None and len(answers.asked) == 2
    assert run(replanner, plan, 1)[0][0] is not None


def test_a_solver_that_fails_ends_nothing(asked_by):
    asked_by(lambda start: (None, "error: out of luck"))
    plan = slow_plan()
    replanner = of_alone(plan)
    run(replanner, plan, EVERY)
    ((none, said),) = run(replanner, plan, 1)
    assert none is None and said is not None and said.outcome == "failed" and "out of luck" in said.line()


def test_a_plan_that_cannot_be_kept_takes_over_all_the_same(asked_by, tmp_path):
    asked_by(better)
    plan = slow_plan()
    replanner = of_alone(plan, file=tmp_path / "no folder" / "new.json")
    run(replanner, plan, EVERY)
    ((new, said),) = run(replanner, plan, 1)
    assert new is not None and said is not None and "cannot be written" in said.line()


def until_done(solver: Solving) -> None:
    deadline = time.monotonic() + 100
    while not solver.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_solver_beside_finds_a_plan_of_the_problem_that_is_no_longer_than_the_start():
    start = slow_plan()
    start.training, start.extra = {"name": "kept"}, {"partition": [1, 1]}
    solver = Solving(start, ReplanConfig(time_limit_s=2.0))
    try:
        until_done(solver)
        plan, fault = solver.result()
    finally:
        solver.close()
    assert plan is not None and not fault and not verify_plan(plan)
    assert plan.makespan_ms < start.makespan_ms and plan.problem == start.problem
    assert plan.training == start.training and plan.extra["partition"] == [1, 1]


def test_a_solver_that_is_gone_or_never_began_is_said(monkeypatch, tmp_path):
    solver = Solving(slow_plan(), ReplanConfig(time_limit_s=50.0))
    assert solver._process is not None
    solver._process.kill()
    until_done(solver)
    assert solver.result() == (None, "exit status -9")
    solver.close()
    monkeypatch.setattr(solving.sys, "executable", str(tmp_path / "no python"))
    for fault in ("no python", "no folder"):
        if fault == "no folder":
            monkeypatch.setattr(solving.tempfile, "tempdir", str(tmp_path / fault))
        solver = Solving(slow_plan(), ReplanConfig())
        assert solver.is_done
        assert solver.result()[0] is None and fault in solver.result()[1]
        solver.close()


def test_what_is_tethered_ends_with_its_input_and_its_folder_with_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    asleep = [sys.executable, "-m", "runtime.tethered", "--folder", str(folder)]
    asleep += ["timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"]
    process = subprocess.Popen(asleep, stdin=subprocess.PIPE, env=launch.environment())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30.0) == 1
    assert not folder.exists()


def test_what_is_tethered_runs_as_without(capfd):
    command = [sys.executable, "-m", "runtime.tethered", "cli", "check", "no such file"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=launch.environment()) as process:
        assert process.wait(60.0) == 2
    assert "no such file" in capfd.readouterr().err


@pytest.mark.parametrize(("replicas", "more"), [(1, replanning.MORE), (2, replanning.MORE), (1, 0)])
def test_training_goes_on_under_another_plan_with_the_same_numbers(tmp_path, replicas, more):
    settings = {"train": {"steps": 10_000, "seed": 3, "replicas": replicas}, "batch": {"microbatches": 6}}
    plain = config_of("line", **settings)
    settings["train"]["replan"] = {"every": 3, "time_limit_s": 2.0}
    config = config_of("line", **settings)
    plan = solve(plan_of(config, offload=False).problem, method="sequential")
    file, trace = tmp_path / "new.json", tmp_path / "trace.json"
    tasks = {"plan": plan.to_json(), "file": str(file), "trace": str(trace), "more": more}
    ranks = config.num_ranks

    found = launch.launch(replanning.train, {**tasks, "config": config.to_json(), "steps": None}, ranks, "cpu")

    assert [said["outcome"] for said in found["said"]][:2] == ["asked", "taken"], found["said"]
    taken, ran = Plan.read(file), Plan.from_json(found["plan"], "")
    assert taken.makespan_ms < found["said"][1]["before_ms"]
    steps = len(json.loads(trace.read_text())["steps"])
    if more:
        assert taken.to_json() == ran.to_json() and found["summary"]["plans"] == 2
        assert steps == more, "steps under the plan before are no part of the trace"
    else:
        # Where no step follows the plan before is the one that ran last.
        assert ran.to_json() == plan.sorted().to_json() and found["summary"]["plans"] == 1 and steps == STEPS

    tasks |= {"trace": None, "file": None, "config": plain.to_json(), "steps": len(found["losses"])}
    alone = launch.launch(replanning.train, tasks, ranks, "cpu")
    assert alone["losses"] == found["losses"] and not alone["said"]


def test_ones_own_loop_goes_on_under_another_plan_with_the_same_numbers(tmp_path):
    timed, partition = measured((0, 1))
    plan = solve(timed, method="sequential")
    task = {"plan": plan.to_json(), "partition": partition, "file": str(tmp_path / "new.json")}
    found = launch.launch(replanning.own_loop, {**task, "steps": None}, 2, "cpu")
    assert found["said"][:2] == ["asked", "taken"]
    assert Plan.from_json(found["plan"], "").to_json() == Plan.read(tmp_path / "new.json").to_json()
    alone = launch.launch(replanning.own_loop, {**task, "steps": len(found["losses"])}, 2, "cpu")
    assert alone["losses"] == found["losses"]


@pytest.mark.parametrize("poor", [0, 1])
def test_a_plan_without_room_on_one_rank_runs_on_none(tmp_path, poor):
    timed, partition = measured((0, 1))
    plan = solve(timed, method="sequential")
    task = {"plan": plan.to_json(), "partition": partition}
    found = launch.launch(
        replanning.own_loop, {**task, "file": str(tmp_path / "new.json"), "steps": None, "poor": poor}, 2, "cpu"
    )
    assert found["said"][:3] == ["asked", "taken", "no room"]
    assert found["plan"] == Plan.read(tmp_path / "new.json").to_json() == plan.to_json()
    alone = launch.launch(replanning.own_loop, {**task, "file": None, "steps": len(found["losses"])}, 2, "cpu")
    assert alone["losses"] == found["losses"]


def test_a_plan_without_room_gives_way_and_is_asked_for_half_as_often(asked_by, tmp_path, monkeypatch):
    answers = asked_by(better)
    plan, file = slow_plan(), tmp_path / "new.json"
    replanner = of_alone(plan, file=file)
    run(replanner, plan, EVERY)
    ((new, _),) = run(replanner, plan, 1)
    assert new is not None and replanner.plan is new
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "reserved", replanning._nothing_left)
        assert replanner.room() is None and replanner.plan is plan
        with pytest.raises(RunFailed, match=r"host memory.*nothing is left"):
            replanner.room()  # there is none to go back to
    pool = replanner.room()
    assert pool is not None and pool.allocated == 0, "it offloads nothing"
    assert Plan.read(file).to_json() == plan.to_json(), "what is kept is the plan in force"
    ((none, said),) = run(replanner, plan, 1)
    assert none is None and said is not None and said.outcome == "no room" and "memory" in said.line()
    assert said.planned_ms == plan.makespan_ms == said.before_ms and said.after_ms == new.makespan_ms
    assert run(replanner, plan, 2 * EVERY - 2) == [(None, None)] * (2 * EVERY - 2) and len(answers.asked) == 1
    run(replanner, plan, 1)
    assert len(answers.asked) == 2


def test_a_record_with_what_became_of_it_comes_back_as_it_was():
    said = Replanned("taken", 2.0, 1.0, "written to x", 1.0, [3])
    step = Step(1, 1.0, 1e-3, None, 2.0, 3.0, 4.0, 0.5, [1], [0], replanned=said)
    assert Step.from_json(json.loads(json.dumps(step.to_json()))) == step


def test_a_plan_that_is_solved_again_starts_from_its_schedule(tiny_problem, tiny_plan):
    told: list[float] = []
    solve(
        tiny_problem, method="auto", time_limit=1.0, start=tiny_plan.ops, on_progress=lambda now: told.append(now.best)
    )
    assert told[0] == pytest.approx(tiny_plan.makespan_ms)
    # A schedule that breaks rules is left aside.
    wrong = tiny_plan.ops.at(tiny_plan.ops.start * 0.5, tiny_plan.ops.end * 0.5)
    told.clear()
    assert not verify_plan(
        solve(tiny_problem, time_limit=1.0, start=wrong, on_progress=lambda now: told.append(now.best))
    )
    assert told[0] != pytest.approx(tiny_plan.makespan_ms / 2)


def test_the_files_of_the_solver_beside_go_with_it():
    solver = Solving(slow_plan(), ReplanConfig(time_limit_s=50.0))
    folder = solver._folder
    assert folder is not None
    assert (folder / "start.json").exists()
    solver.close()
    assert not folder.exists()
