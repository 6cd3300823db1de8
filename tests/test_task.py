"""What a file asks to be solved shows in its content."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from optpipe.errors import InputError
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.profile import Profile
from optpipe.task import read_task

MODEL = {"layers": 2, "width": 8, "heads": 2, "context": 4}


def timing(median: float) -> dict[str, Any]:
    return {"median": median}


def profile_json() -> dict[str, Any]:
    """A measured model of two stages, of two layers each (embedding, two blocks, head)."""
    stage = {
        "layers": 2,
        **{
            f"{name}_ms": timing(2.0)
            for name in ("forward", "backward", "weight", "fused_backward", "offload", "reload")
        },
        "activation_bytes": 1000,
        "weight_context_bytes": 400,
        "offloadable_bytes": 900,
    }
    settings = {
        "model": MODEL,
        "device": "cpu",
        "batch": {"microbatches": 6},
        "pipeline": {"devices": 2, "partition": [2, 2]},
        "memory": {"activation_budget_bytes": 3000},
        "solver": {"time_limit_s": 7.0},
    }
    return {
        "format": "optpipe-profile",
        "version": 1,
        "name": "small",
        "stages": [{"device": d, **stage} for d in range(2)],
        "devices": [{"weight_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2}] * 2,
        "links": [{"message_bytes": 10, "message_ms": timing(0.1)}],
        "channels": [
            {"name": f"{way}:{d}", "transfers": [{"device": d, "direction": way}]}
            for d in range(2)
            for way in ("d2h", "h2d")
        ],
        "settings": settings,
    }


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    return write(tmp_path / "profile.json", profile_json())


def write(path: Path, value: Any) -> Path:
    path.write_text(yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value))
    return path


@pytest.mark.parametrize("name", ["problem.json", "problem.yaml", "problem", "problem.txt"])
def test_a_problem_whatever_its_name(name, tiny_problem: Problem, tmp_path):
    task = read_task(write(tmp_path / name, tiny_problem.to_json()))
    assert task.problem == tiny_problem
    assert task.training is None


def test_a_config_with_a_problem(tiny_problem: Problem, tmp_path):
    config = {"problem": tiny_problem.to_json(), "solver": {"gap": 0.01}}
    task = read_task(write(tmp_path / "config.yaml", config))
    assert task.problem == tiny_problem
    assert task.solver.gap == 0.01
    assert task.training is None


def test_a_budget_beside_a_problem_goes_before_its_own(tiny_problem: Problem, tmp_path):
    config = {"problem": tiny_problem.to_json(), "memory": {"activation_budget_bytes": [5, None]}}
    task = read_task(write(tmp_path / "config.yaml", config))
    assert [device.memory_bytes for device in task.problem.devices] == [5, None]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"memory": {"device_bytes": 5000}}, "memory.device_bytes: needs what weights take"),
        ({"offload": {"enabled": False}}, "offload.enabled: is false, expected a problem without channels"),
        ({"batch": {"microbatches": 9}}, "batch.microbatches: is 9, expected 4"),
        ({"pipeline": {"devices": 3}}, "pipeline.devices: is 3, expected 2"),
        ({"pipeline": {"stages_per_device": 2}}, "pipeline.stages_per_device: makes 4 stages, expected 2"),
        (
            {"model": {"layers": 2, "width": 8, "heads": 2, "context": 8}, "pipeline": {"devices": 1}},
            "pipeline.devices: is 1",
        ),
    ],
)
def test_what_a_config_says_must_fit_its_problem(section, said, tiny_problem: Problem, tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(InputError) as caught:
        read_task(write(path, {"problem": tiny_problem.to_json(), **section}))
    assert str(caught.value).startswith(f"{path}: {said}")
    alike = {"batch": {"microbatches": 4}, "offload": {"enabled": True}, "memory": {"device_bytes": None}}
    alike["pipeline"] = {"devices": 2}
    assert read_task(write(path, {"problem": tiny_problem.to_json(), **alike})).problem == tiny_problem
    without = tiny_problem.changed(channels=()).to_json()
    assert not read_task(write(path, {"problem": without, "offload": {"enabled": False}})).problem.channels


def test_a_config_places_the_stages_as_its_problem(tiny_problem: Problem, tmp_path):
    """Else the plan could not be trained, which would be known only then."""
    stages = [{**stage, "device": s % 2} for s in range(4) for stage in tiny_problem.to_json()["stages"][:1]]
    problem = {**tiny_problem.to_json(), "stages": stages, "comm_ms": [0.0] * 3}
    config = {"problem": problem, "pipeline": {"devices": 2, "stages_per_device": 2, "placement": "v"}}
    with pytest.raises(InputError) as caught:
        read_task(write(tmp_path / "config.yaml", config))
    expected = "pipeline.placement: puts the stages on devices 0 1 1 0, but the problem on 0 1 0 1"
    assert str(caught.value) == f"{tmp_path / 'config.yaml'}: {expected}"
    config["pipeline"]["placement"] = "interleaved"
    assert read_task(write(tmp_path / "config.yaml", config)).problem.num_stages == 4


def test_a_file_is_read_once(tiny_problem: Problem, tmp_path):
    """It may be a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(tiny_problem.to_json()),), daemon=True)
    writer.start()
    assert read_task(pipe).problem == tiny_problem
    writer.join()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"name": "a\x1b[31m"}, "name: expected text without control characters"),
        ({"channels": [{"name": "a\nb", "transfers": []}]}, "channels[0].name: expected text without control"),
    ],
)
def test_names_can_be_printed(part, said, tiny_problem: Problem, tmp_path):
    with pytest.raises(InputError, match=re.escape(said)):
        read_task(write(tmp_path / "problem.json", {**tiny_problem.to_json(), **part}))


