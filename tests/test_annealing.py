"""Annealing, of device orders and of sequences with transfers: never worse, always valid, the same without numba."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics, timing
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.annealing import anneal
from solver.annealing.clock import INFINITE, Walk
from solver.annealing.exchange import alike, exchange_microbatches
from solver.annealing.moves import BLOCK, LENGTH, SLOTS, _move_block, value_of
from solver.annealing.places import UNDO, set_moved, take_back
from solver.annealing.sequences import Sequences, anneal_sequences
from solver.compiled import COMPILED, column
from solver.schedules import generate
from tests.random_schedules import fitted, random_problem, random_schedule


def _with_transfers(rng: random.Random) -> tuple[Problem, Ops]:
    """A random schedule with transfers, and a problem with as much memory as it needs."""
    problem = random_problem(rng)
    ops = timing.earliest(problem, random_schedule(problem, rng, recompute=0.0))
    return fitted(problem, ops), ops


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_annealed_schedules_are_valid_and_no_longer(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    ops = timing.earliest(problem, random_schedule(problem, rng, offload=0.0))
    problem = fitted(problem, ops)
    found = anneal(problem, ops, seconds=20.0, seed=seed, rounds=1)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= semantics.makespan(ops) * (1 + 1e-9)
    again = anneal(problem, ops, seconds=20.0, seed=seed, rounds=1)
    assert list(again) == list(found)


def test_a_bad_order_is_mended_to_the_optimum() -> None:
    """Two devices, unit times: device 0 computes 3 m and cannot be sooner than device 1, which starts 1 later."""
    m = 4
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1, "weight_context_bytes": 1}
    problem = Problem.model_validate(
        {
            "num_microbatches": m,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": 0, **stage}, {"device": 1, **stage}],
            "comm_ms": [0.0],
        }
    )
    ops = random_schedule(problem, random.Random(1), offload=0.0, fused=0.0)
    assert semantics.makespan(ops) > 3 * m + 1
    found = anneal(problem, ops, seconds=30.0, goal=3 * m + 1.0, seed=1)
    assert verify(problem, found) == []
    assert semantics.makespan(found) == pytest.approx(3 * m + 1)


def test_a_channel_that_carries_nothing_is_no_matter() -> None:
    rng = random.Random(1)
    problem = random_problem(rng)
    ops = timing.earliest(problem, random_schedule(problem, rng, recompute=0.0))
    channels = problem.to_json().get("channels", [])
    idle = fitted(problem, ops).changed(channels=[{"name": "idle", "transfers": []}, *channels])
    assert verify(idle, anneal_sequences(idle, ops, seconds=60.0, effort=0.1, seed=1)) == []


def test_transfers_are_refused() -> None:
    rng = random.Random(5)
    while True:
        problem = random_problem(rng)
        ops = random_schedule(problem, rng, offload=1.0)
        if not ops.is_compute.all():
            break
    with pytest.raises(ValueError, match="transfers"):
        anneal(problem, ops, seconds=1.0)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_clock_of_sequences_is_no_slower_than_the_plan(seed: int) -> None:
    """Memory is waited for as long as it has to be, which may be less than for all that was free before."""
    rng = random.Random(seed)
    problem, ops = _with_transfers(rng)
    sequences = Sequences(problem, ops)
    value = value_of(sequences.walk, INFINITE, column([0.0] * SLOTS, float))
    if value >= INFINITE:  # what takes no time has no place of its own at its instant
        assert min(timing.semantics.durations(problem, ops)) == 0
        return
    found = sequences.schedule(sequences.walk.order, sequences.moved)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= semantics.makespan(ops) * (1 + 1e-9)
    assert sorted(o.label for o in found) == sorted(o.label for o in ops)


def _places(walk: Walk) -> list[int]:
    """Where each op in the order says that it is."""
    items: Any = walk.items
    return [int(items[u]["place"] if COMPILED else items[u].place) for u in walk.order]


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_block_passes_another_one_and_can_be_taken_back(seed: int, overtake: bool) -> None:
    """What contradicts neither data nor memory then is a valid schedule, timed as by ``timing``."""
    rng = random.Random(seed)
    problem, ops = _with_transfers(rng)
    sequences = Sequences(problem, ops)
    walk, state = sequences.walk, column([0.0] * SLOTS, float)
    undo, block = column([0] * UNDO, int), column([0] * BLOCK, int)
    first = value_of(walk, INFINITE, state)
    for _ in range(20):
        before = list(walk.order)
        u, step = rng.randrange(len(before)), rng.choice([-1, 1])
        undo[0] = 0
        done = _move_block(walk, undo, u, step, overtake, block)
        assert sorted(walk.order) == sorted(before)
        assert _places(walk) == list(range(len(before)))
        assert not done or undo[0] > 0
        value = value_of(walk, INFINITE, state) if done else INFINITE
        if value < INFINITE:
            length = state[LENGTH]
            found = sequences.schedule(walk.order, sequences.moved)
            assert verify(problem, found) == []
            assert semantics.makespan(found) == pytest.approx(length)
            assert semantics.makespan(timing.earliest(problem, found)) <= length * (1 + 1e-9)
        take_back(walk.items, walk.order, undo)
        assert list(walk.order) == before
        assert _places(walk) == list(range(len(before)))
        assert value_of(walk, INFINITE, state) == first


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_microbatches_change_places_and_can_be_taken_back(seed: int, along: bool, alone: bool) -> None:
    """What contradicts neither data nor memory then is a valid schedule that moves as much, timed as by ``timing``."""
    rng = random.Random(seed)
    problem, ops = _with_transfers(rng)
    sequences = Sequences(problem, ops)
    walk, state = sequences.walk, column([0.0] * SLOTS, float)
    items: Any = walk.items
    undo, n = column([0] * UNDO, int), len(walk.order)
    changed, before_bytes = column([0] * (n + UNDO), int), column([0] * (n + UNDO), int)

    def moved() -> list[int]:
        return [int(items[u]["free"] if COMPILED else items[u].free) for u in range(n)]

    first, amounts = value_of(walk, INFINITE, state), moved()
    chained = [u for u in range(n) if sequences.ops.kind[u] in (Kind.F, Kind.B, Kind.BW)]
    for _ in range(20):
        before = list(walk.order)
        u = rng.choice(chained)
        mate = alike(walk, u, rng.randint(1, 3), rng.choice([-1, 1]))
        if mate < 0:
            continue
        assert sequences.ops.kind[u] == sequences.ops.kind[mate] and sequences.ops.stage[u] == sequences.ops.stage[mate]
        undo[0] = 0
        pairs = exchange_microbatches(walk, undo, changed, before_bytes, 0, u, mate, along, alone, rng.randint(1, 3))
        assert sorted(walk.order) == sorted(before) and list(walk.order) != before
        assert _places(walk) == list(range(n))
        assert sorted(moved()) == sorted(amounts) and (along or moved() == amounts)
        if value_of(walk, INFINITE, state) < INFINITE:
            length = state[LENGTH]
            out = [items[v]["free"] if COMPILED else items[v].free for v in range(n)]
            found = sequences.schedule(list(walk.order), out)
            assert verify(problem, found) == []
            assert semantics.makespan(found) == pytest.approx(length)
        take_back(walk.items, walk.order, undo)
        for k in range(pairs - 1, -1, -1):
            set_moved(walk.items, changed[k], before_bytes[k])
        assert list(walk.order) == before and _places(walk) == list(range(n)) and moved() == amounts
        assert value_of(walk, INFINITE, state) == first


def test_what_others_overtake_on_the_host_is_found() -> None:
    """Three devices, of which the first and the last hold two microbatches; CP-SAT proves that 24 ms is the least, and
    that in order 25 is (whole transfers and halves)."""
    times = [(2.0, 3.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.0, 4.0)]
    rest = {"activation_bytes": 4, "weight_context_bytes": 1, "offloadable_bytes": 4, "offload_ms": 4, "reload_ms": 4}
    lanes = [(device, direction) for device in range(3) for direction in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 3,
            "devices": [{"memory_bytes": 8}, {"memory_bytes": None}, {"memory_bytes": 8}],
            "stages": [
                {"device": device, "forward_ms": f, "backward_ms": b, "weight_ms": w, **rest}
                for device, (f, b, w) in enumerate(times)
            ],
            "comm_ms": [0.0] * 2,
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )
    ops = ada_offload(problem)
    assert semantics.makespan(anneal_sequences(problem, ops, seconds=60.0, effort=5, seed=1)) >= 25
    found = anneal_sequences(problem, ops, seconds=60.0, goal=24.0, effort=20, exchange=True, seed=1)
    assert verify(problem, found) == []
    assert semantics.makespan(found) == 24


def test_where_one_microbatch_fits_blocks_pass_each_other() -> None:
    """From one microbatch after the other: each single op that passes another one contradicts the order of memory."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 2, "weight_context_bytes": 1}
    stage |= {"offloadable_bytes": 2, "offload_ms": 1.0, "reload_ms": 1.0}
    lanes = [(device, direction) for device in range(4) for direction in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 6,
            "devices": [{"memory_bytes": 2}] * 4,
            "stages": [{"device": device, **stage} for device in range(4)],
            "comm_ms": [0.0] * 3,
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )
    ops = generate("sequential", problem)
    assert semantics.makespan(ops) == 72
    found = anneal_sequences(problem, ops, seconds=60.0, effort=5, seed=1)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= 38


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_annealed_sequences_are_valid_and_no_longer(seed: int, parts: bool, exchange: bool) -> None:
    rng = random.Random(seed)
    problem, ops = _with_transfers(rng)
    told: list[Ops] = []
    options = {"seconds": 20.0, "seed": seed, "effort": 0.1, "parts": parts, "exchange": exchange}
    found = anneal_sequences(problem, ops, **options, on_improvement=told.append)
    for each in (*told, found):
        assert verify(problem, each) == []
        assert semantics.makespan(each) <= semantics.makespan(ops) * (1 + 1e-9)
    assert list(anneal_sequences(problem, ops, **options)) == list(found)


