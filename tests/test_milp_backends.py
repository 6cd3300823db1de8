"""Back ends of the MILP: HiGHS here, HiGHS in a child that can be ended, and solvers that PuLP finds."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import semantics
from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.bounds import lower_bound
from solver.milp import child, highs, pulp_backend
from solver.milp.extract import schedule
from solver.milp.formulation import Options, formulate
from solver.milp.highs import Settings
from solver.milp.solve import solve_milp
from tests.random_schedules import fitted, random_problem, random_schedule

BACKENDS = ("highs", "highs-here", "PULP_CBC_CMD", "HiGHS")


def small(seed: int) -> tuple[Problem, object]:
    """A small problem whose budgets a random schedule fits, and that schedule with ascending microbatches."""
    rng = random.Random(seed)
    problem = random_problem(rng, devices=2, stages_per_device=1, microbatches=2)
    ops = random_schedule(problem, rng, offload=0.0, fused=0.0)
    return fitted(problem, ops), ops


@pytest.mark.parametrize("seed", range(6))
def test_all_back_ends_find_the_same_optimum(seed: int) -> None:
    problem, start = small(seed)
    values = []
    for backend in BACKENDS:
        ops, bound, facts = solve_milp(problem, start, time_limit=60, gap=0.0, backend=backend)
        assert ops is not None, (backend, facts)
        assert verify(problem, ops) == []
        assert facts["status"] == "optimal", backend
        values.append(semantics.makespan(ops))
        if bound is not None:
            assert bound <= values[-1] * (1 + 1e-6)
    assert values == pytest.approx([values[0]] * len(values), rel=1e-5)
    assert lower_bound(problem) <= values[0] * (1 + 1e-6)


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_a_valid_schedule_is_a_valid_vector(seed: int) -> None:
    """The start that is given to the solver breaks no row of the program, so it is really taken."""
    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=3)
    ops = random_schedule(problem, rng, offload=0.5, fused=0.0)
    if (ops.bytes >= 0).any():
        ops = random_schedule(problem, random.Random(seed + 1), offload=0.0, fused=0.0)
    problem = fitted(problem, ops)
    program = formulate(problem, Options(), upper=semantics.makespan(ops))
    vector = program.vector_of(ops)
    if vector is None:
        return
    assert program.matrix.violation(vector) < 1e-6 * max(1.0, semantics.makespan(ops))
    assert program.matrix.cost @ vector == pytest.approx(semantics.makespan(ops))
    again = schedule(program, vector)
    assert again is not None
    assert semantics.makespan(again) <= semantics.makespan(ops) * (1 + 1e-6)


def large() -> Problem:
    stage = {
        "forward_ms": 18.5,
        "backward_ms": 18.1,
        "weight_ms": 9.3,
        "activation_bytes": 100,
        "weight_context_bytes": 50,
        "offloadable_bytes": 100,
        "offload_ms": 18.5,
        "reload_ms": 18.5,
    }
    return Problem.model_validate(
        {
            "num_microbatches": 8,
            "devices": [{"memory_bytes": 200}] * 4,
            "stages": [{"device": d, **stage} for d in range(4)],
            "comm_ms": [0.6] * 3,
            "channels": [
                {"name": f"{x}{d}", "transfers": [{"device": d, "direction": x}]}
                for d in range(4)
                for x in ("d2h", "h2d")
            ],
        }
    )


def test_the_child_is_ended_and_what_it_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A HiGHS that never looks at its clock: the parent's limit holds, the start is there all the same."""
    from solver.ada_offload import ada_offload

    problem = large()
    start = ada_offload(problem)
    program = formulate(problem, Options(), upper=semantics.makespan(start))
    deaf = Settings(time_limit=2.0, options={"time_limit": 1e6})
    began = time.monotonic()
    result = child.solve(program.matrix, deaf, start=program.vector_of(start))
    assert result.status in ("time limit", "optimal")
    assert time.monotonic() - began < 60
    assert result.objective <= semantics.makespan(start) * (1 + 1e-6)
    assert result.solution is not None
    assert schedule(program, result.solution) is not None


def test_files_carry_the_names(tmp_path) -> None:
    problem, _ = small(1)
    program = formulate(problem)
    for name in ("model.lp", "model.mps"):
        pulp_backend.write(program, tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "F_0_0" in text
        assert program.row_names[0] in text
    with pytest.raises(InputError, match=r"ends in \.lp or \.mps"):
        pulp_backend.write(program, tmp_path / "model.txt")


def test_names_are_unique() -> None:
    program = formulate(large())
    assert len(set(program.column_names)) == program.matrix.num_columns
    assert len(set(program.row_names)) == program.matrix.num_rows


def test_an_unknown_solver_is_named() -> None:
    problem, start = small(2)
    with pytest.raises(InputError, match="'NOPE' is not found by PuLP"):
        solve_milp(problem, start, backend="NOPE")


def test_unknown_options_are_refused() -> None:
    program = formulate(small(3)[0])
    with pytest.raises(ValueError, match="no_such_option"):
        highs.solve(program.matrix, Settings(options={"no_such_option": 1}))
