"""The benchmarks' own parts: the CP-SAT model allows what the rules allow, results survive interruption."""

import random
from pathlib import Path

import pytest

from benchmarks import comparison, lab, scale
from optpipe import semantics
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify, verify_plan
from solver.bounds import lower_bound
from tests.random_schedules import random_problem
from tests.small_problems import small_problem
from tests.time_indexed import optimum


@pytest.mark.parametrize("seed", range(8))
def test_cpsat_solves_what_the_rules_describe(seed: int) -> None:
    """Fused backwards, recomputation, shared channels, tight memory: each solution verifies, and from a start it is
    no worse than that."""
    pytest.importorskip("ortools")
    from benchmarks.cpsat import solve_with_cpsat
    from solver.list_scheduler import backward_first, list_schedule
    from solver.tables import least_work, paths, tables

    rng = random.Random(seed)
    problem = random_problem(rng, microbatches=3)
    tab = tables(problem)
    problem = problem.with_budgets([int(w * rng.uniform(1, 2)) for w in tab.whole])
    tab = tables(problem)
    start = list_schedule(problem, backward_first(tab, paths(tab), max(least_work(tab))))
    assert start is not None
    found = solve_with_cpsat(problem, 1.0, 1, from_start=True)  # raises where a solution breaks a rule
    assert found.ops is not None
    assert found.bound_ms <= semantics.makespan(found.ops) * 1.01
    if found.status == "optimal":
        assert semantics.makespan(found.ops) <= semantics.makespan(start) * 1.01


@pytest.mark.parametrize("seed", [20, 21, 22, 42, 43, 44, 45])
def test_cpsat_in_any_order_finds_what_an_independent_model_does(seed: int) -> None:
    pytest.importorskip("ortools")
    from ortools.sat.python import cp_model

    from benchmarks.cpsat import build

    problem = small_problem(random.Random(seed), devices=2)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    model = build(problem, ascending=())
    assert solver.solve(model.cp) == cp_model.OPTIMAL
    found = round(solver.objective_value / model.unit)
    assert optimum(problem, found, ascending=False, fuse=True) == pytest.approx(found)
    assert solver.solve(build(problem, longest=found - 1, ascending=()).cp) == cp_model.INFEASIBLE


