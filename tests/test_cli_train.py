"""profile and train on the command line, on two local ranks with a model as small as it gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli import main
from optpipe import memory
from optpipe.errors import RunFailed
from optpipe.plan import Plan
from optpipe.profile import Profile
from optpipe.task import read_task
from runtime.metrics_log import Replanned, Step, Summary
from tests.conftest import DATA, plan_in_order

MICROBATCHES = 3
CONFIG = (DATA / "tiny-config.yaml").read_text()
ONE_AFTER_ANOTHER = " ".join(f"F(0,{j}) F(1,{j}) B(1,{j}) W(1,{j}) B(0,{j}) W(0,{j})" for j in range(MICROBATCHES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop")
    (path / "config.yaml").write_text(CONFIG)
    return path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, list(arguments))

    return invoke


@pytest.fixture(scope="module")
def profile(folder: Path) -> Result:
    """Measured once; its file is profile.json in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(main, ["profile", "config.yaml"])


@pytest.fixture
def plan_file(profile: Result, folder: Path) -> str:
    task = read_task(folder / "profile.json")
    plan = plan_in_order(task.problem, ONE_AFTER_ANOTHER)
    plan.training = task.training
    plan.write(folder / "plan.json")
    return "plan.json"


def test_profile_writes_the_file_and_prints_a_row_a_stage(profile, folder):
    assert profile.exit_code == 0, profile.output
    lines = profile.stdout.splitlines()
    assert lines[0].split()[:3] == ["stage", "device", "layers"]
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "0", "2"], ["1", "1", "2"]]
    assert lines[-1] == "written to profile.json"
    measured = Profile.read(folder / "profile.json")
    assert measured.name == "smallest"
    assert all(stage.forward_ms.median > 0 for stage in measured.stages)


def test_train_logs_steps_and_ends_with_planned_beside_measured(run, plan_file, folder):
    result = run("train", "--schedule", plan_file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps[:3]] == ["1/3", "2/3", "3/3"]
    assert any(line.split() == ["planned", "measured"] for line in lines)
    assert lines[-1] == "checkpoint in weights"
    assert (folder / "weights").is_dir()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3

    result = run("train", "--schedule", plan_file, "--steps", "4", "--resume", "weights")
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("step ")][:1] == ["4/4"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_train_for_machines(run, plan_file, folder):
    (folder / "quick.yaml").write_text(CONFIG.replace("checkpoint: weights, metrics: metrics.jsonl", "seed: 1"))
    result = run("train", "--schedule", plan_file, "--config", "quick.yaml", "--steps", "2", "--json")
    assert result.exit_code == 0, result.output
    *steps, summary = [json.loads(line) for line in result.stdout.splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert summary["steps"] == 2
    assert summary["within_plan"] is True


def test_the_plans_time_in_the_log_is_that_of_all_its_runs_in_a_step(run, plan_file, folder):
    planned = Plan.read(plan_file).makespan_ms
    for runs in (1, 3):
        changed = CONFIG.replace("microbatch_size:", f"accumulate: {runs}, microbatch_size:")
        (folder / "more.yaml").write_text(changed)
        result = run("train", "--schedule", plan_file, "--config", "more.yaml", "--steps", "1")
        assert result.exit_code == 0, result.output
        assert f"(plan {planned * runs:.0f})" in result.stdout


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a.json", "a.replanned.json"), ("a.v1", "a.v1.replanned.json"), ("b.replanned.json", "b.replanned.json")],
)
def test_a_run_that_solves_again_says_what_became_of_it(run, plan_file, folder, monkeypatch, given, kept):
    Path(folder / given).write_text((folder / plan_file).read_text())
    planned = Plan.read(plan_file)
    peaks = memory.peaks(planned.problem, planned.ops)
    step = Step(1, 5.0, 1e-3, None, 9.0, 9.0, 1.0, 0.5, peaks, [0, 0])
    places = []

    def stand_in(plan: Plan, *_: Any, on_step: Any, replanned: str, **__: Any) -> Summary:
        places.append(replanned)
        twice = [2 * peak for peak in peaks]
        on_step(replace(step, replanned=Replanned("taken", 9.0, 4.0, f"written to {replanned}", 4.0, twice)))
        on_step(replace(step, step=2, pipeline_ms=4.5))
        on_step(replace(step, step=3, replanned=Replanned("confirmed", 9.0, 4.5)))
        raise RunFailed("that is all")

    monkeypatch.setattr("runtime.train.train", stand_in)
    result = run("train", "--schedule", given)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("step ", "plan: "))]
    assert places == [kept]
    assert f"schedule 9 (plan {planned.makespan_ms:.0f})" in lines[0] and "peak 100% of plan" in lines[0]
    assert lines[1] == f"plan: another plan takes over: at the times measured 9 ms, then 4 ms; written to {kept}"
    assert "schedule 4 (plan 4)" in lines[2] and "peak 50% of plan" in lines[2]
    assert lines[4] == "plan: the plan that took over is faster: measured 9 ms, then 4.5 ms"
    shown = [json.loads(line) for line in run("train", "--schedule", given, "--json").stdout.splitlines()]
    assert [one["replanned"] and one["replanned"]["outcome"] for one in shown] == ["taken", None, "confirmed"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda plan: plan.pop("training"), "plan.json: training: is missing"),
        (lambda plan: plan["training"].update(modell={}), "plan.json: training.modell: unknown key"),
        (lambda plan: plan["ops"].pop(), "plan.json: is not a valid plan: "),
        (lambda plan: plan["training"]["data"].update(folder="nowhere"), "nowhere"),
    ],
)
def test_a_plan_that_cannot_be_trained_is_one_line(run, plan_file, folder, damage, said):
    plan = json.loads(Path(plan_file).read_text())
    damage(plan)
    Path(plan_file).write_text(json.dumps(plan))
    result = run("train", "--schedule", plan_file, "--json")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert said in line


def test_a_config_that_does_not_fit_the_plan_is_one_line(run, plan_file, folder):
    (folder / "other.yaml").write_text(CONFIG.replace(f"microbatches: {MICROBATCHES}", "microbatches: 5"))
    result = run("train", "--schedule", plan_file, "--config", "other.yaml")
    assert result.exit_code == 2
    assert "other.yaml: batch.microbatches: is 5, but the plan has 3" in result.stderr


def test_a_config_without_a_model_cannot_be_profiled(run, folder):
    (folder / "empty.yaml").write_text("batch: {microbatches: 2}")
    result = run("profile", "empty.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: empty.yaml: model: is missing")


def test_train_writes_a_trace_and_events_where_it_is_told_to(run, plan_file, folder):
    pytest.importorskip("tensorboard")
    result = run("train", "--schedule", plan_file, "--steps", "2", "--trace", "run.json", "--tensorboard", "events")
    assert result.exit_code == 0, result.output
    assert "(plan " in result.stdout and result.stdout.splitlines()[-1] == "trace in run.json"
    assert len(json.loads((folder / "run.json").read_text())["steps"]) == 2
    assert list((folder / "events").glob("events.out.tfevents.*"))
    shown = run("export", plan_file, "--to", "html", "--trace", "run.json", "-o", "run.html", "--no-compare")
    assert shown.exit_code == 0, shown.output
