"""The schedule cache: whatever is in its folder, a lookup gives a valid schedule or none."""

import json
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe import metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from solver.cache import Cache, default_folder
from solver.cache.entry import read_head, read_ops
from solver.list_scheduler import list_schedule
from solver.policy import Policy, draw
from solver.schedules.one_f_one_b import one_f_one_b
from solver.tables import paths, tables
from tests.random_schedules import fitted, random_problem, random_schedule

SEEDS = st.integers(0, 2**32)
IN_A_FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def drifted(problem: Problem, rng: random.Random, *, times: float = 0.1, budget: float = 0.0, more: int = 0) -> Problem:
    """The problem as a later profile may show it: times and budgets off by up to these parts, microbatches by more."""
    value = problem.to_json()
    for stage in value["stages"]:
        for key in stage:
            if key.endswith("_ms"):
                stage[key] *= rng.uniform(1 - times, 1 + times)
    value["comm_ms"] = [c * rng.uniform(1 - times, 1 + times) for c in value["comm_ms"]]
    for device in value["devices"]:
        if device["memory_bytes"] is not None:
            device["memory_bytes"] = int(device["memory_bytes"] * rng.uniform(1 - budget, 1 + budget))
    value["num_microbatches"] = max(1, value["num_microbatches"] + more)
    return Problem.model_validate(value)


def steady_problem(microbatches: int = 12, devices: int = 3) -> Problem:
    """Equal stages with offload on private links."""
    stage = {"forward_ms": 2.0, "backward_ms": 2.0, "weight_ms": 1.0, "activation_bytes": 100}
    stage |= {"weight_context_bytes": 50, "offloadable_bytes": 100, "offload_ms": 1.0, "reload_ms": 1.0}
    both = ("d2h", "h2d")
    links = [{"name": f"{x}{d}", "transfers": [{"device": d, "direction": x}]} for d in range(devices) for x in both]
    return Problem.model_validate(
        {
            "name": "steady",
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": 100 * devices}] * devices,
            "stages": [{"device": d, **stage} for d in range(devices)],
            "comm_ms": [0.1] * (devices - 1),
            "channels": links,
        }
    )


def good_plan(problem: Problem, seed: int = 0, tries: int = 5) -> Plan:
    """The best of a few list schedules."""
    tab, rng = tables(problem), random.Random(seed)
    rules = [policy.rule(tab, paths(tab)) for policy in (Policy(), *(draw(tab, rng) for _ in range(tries)))]
    made = [ops for rule in rules if (ops := list_schedule(problem, rule)) is not None]
    return Plan(problem, min(made, key=semantics.makespan), solver={"method": "test"})


