"""The schedule cache on the command line: what is kept, found again, shown and removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli import main
from optpipe.plan import Plan
from optpipe.verify import verify_plan


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: Any) -> Any:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


def entries(run) -> list[dict[str, Any]]:
    return json.loads(run("cache", "list", "--json"))["entries"]


def test_a_solved_problem_is_found_again(run, tiny_problem_file):
    run("solve", tiny_problem_file, "--time-limit", 10)
    assert len(entries(run)) == 1
    assert "tiny" in run("cache", "list")
    first = Plan.read("plan.json")
    run("solve", tiny_problem_file, "--time-limit", 10, "-o", "again.json")
    again = Plan.read("again.json")
    assert verify_plan(again) == []
    assert again.solver["cache"]["hit"] == "exact"
    assert again.makespan_ms <= first.makespan_ms * (1 + 1e-9)


def test_a_similar_problem_starts_from_it(run, tiny_problem, tiny_problem_file, tmp_path):
    run("solve", tiny_problem_file, "--time-limit", 10)
    value = tiny_problem.to_json()
    value["stages"][0]["forward_ms"] *= 1.03
    (tmp_path / "drifted.json").write_text(json.dumps(value))
    run("solve", "drifted.json", "--time-limit", 10, "-o", "drifted-plan.json")
    plan = Plan.read("drifted-plan.json")
    assert verify_plan(plan) == []
    assert plan.solver["cache"]["hit"] in ("near", "repaired")


def test_without_the_cache_nothing_is_kept(run, tiny_problem_file):
    run("solve", tiny_problem_file, "--time-limit", 10, "--no-cache")
    assert entries(run) == []
    assert "cache" not in Plan.read("plan.json").solver


def test_clear_removes_all(run, tiny_problem_file):
    run("solve", tiny_problem_file, "--time-limit", 10)
    assert json.loads(run("cache", "clear", "--json"))["removed"] == 1
    assert entries(run) == []
    assert "0 schedules" in run("cache", "list")


def test_names_and_paths_are_printed_as_they_are(run, tiny_problem, tmp_path):
    problem = tiny_problem.changed(name="[/x] [bold] :smile:")
    (tmp_path / "named.json").write_text(json.dumps(problem.to_json()))
    said = run("solve", "named.json", "--time-limit", 1, "-o", "y[red].json")
    assert said.startswith("[/x] [bold] :smile:: 2 devices")
    assert said.endswith("written to y[red].json\n")
    assert "[/x] [bold] :smile:" in run("cache", "list")
