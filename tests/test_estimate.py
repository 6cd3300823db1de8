"""Estimates: bytes and FLOPs are those of the runtime, and what comes of them can be solved, checked and trained."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cli import main
from optpipe import gpt
from optpipe.config import Config
from optpipe.errors import InputError
from optpipe.estimate import estimate
from optpipe.hardware import Hardware
from optpipe.messages import RECEIVE_AHEAD, UNSENT, under_way_bytes
from optpipe.plan import Plan
from optpipe.profile import Profile
from optpipe.task import read_task
from optpipe.verify import verify_plan
from runtime import optimizer, program, stages
from runtime.model import build_layers, loss_fn
from runtime.profiler import TRIALS, profile
from runtime.stage import measure_bytes
from runtime.trial import Trial

CONFIGS = Path(__file__).parent.parent / "configs"
HARDWARE = sorted((CONFIGS / "hardware").glob("*.yaml"))
LAPTOP = CONFIGS / "hardware" / "laptop-cpu.yaml"
MODEL = {"layers": 4, "width": 32, "heads": 4, "context": 16}
BYTES = ("activation_bytes", "weight_context_bytes", "offloadable_bytes", "checkpoint_bytes")


def config_of(file: str = "some.yaml", **sections: Any) -> Config:
    return Config.from_json({"model": MODEL, **sections}, file)


def cluster(**changes: Any) -> Hardware:
    """A GPU cluster of round numbers: two nodes of four, two devices to a switch."""
    value = {
        "name": "round",
        "device": "cuda",
        "devices_per_node": 4,
        "peak_flops_per_s": {"float32": 1e13},
        "matmul_efficiency": 0.5,
        "memory_bytes_per_s": 1e12,
        "memory_efficiency": 0.5,
        "memory_bytes": 10**9,
        "reserve_bytes": 10**8,
        "op_overhead_ms": 0.0,
        "within_node": {"bytes_per_s": 1e10, "latency_ms": 0.01},
        "between_nodes": {"bytes_per_s": 1e9, "latency_ms": 0.1},
        "host": {"d2h_bytes_per_s": 1e10, "h2d_bytes_per_s": 2e10, "shared": [[0, 1], [2, 3]]},
    }
    return Hardware.from_json({**value, **changes}, "round.yaml")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def write(path: Path, value: Any) -> Path:
    path.write_text(yaml.safe_dump(value))
    return path


# --- bytes ------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Config:
    """A model of any shape on a CPU, cut into stages anywhere."""
    heads, layers = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    stage_count = draw(st.integers(1, layers + 2))
    cuts = draw(st.lists(st.integers(1, layers + 1), min_size=stage_count - 1, max_size=stage_count - 1, unique=True))
    edges = [0, *sorted(cuts), layers + 2]
    return config_of(
        device="cpu",
        model={
            "layers": layers,
            "width": heads * draw(st.sampled_from([1, 4, 9])),
            "heads": heads,
            "context": draw(st.sampled_from([1, 2, 7, 33])),
            "dropout": draw(st.sampled_from([0.0, 0.3])),
            "tied": draw(st.booleans()),
        },
        batch={"microbatch_size": draw(st.sampled_from([1, 2, 5]))},
        pipeline={"devices": stage_count, "partition": [b - a for a, b in pairwise(edges)]},
    )


@settings(max_examples=60)
@given(models())
def test_the_bytes_of_a_stage_are_those_that_the_runtime_counts(config: Config) -> None:
    """Exactly, whatever the sizes, with dropout and without, however the model is cut."""
    found = estimate(config, Hardware.read(LAPTOP).model_copy(update={"devices_per_node": 8}))
    shape = (config.batch.microbatch_size, config.gpt.context)
    tokens, vectors = torch.randint(256, shape), torch.randn(*shape, config.gpt.width)
    boundaries = stages.boundaries(config)
    for number, stage in enumerate(found.stages):
        (module,) = stages.build_stages(config, number, torch.device("cpu")).values()
        x = vectors if number else tokens
        counted = measure_bytes(module, number, len(found.stages), x, tokens, loss_fn)
        assert {name: getattr(stage, name) for name in BYTES} == {name: getattr(counted, name) for name in BYTES}
        device = found.devices[number]
        kept = device.weight_bytes, device.gradient_bytes, device.optimizer_bytes
        assert kept == optimizer.state_bytes([module])
        assert all(link.message_bytes == spec.nbytes for link, spec in zip(found.links, boundaries, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("width", [32, 64])
def test_the_bytes_of_a_stage_on_a_gpu(dropout: float, width: int) -> None:
    """To a thousandth: random states of kernels are counted or not as they are kept on the device or on the host."""
    model = {**MODEL, "width": width, "context": 48, "dropout": dropout}
    config = config_of(model=model, device="cuda", pipeline={"devices": 2, "partition": [3, 3]})
    found, device = estimate(config, cluster()), torch.device("cuda")
    tokens = torch.randint(256, (4, 48), device=device)
    for number, stage in enumerate(found.stages):
        (module,) = stages.build_stages(config, number, device).values()
        x = torch.randn(4, 48, width, device=device) if number else tokens
        counted = measure_bytes(module, number, 2, x, tokens, loss_fn)
        for name in BYTES:
            assert getattr(stage, name) == pytest.approx(getattr(counted, name), rel=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        {
            "model": {**MODEL, "dropout": 0.2, "tied": True},
            "pipeline": {"devices": 2, "stages_per_device": 2, "placement": "v"},
            "offload": {"shared": [[0, 1]]},  # named, for else a profile goes by the speeds of the moment
        },
        {"pipeline": {"devices": 1}, "train": {"tensor_parallel": 2, "shards": 2}, "offload": {"half_duplex": True}},
    ],
    ids=["v", "tensor parallel and sharded"],
)
def test_an_estimate_has_the_bytes_and_the_channels_of_a_measured_profile(sections: dict[str, Any]) -> None:
    batch = {"microbatches": 3, "microbatch_size": 2}
    config = config_of(device="cpu", batch=batch, measure={"warmup": 0, "iterations": 1}, **sections)
    measured = profile(config)
    config = config.with_partition(measured.settings.pipeline.partition)  # type: ignore[arg-type]
    found = estimate(config, Hardware.read(LAPTOP))
    names = (*BYTES, "device", "layers")
    for ours, theirs in zip(found.stages, measured.stages, strict=True):
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert found.static_bytes == measured.static_bytes
    for device, other in zip(found.devices, measured.devices, strict=True):
        assert device.model_copy(update={"load": other.load}) == other
    assert [channel.name for channel in found.channels] == [channel.name for channel in measured.channels]
    assert found.settings.pipeline == measured.settings.pipeline
    assert measured.hardware is None and "hardware" not in measured.to_json()


@pytest.mark.parametrize(
    ("placement", "chunks", "exact"), [("linear", 1, True), ("linear", 3, True), ("v", 2, True)]
    + [("interleaved", chunks, False) for chunks in (2, 3, 4)],
)  # fmt: skip
@pytest.mark.parametrize("devices", [1, 2, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 24])
def test_messages_take_what_the_trials_of_a_profile_take(
    placement: str, chunks: int, exact: bool, devices: int, microbatches: int
) -> None:
    """Or, interleaved, a few messages more: how many wait there is a matter of the schedule."""
    assert (RECEIVE_AHEAD, UNSENT) == (program.RECEIVE_AHEAD, program.UNSENT)
    pipeline = {"devices": devices, "stages_per_device": chunks, "placement": placement}
    config = Config.from_json({"pipeline": pipeline, "batch": {"microbatches": microbatches}}, "some.yaml")
    placed = config.pipeline.stage_devices
    count = min(microbatches, max(8, 2 * len(placed)))
    plans = [Trial(placed, count, **kind).plan() for kind in TRIALS.values()]
    sizes = [10] * (len(placed) - 1)
    counted = [max(program.build(plan, d, sizes).message_bytes for plan in plans) for d in range(devices)]
    found = under_way_bytes(config, 10)
    if exact:
        assert found == counted
    else:
        more = devices + chunks
        assert all(theirs <= ours <= theirs + 10 * more for ours, theirs in zip(found, counted, strict=True))


# --- FLOPs and times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("batch", "context", "width", "heads"), [(3, 10, 24, 3), (2, 16, 32, 1), (1, 5, 8, 2)])
def test_flops_are_those_that_torch_counts(dropout: float, batch: int, context: int, width: int, heads: int) -> None:
    model = {"layers": 1, "width": width, "heads": heads, "context": context, "dropout": dropout}
    config = config_of(model=model, device="cpu", batch={"microbatch_size": batch}, pipeline={"devices": 1})
    counted = gpt.layers(config)
    modules = build_layers(stages.gpt_config(config))
    tokens = torch.randint(256, (batch, context))
    vectors = torch.randn(batch, context, width, requires_grad=True)
    attention = 4 * batch * context * context * width
    for layer, module, x in zip(counted, modules, (tokens, vectors, vectors), strict=True):
        # The attention kernel of a CPU is none that torch counts: its matrices are, for the same products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
            y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        expected = sum(work.flops for work in layer.forward)
        again = attention // 2 if layer is counted[1] and not dropout else 0  # a kernel computes the weights again
        assert forward.get_total_flops() == expected
        both = sum(work.flops for work in (*layer.backward, *layer.weight))
        assert backward.get_total_flops() == both - again


def test_times_are_the_roofline_and_the_overhead() -> None:
    """A head alone on its device: times by hand."""
    sizes = {"layers": 1, "width": 512, "heads": 8, "context": 1024}
    config = config_of(model=sizes, batch={"microbatch_size": 4}, pipeline={"devices": 3, "partition": [1, 1, 1]})
    head = estimate(config, cluster()).stages[2]
    tokens, at = 4096, 1e3 / 0.5e12
    product = max(2 * tokens * 512 * 256 / 0.5e13 * 1e3, 4 * (tokens * 768 + 512 * 256) * at)
    norm, softmax, pick = (4 * tokens * numbers * at for numbers in (2 * 512, 2 * 256, 1))
    assert head.forward_ms.median == pytest.approx(product + norm + softmax + pick, abs=1e-6)
    slower = estimate(config, cluster(op_overhead_ms=1.0)).stages[2]
    assert slower.forward_ms.median == pytest.approx(head.forward_ms.median + 4, abs=1e-5)
    assert head.fused_backward_ms.median == pytest.approx(head.backward_ms.median + head.weight_ms.median, abs=1e-5)


def test_faster_hardware_is_never_slower() -> None:
    config = config_of(pipeline={"devices": 2})
    before = estimate(config, cluster())
    faster = {"peak_flops_per_s": {"float32": 2e13}, "memory_bytes_per_s": 2e12}
    after = estimate(config.with_partition(before.settings.pipeline.partition), cluster(**faster))  # type: ignore[arg-type]
    for name in ("forward_ms", "backward_ms", "weight_ms", "fused_backward_ms"):
        for slow, fast in zip(before.stages, after.stages, strict=True):
            assert getattr(fast, name).median == pytest.approx(getattr(slow, name).median / 2, abs=2e-6)


def test_a_balanced_partition_gives_the_heavy_head_fewer_blocks() -> None:
    sizes = {"layers": 6, "width": 8, "heads": 2, "context": 16}  # the vocabulary is 32 times its width
    counts = estimate(config_of(model=sizes, pipeline={"devices": 2}), cluster()).settings.pipeline.partition
    assert counts[0] > counts[1]


# --- links ------------------------------------------------------------------------------------------------------


def test_messages_between_nodes_take_the_slower_link() -> None:
    found = estimate(config_of(pipeline={"devices": 6}), cluster())
    nbytes = 4 * 16 * 32 * 4
    fast, slow = 0.01 + nbytes / 1e10 * 1e3, 0.1 + nbytes / 1e9 * 1e3
    assert [link.message_ms.median for link in found.links] == pytest.approx([fast] * 3 + [slow] + [fast], abs=1e-6)
    assert {link.message_bytes for link in found.links} == {nbytes}
    within = estimate(config_of(pipeline={"devices": 2, "stages_per_device": 2, "placement": "v"}), cluster())
    assert [link.message_ms.median > 0 for link in within.links] == [True, False, True]


def test_tensor_parallel_ranks_add_up_their_parts() -> None:
    """Twice in F and twice in B of each block, over the link that their ranks have."""
    alone = estimate(config_of(pipeline={"devices": 1}), cluster(op_overhead_ms=0.0))
    shared = config_of(pipeline={"devices": 1}, train={"tensor_parallel": 2})
    fast = estimate(shared, cluster()).stages[0]
    far = estimate(shared, cluster(devices_per_node=1, host={"d2h_bytes_per_s": 1e10, "h2d_bytes_per_s": 1e10})).stages[
        0
    ]
    nbytes = 4 * 16 * 32 * 4
    more = 2 * MODEL["layers"] * 2 * ((0.1 - 0.01) + nbytes / 2 * (1e-9 - 1e-10) * 1e3)
    assert far.forward_ms.median - fast.forward_ms.median == pytest.approx(more, abs=1e-5)
    assert far.backward_ms.median - fast.backward_ms.median == pytest.approx(more, abs=1e-5)
    assert far.weight_ms == fast.weight_ms
    assert fast.weight_ms.median < alone.stages[0].weight_ms.median


def test_devices_behind_one_switch_share_its_channels() -> None:
    found = estimate(config_of(pipeline={"devices": 3}), cluster())
    assert [c.name for c in found.channels] == ["d2h:0-1", "h2d:0-1", "d2h:2", "h2d:2"]
    stage = found.stages[0]
    assert stage.offload_ms is not None and stage.reload_ms is not None
    assert stage.offload_ms.median == pytest.approx(stage.offloadable_bytes / 1e10 * 1e3, abs=1e-6)
    assert stage.reload_ms.median == pytest.approx(stage.offloadable_bytes / 2e10 * 1e3, abs=1e-6)
    named = estimate(config_of(pipeline={"devices": 3}, offload={"shared": [[1, 2]]}), cluster())
    assert [c.name for c in named.channels] == ["d2h:0", "h2d:0", "d2h:1-2", "h2d:1-2"]
    host = {"d2h_bytes_per_s": 1e10, "h2d_bytes_per_s": 1e10, "half_duplex": True}
    assert [c.name for c in estimate(config_of(), cluster(host=host)).channels] == ["host:0", "host:1"]
    off = estimate(config_of(offload={"enabled": False}), cluster())
    assert off.channels == () and off.stages[0].offload_ms is None and not off.to_problem().can_offload(0)


def test_ranks_of_one_device_behind_one_switch_share_its_speed() -> None:
    """Ranks that make up a device copy together, as when measured; so do those of two pipelines in four places."""
    found = estimate(config_of(pipeline={"devices": 2}, train={"tensor_parallel": 2}), cluster())
    assert [c.name for c in found.channels] == ["d2h:0", "h2d:0", "d2h:1", "h2d:1"]
    assert found.channels[0].transfers[0].alone_bytes_per_s == 0.5e10
    apart = estimate(config_of(pipeline={"devices": 2}, train={"replicas": 2}), cluster())
    assert [c.name for c in apart.channels] == ["d2h:0-1", "h2d:0-1"]
    assert apart.channels[0].transfers[0].alone_bytes_per_s == 1e10
    assert any("2 pipelines side by side" in warning for warning in apart.warnings)


def test_a_pace_is_the_configs_word_on_the_links_of_cpu_devices() -> None:
    paced = config_of(offload={"bandwidth_bytes_per_s": 1e6})
    shared = cluster(device="cpu")
    assert [c.name for c in estimate(paced, shared).channels] == ["d2h:0", "h2d:0", "d2h:1", "h2d:1"]
    assert estimate(paced, shared).channels[0].transfers[0].alone_bytes_per_s == 1e6


# --- memory -----------------------------------------------------------------------------------------------------


def test_devices_have_the_memory_of_the_hardware_where_the_config_says_nothing() -> None:
    found = estimate(config_of(), cluster())
    left = [10**9 - 10**8 - static for static in found.static_bytes]
    assert [device.memory_bytes for device in found.to_problem().devices] == left
    given = estimate(config_of(memory={"device_bytes": 5 * 10**8, "reserve_bytes": 7}), cluster())
    assert given.to_problem().devices[0].memory_bytes == 5 * 10**8 - 7 - given.static_bytes[0]
    for budget in (None, 77):
        one = estimate(config_of(memory={"activation_budget_bytes": budget}), cluster()).to_problem()
        assert [device.memory_bytes for device in one.devices] == [budget, budget]


def test_a_model_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    small = cluster(memory_bytes=200_000, reserve_bytes=0).to_json()
    path = write(tmp_path / "config.yaml", {"model": MODEL, "hardware": small})
    result = run("solve", path, "-o", tmp_path / "plan.json")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"{path}: memory.device_bytes: 200000 does not hold the reserve and the weights" in result.stderr
    assert not (tmp_path / "plan.json").exists()
    # Its profile can be written all the same, to be solved with another memory.
    assert any("does not hold" in warning for warning in estimate(Config.read(path)).warnings)


# --- hardware files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", HARDWARE, ids=lambda path: path.stem)
def test_every_hardware_file_is_right_and_plans(path: Path, tmp_path: Path) -> None:
    hardware = Hardware.read(path)
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json())), "again") == hardware
    sizes = {"layers": 6, "width": 256, "heads": 4, "context": 128}
    value = {"model": sizes, "pipeline": {"devices": 4}, "hardware": str(path)}
    config, plan = write(tmp_path / "config.yaml", value), tmp_path / "plan.json"
    result = run("solve", config, "-o", plan, "--time-limit", 5, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert f"warning: estimated for {hardware.name}, not measured" in " ".join(result.stdout.split())
    assert run("check", plan, "--jitter", 3).exit_code == 0
    assert Plan.read(plan).extra["estimated_for"] == hardware.name


BAD = {
    "name: x": "device: is missing",
    "- 1": "expected a mapping",
    "speed: 1": "speed: unknown key, expected one of name, device",
    "device: tpu": "device: ",
    "matmul_efficiency: 1.5": "matmul_efficiency: ",
    "memory_efficiency: 0": "memory_efficiency: ",
    "memory_bytes: 1.5": "memory_bytes: expected an integer, not 1.5",
    "reserve_bytes: 1000000000": "reserve_bytes: 1000000000 leaves nothing of memory_bytes",
    "peak_flops_per_s: {float64: 1.0}": "peak_flops_per_s.float64: unknown key, expected one of float32",
    "peak_flops_per_s: {bfloat16: 1.0}": "peak_flops_per_s.float32: is missing",
    "within_node: {bytes_per_s: 0.0, latency_ms: 0}": "within_node.bytes_per_s: ",
    "within_node: {bytes_per_s: 1.0}": "within_node.latency_ms: is missing",
    "host: {d2h_bytes_per_s: 1.0, h2d_bytes_per_s: 1.0, shared: [[0]]}": "host.shared[0]: expected at least two",
    "host: {d2h_bytes_per_s: 1.0, h2d_bytes_per_s: 1.0, shared: [[0, 1], [1, 2]]}": "host.shared[1]: device 1 is given",
    "host: {d2h_bytes_per_s: 1.0, h2d_bytes_per_s: 1.0, shared: [[0, 4]]}": "host.shared[0]: device 4 does not exist",
    "!!python/object/apply:os.system ['true']": "line 1: is not YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_in_a_hardware_file_is_one_line_that_names_file_and_key(text: str, tmp_path: Path) -> None:
    path, value = tmp_path / "hardware.yaml", cluster().to_json()
    path.write_text(text)
    if not text.startswith(("name", "-", "!")):
        write(path, {**value, **yaml.safe_load(text)})
    result = run("estimate", CONFIGS / "demo.yaml", "--hardware", path, "-o", tmp_path / "profile.json")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"Error: {path}: {BAD[text]}")
    assert not (tmp_path / "profile.json").exists()


# --- the way through --------------------------------------------------------------------------------------------


def test_the_hardware_of_a_config_stands_in_a_file_beside_it_or_in_itself(tmp_path: Path) -> None:
    write(tmp_path / "round.yaml", cluster().to_json())
    beside = write(tmp_path / "beside.yaml", {"name": "one", "model": MODEL, "hardware": "round.yaml"})
    inside = write(tmp_path / "inside.yaml", {"name": "one", "model": MODEL, "hardware": cluster().to_json()})
    assert read_task(beside) == read_task(inside)
    assert estimate(Config.read(beside)).to_json() == estimate(Config.read(inside)).to_json()
    again = Config.from_json(json.loads(json.dumps(Config.read(inside).to_json())), "again.yaml")
    assert again.described_hardware == cluster()


def test_an_estimate_is_a_profile_that_says_so(tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", {"model": MODEL, "hardware": cluster().to_json(), "solver": {"gap": 0.2}})
    path = tmp_path / "profile.json"
    told = run("estimate", config, "-o", path)
    assert told.exit_code == 0 and "warning: estimated for round, not measured" in told.stdout.replace("\n", " ")
    found = Profile.read(path)
    assert found.hardware == cluster() and found.settings.device == "cuda" and found.settings.hardware is None
    assert found.to_json() == json.loads(path.read_text()) == estimate(Config.read(config)).to_json()
    printed = json.loads(run("estimate", config, "-o", path, "--json").stdout)
    assert printed.pop("output") == str(path) and printed == found.to_json()
    # With the file or without it: the same task.
    task = read_task(config)
    assert task.solver.gap == 0.2 and task.extra == {"estimated_for": "round"}
    assert read_task(path) == read_task(path, None) and read_task(path).problem == task.problem
    assert read_task(config, path).problem == task.problem, "a profile goes before the config's hardware"
    other = write(tmp_path / "other.yaml", {"model": {**MODEL, "width": 64}, "profile": "profile.json"})
    with pytest.raises(InputError, match=r"model\.width: is not what was estimated, expected 32, or a new profile"):
        read_task(other)


def test_a_plan_for_estimated_hardware_trains_where_there_is_such_a_device(tmp_path: Path) -> None:
    value = {
        "model": {**MODEL, "layers": 2},
        "batch": {"microbatches": 3, "microbatch_size": 2},
        "data": {"max_bytes": 200_000},
        "train": {"steps": 1},
        "hardware": str(LAPTOP),
    }
    plan = tmp_path / "plan.json"
    assert run("solve", write(tmp_path / "config.yaml", value), "-o", plan, "--time-limit", 5).exit_code == 0
    assert verify_plan(Plan.read(plan)) == []
    result = run("train", "--schedule", plan, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1] if result.stdout.count("\n") > 1 else result.stdout)


@pytest.mark.parametrize("command", ["estimate", "solve", "compare"])
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"hardware": "none.yaml"}, "none.yaml: no such file"),
        ({"hardware": 5}, "hardware: expected the path of a hardware file, or a mapping, not 5"),
        ({"hardware": {"name": "x"}}, "hardware.device: is missing"),
        ({"hardware": {**cluster().to_json(), "speed": 1}}, "hardware.speed: unknown key, expected one of name"),
        (
            {"hardware": "a.yaml", "profile": "b.json"},
            "hardware: is given beside profile, expected only one of the two",
        ),
        ({"model": None, "hardware": cluster().to_json()}, "model: is missing"),
        (
            {"device": "cpu", "hardware": cluster().to_json()},
            "device: is cpu, but round is cuda, expected cuda or auto",
        ),
        (
            {"pipeline": {"devices": 6}, "hardware": {**cluster().to_json(), "between_nodes": None}},
            "pipeline.devices: makes 6 ranks, expected at most 4, or between_nodes of round",
        ),
    ],
)
def test_what_cannot_be_estimated_is_one_line(
    command: str, sections: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "config.yaml", {"model": MODEL, **sections})
    result = run(command, path)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert said in result.stderr and str(tmp_path) in result.stderr
    assert [found.name for found in tmp_path.iterdir()] == ["config.yaml"]


def test_without_hardware_nothing_is_estimated(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", {"model": MODEL})
    result = run("estimate", path, "-o", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert result.stderr == f"Error: {path}: hardware: is missing, expected the path of a hardware file, or a mapping\n"


def test_small_kernels_make_a_warning() -> None:
    assert len(estimate(config_of(), cluster(device="cpu")).warnings) == 1
    (_, small) = estimate(config_of(), cluster(device="cpu", op_overhead_ms=0.01)).warnings
    assert "of compute is the overhead of small kernels" in small


def test_the_example_is_planned_from_a_fresh_checkout(tmp_path: Path) -> None:
    plan, example = tmp_path / "plan.json", CONFIGS / "estimate_example.yaml"
    assert run("solve", example, "-o", plan, "--time-limit", 5, "--threads", 1).exit_code == 0
    assert run("check", plan).exit_code == 0
    problem = Plan.read(plan).problem
    assert problem.num_devices == 16 and all(device.memory_bytes for device in problem.devices)
    assert run("solve", example, "-o", plan, "--method", "1f1b").exit_code == 3, "its memory is too small for 1F1B"


@pytest.mark.parametrize("bandwidth", [1e-300, 1e-320])
def test_an_estimate_beyond_all_bounds_is_one_line(bandwidth: float) -> None:
    with pytest.raises(InputError, match=r"some\.yaml: model: and its hardware make an estimate beyond all bounds"):
        estimate(config_of(offload={"bandwidth_bytes_per_s": bandwidth}), Hardware.read(LAPTOP))
