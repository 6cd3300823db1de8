"""Host memory: every offload has a place that nothing else uses while it does, and a steady run allocates nothing."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import jitter, semantics
from optpipe.ops import Kind
from optpipe.plan import Plan
from runtime import host_layout
from runtime.executor import Executor
from runtime.host_layout import Interval, Layout, aligned
from runtime.host_memory import HostPool
from runtime.model import loss_fn
from tests.pipelines import (
    batch,
    boundaries,
    gpipe,
    model_problem,
    one_f_one_b,
    plan_of_orders,
    random_plan,
    stage_module,
    v_order,
)
from tests.random_schedules import schedules


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.randoms())
@settings(deadline=None, max_examples=50)
def test_the_pool_hands_out_what_it_has_before_it_allocates(sizes, rng):
    pool, held = HostPool(), []
    most = 0
    for size in sizes:
        buffer = pool.take(size)
        assert buffer.numel() == size and all(buffer is not other for other in held)
        held.append(buffer)
        most = max(most, sum(other.numel() for other in held))
        if rng.random() < 0.5:
            pool.give(held.pop(rng.randrange(len(held))))
        assert pool.in_use == sum(other.numel() for other in held)
    assert pool.peak == most
    for buffer in held:
        pool.give(buffer)
    allocated = pool.allocated
    again = [pool.take(buffer.numel()) for buffer in held]
    assert pool.allocated == allocated and {id(a) for a in again} <= {id(b) for b in held} | {id(a) for a in again}
    for buffer in again:
        pool.give(buffer)
    pool.reset_peak()
    assert pool.in_use == pool.peak == 0


class Cuda:
    """Page-locks nothing, and takes no empty range."""

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return 0 if nbytes else 1

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0


def test_page_locked_memory_of_no_bytes_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    pool = HostPool(pinned=True)
    buffers = [pool.take(nbytes) for nbytes in (0, 8, 0)]
    assert [buffer.numel() for buffer in buffers] == [0, 8, 0]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.in_use == 0
    pool.lay_out(host_layout.lay_out([]))


def on_the_host(plan: Plan, ops, device: int) -> dict[tuple[int, int], tuple[float, float]]:
    """From the start of O to the end of R, by (stage, microbatch)."""
    times = {}
    mine = semantics.device_of(plan.problem, ops) == device
    for op in ops.take(mine):
        if op.kind == Kind.O:
            times[op.stage, op.microbatch] = [op.start, 0.0]
    for op in ops.take(mine):
        if op.kind == Kind.R:
            times[op.stage, op.microbatch][1] = op.end
    return times


@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_no_place_is_used_twice_at_a_time_whatever_the_timing(schedule, seed):
    problem, ops = schedule
    plan = Plan(problem, ops)
    replayed = jitter.replay(problem, ops, np.random.default_rng(seed))
    for device in range(problem.num_devices):
        layout = host_layout.lay_out(host_layout.intervals(plan, device))
        times = on_the_host(plan, replayed, device)
        assert layout.places.keys() == times.keys()
        for one, (start, end) in times.items():
            together = 0
            for other, (first, last) in times.items():
                if first <= start < last:
                    together += layout.places[other].nbytes
                if one != other and start < last and first < end:
                    a, b = layout.places[one], layout.places[other]
                    assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert together <= layout.most_bytes
            assert layout.places[one].offset + layout.places[one].nbytes <= layout.nbytes


def test_places_of_one_size_take_no_more_than_is_in_use():
    m = 12
    problem = model_problem(2, microbatches=m)
    everything = {(s, j) for s in range(2) for j in range(m)}
    for orders, on_host in ((gpipe(2, m), m), (one_f_one_b(2, m), 3)):
        layout = host_layout.lay_out(host_layout.intervals(plan_of_orders(problem, orders, everything), 0))
        size = aligned(problem.stages[0].offloadable_bytes)
        assert layout.nbytes == layout.most_bytes <= on_host * size


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 6)), max_size=30))
def test_first_fit_wastes_little(offloads):
    found = [Interval((0, n), size, min(n + span, len(offloads))) for n, (size, span) in enumerate(offloads)]
    layout = host_layout.lay_out(found)
    assert layout.most_bytes <= layout.nbytes <= 3 * layout.most_bytes


def test_a_place_is_filled_and_used_again_and_what_does_not_fit_goes_elsewhere():
    pool = HostPool()
    pool.lay_out(host_layout.lay_out([Interval((0, 0), 128, 1), Interval((0, 1), 64, 2)]))
    assert pool.allocated == 128 and pool.allocations == 1
    space = pool.space((0, 0))
    first, second, third = (space.take(n) for n in (60, 64, 10))
    assert second.data_ptr() - first.data_ptr() == 64 and pool.in_use == 134
    assert pool.overflowed and pool.needs() == {(0, 0): 192} and pool.allocations == 2
    first.fill_(1), second.fill_(2), third.fill_(3)
    assert set(first.tolist()) == {1} and set(second.tolist()) == {2}
    for buffer in (second, third, first):
        space.give(buffer)
    assert space.take(5).data_ptr() == first.data_ptr()
    assert pool.space("none of the plan's") is pool


def allocations(plan: Plan, steps: int, **options) -> tuple[list[int], list[int], int, int]:
    """Of the pool after each step, the peaks, what the pool had in the end, and what the plan says of it."""
    stages = {s: stage_module(s, plan.problem.num_stages) for s in range(plan.problem.num_stages)}
    inputs = batch(plan.problem.num_microbatches)
    taken, peaks = [], []
    with Executor(plan, stages, boundaries(plan.problem.num_stages), loss_fn, **options) as executor:
        for _ in range(steps):
            peaks.append(executor.step(*inputs).host_peak_bytes)
            taken.append(executor.pool.allocations)
        allocated = executor.pool.allocated
    return taken, peaks, allocated, executor.planned_host_bytes


def test_steps_of_an_exact_plan_allocate_nothing():
    rng = random.Random(0)
    problem = model_problem(1, 2, microbatches=4)
    plans = [random_plan(problem, seed, offload=1.0) for seed in range(3)]
    everything = {(s, j) for s in range(2) for j in range(4)}
    plans += [plan_of_orders(problem, v_order(1, 4), everything)]
    for plan in plans:
        taken, peaks, _, planned = allocations(plan, 3, before_op=lambda *_: time.sleep(rng.random() * 1e-3))
        # A part of an offload is made up of whole storages, which may be a little more: known after the first step.
        assert taken[1:] == taken[:1] * 2
        if plan.ops.bytes.max() < 0:
            assert taken == [1] * 3 and max(peaks) <= planned


def test_a_plan_that_says_too_little_is_made_room_for_after_the_first_step():
    problem = model_problem(1, microbatches=4)
    small = problem.changed(stages=tuple(s.model_copy(update={"offloadable_bytes": 100}) for s in problem.stages))
    order = [(Kind.F, 0, j) for j in range(4)] + [(Kind.BW, 0, j) for j in range(4)]
    plan = plan_of_orders(small, [order], {(0, j) for j in range(4)})
    taken, peaks, allocated, _ = allocations(plan, 3)
    assert taken[0] > 1 and taken[1:] == [taken[0]] * 2
    assert 0 < max(peaks) <= allocated <= 1.05 * 4 * problem.stages[0].offloadable_bytes


def test_what_is_in_use_stays_until_it_is_given_back():
    pool = HostPool()
    pool.lay_out(Layout({}, 4096, 4096))
    buffer = pool.take(100)
    pool.free()
    assert pool.allocated == 4096 + 100
    pool.give(buffer)
    pool.free()
    assert pool.allocated == pool.in_use == 0
