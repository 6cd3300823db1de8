"""The YAML config: what it accepts, and that every mistake is one line that names the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.config import Config
from optpipe.errors import InputError

MODEL = "model: {layers: 4, width: 64, heads: 4, context: 8}\n"
PROBLEM = """
problem:
  num_microbatches: 1
  devices: [{memory_bytes: null}]
  stages: [{device: 0, forward_ms: FORWARD, backward_ms: 1, weight_ms: 1, activation_bytes: 4}]
  comm_ms: []
"""


def read(folder: Path, text: str) -> Config:
    path = folder / "some.yaml"
    path.write_text(text)
    return Config.read(path)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, "")
    assert config.name == "some"
    assert config.batch.microbatches == 8
    assert config.measure.warmup == 3
    assert config.solver.gap == 0.05
    assert config.solver.time_limit_s == 300


def test_an_empty_section_is_one_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, "train:\nbatch:\n") == read(tmp_path, "")


def test_numbers_may_be_written_with_an_exponent_alone(tmp_path: Path) -> None:
    assert read(tmp_path, "optimizer: {learning_rate: 3e-4}").optimizer.learning_rate == 3e-4


def test_a_key_goes_before_the_one_that_a_merge_key_brings(tmp_path: Path) -> None:
    text = PROBLEM.replace("stages: [{", "stages: [&s {").replace("FORWARD", "2").replace("comm_ms: []", "comm_ms: [0]")
    problem = read(tmp_path, text.replace("4}]", "4}, {<<: *s, weight_ms: 5}]")).problem
    assert problem is not None
    assert [(stage.forward_ms, stage.weight_ms) for stage in problem.stages] == [(2, 1), (2, 5)]


def test_paths_that_are_read_count_from_the_configs_folder(tmp_path: Path) -> None:
    config = read(tmp_path, "profile: here.json\ndata: {folder: text}")
    assert config.profile == str(tmp_path / "here.json")
    assert read(tmp_path, "hardware: here.yaml").hardware == str(tmp_path / "here.yaml")
    assert config.data.folder == str(tmp_path / "text")


BAD = {
    "nam: x": "nam: unknown key",
    "train: {step: 3}": "train.step: unknown key, expected one of steps",
    "train: 3": "train: expected a mapping, not 3",
    "- 1": "expected a mapping",
    "name: 5": "name: expected text, not 5",
    "device: tpu": "device: ",
    "model: {layers: 4, width: 65, heads: 4, context: 8}": "model.width: 65 is not a multiple of heads",
    "model: {layers: 4, width: 64, heads: 4}": "model.context: is missing",
    "model: {layers: '4', width: 64, heads: 4, context: 8}": "model.layers: expected an integer, not '4'",
    "model: {layers: true, width: 64, heads: 4, context: 8}": "model.layers: expected an integer, not true",
    "model: {layers: 4, width: 64, heads: 4, context: 8, dropout: 1.0}": "model.dropout: ",
    MODEL + "pipeline: {devices: 7}": "pipeline.devices: makes 7 stages, expected at most 6",
    MODEL + "pipeline: {partition: [3, 2]}": "pipeline.partition: adds up to 5 layers, expected 6",
    "pipeline: {partition: [3]}": "pipeline.partition: has 1 entries, expected 2",
    "pipeline: {partition: balance}": "pipeline.partition: expected 'balanced' or a list of layer counts",
    "pipeline: {partition: [0, 4]}": "pipeline.partition: expected 'balanced' or a list of layer counts",
    "pipeline: {placement: w}": "pipeline.placement: ",
    "pipeline: {placement: v}": "pipeline.stages_per_device: 1 does not make a V",
    "memory: {activation_budget_bytes: -4}": "memory.activation_budget_bytes: expected an integer number of bytes",
    "memory: {activation_budget_bytes: 1.5}": "memory.activation_budget_bytes: expected an integer number of bytes",
    "memory: {activation_budget_bytes: [1, 2, 3]}": "memory.activation_budget_bytes: has 3 entries, expected 2",
    "memory: {activation_budget_bytes: 5, device_bytes: 10}": "memory.device_bytes: is given beside",
    "memory: {reserve_bytes: 10}": "memory.reserve_bytes: needs device_bytes",
    "offload: {shared: [[0]]}": "offload.shared[0]: expected at least two devices",
    "offload: {shared: [0, 1]}": "offload.shared[0]: expected a list, not 0",
    "offload: {shared: [[0, 1], [1, 2]]}\npipeline: {devices: 3}": "offload.shared[1]: device 1 is given twice",
    "offload: {shared: [[0, 7]]}\npipeline: {devices: 2}": "offload.shared[0]: device 7 does not exist",
    "offload: {bandwidth_bytes_per_s: 0}": "offload.bandwidth_bytes_per_s: ",
    "optimizer: {betas: [0.9]}": "optimizer.betas[1]: is missing",
    "optimizer: {learning_rate: fast}": "optimizer.learning_rate: expected a number, not 'fast'",
    "optimizer: {learning_rate: .nan}": "optimizer.learning_rate: expected a finite number",
    "optimizer: {learning_rate: -1}": "optimizer.learning_rate: ",
    "solver: {time_limit_s: -1}": "solver.time_limit_s: ",
    "batch: {microbatches: 200000}": "batch.microbatches: input should be less than or equal to 100000, not 200000",
    "train: {steps: 0}": "train.steps: ",
    "train: {checkpoint: ''}": "train.checkpoint: expected a path, not ''",
    'train: {metrics: "a\\0b"}': "train.metrics: expected a path, not ",
    "train: {resume: ''}": "train.resume: expected a path",
    "data: {folder: ''}": "data.folder: expected a path",
    "data: {pattern: .}": "data.pattern: expected a glob, such as *.txt, not '.'",
    "data: {pattern: ''}": "data.pattern: expected a glob",
    "train: {replan: {every: 0}}": "train.replan.every: ",
    "train: {replan: 50}": "train.replan: expected a mapping, not 50",
    "model: {layers: 1000000, width: 64, heads: 4, context: 8}": "model.layers: input should be less than or equal",
    "train: {shards: 0}": "train.shards: ",
    "train: {tensor_parallel: two}": "train.tensor_parallel: expected an integer, not 'two'",
    MODEL
    + "train: {tensor_parallel: 3}": "train.tensor_parallel: 3 does not divide model.heads, expected a divisor of",
    MODEL.replace("}", ", dropout: 0.1}")
    + "train: {tensor_parallel: 2}": "model.dropout: is 0.1 with train.tensor_par",
    "problem: {name: x}": "problem.num_microbatches: is missing",
    PROBLEM.replace("FORWARD", "-1"): "problem.stages[0].forward_ms: ",
    PROBLEM.replace("FORWARD", "1, forwrd_ms: 1"): "problem.stages[0].forwrd_ms: unknown key",
    "profile: a.json" + PROBLEM.replace("FORWARD", "1"): "profile: is given beside problem",
    "hardware: 5": "hardware: expected the path of a hardware file, or a mapping, not 5",
    "hardware: {name: x}": "hardware.device: is missing",
    "hardware: {nam: x}": "hardware.nam: unknown key, expected one of name",
    "hardware: a.yaml\nprofile: b.json": "hardware: is given beside profile, expected only one of the two",
    "hardware: a.yaml" + PROBLEM.replace("FORWARD", "1"): "hardware: is given beside problem",
    "train: {steps: 1}\ntrain: {steps: 2}": "line 2: is not YAML: key 'train' is given twice",
    "batch: &b {accumulate: 1}\ntrain: {<<: *b, steps: 1, steps: 2}": "line 2: is not YAML: key 'steps' is given twice",
    "train: {steps: 1": "line 1: is not YAML",
    "!!python/object/apply:os.system ['true']": "line 1: is not YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_is_one_line_that_names_file_and_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'some.yaml'}: {BAD[text]}")
    assert "\n" not in message


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        Config.read(tmp_path / "none.yaml")


def test_a_config_without_a_model_says_so_when_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model: is missing"):
        read(tmp_path, "").gpt  # noqa: B018


@pytest.mark.parametrize(
    ("pipeline", "devices"),
    [
        ("{devices: 2, stages_per_device: 2}", (0, 0, 1, 1)),
        ("{devices: 2, stages_per_device: 2, placement: interleaved}", (0, 1, 0, 1)),
        ("{devices: 2, stages_per_device: 2, placement: v}", (0, 1, 1, 0)),
        ("{devices: 3}", (0, 1, 2)),
    ],
)
def test_placements(tmp_path: Path, pipeline: str, devices: tuple[int, ...]) -> None:
    assert read(tmp_path, f"pipeline: {pipeline}").pipeline.stage_devices == devices


def test_ranks_are_devices_times_what_is_around_the_pipeline(tmp_path: Path) -> None:
    train = "{replicas: 2, shards: 3, tensor_parallel: 5}"
    config = read(tmp_path, f"pipeline: {{devices: 7}}\ntrain: {train}")
    assert config.num_ranks == 2 * 3 * 5 * 7 and config.train.pipelines == 6


@pytest.mark.parametrize(
    ("memory", "budgets"),
    [
        ("{}", [None, None]),
        ("{activation_budget_bytes: 7}", [7, 7]),
        ("{activation_budget_bytes: [7, null]}", [7, None]),
        ("{device_bytes: 100}", [90, 70]),
        ("{device_bytes: 100, reserve_bytes: 70}", [20, 0]),
    ],
)
def test_budgets(tmp_path: Path, memory: str, budgets: list[int | None]) -> None:
    assert read(tmp_path, f"memory: {memory}").budgets([10, 30]) == budgets


def test_a_device_too_small_for_its_weights_says_what_is_needed(tmp_path: Path) -> None:
    config = read(tmp_path, "memory: {device_bytes: 100, reserve_bytes: 5}")
    with pytest.raises(InputError, match=r"memory.device_bytes: 100 does not hold .* device 1, expected at least 125"):
        config.budgets([95, 120])


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_example_configs_are_right(path: Path) -> None:
    config = Config.read(path)
    assert config.gpt.num_layers >= config.pipeline.num_stages


configs = st.builds(
    lambda layers, heads, head_width, devices, chunks, budget, folder, seed, rate: {
        "model": {"layers": layers, "width": heads * head_width, "heads": heads, "context": 8},
        "pipeline": {
            "devices": devices,
            "stages_per_device": chunks,
            "placement": "v" if chunks == 2 else "linear",
            "partition": [layers + 2 - devices * chunks + 1] + [1] * (devices * chunks - 1),
        },
        "memory": budget,
        "data": {"folder": folder},
        "train": {"seed": seed},
        "optimizer": {"learning_rate": rate, "betas": [0, 0.5]},
        "solver": {"threads": None},
    },
    layers=st.integers(4, 9),
    heads=st.integers(1, 4),
    head_width=st.integers(1, 8),
    devices=st.integers(1, 3),
    chunks=st.integers(1, 2),
    budget=st.one_of(
        st.builds(lambda n: {"activation_budget_bytes": n}, st.one_of(st.none(), st.integers(0, 2**60))),
        st.builds(lambda n, r: {"device_bytes": n, "reserve_bytes": r}, st.integers(0, 2**60), st.integers(0, 9)),
    ),
    folder=st.one_of(st.none(), st.text("abc/. {}", min_size=1)),
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-9, 1e9),
)


@settings(deadline=None)
@given(configs)
def test_a_config_survives_the_trip_through_yaml_and_json(value: dict) -> None:
    config = Config.from_json(yaml.safe_load(yaml.safe_dump(value)), "some.yaml")
    again = Config.from_json(json.loads(json.dumps(config.to_json())), "some.yaml")
    assert again == config


@settings(deadline=None)
@given(configs)
def test_the_training_part_is_a_config_without_planning(value: dict) -> None:
    config = Config.from_json(value, "some.yaml")
    training = config.training()
    assert not training.keys() & {"memory", "solver", "problem", "profile", "measure"}
    carried = Config.from_json(json.loads(json.dumps(training)), "plan.json", "training")
    for section in training:
        assert getattr(carried, section) == getattr(config, section)
