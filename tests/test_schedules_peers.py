"""Known schedules beside those of other generators, on the same times and memory: rows of benchmarks/peers."""

import csv
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import peers
from optpipe import memory, semantics
from optpipe.ops import Kind
from optpipe.verify import verify
from solver.schedules import DoesNotApply, generate
from solver.schedules.errors import DoesNotFit
from solver.schedules.group_block import lags, timed_block
from solver.schedules.interleaved_zero_bubble import orders_of
from solver.schedules.link_load import links_carry
from solver.schedules.on_demand import with_transfers_on_demand
from solver.schedules.orders import in_order
from solver.schedules.pipe_offload import forwards_late, with_transfers
from solver.schedules.weights import with_weights
from solver.tables import NO_LIMIT
from tests.random_schedules import random_problem

#: Of theirs, on 4 devices and 8 microbatches: all that ours must equal or beat.
MATCHED = (
    "1F1B", "GPipe", "LoopedBFS", "interleaved-1F1B", "group-interleaved-1F1B", "InterleavedZeroBubble", "ZB", "ILP",
    "V-Half", "V-Min", "v_auto_schedule pattern search", "DualPipeV",
    "PipeOffload",
)  # fmt: skip


def all_rows():
    with (peers.HERE / "peers" / "peers.csv").open() as stream:
        return list(csv.DictReader(stream))


def rows():
    for row in peers.at_one_speed(all_rows()):
        slow_link = float(row["offload_time"] or 0) >= 0.5
        small = row["devices"] == "4" and row["microbatches"] == "8"
        if small and row["schedule"].startswith(MATCHED) and not slow_link:
            yield row


@pytest.mark.parametrize("schedule", dict.fromkeys(row["schedule"] for row in rows()))
def test_no_longer_than_a_peer(schedule):
    for row in rows():
        if row["schedule"] == schedule:
            found = peers.compared(row)
            assert not peers.longer(found), found


def test_every_row_is_compared_or_left_out_for_a_reason():
    """What needs more memory where all transfers are as fast is there both ways, and no row is lost."""
    given_rows = all_rows()
    chosen = peers.at_one_speed(given_rows)
    left_out = [row for row in given_rows if peers.why_left_out(row) is not None]
    faster = [row for row in chosen if row["schedule"].endswith("with faster first transfers")]
    same = [row for row in chosen if row["schedule"].endswith("at one speed")]
    assert len(chosen) + len(left_out) == len(given_rows) + len(same)
    assert all(peers.ours_of(row["schedule"])[0] for row in chosen)
    assert faster and len(faster) == len(same)
    for row, slower in zip(faster, same, strict=True):
        assert float(row["peak_activations"]) < float(slower["peak_activations"])
        assert row["makespan"] == slower["makespan"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["interleaved-1f1b", "zb-interleaved", "gpipe"]))
def test_any_number_of_chunks_and_microbatches(seed, name):
    rng = random.Random(seed)
    D, chunks, m = rng.randint(2, 5), rng.randint(2, 4), rng.randint(1, 13)
    stages = [
        {"device": s % D, "activation_bytes": 1}
        | {f"{op}_ms": rng.choice([0.5, 1.0, 1.5]) for op in ("forward", "backward", "weight")}
        for s in range(D * chunks)
    ]
    problem = peers.Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * D,
            "stages": stages,
            "comm_ms": [rng.choice([0.0, 0.1])] * (D * chunks - 1),
        }
    )
    assert verify(problem, generate(name, problem)) == []


@pytest.mark.parametrize(("D", "m"), [(1, 2), (2, 4), (3, 9), (4, 8), (5, 13)])
def test_dual_pipe_v(D, m):
    places = [*range(D), *reversed(range(D))]
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1}
    problem = peers.Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * D,
            "stages": [{**stage, "device": d} for d in places],
            "comm_ms": [0.0] * (2 * D - 1),
        }
    )
    ops = generate("dualpipe-v", problem)
    assert verify(problem, ops) == []
    assert max(memory.peaks(problem, ops)) <= 2 * D + 1
    assert {Kind.BW, Kind.F} < set(ops.kind.tolist()) or D == 1
    with pytest.raises(DoesNotApply, match="as many microbatches as stages"):
        generate("dualpipe-v", problem.changed(num_microbatches=2 * D - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, 0.0, 0.5, 1.0]), st.booleans())
