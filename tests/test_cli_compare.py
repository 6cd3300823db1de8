"""compare on the command line: every known schedule is there, with its figures or with why it cannot be used."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cli import main
from solver.schedules import SCHEDULES


@pytest.fixture
def rows(tiny_problem_file):
    result = CliRunner().invoke(main, ["compare", str(tiny_problem_file), "--time-limit", "10", "--json"])
    assert result.exit_code == 0, result.output
    return {row["schedule"]: row for row in json.loads(result.stdout)["schedules"]}


def test_every_schedule_is_measured_or_says_why_not(rows, tiny_problem):
    assert set(rows) == {"ada-offload", *SCHEDULES, "optpipe"}
    for row in rows.values():
        if row["feasible"]:
            assert row["why_not"] == ""
            for peak, device in zip(row["peak_bytes"], tiny_problem.devices, strict=True):
                assert peak <= device.memory_bytes
        else:
            assert row["why_not"]


def test_nothing_usable_is_shorter_than_ours(rows):
    assert rows["optpipe"]["feasible"]
    usable = [row["makespan_ms"] for row in rows.values() if row["feasible"]]
    assert rows["optpipe"]["makespan_ms"] <= min(usable) * (1 + 1e-9)


def test_what_does_not_fit_says_what_it_needs(rows):
    assert not rows["gpipe"]["feasible"]
    assert "its budget is" in rows["gpipe"]["why_not"]


def test_the_table_is_for_people(tiny_problem_file):
    result = CliRunner().invoke(main, ["compare", str(tiny_problem_file), "--time-limit", "10"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("schedule")
    assert any(line.startswith("1f1b") for line in lines)
    assert lines[-1].startswith("optpipe")


def test_a_missing_file_is_exit_2():
    result = CliRunner().invoke(main, ["compare", "absent.json"])
    assert result.exit_code == 2
    assert result.stderr == "Error: absent.json: no such file\n"
