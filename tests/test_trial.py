"""The schedules that a profile is measured under are valid and keep 1F1B's memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import memory
from optpipe.ops import Kind
from optpipe.verify import verify_plan
from runtime.trial import Trial

placements = st.one_of(
    st.integers(1, 5).map(lambda n: list(range(n))),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda p: [s % p[0] for s in range(p[0] * p[1])]),
    st.integers(1, 3).map(lambda n: [min(s, 2 * n - 1 - s) for s in range(2 * n)]),
    st.integers(1, 3).map(lambda n: [s // 2 for s in range(2 * n)]),
)


@settings(max_examples=100, deadline=None)
@given(
    placements, st.integers(1, 9), st.booleans(), st.booleans(), st.one_of(st.none(), st.integers(1, 3)), st.booleans()
)
def test_trials_are_valid_plans(
    placement: list[int], microbatches: int, split: bool, offload: bool, in_flight: int | None, half_duplex: bool
) -> None:
    trial = Trial(placement, microbatches, split=split, offload=offload, in_flight=in_flight, half_duplex=half_duplex)
    plan = trial.plan()
    assert verify_plan(plan) == []
    kinds = set(plan.ops.kind.tolist())
    assert (Kind.W in kinds) == split
    assert (Kind.O in kinds) == (offload and microbatches != 0 and any(map(trial.moves, range(microbatches))))
    # One byte an activation: the peak counts microbatches.
    held = [sum(trial.limit(s) for s, d in enumerate(placement) if d == device) for device in set(placement)]
    assert all(peak <= most for peak, most in zip(memory.peaks(plan.problem, plan.ops), held, strict=True))


@given(placements, st.integers(1, 6), st.booleans())
def test_trials_may_recompute_every_forward(placement: list[int], microbatches: int, split: bool) -> None:
    plan = Trial(placement, microbatches, split=split, recompute=True).plan()
    assert verify_plan(plan) == []
    again = [op for op in plan.ops if op.kind == Kind.C]
    assert len(again) == len(placement) * microbatches


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_without_limits_a_line_of_stages_runs_1f1b(devices: int) -> None:
    plan = Trial(range(devices), 8, split=False).plan()
    # 1F1B with F = 1 and BW = 2: (m + devices - 1) x 3.
    assert plan.makespan_ms == pytest.approx(3 * (8 + devices - 1))
    assert memory.peaks(plan.problem, plan.ops) == list(range(devices, 0, -1))
