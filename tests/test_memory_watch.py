"""Samples of memory: what the ledger counts, at the instants of the clock that ops are timed by."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from optpipe.ops import Kind
from runtime.accounting import Ledger
from runtime.executor import Executor
from runtime.memory_watch import MemoryWatch
from runtime.model import loss_fn
from runtime.program import Compute
from runtime.result import Mark, of_compute
from tests.pipelines import batch, boundaries, model_problem, random_plan, stage_module


class DeviceClock:
    """Marks that say only later when the device passed them, as events of CUDA do: it runs behind the host."""

    def __init__(self) -> None:
        self.marks = 0
        self.passed: dict[int, float] = {}

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, mark: Any) -> float:
        return self.passed[mark]


def test_levels_stand_where_the_device_was_not_where_the_host_was():
    ledger, clock = Ledger(), DeviceClock()
    watch = MemoryWatch(ledger, torch.device("cpu"))
    watch.begin(clock)
    held = []
    for size in (100, 50, 0):
        watch.look()
        if size:
            held.append(ledger.hold(torch.empty(size, dtype=torch.uint8)))
    for hold in held:
        hold.release()
    watch.look()
    clock.passed = {1: 10.001, 2: 10.5, 3: 11.0, 4: 19.0}
    samples = watch.samples(10.0)
    assert [sample.time for sample in samples] == pytest.approx([1.0, 500.0, 1000.0, 9000.0])
    assert [(sample.held, sample.most) for sample in samples] == [(0, 0), (100, 100), (150, 150), (0, 150)]
    assert watch.peak == 150


def test_waits_are_told_by_the_clock_of_the_device():
    """The host does not wait where streams do: what lies between its marks is known when the device has passed them."""
    clock = DeviceClock()
    item = Compute(0, Kind.B, 1, 2, takes=None, gives=None, waits=(), post=(), post_ahead=())
    mark = Mark(item, *(clock.mark() for _ in range(5)), cpu_ms=0.0)
    clock.passed = dict(enumerate((7.001, 7.003, 7.006, 7.007, 7.011), 1))
    (record,) = of_compute([mark], clock, 7.0)
    assert (record.kind, record.stage, record.microbatch) == (Kind.B, 1, 2)
    assert (record.start, record.end) == pytest.approx((7.0, 11.0))
    assert (record.memory_wait_ms, record.message_wait_ms) == pytest.approx((2.0, 3.0))


def test_a_peak_between_two_samples_is_not_missed():
    ledger = Ledger()
    watch = MemoryWatch(ledger, torch.device("cpu"))
    watch.begin(DeviceClock())
    stays = ledger.hold(torch.empty(7, dtype=torch.uint8))
    ledger.hold(torch.empty(1000, dtype=torch.uint8)).release()
    watch.look()
    watch.look()
    assert [sample[1:3] for sample in watch._looks] == [(7, 1007), (7, 7)]
    stays.release()
    watch.begin(DeviceClock())
    assert watch.peak == 0


def test_the_allocator_is_asked_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4096 + (device.index or 0))
    watch = MemoryWatch(Ledger(), torch.device("cuda", 3))
    clock = DeviceClock()
    watch.begin(clock)
    watch.look()
    clock.passed = {1: 0.0}
    assert watch.samples(0.0)[0].allocated == 4099


def test_lanes_may_look_at_once():
    ledger = Ledger()
    watch = MemoryWatch(ledger, torch.device("cpu"))
    watch.begin(DeviceClock())

    def lane() -> None:
        for _ in range(200):
            hold = ledger.hold(torch.empty(10, dtype=torch.uint8))
            watch.look()
            hold.release()

    threads = [threading.Thread(target=lane) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [mark for mark, *_ in watch._looks] == list(range(1, 801))
    assert 10 <= watch.peak == max(most for _, _, most, _ in watch._looks) <= 40


@pytest.mark.parametrize("seed", range(3))
def test_samples_of_a_run_enclose_its_ops_and_reach_its_peak(seed):
    m, count = 4, 2
    plan = random_plan(model_problem(1, count, microbatches=m), random.Random(seed).randrange(2**20), offload=0.7)
    inputs, targets = batch(m)
    stages = {s: stage_module(s, count) for s in range(count)}
    peaks = []
    for watched in (False, True):
        with Executor(plan, stages, boundaries(count), loss_fn, watch_memory=watched) as executor:
            result = executor.step(inputs, targets)
        peaks.append(result.peak_bytes)
        assert bool(result.memory) == watched
    assert len(result.memory) == 2 * len(result.ops)
    times = [sample.time for sample in result.memory]
    for op in result.ops:
        assert any(time <= op.start for time in times) and any(time >= op.end for time in times)
    assert max(sample.most for sample in result.memory) == result.peak_bytes
    assert result.memory[-1].held == 0
    assert peaks[0] > 0 and peaks[1] > 0
