"""Problem and plan files: nothing is lost on a round trip; what is wrong is named in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from optpipe.errors import InputError
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan
from tests.random_schedules import schedules

INSTANCES = sorted((Path(__file__).parent.parent / "benchmarks" / "instances").glob("*.json"))


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_benchmark_problems_round_trip(path: Path) -> None:
    assert Problem.read(path).to_json() == json.loads(path.read_text())


@given(schedules())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plans_round_trip(tmp_path: Path, case: tuple[Problem, Ops]) -> None:
    problem, ops = case
    extra = {"note": {"by": ["me"]}}
    plan = Plan(problem, ops, 0.5, {"method": "random"}, {"model": {"layers": 2}}, extra).sorted()
    path = tmp_path / "plan.json"
    plan.write(path)
    again = Plan.read(path)
    assert again.problem == problem
    assert list(again.ops) == list(plan.ops)
    assert (again.lower_bound_ms, again.solver, again.training) == (0.5, plan.solver, plan.training)
    assert (again.extra, again.makespan_ms) == (extra, plan.makespan_ms)
    assert verify_plan(again) == []
    assert json.loads(path.read_text()) == plan.to_json()


def small() -> dict[str, Any]:
    stage = {"device": 0, "forward_ms": 1, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 10}
    problem = {
        "name": "small",
        "num_microbatches": 1,
        "devices": [{"memory_bytes": 10}],
        "stages": [stage],
        "comm_ms": [],
        "channels": [{"name": "out", "transfers": [{"device": 0, "direction": "d2h"}]}],
    }
    ops = [
        {"kind": "F", "stage": 0, "microbatch": 0, "start": 0, "end": 1},
        {"kind": "BW", "stage": 0, "microbatch": 0, "start": 1, "end": 3},
    ]
    return {"format": "optpipe-plan", "version": 1, "problem": problem, "ops": ops, "makespan_ms": 3.0}


def test_unknown_keys_of_plan_problem_and_ops_are_kept(tmp_path: Path) -> None:
    value = small()
    value["colour"] = "red"
    value["problem"]["owner"] = "me"
    value["problem"]["stages"][0]["layers"] = [0, 1]
    value["ops"][1]["why"] = "because"
    path = tmp_path / "plan.json"
    Plan.from_json(value, "x").write(path)
    again = json.loads(path.read_text())
    assert again["colour"] == "red"
    assert again["problem"] == value["problem"]
    assert again["ops"][1]["why"] == "because"


def put(value: Any, path: str, item: Any) -> None:
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in way:
        value = value[part]
    if item is ...:
        del value[last]
    else:
        value[last] = item


@pytest.mark.parametrize(
    ("path", "item", "key", "words"),
    [
        ("format", "other", "format", "expected 'optpipe-plan'"),
        ("version", 2, "version", "expected 1, not 2"),
        ("version", ..., "version", "expected 1"),
        ("ops", ..., "ops", "is missing"),
        ("ops", {}, "ops", "expected a list"),
        ("ops/0", 3, "ops[0]", "expected an object"),
        ("ops/0/kind", "X", "ops[0].kind", "expected one of F, B, W, BW, C, O, R"),
        ("ops/1/stage", 1, "ops[1].stage", "expected an integer from 0 to 0, not 1"),
        ("ops/1/stage", True, "ops[1].stage", "expected an integer"),
        ("ops/1/microbatch", -1, "ops[1].microbatch", "not -1"),
        ("ops/1/start", "1", "ops[1].start", "expected a number"),
        ("ops/1/end", ..., "ops[1].end", "is missing"),
        ("ops/1/bytes", 1.5, "ops[1].bytes", "whole number of bytes"),
        ("makespan_ms", "3", "makespan_ms", "expected a number"),
        ("makespan_ms", 10**400, "makespan_ms", "expected a number"),
        ("ops/0/start", 10**400, "ops[0].start", "expected at most 1e+15 ms"),
        ("ops/0/end", -1e300, "ops[0].end", "expected at most 1e+15 ms"),
        ("problem/num_microbatches", 10**9, "problem.num_microbatches", "less than or equal to 100000"),
        ("problem/stages/0/weight_ms", 1e308, "problem.stages[0].weight_ms", "less than or equal to"),
        ("lower_bound_ms", -1, "lower_bound_ms", "at least 0"),
        ("solver", [], "solver", "expected a mapping"),
        ("problem/num_microbatches", 0, "problem.num_microbatches", "greater than or equal to 1"),
        ("problem/num_microbatches", "8", "problem.num_microbatches", "expected an integer, not '8'"),
        ("problem/stages/0/forward_ms", -1.0, "problem.stages[0].forward_ms", "greater than or equal to 0"),
        ("problem/stages/0/forward_ms", "1", "problem.stages[0].forward_ms", "expected a number, not '1'"),
        ("problem/stages/0/device", 4, "problem.stages[0].device", "device 4 does not exist"),
        ("problem/stages/0/offloadable_bytes", 11, "problem.stages[0].offloadable_bytes", "expected at most 10"),
        ("problem/devices", [{"memory_bytes": 1}, {"memory_bytes": 1}], "problem.devices[1]", "no stage uses"),
        ("problem/comm_ms", [0.5], "problem.comm_ms", "has 1 entries, expected 0"),
        ("problem/channels/0/transfers/0/direction", "up", "problem.channels[0].transfers[0].direction", "'d2h'"),
    ],
)
def test_what_is_wrong_is_named(path: str, item: Any, key: str, words: str) -> None:
    value = small()
    put(value, path, item)
    with pytest.raises(InputError) as caught:
        Plan.from_json(value, "plan.json")
    assert caught.value.file == "plan.json"
    assert caught.value.key == key
    assert words in caught.value.message
    assert "\n" not in str(caught.value)


def test_a_problem_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    value = small()["problem"]
    value["stages"][0]["forwrd_ms"] = 1
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"stages\[0\]\.forwrd_ms: unknown key, expected one of device, forward_ms"):
        Problem.read(path)


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    for text, words in (
        ("9" * 5000, "not usable JSON"),
        ("{", "is not JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "b: is given twice"),
        ("[" * 100000, "nested"),
    ):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            Plan.read(path)
    with pytest.raises(InputError, match="no such file"):
        Plan.read(tmp_path / "absent.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    plan = Plan.from_json(small(), "x")
    plan.solver = {"bad": float("nan")}
    with pytest.raises(ValueError, match="JSON"):
        plan.write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        Plan.from_json(small(), "x").write(tmp_path / "nowhere" / "plan.json")


def test_a_link_stays_and_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    plan = Plan.from_json(small(), "x")
    plan.write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.read(tmp_path / "real.json").makespan_ms == 3.0
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        plan.write(tmp_path / "pipe")
