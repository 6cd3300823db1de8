"""Known schedules: valid but for memory wherever they apply, and as their papers say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.bounds import lower_bound
from solver.feasibility import smallest_budgets
from solver.schedules import SCHEDULES, DoesNotApply, DoesNotFit
from solver.schedules.orders import Step, in_order
from solver.schedules.timeline import Timeline, earliest_gap, latest_gap
from tests.random_schedules import random_problem

SEEDS = st.integers(0, 2**32)


def pipeline(S: int, m: int, *, budget: int | None = None, checkpoint: int | None = None, **times: float) -> Problem:
    """Equal stages, one a device; an activation is 2 bytes, of which W frees one."""
    stage = {
        "forward_ms": times.get("f", 1.0),
        "backward_ms": times.get("b", 1.0),
        "weight_ms": times.get("w", 1.0),
        "activation_bytes": 2,
        "weight_context_bytes": 1,
        "checkpoint_bytes": checkpoint,
    }
    return Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": budget}] * S,
            "stages": [{**stage, "device": s} for s in range(S)],
            "comm_ms": [times.get("c", 0.0)] * (S - 1),
        }
    )


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_valid_wherever_it_applies(name: str, seed: int) -> None:
    problem = random_problem(random.Random(seed))
    try:
        ops = SCHEDULES[name](problem)
    except DoesNotApply as reason:
        assert len(str(reason)) > 10
        return
    assert verify(problem, ops) == []


@pytest.mark.parametrize(("S", "m"), [(1, 1), (1, 5), (4, 8), (3, 2)])
def test_classical_makespans(S: int, m: int) -> None:
    problem = pipeline(S, m)
    for name in ("gpipe", "1f1b"):
        assert semantics.makespan(SCHEDULES[name](problem)) == pytest.approx(3 * (m + S - 1))
    assert semantics.makespan(SCHEDULES["sequential"](problem)) == pytest.approx(3 * S * m)


def test_activations_held() -> None:
    problem = pipeline(4, 8)
    assert memory.peaks(problem, SCHEDULES["gpipe"](problem)) == [16] * 4
    assert memory.peaks(problem, SCHEDULES["1f1b"](problem)) == [8, 6, 4, 2]
    assert memory.peaks(problem, SCHEDULES["sequential"](problem)) == [2] * 4


def test_gpipe_with_recomputation_keeps_one_activation_and_the_checkpoints() -> None:
    problem = pipeline(3, 6, checkpoint=0)
    ops = SCHEDULES["gpipe-recompute"](problem)
    assert memory.peaks(problem, ops) == [2] * 3
    assert (ops.kind == Kind.C).sum() == 3 * 5
    with pytest.raises(DoesNotApply, match="checkpoint_bytes"):
        SCHEDULES["gpipe-recompute"](pipeline(3, 6))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.floats(0, 0.5), st.floats(0, 1), st.floats(0.5, 2))
def test_zero_bubble_is_optimal_with_room_for_one_pipeline(S: int, more: int, c: float, w: float, b: float) -> None:
    """Wherever 2 c <= W <= min(F, B) and m > S."""
    weight = 2 * c + w * (min(1.0, b) - 2 * c) if 2 * c <= min(1.0, b) else min(1.0, b)
    problem = pipeline(S, S + more, budget=2 * S, f=1.0, b=b, w=weight, c=min(c, weight / 2))
    ops = SCHEDULES["zero-bubble"](problem)
    assert verify(problem, ops) == []
    assert semantics.makespan(ops) == pytest.approx(lower_bound(problem))


def test_zb_h1_and_h2_hold_what_their_namesakes_do() -> None:
    problem = pipeline(4, 12)
    first, second = SCHEDULES["zb-h1"](problem), SCHEDULES["zb-h2"](problem)
    assert max(memory.peaks(problem, first)) == 8
    assert semantics.makespan(first) == pytest.approx(3 * 12 + 3)
    assert max(memory.peaks(problem, second)) <= 14
    assert metrics.span(problem, second) == pytest.approx(3 * 12)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for chunks, m in ((2, 8), (4, 8), (2, 7), (3, 13)):
        stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1}
        problem = Problem.model_validate(
            {
                "num_microbatches": m,
                "devices": [{"memory_bytes": None}] * 4,
                "stages": [{**stage, "device": s % 4} for s in range(4 * chunks)],
                "comm_ms": [0.0] * (4 * chunks - 1),
            }
        )
        ops = SCHEDULES["interleaved-1f1b"](problem)
        assert verify(problem, ops) == []
        if m % 4 == 0:
            assert semantics.makespan(ops) == pytest.approx(3 * (m * chunks + 3))
    with pytest.raises(DoesNotApply, match="1F1B is what applies"):
        SCHEDULES["interleaved-1f1b"](pipeline(4, 8))


def v_pipeline(D: int, m: int, *, budget: int | None = None) -> Problem:
    """Two equal stages a device in V placement."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1, "weight_context_bytes": 1}
    return Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": budget}] * D,
            "stages": [{**stage, "device": d} for d in (*range(D), *reversed(range(D)))],
            "comm_ms": [0.0] * (2 * D - 1),
        }
    )