def _with_budget_on(device: int, devices: int, rng: random.Random) -> Problem:
    """Whole ms, transfers of an even number of them, a budget for one device alone."""
    stages = [
        {"device": d, **{f"{kind}_ms": rng.randint(1, 3) for kind in ("forward", "backward", "weight")}}
        | {"activation_bytes": 4, "weight_context_bytes": rng.choice([1, 2]), "offloadable_bytes": 4}
        | dict.fromkeys(("offload_ms", "reload_ms"), rng.choice([2, 4]))
        for d in range(devices)
    ]
    lanes = [(d, direction) for d in range(devices) for direction in ("d2h", "h2d")]
    budget = rng.choice([5, 6, 8])
    return Problem.model_validate(
        {
            "num_microbatches": 4,
            "devices": [{"memory_bytes": budget if d == device else None} for d in range(devices)],
            "stages": stages,
            "comm_ms": [rng.randint(0, 1) for _ in range(devices - 1)],
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )


@pytest.mark.parametrize(("device", "devices"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (2, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_program_of_one_budget_asks_no_more_than_the_problem(seed: int, device: int, devices: int) -> None:
    """CP-SAT's optimum for the whole problem has a counterpart in it; on the second of two devices nothing shorter has.
    (There both say the same: the first one's part is decided.)"""
    pytest.importorskip("ortools")
    from ortools.sat.python import cp_model

    from benchmarks.cpsat import build
    from benchmarks.one_device import without_others_memory

    problem = _with_budget_on(device, devices, random.Random(100 * seed + 10 * device + devices))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    model = build(problem, ascending=(), parts=2)
    assert model.unit == 1.0 and solver.solve(model.cp) == cp_model.OPTIMAL
    least = round(solver.objective_value)
    assert solver.solve(without_others_memory(problem, device, least + 1, 2, 1)) == cp_model.OPTIMAL
    if devices == 2 and device == 1:
        assert solver.solve(without_others_memory(problem, device, least, 2, 1)) == cp_model.INFEASIBLE
    stage = problem.stages[device]
    work = problem.num_microbatches * (stage.forward_ms + stage.backward_ms + stage.weight_ms)
    assert solver.solve(without_others_memory(problem, device, work, 2, 1)) == cp_model.INFEASIBLE


@pytest.mark.parametrize("out", [2.0, 4.0])
@pytest.mark.parametrize("context", [0, 1, 2])
@pytest.mark.parametrize("budget", [4, 6, 8])
def test_cpsat_moves_halves_where_that_is_shorter(budget: int, context: int, out: float) -> None:
    """Its schedules are valid, never longer than with whole transfers, and never below the bound of all schedules."""
    pytest.importorskip("ortools")
    from ortools.sat.python import cp_model

    from benchmarks.cpsat import build, solved_ops

    stage = dict.fromkeys(("forward_ms", "backward_ms", "weight_ms"), 1.0)
    moved = {"activation_bytes": 4, "offloadable_bytes": 4, "offload_ms": out, "reload_ms": 2.0}
    ends = [{"device": d, "direction": way} for d in range(3) for way in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 4,
            "devices": [{"memory_bytes": budget}] * 3,
            "stages": [{**stage, **moved, "weight_context_bytes": context, "device": d} for d in range(3)],
            "comm_ms": [0.0] * 2,
            "channels": [{"name": f"c{n}", "transfers": [end]} for n, end in enumerate(ends)],
        }
    )
    found = []
    for parts in (1, 2):
        model, solver = build(problem, ascending=(), parts=parts), cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model.cp) == cp_model.OPTIMAL
        ops = earliest(problem, Ops.of(solved_ops(model, solver)))
        assert verify(problem, ops) == []
        found.append(semantics.makespan(ops))
    assert lower_bound(problem) - 1e-9 <= found[1] <= found[0]
    if budget == 6:
        assert found[1] < found[0], "half of one stays beside another that is whole"


@pytest.mark.parametrize(("budget", "shortest"), [(200, 3.0), (150, 4.0), (100, 5.0)])
def test_patterns_repeat_as_plans_do(budget: int, shortest: float) -> None:
    """At the shortest period a pattern, rolled out, is a valid schedule; a little below it there is none. With room for
    one it is 5 ms: F and O, then R, B and W."""
    pytest.importorskip("ortools")
    from ortools.sat.python import cp_model

    from benchmarks.repeating import Repeating, repeats

    stage = dict.fromkeys(("forward_ms", "backward_ms", "weight_ms", "offload_ms", "reload_ms"), 1.0)
    sizes = {"activation_bytes": 100, "weight_context_bytes": 50, "offloadable_bytes": 100}
    ends = [{"device": d, "direction": way} for d in range(4) for way in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 6,
            "devices": [{"memory_bytes": budget}] * 4,
            "stages": [{**stage, **sizes, "device": d} for d in range(4)],
            "comm_ms": [0.0] * 3,
            "channels": [{"name": f"c{n}", "transfers": [end]} for n, end in enumerate(ends)],
        }
    )
    pattern, solver = Repeating(problem, shortest), cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(pattern.cp) == cp_model.OPTIMAL
    ops = []
    for s, cell in enumerate(pattern.cells[0]):
        at = {name: solver.value(variable) / pattern.unit for name, variable in cell._asdict().items()}
        share = solver.value(cell.moved) / pattern.parts
        for j in range(problem.num_microbatches):
            later = j * shortest
            for kind, name in ((Kind.F, "forward"), (Kind.B, "backward"), (Kind.W, "weight")):
                ops.append(Op(kind, s, j, at[name] + later, at[name] + later + 1.0))
            for kind, name in ((Kind.O, "out"), (Kind.R, "back")) if share else ():
                ops.append(Op(kind, s, j, at[name] + later, at[name] + later + share, round(share * 100)))
    assert verify(problem, Ops.of(ops)) == []
    assert budget >= 200 or any(op.kind == Kind.O for op in ops)
    assert repeats(problem, shortest * 0.99, 1, 60.0, 1) == "infeasible"


def line(name: str, *, bound: float, best: float, runs: dict[tuple[str, float], dict[str, object]]) -> comparison.Line:
    problem = Problem.read(lab.instance_file("unit-s4-m8-memS-nooff"))
    return comparison.Line(name, problem, lab.Reference(best, bound), {"1f1b": 120.0}, runs)


def plan_of(makespan: float, bound: float = 0.0) -> dict[str, object]:
    return {"makespan_ms": makespan, "bound_ms": bound, "violations": []}


def test_the_summary_counts_rows() -> None:
    first, last, other = ("auto", 5.0), ("auto", 60.0), ("cpsat", 60.0)
    lines = [
        line("even", bound=100, best=100, runs={first: plan_of(100), last: plan_of(100), other: plan_of(99.0)}),
        line("open", bound=100, best=104, runs={first: plan_of(104), last: plan_of(102), other: {"status": "unknown"}}),
        line("worse", bound=100, best=100, runs={first: plan_of(130), last: plan_of(121), other: plan_of(122)}),
    ]
    said = "\n".join(comparison.summary(lines, [first, last, other]))
    assert "auto 60 s: gap at most 0.5% on 1 of 3 rows (33%)" in said
    assert "more than 0.1% above the best known on 1 rows: worse" in said
    assert "below the best known on 1 rows: open" in said
    assert "above a known schedule on 1 rows: worse (1f1b)" in said
    assert "auto 5 s: within 0.5% of auto 60 s on 1 of 3 rows" in said
    assert (
        "against cpsat 60 s: behind on 1 rows: even; ahead on 2, of these on 1 where the other found no schedule"
        in said
    )
    assert "UNSOUND BOUND: even: 100.0000 is above a schedule of 99.0000" in said


def test_invalid_and_failed_runs_count_for_nothing() -> None:
    run = ("auto", 5.0)
    broken = {"makespan_ms": 90.0, "bound_ms": 80.0, "violations": ["F(0,0) is missing"]}
    lines = [
        line("broken", bound=80, best=100, runs={run: broken}),
        line("failed", bound=80, best=100, runs={run: {"error": "killed"}}),
    ]
    assert [one.makespan(run) for one in lines] == [None, None]
    said = "\n".join(comparison.summary(lines, [run]))
    assert "INVALID: broken, auto 5 s: F(0,0) is missing" in said
    assert "FAILED: failed, auto 5 s: killed" in said
    assert "gap at most 0.5% on 0 of 2 rows" in said
    assert "more than 0.1% above the best known on 2 rows" in said


def test_results_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(trial: lab.Trial, problem: Problem) -> dict[str, object]:
        asked.append(trial.label)
        return {"error": "no"} if trial.label == "bad" else {"makespan_ms": 1.0}

    monkeypatch.setattr(lab, "run", run)
    problem = Problem.read(lab.instance_file("unit-s4-m8-memS-nooff"))
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        results = lab.Results(path, "v1")
        assert results.measured(lab.Trial("good", "auto", 1.0), problem) == {"makespan_ms": 1.0}
        assert "error" in results.measured(lab.Trial("bad", "auto", 1.0), problem)
    assert asked == ["good", "bad", "bad"], "what failed is tried again, what is known is not"
    with path.open("a") as stream:
        stream.write('{"key": "cut o')
    assert lab.Results(path, "v1").known(lab.Trial("good", "auto", 1.0)) == {"makespan_ms": 1.0}
    assert lab.Results(path, "v2").known(lab.Trial("good", "auto", 1.0)) is None
    assert lab.Results(path, "any").known(lab.Trial("good", "auto", 1.0)) == {"makespan_ms": 1.0}
    assert lab.Results(path, "v2", measure=False).measured(lab.Trial("good", "auto"), problem) == {
        "error": "not measured"
    }


def test_a_trial_runs_by_itself_and_is_verified(tmp_path: Path) -> None:
    problem = Problem.read(lab.instance_file("unit-s4-m8-memS-nooff"))
    found = lab.run(lab.Trial("unit", "1f1b", 1.0, 1), problem, tmp_path / "plan.json")
    plan = Plan.read(tmp_path / "plan.json")
    assert found["violations"] == verify_plan(plan) == []
    assert found["makespan_ms"] == plan.makespan_ms and found["peak_mb"] > 0
    assert "InputError" in lab.run(lab.Trial("unit", "no such method", 1.0, 1), problem)["error"]


def test_every_instance_has_a_reference_that_it_does_not_contradict() -> None:
    known = lab.references()
    assert sorted(known) == sorted(lab.instances())
    assert all(0 < one.bound_ms <= one.best_ms * (1 + 1e-6) for one in known.values())
    assert all(one.whole_bound_ms > one.bound_ms for one in known.values() if one.whole_bound_ms is not None)


def test_sized_problems_are_the_instance_they_come_from() -> None:
    made, kept = scale.sized(8, 32), Problem.read(lab.instance_file("flat-s8-m32-memS2-off1"))
    assert made.to_json() | {"channels": None} == kept.to_json() | {"channels": None}
    assert made.channels_of == kept.channels_of
