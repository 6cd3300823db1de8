"""solve on the command line: what it takes, what it writes, and how it says that nothing fits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from cli import main
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan
from solver.options import SolveOptions
from tests.test_task import profile_json

ROOT = Path(__file__).parent.parent


@pytest.fixture
def solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``optpipe solve`` in an empty folder, for a few seconds at most."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: Any) -> Result:
        return CliRunner().invoke(main, ["solve", "--time-limit", "10", *(str(argument) for argument in arguments)])

    return invoke


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tiny_plan: Plan) -> list[SolveOptions]:
    """The options that the solver was called with; it answers with the plan made by hand."""
    seen: list[SolveOptions] = []

    def stand_in(problem: Problem, options: SolveOptions, on_progress: Any = None, *, start: Any = None) -> Plan:
        seen.append(options)
        return Plan(problem, tiny_plan.ops, 1.0, {"method": options.method})

    monkeypatch.setattr("solver.solve.solve", stand_in)
    return seen


def tight(problem: Problem, budget: int) -> dict[str, Any]:
    return problem.with_budgets([budget] * problem.num_devices).to_json()


def test_without_an_output_it_writes_plan_json(solve, tiny_problem_file):
    result = solve(tiny_problem_file)
    assert result.exit_code == 0, result.output
    plan = Plan.read("plan.json")
    assert verify_plan(plan) == []
    assert plan.lower_bound_ms is not None and plan.lower_bound_ms <= plan.makespan_ms
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny: 2 devices, 2 stages, 4 microbatches, by auto")
    assert lines[1].startswith(
        f"makespan {plan.makespan_ms:.5g} ms · proven lower bound {plan.lower_bound_ms:.5g} ms (gap "
    )
    assert lines[2].split() == ["device", "stages", "peak", "budget", "filled", "offloaded", "busy"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
    assert lines[-1] == "written to plan.json"
    assert result.stderr == ""


def test_what_it_writes_is_what_check_accepts(solve, tiny_problem_file):
    solve(tiny_problem_file)
    result = CliRunner().invoke(main, ["check", "plan.json", "--jitter", "20"])
    assert result.exit_code == 0, result.output


def test_json(solve, tiny_problem_file):
    said = json.loads(solve(tiny_problem_file, "--json", "-o", "other.json").stdout)
    plan = Plan.read("other.json")
    assert said["feasible"] is True and said["output"] == "other.json"
    assert said["makespan_ms"] == plan.makespan_ms
    assert said["lower_bound_ms"] == plan.lower_bound_ms
    assert all(peak <= budget for peak, budget in zip(said["peak_bytes"], said["budget_bytes"], strict=True))
    assert said["solver"]["method"] == "auto"


def test_options_go_before_the_files_and_the_files_before_the_defaults(solve, asked, tiny_problem, tmp_path):
    config = {
        "problem": tiny_problem.to_json(),
        "solver": {"method": "gpipe", "objective": "span", "gap": 0.5, "threads": 1, "seed": 3, "time_limit_s": 77.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    CliRunner().invoke(main, ["solve", str(path)])
    solve(path, "--method", "1f1b", "--objective", "makespan", "--gap", 0, "--threads", 2, "--seed", 0)
    CliRunner().invoke(main, ["solve", str(tmp_path / "plan.json")])
    from_file, from_options, defaults = asked
    assert (from_file.method, from_file.objective, from_file.gap) == ("gpipe", "span", 0.5)
    assert (from_file.threads, from_file.seed, from_file.time_limit) == (1, 3, 77.0)
    assert (from_options.method, from_options.objective, from_options.gap) == ("1f1b", "makespan", 0.0)
    assert (from_options.threads, from_options.seed, from_options.time_limit) == (2, 0, 10.0)
    assert (defaults.method, defaults.gap, defaults.time_limit, defaults.threads) == ("auto", 0.05, 300.0, None)


def test_a_plan_solved_again_keeps_its_training_and_unknown_keys(solve, asked, tiny_plan, tmp_path):
    tiny_plan.training = {"train": {"steps": 3}}
    tiny_plan.extra = {"note": "mine"}
    tiny_plan.write(tmp_path / "old.json")
    assert solve("old.json", "-o", "new.json").exit_code == 0
    new = Plan.read("new.json")
    assert new.training == {"train": {"steps": 3}}
    assert new.extra == {"note": "mine"}


def test_a_plan_is_solved_again_from_its_schedule_on(tiny_plan, tmp_path, monkeypatch):
    starts = []

    def stand_in(problem: Problem, *_: Any, start: Any) -> Plan:
        starts.append(start)
        return tiny_plan

    monkeypatch.setattr("solver.solve.solve", stand_in)
    tiny_plan.write(tmp_path / "old.json")
    (tmp_path / "problem.json").write_text(json.dumps(tiny_plan.problem.to_json()))
    for file in ("old.json", "problem.json"):
        assert (
            CliRunner().invoke(main, ["solve", str(tmp_path / file), "-o", str(tmp_path / "new.json")]).exit_code == 0
        )
    assert list(starts[0]) == list(Plan.read(tmp_path / "old.json").ops) and starts[1] is None


def test_a_budget_that_is_too_small_is_exit_3_with_the_one_that_works(solve, tiny_problem, tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(tight(tiny_problem, 900)))
    result = solve("problem.json")
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "1000" in line
    assert not Path("plan.json").exists()
    (tmp_path / "problem.json").write_text(json.dumps(tight(tiny_problem, 1000)))
    assert solve("problem.json", "--time-limit", 2).exit_code == 0


def test_infeasible_for_machines(solve, tiny_problem, tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(tight(tiny_problem, 900)))
    result = solve("problem.json", "--json")
    assert result.exit_code == 3
    said = json.loads(result.stdout)
    assert said["feasible"] is False
    assert said["smallest_budget_bytes"] == [1000, 1000]


def test_a_schedule_that_does_not_fit_is_exit_3(solve, tiny_problem_file):
    result = solve(tiny_problem_file, "--method", "gpipe")
    assert result.exit_code == 3
    assert "gpipe" in result.stderr


def test_an_unknown_method_is_exit_2(solve, tiny_problem_file):
    result = solve(tiny_problem_file, "--method", "magic")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: --method: 'magic' is unknown") and "1f1b" in line


@pytest.mark.parametrize(("method", "said"), [("magic", "'magic' is unknown"), ("dualpipe-v", "'dualpipe-v' does not")])
def test_a_method_of_a_file_that_is_wrong_is_named_there(method, said, solve, tiny_problem):
    config = {"problem": tiny_problem.to_json(), "solver": {"method": method}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    profile = profile_json()
    profile["settings"]["solver"]["method"] = method
    Path("profile.json").write_text(json.dumps(profile))
    Path("with.yaml").write_text(yaml.safe_dump({"solver": {"method": method}, "profile": "profile.json"}))
    for file, key in (("config.yaml", ""), ("with.yaml", ""), ("profile.json", "settings.")):
        result = solve(file)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"Error: {file}: {key}solver.method: {said}")


def test_an_old_plan_stays_whole_when_the_solver_fails(solve, monkeypatch, tiny_problem_file, tmp_path):
    (tmp_path / "plan.json").write_text("old")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("solver.solve.solve", fail)
    result = solve(tiny_problem_file)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: RuntimeError: out of luck")
    assert (tmp_path / "plan.json").read_text() == "old"


def test_interrupted_it_keeps_the_best_plan(tmp_path):
    instance = ROOT / "benchmarks" / "instances" / "unit-s8-m16-memS3-off2.json"
    arguments = ["solve", str(instance), "--gap", "0", "--time-limit", "1000", "-o", str(tmp_path / "plan.json")]
    # On a busy machine it may not have begun to solve, and then says 130.
    for seconds in (6, 20, 60):
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
        if process.returncode != 130:
            break
    assert process.returncode == 0, said
    assert verify_plan(Plan.read(tmp_path / "plan.json")) == []
