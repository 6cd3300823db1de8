"""What a plan leaves idle is measured, and nothing else is."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime import idle_links, links, replan
from runtime.host_memory import HostPool
from runtime.links import COPY_BYTES, HostLink
from solver.solve import solve
from tests.test_replan import EVERY, Answers, of_alone, run


def problem(shared: list[list[int]], budget: int | None = None, nbytes: int = 100) -> Problem:
    """Three devices, the first with two stages, one of which can move nothing; channels by who shares them."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": nbytes}
    moved = {"offloadable_bytes": nbytes, "offload_ms": 1.0, "reload_ms": 1.0}
    return Problem.model_validate(
        {
            "num_microbatches": 4,
            "devices": [{"memory_bytes": budget}] * 3,
            "stages": [stage | {"device": 0}, *({"device": d} | stage | moved for d in (0, 1, 2))],
            "comm_ms": [0.0] * 3,
            "channels": [
                {"name": f"{way}:{group}", "transfers": [{"device": d, "direction": way} for d in group]}
                for group in shared
                for way in ("d2h", "h2d")
            ],
        }
    )


@pytest.mark.parametrize(
    ("shared", "rounds"),
    [
        ([[0], [1], [2]], [[0, 1, 2]]),
        ([[0, 1], [2]], [[0, 2], [1]]),
        ([[0, 1, 2]], [[0], [1], [2]]),
        ([[2]], [[2]]),
        ([], []),
    ],
)
def test_devices_that_share_a_channel_copy_one_after_the_other(shared, rounds):
    plan = solve(problem(shared), method="gpipe")
    assert idle_links.rounds(plan) == rounds
    for own in range(3):
        asked: list[tuple[bool, int]] = []

        def measure(taking_part: bool, nbytes: int, asked: list[Any] = asked) -> HostLink | None:
            asked.append((taking_part, nbytes))
            return HostLink(1e3, 2e3) if taking_part else None

        found = idle_links.times(plan, own, measure)
        # Every rank is there in every round; what it says is of its stages that can move something.
        assert [taking_part for taking_part, _ in asked] == [own in devices for devices in rounds]
        copies = any(own in devices for devices in rounds)
        assert found == ({(own + 1, Kind.O): 100.0, (own + 1, Kind.R): 50.0} if copies else {})
        assert all(nbytes == 100 for taking_part, nbytes in asked if taking_part)


def test_links_that_carry_something_are_not_asked_and_copies_are_not_larger_than_they_need_be():
    value = problem([[0], [1], [2]], nbytes=10 * COPY_BYTES)
    plan = solve(value, method="gpipe")
    asked: list[int] = []
    idle_links.times(plan, 0, lambda taking_part, nbytes: asked.append(nbytes))
    assert asked == [COPY_BYTES]
    moved = solve(problem([[0], [1], [2]], budget=500), time_limit=2.0)
    busy = {moved.problem.stages[op.stage].device for op in moved.ops if op.kind == Kind.O}
    assert busy and not busy & {device for devices in idle_links.rounds(moved) for device in devices}


def test_a_paced_link_is_found_to_have_its_pace():
    measure = idle_links.measured_on(torch.device("cpu"), (2e8, 1e8))
    began = time.perf_counter()
    found = measure(True, 1 << 20)
    took = time.perf_counter() - began
    assert found is not None
    # A copy may be late, never early: nor is a link found to be faster than its pace.
    assert 0 < found.d2h < 2.01e8 and 0 < found.h2d < 1.01e8
    assert took > (idle_links.REPEATS + 1) * (1 << 20) * (1 / 2e8 + 1 / 1e8)
    assert measure(False, 1) is None


def test_a_plan_without_transfers_is_asked_about_with_the_links_as_they_are(monkeypatch):
    answers = Answers(lambda start: (start, ""))
    monkeypatch.setattr(replan, "Solving", answers)
    stage = {"device": 0, "forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 100}
    one = Problem.model_validate(
        {
            "num_microbatches": 4,
            "devices": [{"memory_bytes": None}],
            "stages": [stage | {"offloadable_bytes": 100, "offload_ms": 9.0, "reload_ms": 9.0}],
            "comm_ms": [],
            "channels": [{"name": way, "transfers": [{"device": 0, "direction": way}]} for way in ("d2h", "h2d")],
        }
    )
    plan: Plan = solve(one, method="gpipe")
    run(of_alone(plan, measure=lambda taking_part, nbytes: HostLink(1e5, 2e5)), plan, EVERY)
    (start,) = answers.asked
    assert (start.problem.stages[0].offload_ms, start.problem.stages[0].reload_ms) == (1.0, 0.5)


def test_copies_are_measured_in_memory_that_stays_page_locked(monkeypatch):
    locked: set[int] = set()

    class Cuda:
        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
            locked.add(pointer)
            return 0

        def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
            locked.remove(pointer)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(links, "HostPool", lambda pinned: HostPool(pinned=True))
    host = links.HostLinks(torch.device("cpu"), (None, None), 1 << 16)
    assert host.measure(True, 2) is not None
    assert len(locked) == 1
    host.close()
    assert not locked
