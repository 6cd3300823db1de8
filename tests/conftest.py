"""Fixtures that several test modules share: a problem that a person can follow, and a plan of it with an offload."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# One thread a process: results do not depend on the machine, and ranks do not fight over its cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where Ctrl-C is ignored, as in a worker of pytest-xdist, all that tests start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest

# A test states what is right, not how soon: machines are shared, and compiled code takes its time at the first call.
# The same examples every time, so that a run says something about the change that it is for; to look for new ones:
# pytest --hypothesis-profile=search
settings.register_profile("optpipe", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("optpipe")

DATA = Path(__file__).parent / "data"

#: An order for the tiny problem: stage 0 sends the activations of microbatch 1 to the host and back.
TINY_ORDER = """
    F(0,0) F(0,1) O(0,1) F(1,0) F(0,2) B(1,0) W(1,0) B(0,0) F(1,1) W(0,0) R(0,1) B(1,1) W(1,1) B(0,1) F(1,2) W(0,1)
    F(0,3) B(1,2) W(1,2) B(0,2) F(1,3) W(0,2) B(1,3) W(1,3) B(0,3) W(0,3)
"""


def plan_in_order(problem: Problem, order: str) -> Plan:
    """The plan that keeps an order, such as ``"F(0,0) B(0,0) W(0,0)"``, with every op as early as it can be."""
    ops = []
    for at, text in enumerate(order.split()):
        kind, place = text.rstrip(")").split("(")
        stage, microbatch = place.split(",")
        ops.append(Op(Kind[kind], int(stage), int(microbatch), at, at + 1.0))
    return Plan(problem, earliest(problem, Ops.of(ops)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache of its own: none finds what another one solved, and the user's stays as it is."""
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("OPTPIPE_COMPILE", "0")  # in processes that tests start: they would all compile for that cache


@pytest.fixture(scope="session")
def tiny_problem_file() -> Path:
    return DATA / "tiny-problem.json"


@pytest.fixture(scope="session")
def tiny_problem(tiny_problem_file: Path) -> Problem:
    return Problem.read(tiny_problem_file)


@pytest.fixture
def tiny_plan(tiny_problem: Problem) -> Plan:
    plan = plan_in_order(tiny_problem, TINY_ORDER)
    plan.solver = {"method": "by hand"}
    return plan


@pytest.fixture
def tiny_plan_file(tiny_plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    tiny_plan.write(path)
    return path