def test_schedules_on_a_v() -> None:
    """Zero bubble within 1F1B's memory; half and a third of it for a growing bubble."""
    problem = v_pipeline(8, 24, budget=16)
    ops = SCHEDULES["zb-v"](problem)
    assert verify(problem, ops) == []
    assert semantics.makespan(ops) == pytest.approx(lower_bound(problem))
    half, third = SCHEDULES["v-half"](problem), SCHEDULES["v-min"](problem)
    assert max(memory.peaks(problem, half)) == 10
    assert max(memory.peaks(problem, third)) == 8
    assert (
        semantics.makespan(ops) < semantics.makespan(half) < semantics.makespan(third) < 1.2 * semantics.makespan(ops)
    )
    with pytest.raises(DoesNotFit):
        SCHEDULES["zb-v"](v_pipeline(8, 24, budget=4))
    with pytest.raises(DoesNotApply, match="V placement"):
        SCHEDULES["zb-v"](pipeline(4, 8))


def test_pipe_offload_moves_whole_chunks_and_hides_it() -> None:
    """Fast links: half the memory of the interleaved schedule in about its time; the first chunk leaves."""
    stage = {
        "forward_ms": 1.0,
        "backward_ms": 1.0,
        "weight_ms": 1.0,
        "activation_bytes": 10,
        "weight_context_bytes": 10,
    }
    transfers = {"offloadable_bytes": 10, "offload_ms": 0.3, "reload_ms": 0.3}
    both = ("d2h", "h2d")
    problem = Problem.model_validate(
        {
            "num_microbatches": 16,
            "devices": [{"memory_bytes": 40}] * 4,
            "stages": [{**stage, **transfers, "device": s % 4} for s in range(8)],
            "comm_ms": [0.0] * 7,
            "channels": [
                {"name": f"{d}", "transfers": [{"device": d, "direction": x} for x in both]} for d in range(4)
            ],
        }
    )
    ops = SCHEDULES["pipe-offload"](problem)
    assert verify(problem, ops) == []
    free = problem.with_budgets([None] * 4)
    assert max(memory.peaks(free, SCHEDULES["zb-interleaved"](free))) >= 80
    assert semantics.makespan(ops) <= 1.1 * semantics.makespan(SCHEDULES["zb-interleaved"](free))
    moved = set(ops.stage[ops.kind == Kind.O].tolist())
    assert moved and moved <= set(range(8)) and set(range(4)) <= moved
    with pytest.raises(DoesNotApply, match="something to offload"):
        SCHEDULES["pipe-offload"](problem.changed(channels=[]))


def test_gaps_of_a_channel() -> None:
    lane, other = Timeline(), Timeline()
    lane.take(2.0, 4.0)
    other.take(5.0, 6.0)
    assert earliest_gap([lane], 0.0, 2.0) == 0.0
    assert earliest_gap([lane], 1.0, 2.0) == 4.0
    assert earliest_gap([lane, other], 1.0, 2.0) == 6.0
    assert latest_gap([lane, other], 6.0, 1.0) == 4.0
    assert latest_gap([lane], 5.0, 2.0) == 0.0
    lane.give_back(2.0, 4.0)
    assert earliest_gap([lane], 1.0, 2.0) == 1.0