def test_annealing_finds_what_to_offload() -> None:
    """Memory for half of the microbatches in flight that keep both devices busy, and links that are fast enough."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 2, "weight_context_bytes": 1}
    stage |= {"offloadable_bytes": 2, "offload_ms": 0.5, "reload_ms": 0.5}
    lanes = [(device, direction) for device in range(4) for direction in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 8,
            "devices": [{"memory_bytes": 4}] * 4,
            "stages": [{"device": device, **stage} for device in range(4)],
            "comm_ms": [0.0] * 3,
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )
    ops = generate("zero-bubble", problem)
    assert ops.is_compute.all() and semantics.makespan(ops) > 40
    found = anneal_sequences(problem, ops, seconds=60.0, goal=30.0, effort=5, seed=1)
    assert verify(problem, found) == []
    assert semantics.makespan(found) <= 30.0


def test_recomputation_and_many_channels_are_left_alone() -> None:
    rng = random.Random(3)
    while True:
        problem = random_problem(rng)
        ops = timing.earliest(problem, random_schedule(problem, rng, recompute=1.0))
        if (ops.kind == Kind.C).any():
            break
    assert anneal_sequences(problem, ops, seconds=1.0) is ops


_SCRIPT = """
import random
from optpipe import timing
from solver.annealing import anneal
from solver.annealing.sequences import anneal_sequences
from tests.random_schedules import random_problem, random_schedule
rng = random.Random(7)
problem = random_problem(rng, devices=3, stages_per_device=2, microbatches=4)
ops = timing.earliest(problem, random_schedule(problem, rng, offload=0.0))
print([(o.label, round(o.start, 9)) for o in anneal(problem, ops, seconds=60.0, seed=3, rounds=1)])
ops = timing.earliest(problem, random_schedule(problem, rng, recompute=0.0))
print([(o.label, round(o.start, 9)) for o in anneal_sequences(problem, ops, seconds=60.0, seed=3, effort=0.3)])
"""


def test_plain_python_gives_the_same_schedule() -> None:
    pytest.importorskip("numba", reason="without numba there is only plain Python")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
        for extra in ({"OPTPIPE_COMPILE": "1"}, {"OPTPIPE_COMPILE": "0"})
    ]
    assert outputs[0] == outputs[1]
    assert "F(0,0)" in outputs[0]
