"""Triangle rows: what breaks them is found; added lazily they cut no schedule off and keep limits."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale import sized
from optpipe import semantics
from optpipe.ops import Floats, Kind
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.ada_offload import ada_offload
from solver.milp import child, highs, pulp_backend
from solver.milp.extract import schedule
from solver.milp.formulation import Formulation, Options, Triangles, formulate, free_window
from solver.milp.highs import Settings
from solver.milp.incumbent import incumbent
from solver.milp.lazy import Cut, cut
from solver.milp.model import Objective
from solver.milp.orders import (
    NO_ORDERS,
    OrderBits,
    Orders,
    broken_triangles,
    by_device,
    flat,
    open_triples,
    triangle_rows,
)
from solver.milp.prove import prove_by_blocks
from solver.milp.sparse import INF, Matrix
from tests.random_schedules import fitted, random_problem, random_schedule
from tests.small_problems import small_problem

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"
seeds = st.integers(0, 2**32)
WAYS: tuple[Triangles, ...] = ("none", "lazy", "all")


def bits_of(n: int, rng: np.random.Generator, part: float = 0.8) -> tuple[OrderBits, int]:
    """Order bits of n ops of which a part of the pairs is open, in random directions; how many columns they have."""
    bits = OrderBits(np.zeros((n, n)), np.zeros((n, n)), np.full((n, n), -1, np.int64))
    a, b = np.nonzero(np.triu(rng.random((n, n)) < part, 1))
    swap = rng.random(len(a)) < 0.5
    a, b = np.where(swap, b, a), np.where(swap, a, b)
    bits.column[a, b] = bits.column[b, a] = rng.permutation(len(a))
    bits.sign[a, b], bits.sign[b, a], bits.const[b, a] = 1.0, -1.0, 1.0
    return bits, len(a)


def rounds(program: Formulation, seconds: float = 60.0) -> Cut:
    """The rows that rounds on the relaxation add."""
    matrix = program.matrix
    root = highs._Root(matrix, Settings(), None)
    return cut(root, matrix.orders, matrix.num_rows, time.monotonic() + seconds, None)


def relaxed_value(matrix: Matrix) -> float:
    return highs.solve(matrix._replace(integer=np.zeros_like(matrix.integer), orders=NO_ORDERS)).objective


def shortest(seed: int) -> tuple[Problem, float]:
    """A problem of which the relaxation breaks triangle rows, and the makespan of a schedule."""
    problem = sized(4, 3 + seed % 4)
    return problem, semantics.makespan(ada_offload(problem))


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_broken_rows_are_those_of_every_three(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits, columns = bits_of(int(rng.integers(1, 8)), rng)
    x = rng.random(max(1, columns)).round(1)
    before = bits.const + np.where(bits.column >= 0, bits.sign * x[bits.column], 0.0)
    expected = {}
    for p, q, r in permutations(range(len(before)), 3):
        excess = before[p, q] + before[q, r] - before[p, r] - 1.0
        if min(bits.column[p, q], bits.column[q, r], bits.column[p, r]) >= 0 and excess > 0.05:
            expected[min((p, q, r), (q, r, p), (r, p, q))] = excess
    *ops, over = broken_triangles(bits, x, 0.05)
    found = [min((p, q, r), (q, r, p), (r, p, q)) for p, q, r in zip(*(part.tolist() for part in ops), strict=True)]
    assert len(found) == len(set(found))
    assert dict(zip(found, over.tolist(), strict=True)) == pytest.approx(expected)
    rows = triangle_rows(bits, *ops)
    assert (rows.value * x[rows.column]).sum(axis=1) - rows.upper == pytest.approx(over)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_an_order_breaks_no_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits, columns = bits_of(8, rng)
    x = np.zeros(columns)
    place = rng.permutation(8)
    a, b = np.nonzero((bits.column >= 0) & (bits.sign > 0))
    x[bits.column[a, b]] = place[a] < place[b]
    assert len(broken_triangles(bits, x, 1e-9)[0]) == 0


def test_a_cycle_breaks_a_row() -> None:
    """In a program: three ops one after the other in a circle break a row; nothing but halves breaks none."""
    program = formulate(Problem.read(INSTANCES / "unit-s4-m8-meminf-nooff.json"))
    device = program.devices[0]
    halves = np.where(program.matrix.integer, 0.5, 0.0)
    assert len(broken_triangles(device, halves, 0.02)[0]) == 0
    p, q, r = (int(ops[0]) for ops in open_triples(device))
    cycle = halves.copy()
    for a, b in ((p, q), (q, r), (r, p)):
        cycle[device.column[a, b]] = (1.0 - device.const[a, b]) * device.sign[a, b]
    *ops, _ = broken_triangles(device, cycle, 0.02)
    assert {p, q, r} in [set(triple) for triple in zip(*(part.tolist() for part in ops), strict=True)]


def test_orders_travel_with_the_program() -> None:
    program = formulate(shortest(1)[0], Options(triangles="lazy"))
    again = Matrix.of_arrays(program.matrix.arrays())
    assert all((a == b).all() for a, b in zip(again[:-1], program.matrix[:-1], strict=True))
    told = [device for device in program.devices if (device.column >= 0).any()]
    for bits, device in zip(by_device(again.orders), told, strict=True):
        n = len(bits.column)
        assert (bits.column == device.column[:n, :n]).all()
        there = bits.column >= 0
        for mine, theirs in ((bits.const, device.const), (bits.sign, device.sign)):
            assert (mine[there] == theirs[:n, :n][there]).all()
        assert not (device.column[n:] >= 0).any()


@given(seeds, st.sampled_from(["makespan", "span"]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_the_optimum_stays(seed: int, objective: Objective, load: bool) -> None:
    problem = small_problem(random.Random(seed))
    options = Options(objective=objective, load=load, staircase=load)
    programs = [formulate(problem, replace(options, triangles=way)) for way in WAYS]
    results = [highs.solve(program.matrix, Settings(time_limit=300)) for program in programs]
    assert [result.status for result in results] == ["optimal"] * 3
    assert [result.objective for result in results] == pytest.approx([results[0].objective] * 3, rel=1e-6)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_optimum_stays_where_rows_are_added(objective: Objective, load: bool) -> None:
    problem, upper = shortest(1 if load and objective == "makespan" else 0)
    options = Options(objective=objective, load=load, staircase=False)
    values = []
    for way in WAYS:
        program = formulate(problem, replace(options, triangles=way), upper=upper * (1 + 1e-6))
        result = highs.solve(program.matrix, Settings(time_limit=300))
        assert result.status == "optimal"
        assert result.rows == program.matrix.num_rows + result.lazy_rows
        ops = schedule(program, result.solution)
        assert ops is not None
        assert verify(problem, ops) == []
        values.append(result.objective)
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_root_bound_lies_between(seed: int, objective: Objective) -> None:
    problem, upper = shortest(seed)
    for load in (False, True):
        options = Options(objective=objective, load=load, staircase=load)
        programs = {way: formulate(problem, replace(options, triangles=way), upper=upper) for way in WAYS}
        found = rounds(programs["lazy"])
        low, high = (relaxed_value(programs[way].matrix) for way in ("none", "all"))
        value = relaxed_value(programs["lazy"].matrix.with_rows(found.rows))
        assert low - 1e-6 * upper <= found.bound <= value + 1e-6 * upper
        assert value <= high + 1e-6 * upper


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_schedules_break_no_added_row(seed: int) -> None:
    """The whole program and a free part of it, with parts too."""
    rng = random.Random(seed)
    problem = random_problem(rng, devices=2, microbatches=5)
    ops = random_schedule(problem, rng, offload=0.4, fused=0.3)
    if (ops.kind == Kind.C).any() or (ops.bytes >= 0).any():
        return
    problem = fitted(problem, ops)
    value = semantics.makespan(ops)
    whole = formulate(problem, Options(triangles="lazy", load=False), upper=value)
    found = incumbent(problem, whole.table, ops)
    if found is None:
        return
    begin = rng.uniform(0, 0.5 * value)
    free = free_window(found, problem, begin, begin + 0.5 * value)
    options = Options(triangles="lazy", parts=rng.random() < 0.5)
    part = formulate(problem, options, upper=value * (1 + 1e-6), known=found, free=free)
    for program in (whole, part):
        rows = rounds(program).rows
        assert program.matrix.with_rows(rows).violation(program.vector(found)) < 1e-5


def test_the_best_schedule_breaks_no_added_row() -> None:
    problem, upper = shortest(1)
    program = formulate(problem, Options(triangles="lazy", load=False, staircase=False), upper=upper)
    rows = rounds(program).rows
    assert len(rows.upper)
    best = highs.solve(formulate(problem, Options(), upper=upper).matrix, Settings(time_limit=300))
    ops = schedule(formulate(problem, Options(), upper=upper), best.solution)
    assert ops is not None
    vector = program.vector_of(ops)
    assert vector is not None
    assert program.matrix.with_rows(rows).violation(vector) < 1e-6


def _result(matrix: Matrix, solve: object, seed: int) -> tuple[float, int, int, Floats]:
    result = (child if solve == "child" else highs).solve(matrix, Settings(time_limit=300, seed=seed))
    assert result.status == "optimal"
    assert result.solution is not None
    return result.objective, result.nodes, result.lazy_rows, result.solution


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same(seed: int) -> None:
    """Twice in this process, and in a child, which knows how many rows were added there."""
    problem, upper = shortest(1)
    program = formulate(problem, Options(triangles="lazy", staircase=False), upper=upper)
    first, *others = (_result(program.matrix, where, seed) for where in ("here", "here", "child"))
    assert first[2] > 0
    for other in others:
        assert other[:3] == first[:3]
        assert (other[3] == first[3]).all()


class _Slow:
    """A relaxation that takes what time it is given, and always has the same cycle."""

    def __init__(self, x: Floats) -> None:
        self.x, self.given, self.rows = x, [], 0

    def solve(self, seconds: float) -> tuple[float, Floats] | None:
        self.given.append(seconds)
        if seconds <= 0:
            return None
        time.sleep(0.05)
        return 1.0, self.x

    def add(self, rows: object) -> None:
        self.rows += 1


def cyclic(n: int) -> tuple[Orders, Floats]:
    """n ops of one device with all pairs open, and a solution with many cycles."""
    rng = np.random.default_rng(0)
    bits, columns = bits_of(n, rng, 1.0)
    return flat(0, bits), rng.integers(0, 2, columns).astype(np.float64)


def test_rounds_end_in_time_and_when_asked() -> None:
    orders, x = cyclic(12)
    endless = _Slow(x)
    cut(endless, orders, 1000, time.monotonic() + 60, None)
    assert 1 < len(endless.given) < 100
    late = _Slow(x)
    found = cut(late, orders, 1000, time.monotonic() - 1, None)
    assert late.rows == 0
    assert found.bound == -INF
    enough = _Slow(x)
    found = cut(enough, orders, 1000, time.monotonic() + 60, lambda bound: bound >= 1.0)
    assert (len(enough.given), enough.rows, found.bound) == (1, 0, 1.0)


def test_devices_with_too_many_ops_are_left_out() -> None:
    """Their threes alone would take longer than there is time."""
    orders, x = cyclic(300)
    assert len(cut(_Slow(x), orders, 1000, time.monotonic() + 60, None).rows.upper) == 0


def test_the_time_limit_counts_the_rounds() -> None:
    problem = Problem.read(INSTANCES / "unit-s8-m32-memS-nooff.json")
    program = formulate(problem, Options(triangles="lazy"), upper=150.0)
    # The relaxation takes seconds, but ends when it has to.
    assert highs._Root(program.matrix, Settings(), None).solve(0.1) is None
    began = time.monotonic()
    result = child.solve(program.matrix, Settings(time_limit=2.0))
    assert result.status == "time limit"
    assert time.monotonic() - began < 5.0


def test_a_wish_to_stop_ends_the_rounds() -> None:
    problem = Problem.read(INSTANCES / "unit-s8-m16-memS-nooff.json")
    program = formulate(problem, Options(triangles="lazy"), upper=69.0)
    began = time.monotonic()
    result = child.solve(program.matrix, Settings(time_limit=120), stop=lambda _: True)
    assert result.status == "stopped"
    assert time.monotonic() - began < 30


def test_a_bound_that_is_enough_ends_it_at_the_root() -> None:
    """Here the relaxation proves what the best schedule takes, 27 ms."""
    problem = Problem.read(INSTANCES / "unit-s4-m8-memS-nooff.json")
    start = ada_offload(problem)
    upper = semantics.makespan(start)
    program = formulate(problem, Options(triangles="lazy"), upper=upper)
    vector = program.vector_of(start)
    result = highs.solve(program.matrix, Settings(time_limit=60), start=vector, stop=lambda bound: bound >= 26.9)
    assert (result.status, result.nodes) == ("stopped", 0)
    assert result.bound == pytest.approx(27.0)
    assert result.objective == pytest.approx(upper)


def test_proofs_take_lazy_rows() -> None:
    """The relaxation of some devices, and of all: as good a bound, and none above a schedule."""
    problem, upper = shortest(1)
    proofs = [
        prove_by_blocks(problem, Options(triangles=way), Settings(time_limit=60), upper, 0.0, in_child=False)
        for way in WAYS
    ]
    assert all(proof.exhausted for proof in proofs)
    assert [proof.bound for proof in proofs] == pytest.approx([proofs[0].bound] * 3, rel=1e-6)
    part = formulate(problem, Options(relaxed=True, devices=(1, 2), triangles="lazy"), upper=upper)
    assert set(part.matrix.orders.device.tolist()) <= {1, 2}


def test_other_back_ends_have_none_of_them() -> None:
    problem = small_problem(random.Random(3))
    programs = [formulate(problem, Options(triangles=way)) for way in ("none", "lazy")]
    assert programs[0].row_names == programs[1].row_names
    values = [pulp_backend.solve(program, "HiGHS", Settings(time_limit=60)).objective for program in programs]
    assert values == pytest.approx([values[0]] * 2)
