"""The program of a problem as a file: what another solver finds in it is the best schedule."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import highspy
import pulp
import pytest
from click.testing import CliRunner, Result

from cli import main
from optpipe.errors import InputError
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from solver.milp.export import program_of
from solver.schedules import generate
from tests.small_problems import small_problem


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def unit_problem() -> Problem:
    """F = B = W = 1 on two devices, three microbatches, no messages, all the memory there is: 10 ms, since the second
    device cannot start before 1 and has 9 to do."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 2, "weight_context_bytes": 1}
    return Problem.model_validate(
        {
            "num_microbatches": 3,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [{"device": d, **stage} for d in range(2)],
            "comm_ms": [0.0],
        }
    )


@pytest.mark.parametrize("form", ["mps", "lp"])
def test_other_solvers_find_the_known_optimum_in_the_exported_file(form, unit_problem, tmp_path):
    start = generate("gpipe", unit_problem, "makespan")
    plan = Plan(unit_problem, start, None, {"method": "gpipe"})
    assert plan.makespan_ms > 10
    plan.write(tmp_path / "plan.json")
    path = tmp_path / f"program.{form}"
    done = invoke("export", tmp_path / "plan.json", "--to", form, "-o", path)
    assert done.exit_code == 0, done.output
    assert [_by_cbc(path), _by_highs(path)] == pytest.approx([10.0, 10.0])


def _by_highs(path: Path) -> float:
    """By HiGHS, as it reads the file itself, with the names that are in it."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    assert "F_0_0" in highs.getLp().col_names_
    highs.run()
    assert highs.modelStatusToString(highs.getModelStatus()) == "Optimal"
    return float(highs.getObjectiveValue())


def _by_cbc(path: Path) -> float:
    """By CBC, as it reads the file itself."""
    if path.suffix == ".mps":
        variables, model = pulp.LpProblem.fromMPS(str(path))
        assert variables
        model.solve(pulp.PULP_CBC_CMD(msg=False))
        assert pulp.LpStatus[model.status] == "Optimal"
        return float(pulp.value(model.objective))
    solution = path.with_suffix(".txt")
    command = [pulp.PULP_CBC_CMD().path, str(path), "solve", "solution", str(solution)]
    subprocess.run(command, capture_output=True, check=True)
    first = solution.read_text().splitlines()[0]
    assert first.startswith("Optimal")
    return float(first.split()[-1])


def test_what_the_program_leaves_out_is_said(tiny_plan_file, tmp_path):
    done = invoke("export", tiny_plan_file, "--to", "mps", "-o", tmp_path / "program.mps")
    assert done.exit_code == 0
    assert "warning: the program leaves out offloaded microbatches that others overtake" in done.stderr
    assert "F_0_0" in (tmp_path / "program.mps").read_text()


def test_what_is_too_large_for_one_program_is_refused():
    instance = Path(__file__).parents[1] / "benchmarks" / "instances" / "scale-s64-m1024-memS2-off1.json"
    problem = Problem.read(instance)
    with pytest.raises(InputError, match="order bits, expected at most"):
        program_of(problem, generate("sequential", problem, "makespan"), "mps")


def test_what_no_program_can_do_is_said():
    """Two stages that fit one after the other only where one of them is computed again."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 100, "checkpoint_bytes": 20}
    problem = Problem.model_validate(
        {
            "num_microbatches": 2,
            "devices": [{"memory_bytes": 120}],
            "stages": [{"device": 0, **stage}] * 2,
            "comm_ms": [0.0],
        }
    )
    ops = generate("sequential", problem, "makespan")
    assert verify(problem, ops) == []
    with pytest.raises(InputError, match="has no solution as short as this: it leaves out recomputation"):
        program_of(problem, ops, "mps")


def test_solve_with_a_solver_of_pulps(tmp_path):
    # One whose bound is not reached without the MILP.
    problem = small_problem(random.Random(12))
    (tmp_path / "problem.json").write_text(problem.model_dump_json(exclude_unset=True))
    done = invoke(
        *("solve", tmp_path / "problem.json", "-o", tmp_path / "plan.json"),
        *("--solver", "PULP_CBC_CMD", "--no-cache", "--time-limit", "120", "--gap", "0"),
    )
    assert done.exit_code == 0, done.output
    plan = Plan.read(tmp_path / "plan.json")
    assert verify_plan(plan) == []
    assert plan.solver["method"] == "milp"
    assert plan.solver["milp"]["solver"] == "PULP_CBC_CMD"
    assert plan.solver["milp"]["status"] == "optimal"


def test_a_solver_that_is_not_there_is_refused_before_anything_long(unit_problem, tmp_path):
    (tmp_path / "problem.json").write_text(unit_problem.model_dump_json(exclude_unset=True))
    done = invoke("solve", tmp_path / "problem.json", "-o", tmp_path / "plan.json", "--solver", "ABACUS")
    assert done.exit_code == 2
    assert "--solver: 'ABACUS' is not found by PuLP, expected highs or one of" in done.stderr
    assert "PULP_CBC_CMD" in done.stderr
