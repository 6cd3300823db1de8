"""A profile is taken in place, and what it says holds in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optpipe.config import Config, OffloadConfig
from optpipe.errors import InputError
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.profile import Profile, TrialProfile
from optpipe.timing import earliest
from optpipe.verify import verify_plan
from runtime import costs, launch, links, optimizer, stages
from runtime.conditions import warnings
from runtime.links import HostLink, HostLinkTrial
from runtime.model import loss_fn
from runtime.place import Place
from runtime.profiler import profile
from runtime.stage import measure_bytes
from runtime.train import train
from runtime.trial import Trial

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "device": "cpu",
    "model": {"layers": 3, "width": 32, "heads": 2, "context": 32},
    "data": {"max_bytes": 200_000},
    "batch": {"microbatches": 4, "microbatch_size": 2},
    "measure": {"warmup": 1, "iterations": 2},
    "train": {"steps": 2},
}
PIPELINES: dict[str, dict[str, Any]] = {
    "line": {"pipeline": {"devices": 2}, "offload": {"bandwidth_bytes_per_s": 2e9}},
    "v": {
        "pipeline": {"devices": 2, "stages_per_device": 2, "placement": "v"},
        "offload": {"half_duplex": True, "shared": [[0, 1]]},
    },
}


@pytest.fixture(scope="module", params=PIPELINES)
def measured(request: pytest.FixtureRequest) -> tuple[Profile, list[str]]:
    said: list[str] = []
    found = profile(Config.from_json({**SETTINGS, **PIPELINES[request.param]}, "some.yaml"), said.append)
    return found, said


def plan_of(found: Profile, *, split: bool) -> Plan:
    problem = found.to_problem()
    trial = Trial(
        found.settings.pipeline.stage_devices,
        problem.num_microbatches,
        split=split,
        offload=True,
        half_duplex=found.settings.offload.half_duplex,
    )
    return Plan(problem, earliest(problem, trial.plan().ops), training=found.training)


def test_a_profile_has_every_figure_and_makes_a_problem(measured: tuple[Profile, list[str]]) -> None:
    found, said = measured
    counts = [stage.layers for stage in found.stages]
    assert sum(counts) == 5 and found.settings.pipeline.partition == tuple(counts)
    for stage in found.stages:
        for name in (
            "forward_ms",
            "backward_ms",
            "weight_ms",
            "fused_backward_ms",
            "recompute_ms",
            "offload_ms",
            "reload_ms",
        ):
            assert getattr(stage, name).median > 0
        assert 0 < stage.weight_context_bytes <= stage.activation_bytes
        assert 0 < stage.offloadable_bytes <= stage.activation_bytes
        assert stage.checkpoint_bytes is not None and stage.checkpoint_bytes < stage.activation_bytes
    for index, link in enumerate(found.links):
        apart = found.stages[index].device != found.stages[index + 1].device
        assert link.message_bytes == 2 * 32 * 32 * 4
        assert (link.message_ms.median > 0) == apart
    assert all(device.static_bytes > 0 and device.load for device in found.devices)
    assert found.devices[1].message_bytes > 0
    # Weights, gradients of the same size, two moments and a step count a parameter.
    assert all(d.weight_bytes == d.gradient_bytes < d.optimizer_bytes / 2 for d in found.devices)
    assert len(found.trials) == 4 and len(said) >= 4
    problem = found.to_problem()
    assert problem.num_stages == len(counts) and all(map(problem.can_offload, range(problem.num_stages)))
    assert Profile.from_json(found.to_json(), "again.json").to_problem() == problem


def test_channels_are_those_of_the_config(measured: tuple[Profile, list[str]]) -> None:
    found, _ = measured
    names = [channel.name for channel in found.channels]
    if found.settings.offload.half_duplex:
        assert names == ["host:0-1"] and len(found.channels[0].transfers) == 4
    else:
        assert names == ["d2h:0", "h2d:0", "d2h:1", "h2d:1"]
        # A paced copy never beats its pace.
        assert all(c.transfers[0].alone_bytes_per_s <= 2.02e9 for c in found.channels)  # type: ignore[operator]
    assert all(t.alone_bytes_per_s and t.together_bytes_per_s for c in found.channels for t in c.transfers)


def test_the_bytes_of_a_profile_hold_in_training(measured: tuple[Profile, list[str]]) -> None:
    # One placement with B and W apart, the other with BW.
    plan = plan_of(measured[0], split=not measured[0].settings.offload.half_duplex)
    assert verify_plan(plan) == []
    summary = train(plan)
    assert summary.within_plan
    # Not by a wide margin, either: the plan's bytes are those of this model.
    for real, planned in zip(summary.measured_peak_bytes, summary.planned_peak_bytes, strict=True):
        assert real > 0.5 * planned
    moved = [0, 0]
    for op in plan.ops:
        if op.kind == Kind.O:
            stage = plan.problem.stages[op.stage]
            moved[stage.device] += stage.offloadable_bytes
    assert all(0 < host <= most for host, most in zip(summary.host_peak_bytes, moved, strict=True))


def test_two_ranks_that_share_tensors_are_measured_as_one_device() -> None:
    """And without offloading no copy is measured."""
    alone = {"pipeline": {"devices": 1}, "offload": {"enabled": False}, "measure": {"warmup": 0, "iterations": 1}}
    alone |= {"batch": {"microbatches": 2, "microbatch_size": 2}, "model": {**SETTINGS["model"], "layers": 1}}
    config = Config.from_json({**SETTINGS, **alone, "train": {"tensor_parallel": 2}}, "some.yaml")
    found = profile(config)
    assert found.stages[0].offload_ms is None and found.channels == () and found.links == ()
    assert not found.to_problem().can_offload(0)
    assert len(found.devices) == len(found.stages) == 1 and found.trials[0].measured_ms > 0
    assert found.devices[0].load is None, "it would count the waits for each other"
    (whole,) = stages.build_stages(found.settings, 0, torch.device("cpu")).values()
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    assert found.stages[0].activation_bytes < measure_bytes(whole, 0, 1, tokens, tokens, loss_fn).activation_bytes
    assert optimizer.state_bytes([whole])[0] * 0.5 < found.devices[0].weight_bytes < optimizer.state_bytes([whole])[0]
    other = Config.from_json({**SETTINGS, **alone}, "other.yaml")
    with pytest.raises(InputError, match=r"^other.yaml: train.tensor_parallel: is not what was measured, expected 2"):
        found.for_config(other)


def test_text_that_is_not_there_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("ranks were started"))
    for data, message in (({"folder": "/nowhere"}, "data.folder: /nowhere is no folder"), ({"max_bytes": 9}, "data")):
        with pytest.raises(InputError, match=f"^some.yaml: {message}"):
            profile(Config.from_json({**SETTINGS, "data": data}, "some.yaml"))
    with pytest.raises(InputError, match=r"^some.yaml: train.validate_every: needs held-out text"):
        parts = {"train": {"validate_every": 2}, "data": {"validation_fraction": 0.0}}
        profile(Config.from_json({**SETTINGS, **parts}, "some.yaml"))


def test_a_config_without_a_model_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"^some.yaml: model: is missing"):
        profile(Config.from_json({}, "some.yaml"))


def test_layer_costs_are_one_a_layer() -> None:
    config = Config.from_json(SETTINGS, "some.yaml")
    found = costs.layers(config, torch.device("cpu"), Place.of(0, config, torch.device("cpu")))
    assert len(found) == 5 and min(found) > 0 and len(set(found[1:4])) == 1


def test_groups_that_slow_each_other_share_a_switch() -> None:
    assert links.shared_groups(4, {(0, 1): 0.5, (1, 2): 1.0, (2, 3): 0.55}) == [(0, 1), (2, 3)]
    assert links.shared_groups(3, {(0, 1): 0.5, (1, 2): 0.5}) == [(0, 1, 2)]
    assert links.shared_groups(3, {(0, 1): 0.9, (1, 2): 0.7}) == []


def test_a_switch_is_found_from_speeds_and_named_in_channels() -> None:
    alone = [HostLink(2e9, 2e9)] * 3
    together = {(0, 1): [HostLink(2e9, 2e9)] * 2, (1, 2): [HostLink(1e9, 1.9e9)] * 2}
    found = links.channels(OffloadConfig(), alone, together)
    assert [channel.name for channel in found] == ["d2h:0", "h2d:0", "d2h:1-2", "h2d:1-2"]
    speeds = {(t.device, t.direction): t.together_bytes_per_s for c in found for t in c.transfers}
    assert speeds[0, "d2h"] == 2e9 and speeds[1, "d2h"] == 1e9 and speeds[2, "h2d"] == 1.9e9
    paced = links.channels(OffloadConfig(bandwidth_bytes_per_s=2e9), alone, together)
    assert len(paced) == 6, "a pace is the config's word on what is shared"


def test_speeds_beside_both_neighbours_count_and_what_no_channel_says_is_named() -> None:
    alone = (HostLink(4e9, 4e9),) * 3
    pairs = {(0, 1): [HostLink(4e9, 4e9)] * 2, (1, 2): [HostLink(4e9, 4e9)] * 2}
    trial = HostLinkTrial(alone, pairs, {1: HostLink(2e9, 4e9)}, (HostLink(4e9, 4e9),) * 2 + (HostLink(2e9, 2e9),))
    found = links.channels(OffloadConfig(), trial.alone, trial.pairs, trial.crowded)
    speeds = {(t.device, t.direction): t.together_bytes_per_s for c in found for t in c.transfers}
    assert speeds[1, "d2h"] == 2e9 and speeds[1, "h2d"] == speeds[0, "d2h"] == 4e9
    told = links.doubts(OffloadConfig(), trial)
    assert told[0].startswith("device 2 copies both ways at once at 50% of its speed one way")
    assert told[1].startswith("device 1 copies at 50% of its speed beside both neighbours, but at 100% beside one")
    assert len(told) == 2 and links.doubts(OffloadConfig(bandwidth_bytes_per_s=4e9), trial) == []
    assert len(links.doubts(OffloadConfig(half_duplex=True), trial)) == 1
    assert links.channels(OffloadConfig(), (), {}) == () and links.doubts(OffloadConfig(), HostLinkTrial()) == []


def test_doubtful_figures_are_named() -> None:
    good = TrialProfile(name="1F1B", predicted_ms=100, measured_ms=105)
    bad = TrialProfile(name="1F1B, offloads", predicted_ms=100, measured_ms=150)
    assert warnings([1.05, None], 0.0, (good,)) == []
    found = warnings([1.05, 1.5], 0.2, (good, bad))
    assert len(found) == 3
    assert found[0].startswith("the machine was loaded: compute took up to 1.50 times its CPU time (device 1)")
    assert found[1].startswith("20% of the copies")
    assert found[2].startswith("1F1B, offloads: a step took 150 ms")
    (unseen,) = warnings([1.05], 0.0, (), pipelines=4)
    assert unseen.startswith("4 pipelines side by side (train.replicas, train.shards): what they exchange")


def test_more_ranks_than_cores_are_no_foreign_load() -> None:
    assert warnings([1.9, 2.1], 0.0, (), crowding=2.0) == [
        "the ranks have 2 threads a core: times hold while all ranks are busy"
    ]
    assert "the machine was loaded" in warnings([1.9, 2.5], 0.0, (), crowding=2.0)[1]
