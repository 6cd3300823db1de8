"""The profile file: it survives a round trip, says what is wrong with it, and makes the problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.config import Config
from optpipe.errors import InputError
from optpipe.profile import ChannelProfile, DeviceProfile, LinkProfile, Profile, StageProfile, Timing, TransferProfile

SETTINGS = {
    "name": "small",
    "model": {"layers": 4, "width": 64, "heads": 4, "context": 8},
    "batch": {"microbatches": 3, "microbatch_size": 2},
    "pipeline": {"devices": 2, "partition": [4, 2]},
    "memory": {"activation_budget_bytes": [900, None]},
    "device": "cpu",
}


def timing(ms: float) -> Timing:
    return Timing.of([ms, ms + 0.5, ms + 1.0])


def make(settings: dict[str, Any] | None = None) -> Profile:
    stages = tuple(
        StageProfile(
            device=device,
            layers=layers,
            forward_ms=timing(1 + device),
            backward_ms=timing(2),
            weight_ms=timing(3),
            fused_backward_ms=timing(4),
            activation_bytes=1000,
            weight_context_bytes=400,
            offloadable_bytes=900,
            offload_ms=timing(5),
            reload_ms=timing(6),
        )
        for device, layers in ((0, 4), (1, 2))
    )
    channels = tuple(
        ChannelProfile(
            name=f"{direction}:{device}",
            transfers=(TransferProfile(device=device, direction=direction, alone_bytes_per_s=1e9),),
        )
        for device in (0, 1)
        for direction in ("d2h", "h2d")
    )
    return Profile.make(
        name="small",
        machine={"torch": "2", "cores": 2},
        stages=stages,
        devices=(DeviceProfile(weight_bytes=10, gradient_bytes=10, optimizer_bytes=20, load=1.0),) * 2,
        links=(LinkProfile(message_bytes=64, message_ms=timing(0.1), latency_ms=0.05, bytes_per_s=1e9),),
        channels=channels,
        settings=Config.from_json(settings or SETTINGS, ""),
        warnings=("a word",),
    )


def changed(**sections: Any) -> Config:
    return Config.from_json({**SETTINGS, **sections}, "some.yaml")


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = make()
    profile.write(path)
    assert Profile.read(path).to_json() == json.loads(path.read_text()) == profile.to_json()
    assert Profile.read(path).to_problem() == profile.to_problem()


def test_unknown_keys_are_kept(tmp_path: Path) -> None:
    value = make().to_json()
    value["later"] = {"a": 1}
    value["stages"][0]["also"] = 2
    again = Profile.from_json(value, "profile.json").to_json()
    assert again["later"] == {"a": 1} and again["stages"][0]["also"] == 2


BAD = [
    (("format",), "optpipe-plan", "format: expected 'optpipe-profile', not 'optpipe-plan'"),
    (("version",), 2, "version: expected 1, not 2"),
    (("version",), True, "version: expected 1, not True"),
    (("stages",), [], "stages: "),
    (("stages", 0, "forward_ms"), 3, "stages[0].forward_ms: expected a mapping, not 3"),
    (("stages", 0, "forward_ms", "median"), -3, "stages[0].forward_ms.median: "),
    (("stages", 1, "device"), 2, "stages[1].device: device 2 does not exist, expected 0 to 1"),
    (("stages", 1, "weight_context_bytes"), 1001, "stages[1].weight_context_bytes: 1001 is more than"),
    (("stages", 1, "layers"), 3, "settings.pipeline.partition: is not what the stages hold"),
    (("links",), [], "links: has 0 entries, expected 1"),
    (("channels", 0, "transfers", 0, "direction"), "up", "channels[0].transfers[0].direction: "),
    (("channels", 0, "transfers", 0, "device"), 9, "channels[0].transfers[0].device: device 9 does not exist"),
    (("channels", 1, "name"), "d2h:0", "channels[1].name: 'd2h:0' is given twice"),
    (("channels", 0, "transfers"), [{"device": 0, "direction": "d2h"}] * 2, "channels[0].transfers[1]: is given twice"),
    (("devices",), [{"weight_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2}] * 3, "devices[2]: no stage uses"),
    (("settings", "batch", "microbatches"), 200_000, "settings.batch.microbatches: input should be less than or"),
    (("settings", "model", "layer"), 9, "settings.model.layer: unknown key"),
]


@pytest.mark.parametrize(("place", "value", "message"), BAD)
def test_a_mistake_is_one_line_that_names_the_key(place: tuple[Any, ...], value: Any, message: str) -> None:
    whole = make().to_json()
    here: Any = whole
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = value
    with pytest.raises(InputError) as caught:
        Profile.from_json(whole, "profile.json")
    assert str(caught.value).startswith(f"profile.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", list(make().to_json()))
def test_a_missing_part_is_named_or_has_a_default(key: str) -> None:
    value = make().to_json()
    del value[key]
    if key in ("name", "machine", "channels", "trials", "warnings"):
        Profile.from_json(value, "profile.json")
    else:
        with pytest.raises(InputError, match=f"^profile.json: {key}: "):
            Profile.from_json(value, "profile.json")


def test_the_problem_is_made_of_the_medians_and_the_configs_budgets() -> None:
    problem = make().to_problem()
    assert [device.memory_bytes for device in problem.devices] == [900, None]
    assert [stage.forward_ms for stage in problem.stages] == [1.5, 2.5]
    assert problem.stages[0].bw_ms == 4.5
    assert problem.num_microbatches == 3
    assert problem.comm_ms == (0.6,)
    assert problem.can_offload(0) and problem.can_offload(1)
    assert make().to_problem([5, 6]).devices[1].memory_bytes == 6
    with pytest.raises(InputError, match="device 1 does not exist"):
        make().to_problem([5])


def test_without_offloading_the_problem_has_no_channels() -> None:
    problem = make({**SETTINGS, "offload": {"enabled": False}}).to_problem()
    assert not problem.channels and not problem.can_offload(0)


def test_device_bytes_leave_what_the_static_bytes_do_not_take() -> None:
    profile = make().for_config(changed(memory={"device_bytes": 1000, "reserve_bytes": 100}))
    assert [device.memory_bytes for device in profile.to_problem().devices] == [860, 860]


def test_another_configs_budget_and_batch_are_taken_over() -> None:
    config = changed(memory={"activation_budget_bytes": 7}, batch={"microbatches": 5, "microbatch_size": 2})
    profile = make().for_config(config)
    assert profile.to_problem().num_microbatches == 5
    assert profile.to_problem().devices[0].memory_bytes == 7
    assert profile.training["batch"]["microbatches"] == 5


def test_a_balanced_partition_and_sections_left_out_are_what_was_measured() -> None:
    profile = make().for_config(Config.from_json({"memory": {"activation_budget_bytes": 7}}, "some.yaml"))
    assert profile.settings.model == make().settings.model
    assert profile.training["pipeline"]["partition"] == [4, 2]
    balanced = changed(pipeline={"devices": 2}, device="auto")
    assert make().for_config(balanced).settings.pipeline == make().settings.pipeline


def test_a_memory_section_left_out_is_the_profiles() -> None:
    left_out = Config.from_json({"batch": {"microbatches": 5, "microbatch_size": 2}}, "some.yaml")
    assert [device.memory_bytes for device in make().for_config(left_out).to_problem().devices] == [900, None]
    lifted = Config.from_json({"memory": {"activation_budget_bytes": None}}, "some.yaml")
    assert [device.memory_bytes for device in make().for_config(lifted).to_problem().devices] == [None, None]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {**SETTINGS["model"], "width": 128}}, "model.width: is not what was measured, expected 64"),
        ({"batch": {"microbatches": 3, "microbatch_size": 4}}, "batch.microbatch_size: is not what was measured"),
        ({"pipeline": {"devices": 3}}, "pipeline.devices: is not what was measured, expected 2"),
        ({"pipeline": {"devices": 2, "partition": [3, 3]}}, "pipeline.partition: .*expected .4, 2., or a new profile"),
        ({"device": "cuda"}, "device: is not what was measured, expected 'cpu'"),
        ({"offload": {"bandwidth_bytes_per_s": 5}}, "offload.bandwidth_bytes_per_s: is not what was measured"),
    ],
)
def test_a_config_that_would_measure_something_else_is_refused(sections: dict[str, Any], key: str) -> None:
    config = changed(**{"memory": {}, **sections})
    with pytest.raises(InputError, match=f"^some.yaml: {key}"):
        make().for_config(config)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_a_timing_summarises_its_samples(samples: list[float]) -> None:
    found = Timing.of(samples)
    assert min(samples) - 1e-5 <= found.median <= max(samples) + 1e-5
    assert 0 <= found.iqr <= max(samples) - min(samples) + 1e-5
    assert 1 <= len(found.samples) <= 20