@IN_A_FOLDER
@given(SEEDS)
def test_a_lookup_gives_a_valid_schedule_or_none(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(tmp_path_factory.mktemp("cache"))
    problem = random_problem(rng)
    for _ in range(3):
        ops = random_schedule(problem, rng)
        near = drifted(fitted(problem, ops), rng, times=0.0)
        cache.store(Plan(near, earliest(near, ops)))
        problem = drifted(problem, rng, more=rng.choice([-1, 0, 1]))
    for _ in range(4):
        asked = drifted(near, rng, times=0.3, budget=0.4, more=rng.randint(-2, 2))
        found = cache.lookup(asked)
        if all(w <= b for w, b in zip(tables(asked).whole, tables(asked).budget, strict=True)):
            assert found is not None, "one microbatch fits every device, so some repair must"
        if found is not None:
            ops, facts = found
            assert verify(asked, ops) == []
            assert facts["makespan_ms"] == semantics.makespan(ops)
            assert facts["hit"] in ("exact", "near", "repaired")


@settings(IN_A_FOLDER, max_examples=20)
@given(SEEDS)
def test_an_identical_problem_gets_the_stored_makespan_or_less(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    cache = Cache(tmp_path_factory.mktemp("cache"))
    problem = random_problem(rng)
    ops = random_schedule(problem, rng)
    plan = Plan(fitted(problem, ops), ops)
    cache.store(plan)
    found = cache.lookup(Problem.model_validate(plan.problem.to_json()))
    assert found is not None and found[1]["distance"] == 0
    assert found[1]["makespan_ms"] <= plan.makespan_ms * (1 + semantics.TOLERANCE)


def test_the_units_of_a_problem_do_not_matter(cache: Cache) -> None:
    plan = good_plan(steady_problem())
    cache.store(plan)
    value = plan.problem.to_json()
    value["comm_ms"] = [7 * c for c in value["comm_ms"]]
    for stage in value["stages"]:
        stage |= {key: 7 * stage[key] for key in stage if key.endswith("_ms")}
        stage |= {key: 3 * stage[key] for key in stage if key.endswith("_bytes")}
    value["devices"] = [{"memory_bytes": 3 * d["memory_bytes"]} for d in value["devices"]]
    found = cache.lookup(Problem.model_validate(value))
    assert found is not None and found[1]["hit"] in ("exact", "repaired") and found[1]["distance"] == 0
    assert found[1]["makespan_ms"] <= 7 * plan.makespan_ms * (1 + 1e-9)


@pytest.mark.parametrize("more", [-2, -1, 1, 2])
@pytest.mark.parametrize("comm", [0.0, 0.1])
def test_a_microbatch_more_or_less_keeps_the_pattern(cache: Cache, more: int, comm: float) -> None:
    """1F1B repeats itself, so with other microbatch counts it must come out as 1F1B, not as a patched-up order."""
    problem = steady_problem().changed(comm_ms=(comm, comm))
    cache.store(Plan(problem, one_f_one_b(problem)))
    asked = problem.changed(num_microbatches=problem.num_microbatches + more)
    found = cache.lookup(asked)
    assert found is not None
    assert found[1]["microbatches"] == problem.num_microbatches
    assert found[1]["makespan_ms"] <= semantics.makespan(one_f_one_b(asked)) * (1 + 1e-9)


def test_offloads_survive_a_microbatch_more(cache: Cache) -> None:
    """With memory for one microbatch a device, an answer must offload, whatever the count."""
    problem = steady_problem().with_budgets([100] * 3)
    plan = good_plan(problem)
    cache.store(plan)
    for more in (-1, 1):
        found = cache.lookup(problem.changed(num_microbatches=problem.num_microbatches + more))
        assert found is not None
        period = plan.makespan_ms / problem.num_microbatches
        assert abs(found[1]["makespan_ms"] - plan.makespan_ms) < 3 * period


def test_partial_transfers_move_the_same_part(cache: Cache) -> None:
    problem = steady_problem(4).with_budgets([None] * 3)
    ops = random_schedule(problem, random.Random(3), offload=1.0, fused=0.0)
    moves = ~ops.is_compute
    ops = earliest(
        problem, Ops.columns(ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, np.where(moves, 60, -1))
    )
    cache.store(Plan(problem, ops))
    (entry,) = cache.entries()
    stored = read_ops(entry)
    assert stored is not None
    twice = problem.changed(
        stages=tuple({**s, "activation_bytes": 200, "offloadable_bytes": 200} for s in problem.to_json()["stages"])
    )
    assert set(stored.ops(twice, 1.0).bytes[stored.kind >= Kind.O].tolist()) == {120}


@pytest.mark.parametrize("other", ["objective", "placement", "channels", "microbatches"])
def test_no_hit_where_an_order_makes_no_sense(cache: Cache, other: str) -> None:
    problem = steady_problem()
    cache.store(good_plan(problem))
    value = problem.to_json()
    if other == "placement":
        value["stages"] = value["stages"][::-1]
    elif other == "channels":
        value["channels"] = value["channels"][:2]
    elif other == "microbatches":
        value["num_microbatches"] += 3
    assert cache.lookup(Problem.model_validate(value), "span" if other == "objective" else "makespan") is None
    assert cache.lookup(problem) is not None


def test_the_objective_decides_which_answer_is_best(cache: Cache) -> None:
    problem = steady_problem()
    for seed in range(5):
        cache.store(good_plan(drifted(problem, random.Random(seed)), seed, 2), "span")
    found = cache.lookup(problem, "span")
    assert found is not None
    assert found[1]["span_ms"] == metrics.span(problem, found[0])
    with pytest.raises(ValueError, match="objective"):
        cache.lookup(problem, "speed")


def test_a_cell_keeps_its_best_plan(cache: Cache) -> None:
    problem = steady_problem()
    good, bad = good_plan(problem), Plan(problem, random_schedule(problem, random.Random(1), offload=0.0))
    roomy = problem.with_budgets([None] * 3)
    good, bad = Plan(roomy, good.ops), Plan(roomy, bad.ops)
    assert good.makespan_ms < bad.makespan_ms
    assert cache.store(bad)
    assert cache.store(good), "a better plan replaces the entry"
    assert not cache.store(bad), "a worse one does not"
    assert [entry.makespan_ms for entry in cache.entries()] == [good.makespan_ms]


def test_it_forgets_what_was_of_no_use_for_longest(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most_entries=4)
    problem = steady_problem(4)
    plans = [good_plan(drifted(problem, random.Random(seed)), tries=0) for seed in range(7)]
    for age, plan in enumerate(plans[:4]):
        cache.store(plan)
        newest = max(cache.entries(), key=lambda entry: entry.used)
        os.utime(newest.path, (age + 1.0, age + 1.0))
    kept = {entry.makespan_ms for entry in cache.entries()}
    oldest = plans[0].makespan_ms
    assert oldest in kept and len(kept) == 4
    cache.store(plans[4])
    left = {entry.makespan_ms for entry in cache.entries()}
    assert len(left) == 4 and oldest not in left and plans[4].makespan_ms in left
    small = Cache(tmp_path, most_bytes=1)
    small.store(plans[5])
    assert [entry.makespan_ms for entry in small.entries()] == [plans[5].makespan_ms], "the newest always stays"


def _damages(text: str, rng: random.Random) -> Iterator[bytes]:
    raw = text.encode()
    head, _, ops = text.partition("\n")
    yield b""
    yield b"\xff\xfe\x00\x01" * 50
    yield b"[" * 100_000
    yield b"{}"
    yield raw[: rng.randrange(len(raw))]
    yield raw[: raw.index(b"\n") + 1]
    yield raw.replace(b'"microbatch": [', b'"microbatch": [99999999, ', 1)
    yield raw.replace(b'"start": [', b'"start": [NaN, ', 1)
    yield raw.replace(b'"start": [', b'"start": [1e300, ', 1)
    yield raw.replace(b'"stage": [0', b'"stage": [-1', 1)
    yield raw.replace(b'"stage": [0', b'"stage": [123456789012345678901234567890', 1)
    yield raw.replace(b'"kind": ["F"', b'"kind": ["X"', 1)
    yield raw.replace(b'"kind": ["F"', b'"kind": ["O"', 1)
    value = json.loads(text)
    for key in value:
        yield json.dumps({k: v for k, v in value.items() if k != key}).encode()
    for changed in ({"microbatches": -3}, {"stages": 1000}, {"problem": []}, {"version": 2}, {"makespan_ms": "1"}):
        yield f"{json.dumps({**json.loads(head[:-1] + '}'), **changed})[:-1]},\n{ops}".encode()
    columns = value["ops"]
    columns["kind"], columns["start"] = columns["kind"][::-1], columns["start"][::-1]
    yield f"{head}\n{json.dumps({'ops': columns})[1:]}".encode()


def test_broken_and_foreign_files_are_passed_over(cache: Cache) -> None:
    problem = steady_problem(5)
    plan = good_plan(problem)
    cache.store(plan)
    (entry,) = cache.entries()
    text = entry.path.read_text()
    for damaged in _damages(text, random.Random(4)):
        entry.path.write_bytes(damaged)
        for asked in (problem, problem.changed(num_microbatches=6)):
            found = cache.lookup(asked)
            assert found is None or verify(asked, found[0]) == []
        cache.entries()
        assert cache.store(plan) or read_head(entry.path) is not None
        entry.path.write_text(text)
    assert cache.lookup(problem) is not None
    entry.path.write_text(text.replace('"makespan_ms": ', f'"makespan_ms": 1{"0" * 400}, "was": ', 1))
    assert cache.entries() == [] and cache.lookup(problem) is None
    (cache.folder / "notes.txt").write_text("mine")
    entry.path.unlink()
    entry.path.mkdir()
    assert cache.lookup(problem) is None and not cache.store(plan) and cache.entries() == []


def test_an_entry_that_lies_about_its_problem_is_found_out(cache: Cache) -> None:
    """An order that needs more memory than the problem has, under the name of one that fits."""
    problem = steady_problem(6).with_budgets([100] * 3)
    cache.store(good_plan(problem))
    (honest,) = cache.entries()
    roomy = problem.with_budgets([None] * 3)
    cache.store(Plan(roomy, random_schedule(roomy, random.Random(0), offload=0.0)))
    liar = next(entry for entry in cache.entries() if entry.path != honest.path)
    honest.path.write_text(honest.path.read_text().split("\n")[0] + "\n" + liar.path.read_text().split("\n")[1])
    found = cache.lookup(problem)
    assert found is not None and verify(problem, found[0]) == []


def test_clear_removes_entries_and_nothing_else(cache: Cache) -> None:
    problem = steady_problem(4)
    for seed in range(3):
        cache.store(good_plan(drifted(problem, random.Random(seed)), tries=0))
    others = [cache.folder / name for name in ("notes.txt", "schedule-x.json", "plan.json")]
    for path in others:
        path.write_text("{}")
    entry = cache.entries()[0].path
    entry.write_text("broken")
    (cache.folder / f".{entry.name}.left").write_text("half")
    assert cache.clear() == 3
    assert sorted(cache.folder.iterdir()) == sorted(others)
    assert cache.entries() == [] and cache.lookup(problem) is None and cache.clear() == 0


def test_a_folder_that_cannot_be_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    plan = good_plan(steady_problem(4))
    assert not cache.store(plan)
    assert cache.lookup(plan.problem) is None and cache.entries() == [] and cache.clear() == 0


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "own"
    monkeypatch.delenv("OPTPIPE_CACHE")
    assert default_folder() == tmp_path / "xdg" / "optpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / "home" / ".cache" / "optpipe"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTPIPE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    for own in ("", "~/schedules"):
        monkeypatch.setenv("OPTPIPE_CACHE", own)
        cache, plan = Cache(), good_plan(steady_problem(4))
        assert not cache.store(plan)
        assert cache.lookup(plan.problem) is None and cache.entries() == [] and cache.clear() == 0


def _writer(folder: str, seed: int, count: int) -> None:
    cache = Cache(folder)
    problem = steady_problem(4)
    for number in range(count):
        own = good_plan(drifted(problem, random.Random(1000 * seed + number)), tries=0)
        assert cache.store(own)
        cache.store(good_plan(problem, number, tries=1))  # the entry that all writers fight for
        found = cache.lookup(own.problem)
        assert found is not None and verify(own.problem, found[0]) == []


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    count, spawn = 20, multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_writer, args=(str(tmp_path), seed, count)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    entries = Cache(tmp_path).entries()
    assert len(entries) == len(list(tmp_path.iterdir())) == 2 * count + 1
    assert all(read_ops(entry) is not None for entry in entries)