@settings(max_examples=200, deadline=None)
@given(seed=SEEDS)
def test_a_gap_is_the_first_or_last_one_that_is_free(seed: int) -> None:
    """Also where transfers take no time, and where instants differ by rounding."""
    rng = random.Random(seed)
    lane = Timeline()

    def is_free(start: float, end: float) -> bool:
        return all(stop <= start + 1e-9 or begin >= end - 1e-9 for begin, stop in lane.taken)

    for _ in range(12):
        length, instant = (
            float(rng.choice([0, 0, 1, 2])),
            rng.choice([0, 1, 2, 5, 9]) + rng.choice([0.0, 1e-15, -1e-15]),
        )
        ends = [instant, *(stop for _, stop in lane.taken), *(begin for begin, _ in lane.taken)]
        found = earliest_gap([lane], instant, length)
        assert is_free(found, found + length)
        assert found == pytest.approx(min(x for x in ends if x >= instant and is_free(x, x + length)))
        late = latest_gap([lane], instant, length)
        assert is_free(late, late + length)
        assert late == pytest.approx(max(x - length for x in ends if x <= instant and is_free(x - length, x)))
        lane.take(found, found + length)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_pipe_offload_is_valid_where_ops_take_no_time(seed: int) -> None:
    rng = random.Random(seed)
    devices, chunks = rng.choice([1, 2, 3]), 2

    def time() -> float:
        return float(rng.choice([0, 0, 1, 2, 3]))

    stages = [
        {
            "device": s % devices,
            "activation_bytes": 2,
            "weight_context_bytes": rng.randint(0, 2),
            "offloadable_bytes": 2,
            **{name: time() for name in ("forward_ms", "backward_ms", "weight_ms", "offload_ms", "reload_ms")},
        }
        for s in range(chunks * devices)
    ]
    ends = [[(d, way) for way in ("d2h", "h2d")] for d in range(devices)]
    if rng.random() < 0.5:
        ends = [[end for pair in ends for end in pair]]
    problem = Problem.model_validate(
        {
            "num_microbatches": rng.choice([2, 4, 5]),
            "devices": [{"memory_bytes": rng.choice([4, 6, 8])}] * devices,
            "stages": stages,
            "comm_ms": [float(rng.choice([0, 1]))] * (len(stages) - 1),
            "channels": [
                {"name": f"c{n}", "transfers": [{"device": d, "direction": way} for d, way in group]}
                for n, group in enumerate(ends)
            ],
        }
    )
    try:
        ops = SCHEDULES["pipe-offload"](problem)
    except (DoesNotApply, DoesNotFit) as reason:
        assert len(str(reason)) > 10
        return
    assert verify(problem, ops) == []


def test_zero_bubble_has_no_bubble_left_with_room_for_two_pipelines() -> None:
    problem = pipeline(4, 16, budget=16)
    assert metrics.span(problem, SCHEDULES["zero-bubble"](problem)) == pytest.approx(3 * 16 + 3, abs=3.1)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_one_microbatch_at_a_time_fits_the_smallest_budgets(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    tight = problem.with_budgets(list(smallest_budgets(problem)))
    assert verify(tight, SCHEDULES["sequential"](tight)) == []
    for device, budget in enumerate(smallest_budgets(problem)):
        less: list[int | None] = [None] * problem.num_devices
        less[device] = budget - 1
        with pytest.raises(DoesNotApply, match=f"device {device} "):
            SCHEDULES["sequential"](problem.with_budgets(less))


def test_orders_that_contradict_each_other_are_refused() -> None:
    problem = pipeline(2, 1)
    with pytest.raises(ValueError, match=r"device 0 never gets to B\(0,0\)"):
        in_order(problem, [[Step(Kind.B, 0, 0), Step(Kind.F, 0, 0)], [Step(Kind.F, 1, 0), Step(Kind.B, 1, 0)]])
