"""The MILP: its optimum is the problem's, its rows hold for schedules, a free part only gets better."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import metrics, semantics, timing
from optpipe.ops import Floats, Kind, Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.list_scheduler import list_schedule
from solver.milp import highs
from solver.milp.extract import schedule
from solver.milp.formulation import Formulation, Options, formulate, free_window
from solver.milp.highs import MilpResult, Settings
from solver.milp.incumbent import ascending, incumbent
from solver.milp.precedence import Contradiction, boolean_product
from solver.milp.solve import solve_milp
from solver.milp.sparse import Matrix, compressed
from solver.policy import draw
from solver.tables import paths, tables
from tests.random_schedules import fitted, random_problem, random_schedule, schedules
from tests.small_problems import small_problem
from tests.time_indexed import optimum

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"
seeds = st.integers(0, 2**32)


def solved(program: Formulation, vector: Floats | None = None) -> MilpResult:
    result = highs.solve(program.matrix, Settings(time_limit=300), start=vector)
    assert result.status == "optimal"
    return result


def some_schedule(problem: Problem, rng: random.Random) -> Ops | None:
    tab = tables(problem)
    return list_schedule(problem, draw(tab, rng).rule(tab, paths(tab)))


@pytest.mark.parametrize("seed", range(1, 14))
def test_the_optimum_is_that_of_an_independent_model(seed: int) -> None:
    problem = small_problem(random.Random(seed))
    program = formulate(problem)
    result = solved(program)
    ops = schedule(program, result.solution)
    assert ops is not None
    assert verify(problem, ops) == []
    assert semantics.makespan(ops) == pytest.approx(result.objective)
    assert optimum(problem, round(result.objective), ascending=True, fuse=True) == pytest.approx(result.objective)
    if program.bound_holds:
        assert optimum(problem, round(result.objective), ascending=False, fuse=True) == pytest.approx(result.objective)


@pytest.mark.parametrize("seed", [100, *range(102, 106), *range(107, 113)])
def test_the_relaxation_bounds_every_schedule(seed: int) -> None:
    """Also those whose microbatches overtake each other and that move a half."""
    problem = small_problem(random.Random(seed), devices=1 + seed % 2)
    value = solved(formulate(problem)).objective
    best = optimum(problem, round(value), ascending=False, parts=2, fuse=True)
    assert best is not None
    relaxed = formulate(problem, Options(relaxed=True), upper=value)
    assert relaxed.bound_holds
    assert solved(relaxed).objective <= best + 1e-5


@given(seeds)
@settings(max_examples=20)
def test_valid_rows_cut_no_optimum_off(seed: int) -> None:
    rng = random.Random(seed)
    problem = small_problem(rng)
    bare = Options(load=False, staircase=False)
    values = [
        solved(formulate(problem, options)).objective
        for options in (bare, Options(), Options(triangles="all"), Options(load=True, staircase=False))
    ]
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)


@given(seeds)
@settings(max_examples=60)
def test_schedules_break_no_row_and_stay_in_their_windows(seed: int) -> None:
    rng = random.Random(seed)
    problem = small_problem(rng)
    ops = some_schedule(problem, rng)
    if ops is None or (ops.kind == Kind.C).any():
        return
    for objective, value in (("makespan", semantics.makespan(ops)), ("span", metrics.span(problem, ops))):
        program = formulate(problem, Options(objective=objective, triangles="all"), upper=value)
        vector = program.vector_of(ops)
        if vector is None:
            assert problem.num_stages > 1 or (ops.kind == Kind.O).any()
            return
        assert program.matrix.violation(vector) < 1e-6
        assert program.matrix.cost @ vector == pytest.approx(value)
        again = schedule(program, vector)
        assert again is not None
        assert verify(problem, again) == []


@given(seeds)
@settings(max_examples=25)
def test_the_start_is_taken(seed: int) -> None:
    """Nodes forbidden and heuristics off, what comes back is at least as good as what went in."""
    rng = random.Random(seed)
    problem = small_problem(rng)
    ops = some_schedule(problem, rng)
    if ops is None:
        return
    program = formulate(problem, upper=semantics.makespan(ops))
    vector = program.vector_of(ops)
    if vector is None:
        return
    limits = Settings(time_limit=20, nodes=0, options={"presolve": "off", "mip_heuristic_effort": 0.0})
    result = highs.solve(program.matrix, limits, start=vector)
    assert result.objective <= semantics.makespan(ops) * (1 + 1e-9)


@given(schedules())
@settings(max_examples=80)
def test_microbatches_can_be_renumbered_to_ascend(drawn: tuple[Problem, Ops]) -> None:
    """Without offloads always, with the same times; with offloads the result is valid where there is one."""
    problem, ops = drawn
    plain = ops.take(~np.isin(ops.kind, (Kind.O, Kind.R, Kind.C)))
    renumbered = ascending(problem, plain)
    assert renumbered is not None
    roomy = problem.with_budgets([None] * problem.num_devices)
    assert verify(roomy, renumbered) == []
    for s in range(problem.num_stages):
        for kinds in ((Kind.F,), (Kind.B, Kind.BW)):
            mask = np.isin(renumbered.kind, kinds) & (renumbered.stage == s)
            order = np.argsort(renumbered.start[mask], kind="stable")
            assert (np.diff(renumbered.microbatch[mask][order]) == 1).all()
    whole = ops.take(ops.kind != Kind.C)
    if (whole.bytes < 0).all():
        with_offloads = ascending(problem, whole)
        if with_offloads is not None and len(whole) == len(ops):
            assert verify(problem, with_offloads) == []


@given(seeds)
@settings(max_examples=25)
def test_a_free_part_only_gets_better(seed: int) -> None:
    """Whatever is free, the schedule is a solution, and what is found is a schedule, no longer; with parts too."""
    rng = random.Random(seed)
    problem = random_problem(rng, devices=2, microbatches=4)
    parts = rng.random() < 0.7
    ops = random_schedule(problem, rng, offload=0.4, fused=0.3, parts=0.5 if parts else 0.0)
    if (ops.kind == Kind.C).any():
        return
    problem = fitted(problem, ops)
    found = incumbent(problem, formulate(problem).table, ops, parts=parts)
    if found is None:
        return
    value = found.objective["makespan"]
    begin = rng.uniform(0, value)
    free = free_window(found, problem, begin, begin + 0.3 * value)
    program = formulate(problem, Options(parts=parts), upper=value * (1 + 1e-6), known=found, free=free)
    start = program.vector(found)
    assert program.matrix.violation(start) < 1e-5
    better = schedule(program, solved(program, start).solution)
    assert better is not None
    assert verify(problem, better) == []
    assert semantics.makespan(better) <= value * (1 + 1e-3)  # whole bytes, of as few as a hundred


@pytest.mark.parametrize("seed", [100, 103, 105, *range(107, 112), 135, 149])
def test_parts_are_worth_no_less_than_halves(seed: int) -> None:
    """The optimum with parts lies between that of an independent model with halves and the relaxation."""
    coarse = small_problem(random.Random(seed), devices=1 + seed % 2)
    problem = _finer(coarse)
    whole = solved(formulate(problem)).objective
    program = formulate(problem, Options(parts=True), upper=whole)
    result = solved(program)
    ops = schedule(program, result.solution)
    assert ops is not None
    assert verify(problem, ops) == []
    assert semantics.makespan(ops) == pytest.approx(result.objective, rel=1e-5)
    halves = optimum(coarse, round(whole), ascending=True, parts=2, fuse=True)
    assert halves is not None
    assert result.objective <= min(halves, whole) + 1e-5
    relaxed = solved(formulate(problem, Options(relaxed=True), upper=whole)).objective
    assert result.objective >= relaxed - 1e-5


def _finer(problem: Problem) -> Problem:
    """The problem with a million bytes for each, so that parts of an activation are whole bytes."""
    value = problem.to_json()
    for stage in value["stages"]:
        for name in ("activation_bytes", "weight_context_bytes", "offloadable_bytes"):
            stage[name] *= 1_000_000
    finer = Problem.model_validate(value)
    budgets = [d.memory_bytes and d.memory_bytes * 1_000_000 for d in problem.devices]
    return finer.with_budgets(budgets)


def test_nothing_free_keeps_the_schedule() -> None:
    problem = Problem.read(INSTANCES / "flat-s4-m8-memS2-off1.json")
    ops = some_schedule(problem, random.Random(1))
    assert ops is not None
    ops = timing.earliest(problem, ops)  # what a rule waits for is no part of the order
    found = incumbent(problem, formulate(problem).table, ops)
    assert found is not None
    value = semantics.makespan(ops)
    program = formulate(problem, upper=value, known=found, free=np.zeros(len(found.start), bool))
    assert program.matrix.num_binaries <= 1  # the objective in whole units
    assert solved(program).objective == pytest.approx(value)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_known_optimum(objective: str) -> None:
    problem = Problem.read(INSTANCES / "flat-s4-m8-memS-nooff.json")
    start = min((some_schedule(problem, random.Random(s)) for s in range(5)), key=semantics.makespan)
    found = solve_milp(problem, start, objective=objective, gap=0.0, time_limit=60)
    value = {"makespan": semantics.makespan, "span": lambda ops: metrics.span(problem, ops)}[objective]
    assert found.ops is not None
    assert verify(problem, found.ops) == []
    assert found.bound == pytest.approx(value(found.ops), rel=1e-6)
    if objective == "makespan":
        assert found.bound == pytest.approx(456.3)


def test_the_span_leaves_room_to_start_late() -> None:
    """Device 1 has to wait for device 0, which the makespan counts and the span does not."""
    rng = random.Random(5)
    for _ in range(6):
        problem = small_problem(rng, devices=2)
        long = solve_milp(problem, None, gap=0.0, time_limit=60, backend="highs-here")
        short = solve_milp(problem, None, objective="span", gap=0.0, time_limit=60, backend="highs-here")
        assert long.ops is not None
        assert short.ops is not None
        assert verify(problem, short.ops) == []
        assert metrics.span(problem, short.ops) <= metrics.span(problem, long.ops) + 1e-6
        assert short.bound is None or short.bound <= metrics.span(problem, short.ops) + 1e-6


def test_what_is_too_short_contradicts_itself() -> None:
    problem = Problem.read(INSTANCES / "flat-s4-m8-memS-nooff.json")
    with pytest.raises(Contradiction):
        formulate(problem, upper=300.0)


def test_too_large_a_program_is_not_built() -> None:
    problem = Problem.read(INSTANCES / "scale-s64-m256-memS2-off1.json")
    found = solve_milp(problem, None, time_limit=1)
    assert found.ops is None
    assert found.facts["status"] == "too large"


@given(seeds)
@settings(max_examples=30)
def test_boolean_product(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.random((9, 13)) < 0.2, rng.random((13, 11)) < 0.2
    assert (boolean_product(a, b) == (a.astype(int) @ b.astype(int) > 0)).all()


def test_entries_of_one_place_add_up() -> None:
    loose = Matrix(
        cost=np.zeros(2),
        lower=np.zeros(2),
        upper=np.ones(2),
        integer=np.zeros(2, bool),
        first=np.array([1, 0, 1, 1]),
        column=np.array([0, 1, 1, 0]),
        value=np.array([1.0, 5.0, 2.0, 3.0]),
        row_lower=np.zeros(2),
        row_upper=np.ones(2),
    )
    found = compressed(loose)
    assert found.first.tolist() == [0, 1, 3]
    assert found.column.tolist() == [1, 0, 1]
    assert found.value.tolist() == [5.0, 4.0, 2.0]
