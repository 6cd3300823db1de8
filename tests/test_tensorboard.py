"""TensorBoard events: every figure of a step, beside the plan's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optpipe import metrics
from optpipe.errors import InputError
from optpipe.plan import Plan
from runtime.metrics_log import Step
from runtime.tensorboard import Events


def step(number: int, **changes: float) -> Step:
    figures = {
        "step": number,
        "loss": 4.0 / number,
        "learning_rate": 0.01,
        "grad_norm": None,
        "pipeline_ms": 20.0,
        "step_ms": 25.0,
        "tokens_per_s": 1000.0,
        "bubble_ratio": 0.25,
        "peak_bytes": [1800, 900],
        "host_peak_bytes": [1000, 0],
    }
    return Step(**{**figures, **changes})


def test_each_step_is_written_beside_its_plan(tiny_plan: Plan, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    planned = metrics.measure(tiny_plan.problem, tiny_plan.ops)
    with Events(tmp_path, planned) as events:
        events.add(step(1))
        events.add(step(2, validation_loss=1.5))

    def read(folder: Path, name: str) -> list[tuple[int, float]]:
        found = accumulator.EventAccumulator(str(folder))
        found.Reload()
        return [(event.step, event.value) for event in found.Scalars(name)]

    assert read(tmp_path, "loss") == [(1, 4.0), (2, 2.0)]
    assert read(tmp_path, "validation_loss") == [(2, 1.5)]
    assert read(tmp_path / "schedule_ms_planned", "schedule_ms") == [(1, pytest.approx(14.2)), (2, pytest.approx(14.2))]
    assert read(tmp_path / "schedule_ms_measured", "schedule_ms") == [(1, 20.0), (2, 20.0)]
    (folder,) = tmp_path.glob("peak_bytes_device 0_planned")
    assert read(folder, "peak_bytes/device 0")[0] == (1, planned.peak_bytes[0])


def test_without_a_folder_nothing_is_needed(tiny_plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    planned = metrics.measure(tiny_plan.problem, tiny_plan.ops)
    with Events(None, planned) as events:
        events.add(step(1))


def test_without_tensorboard_it_says_what_is_missing(tiny_plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="--tensorboard: needs TensorBoard: pip install"):
        Events(tmp_path, metrics.measure(tiny_plan.problem, tiny_plan.ops))


def test_the_log_line_says_how_long_the_schedule_took_and_should_have_taken():
    line = step(3).line(10, [2000, 1000], 14.2)
    assert line.startswith("step  3/10  loss 1.3333  1,000 tokens/s  25 ms, schedule 20 (plan 14)  bubble 25%")
    assert line.endswith("peak 90% of plan")