def test_overtaking_keeps_within_the_memory(seed, overtake, lazy):
    """Wherever the order itself fits when each W runs at once, it is completed, and never above that memory."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    D = problem.num_devices
    if [stage.device for stage in problem.stages] != [s % D for s in range(problem.num_stages)]:
        return
    orders = orders_of(problem, problem.num_stages // D, rng.randint(1, D), 0)
    try:
        budgets = memory.peaks(problem, in_order(problem, with_weights(problem, orders, [0] * D, lazy=False)))
    except (DoesNotFit, ValueError):
        free = with_weights(problem, orders, [NO_LIMIT] * D, lazy=False, most_pending=0)
        budgets = memory.peaks(problem, in_order(problem, free))
    ops = in_order(problem, with_weights(problem, orders, budgets, lazy=lazy, overtake=overtake))
    assert verify(problem.with_budgets(list(budgets)), ops) == []


def test_building_block_of_pipe_offload():
    """Half the lag holds about half as much; late forwards never lengthen a schedule, nor add to its memory."""
    row = next(row for row in rows() if row["schedule"].startswith("PipeOffload(group_interleaved g=2, chunks=2"))
    problem = peers.problem_of(row, "looped").changed(num_microbatches=16)
    peak = {}
    for group, lag in ((2, lag) for lag in lags(4, 2)):
        orders = [[step for _, step in line] for line in timed_block(problem, 2, group, lag)]
        ops = in_order(problem, with_weights(problem, orders, [NO_LIMIT] * 4, lazy=False, most_pending=0))
        late = forwards_late(problem, ops)
        assert semantics.makespan(late) <= semantics.makespan(ops)
        assert all(a <= b for a, b in zip(memory.peaks(problem, late), memory.peaks(problem, ops), strict=True))
        peak[lag] = max(memory.peaks(problem, ops))
    assert peak[1] < 0.7 * peak[2]


def test_transfers_on_demand_fit_and_move_nothing_without_need():
    row = next(row for row in rows() if row["schedule"].startswith("PipeOffload(group_interleaved g=4, chunks=2"))
    plenty = peers.problem_of(row, "looped").with_budgets([None] * 4)
    orders = [[step for _, step in line] for line in timed_block(plenty, 2, 4, 1)]
    base = in_order(plenty, with_weights(plenty, orders, [NO_LIMIT] * 4, lazy=False, most_pending=0))
    untouched = with_transfers_on_demand(plenty, base)
    assert untouched is not None and Kind.O not in untouched.kind
    peak, found = max(memory.peaks(plenty, base)), 0
    for budget, age, seed in product(range(600, peak, 600), (0.0, 1e3), (None, 1, 2)):
        tight = plenty.with_budgets([budget] * 4)
        ops = with_transfers_on_demand(tight, base, age, None if seed is None else random.Random(seed))
        if ops is not None:
            found += 1
            assert verify(tight, ops) == []
    assert found >= 6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_links_cannot_carry_does_not_fit(seed):
    rng = random.Random(seed)
    D, chunks, m = rng.randint(2, 4), rng.randint(2, 3), rng.randint(3, 8)
    move = rng.choice([0.3, 0.7, 1.0, 1.5])
    stages = [
        {"device": s % D, "forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 2}
        | {"offloadable_bytes": rng.choice([1, 2]), "offload_ms": move, "reload_ms": move * rng.choice([1.0, 1.3])}
        for s in range(D * chunks)
    ]
    ways = [{"device": d, "direction": x} for d in range(D) for x in ("d2h", "h2d")]
    channels = rng.choice([[[way] for way in ways], [ways], [ways[::2], ways[1::2]]])
    problem = peers.Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * D,
            "stages": stages,
            "comm_ms": [0.0] * (D * chunks - 1),
            "channels": [{"name": str(k), "transfers": transfers} for k, transfers in enumerate(channels)],
        }
    )
    group = rng.randint((D + 1) // 2, D)
    orders = [[step for _, step in line] for line in timed_block(problem, chunks, group, lags(D, group)[-1])]
    base = in_order(problem, with_weights(problem, orders, [NO_LIMIT] * D, lazy=False, most_pending=0))
    peaks = memory.peaks(problem, base)
    assert links_carry(problem.with_budgets(list(peaks)), base)
    tight = problem.with_budgets([rng.randint(2, peak) for peak in peaks])
    if not links_carry(tight, base):
        assert all(with_transfers_on_demand(tight, base, age) is None for age in (0.0, 1.0, 1e3))
        for offloaded in range(D * chunks + 1):
            moved = with_transfers(tight, base, range(offloaded))
            budgets = [device.memory_bytes for device in tight.devices]
            assert any(a > b for a, b in zip(memory.peaks(tight, moved), budgets, strict=True))


def test_pairs_of_a_peer_share_one_way_each():
    """Both devices of a pair send in turn and reload in turn, and one may send while the other reloads."""
    row = next(row for row in rows() if row["schedule"].startswith("PipeOffload"))
    problem = peers.problem_of(row, "looped")
    ways = [{(t.device, t.direction) for t in channel.transfers} for channel in problem.channels]
    for a, b in product([(0, "d2h"), (0, "h2d"), (1, "d2h"), (1, "h2d")], repeat=2):
        together = any({a, b} <= way for way in ways)
        assert together == (a[0] == b[0] or a[1] == b[1])