def test_all_activations_together_have_a_size_that_can_be_counted(tiny_problem: Problem, tmp_path):
    value = tiny_problem.to_json()
    value["stages"][1]["activation_bytes"] = 2**61
    with pytest.raises(
        InputError, match=re.escape("stages[1].activation_bytes: is too large, expected less than 2^62")
    ):
        read_task(write(tmp_path / "problem.json", value))


def test_a_profile_carries_its_training_and_solver_settings(profile_file):
    task = read_task(profile_file)
    assert task.problem.num_microbatches == 6
    assert [device.memory_bytes for device in task.problem.devices] == [3000, 3000]
    assert task.solver.time_limit_s == 7.0
    assert task.training is not None and task.training["pipeline"]["partition"] == [2, 2]


def test_a_config_with_a_profile_changes_memory_and_microbatches(profile_file, tmp_path):
    config = {
        "model": MODEL,
        "device": "cpu",
        "batch": {"microbatches": 9},
        "memory": {"activation_budget_bytes": 2000},
        "profile": profile_file.name,
    }
    own = read_task(write(tmp_path / "config.yaml", config))
    assert own.problem.num_microbatches == 9
    assert own.problem.devices[0].memory_bytes == 2000
    del config["profile"]
    given = read_task(write(tmp_path / "config.yaml", config), profile_file)
    assert given.problem == own.problem
    assert given.training == own.training


def test_a_config_must_fit_what_was_measured(profile_file, tmp_path):
    config = write(tmp_path / "config.yaml", {"model": {**MODEL, "width": 16}, "device": "cpu"})
    with pytest.raises(InputError, match=r"config\.yaml: model\.width: is not what was measured, expected 8"):
        read_task(config, profile_file)


def test_a_plan_is_solved_again_with_what_it_carried(tiny_plan: Plan, tmp_path):
    tiny_plan.training, tiny_plan.extra = {"model": MODEL}, {"note": "kept"}
    tiny_plan.write(tmp_path / "plan.json")
    task = read_task(tmp_path / "plan.json")
    assert task.problem == tiny_plan.problem
    assert task.training == {"model": MODEL}
    assert task.extra == {"note": "kept"}


@pytest.mark.parametrize("what", ["plan", "problem", "profile", "config with a problem"])
def test_a_profile_goes_with_a_config_alone(what, tiny_plan: Plan, profile_file, tmp_path):
    values = {
        "plan": tiny_plan.to_json(),
        "problem": tiny_plan.problem.to_json(),
        "profile": profile_json(),
        "config with a problem": {"problem": tiny_plan.problem.to_json()},
    }
    path = write(tmp_path / "task.yaml", values[what])
    with pytest.raises(InputError, match="--profile: goes with a config"):
        read_task(path, profile_file)


def test_the_profile_of_these_tests_is_one(profile_file):
    assert Profile.read(profile_file).static_bytes == [4, 4]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "expected a config, a problem, a profile or a plan"),
        ({"format": "chrome-trace"}, "format: expected 'optpipe-plan' or 'optpipe-profile', not 'chrome-trace'"),
        ({"model": MODEL}, "profile: is missing, expected the file that 'optpipe profile"),
        ({}, "profile: is missing"),
    ],
)
def test_anything_else_is_refused(value, said, tmp_path):
    path = write(tmp_path / "task.yaml", value)
    with pytest.raises(InputError) as error:
        read_task(path)
    assert str(error.value).startswith(f"{path}: {said}")
