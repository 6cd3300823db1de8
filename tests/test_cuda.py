"""The runtime on a GPU: one rank, several stages. Skipped without one, but for what needs none."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from benchmarks import offload_gpu
from optpipe import memory
from optpipe.ops import Kind
from optpipe.plan import Plan
from runtime import events
from runtime.accounting import Ledger
from runtime.boundary import TensorSpec
from runtime.channel import CudaLane
from runtime.evaluate import Evaluator
from runtime.executor import Executor
from runtime.host_layout import Layout, Place
from runtime.host_memory import HostPool
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.saved import InputGradient, Saved, enter, storages
from runtime.stage import dropout_seed, seeded
from tests.pipelines import MODEL, batch, boundaries, model_problem, plan_of_orders, random_plan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def stages_on_gpu(count, config=MODEL):
    n = config.num_layers
    return {
        s: nn.Sequential(*build_layers(config, 3, range(n * s // count, n * (s + 1) // count), "cuda"))
        for s in range(count)
    }


def expected(count, m):
    """Loss and gradients of the same stages without a pipeline."""
    stages = stages_on_gpu(count)
    inputs, targets = batch(m)
    total = torch.zeros((), device="cuda")
    for j in range(m):
        x = inputs[j].cuda()
        for s in range(count):
            with seeded(dropout_seed(0, 0, s, j), torch.device("cuda")):
                x = stages[s](x)
        loss = loss_fn(x, targets[j].cuda()) / m
        loss.backward()
        total += loss.detach()
    return float(total), [p.grad for s in range(count) for p in stages[s].parameters()]


@needs_gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_plans_give_the_gradients_of_plain_training(seed):
    m, count = 4, 3
    plan = random_plan(model_problem(1, count, microbatches=m), seed, offload=0.7)
    stages = stages_on_gpu(count)
    executor = Executor(plan, stages, boundaries(count), loss_fn, device="cuda")
    inputs, targets = ([tensor.cuda() for tensor in tensors] for tensors in batch(m))
    result = executor.step(inputs, targets)
    executor.close()
    loss, gradients = expected(count, m)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for found, value in zip((p.grad for s in range(count) for p in stages[s].parameters()), gradients, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
    assert len(result.ops) == len(plan.ops)
    # Saved tensors differ a little between the kernels of the two kinds of device; what was measured is the CPU's.
    assert 0 < result.peak_bytes <= 1.5 * memory.peaks(plan.problem, plan.ops)[0]
    assert executor.ledger.activation_bytes == executor.ledger.message_bytes == executor.pool.in_use == 0


@needs_two_gpus
def test_the_device_need_not_be_the_current_one():
    """Its compute stream is far behind: whoever waits for a stream of the current device copies what is not there."""
    m, count, device = 4, 3, torch.device("cuda", 1)
    plan = random_plan(model_problem(1, count, microbatches=m), 2, offload=1.0)
    stages = {s: stage.to(device) for s, stage in stages_on_gpu(count).items()}
    inputs, targets = ([tensor.to(device) for tensor in tensors] for tensors in batch(m))
    evaluator = Evaluator(plan.problem, stages, boundaries(count), loss_fn, device=device)
    with Executor(plan, stages, boundaries(count), loss_fn, device=device) as executor, torch.cuda.device(0):
        for number in range(2):
            for stage in stages.values():
                stage.zero_grad()
            with torch.cuda.device(device):
                torch.cuda._sleep(10**9)
            result = executor.step(inputs, targets, number=number)
        held_out = evaluator.loss(inputs, targets)
    evaluator.close()
    loss, gradients = expected(count, m)
    assert result.loss == pytest.approx(loss, rel=1e-5) and held_out == pytest.approx(loss, rel=1e-5)
    for found, value in zip((p.grad for s in range(count) for p in stages[s].parameters()), gradients, strict=True):
        torch.testing.assert_close(found.cpu(), value.cpu(), rtol=1e-4, atol=1e-6)
    assert all(op.start <= op.end for op in result.ops)


class FakeStream:
    """Of a device, without one: it writes down what it waits for."""

    def __init__(self, device):
        self.device, self.waited = device, []

    def wait_stream(self, stream):
        self.waited.append(stream)

    def wait_event(self, event):
        self.waited.append(event.stream)


class FakeEvent:
    def __init__(self, enable_timing):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream or torch.cuda.current_stream()

    def synchronize(self):
        pass


class Copy:
    """A job of a lane."""

    def start(self):
        return [(torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8))]

    def finish(self):
        pass


def test_streams_are_those_of_the_device_also_where_another_is_current(monkeypatch):
    current = [FakeStream(torch.device("cuda", n)) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[device.index if device else 0])
    device = torch.device("cuda", 1)
    lane, clock = CudaLane("d2h", device), events.clock(device)
    assert clock._anchor.stream is clock.mark().raw.stream is current[1]
    end = lane.submit(Copy())
    assert lane._stream.waited == [current[1]] and end.raw.stream is lane._stream
    end.wait()
    assert current[1].waited == [lane._stream] and not current[0].waited


@needs_gpu
def test_the_allocator_agrees_that_offloaded_activations_are_gone():
    config = GPTConfig(layers=2, width=256, heads=4, context=256, vocabulary=256)
    module = nn.Sequential(*build_layers(config, 0, [1, 2], "cuda"))
    ledger, pool, lane = Ledger(), HostPool(pinned=True), CudaLane("d2h", torch.device("cuda"))
    saved = Saved(ledger, torch.device("cuda", torch.cuda.current_device()), storages(module.parameters()), pool)
    place, x = InputGradient(Ledger()), torch.randn(8, 256, 256, device="cuda")
    module(x.clone().requires_grad_()).sum().backward()  # workspaces are made on first use
    module.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with saved.hooks():
        y = module(enter(x.clone(), place))
    edge = get_gradient_edge(y)
    gradient = torch.ones_like(y)
    del y
    held = torch.cuda.memory_allocated() - before
    assert ledger.activation_bytes <= held <= 1.05 * ledger.activation_bytes + 2 * gradient.nbytes
    lane.submit(saved.offload()).wait()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= gradient.nbytes + 4096
    lane.submit(saved.reload()).wait()
    torch.autograd.backward([edge], [gradient])
    assert torch.isfinite(place.value).all()


@needs_gpu
def test_offloads_overlap_with_compute():
    config = GPTConfig(layers=6, width=1024, heads=8, context=512, vocabulary=256)
    m, size = 6, 8
    order = [(Kind.F, 0, j) for j in range(m)] + [(Kind.BW, 0, j) for j in range(m)]
    plan = plan_of_orders(model_problem(1, microbatches=m), [order], {(0, j) for j in range(m - 1)})
    executor = Executor(plan, stages_on_gpu(1, config), [], loss_fn, device="cuda")
    tokens = torch.randint(0, 256, (m * size, 513), device="cuda")
    inputs, targets = list(tokens[:, :-1].chunk(m)), list(tokens[:, 1:].chunk(m))
    for _ in range(3):
        result = executor.step(inputs, targets)
    executor.close()
    computes = [op for op in result.ops if op.kind in (Kind.F, Kind.BW)]
    moves = [op for op in result.ops if op.kind in (Kind.O, Kind.R)]
    shared = sum(max(0.0, min(move.end, op.end) - max(move.start, op.start)) for move in moves for op in computes)
    assert shared > 0.5 * sum(move.end - move.start for move in moves)


@needs_gpu
def test_memory_is_sampled_on_the_clock_of_the_ops():
    m, count = 6, 2
    plan = random_plan(model_problem(1, count, microbatches=m), 3, offload=0.8)
    inputs, targets = ([tensor.cuda() for tensor in tensors] for tensors in batch(m))
    with Executor(plan, stages_on_gpu(count), boundaries(count), loss_fn, device="cuda", watch_memory=True) as executor:
        for number in range(3):
            result = executor.step(inputs, targets, number=number)
    samples = result.memory
    assert len(samples) == 2 * len(result.ops)
    times = [sample.time for sample in samples]
    assert times == sorted(times)
    computes = [op for op in result.ops if op.kind in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C)]
    for op, following in itertools.pairwise(computes):
        assert any(op.end <= time <= following.start for time in times)
        waited = following.memory_wait_ms + following.message_wait_ms
        assert 0 <= waited <= following.start - op.end + 0.01
    assert max(sample.most for sample in samples) == result.peak_bytes
    assert samples[-1].held == 0
    # What torch holds is at least the activations; both go up and down together.
    assert all(sample.allocated >= sample.held for sample in samples)
    swing = max(sample.allocated for sample in samples) - min(sample.allocated for sample in samples)
    assert swing >= 0.5 * result.peak_bytes


@needs_gpu
def test_page_locked_memory_is_of_the_plans_size_and_is_given_back():
    for nbytes in (100_000, (3 << 20) + 64):
        pool = HostPool(pinned=True)
        pool.lay_out(Layout({"one": Place(0, nbytes)}, nbytes, nbytes))
        buffer = pool.space("one").take(nbytes)
        assert pool.allocated == nbytes and buffer.is_pinned() and buffer.data_ptr() % 4096 == 0
        here = torch.arange(nbytes, device="cuda", dtype=torch.int32).to(torch.uint8)
        buffer.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer, here.cpu())
        pool.space("one").give(buffer)
        locked = dict(pool._locked)
        assert len(locked) == 1
        pool.lay_out(Layout({}, 0, 0))
        assert not pool._locked and not buffer.is_pinned()


@needs_gpu
def test_a_steady_run_takes_no_memory_from_the_system():
    m = 6
    order = [(Kind.F, 0, j) for j in range(m)] + [(Kind.BW, 0, j) for j in range(m)]
    plan = plan_of_orders(model_problem(1, microbatches=m), [order], {(0, j) for j in range(m)})
    inputs, targets = ([tensor.cuda() for tensor in tensors] for tensors in batch(m))
    with Executor(plan, stages_on_gpu(1), [], loss_fn, device="cuda") as executor:
        taken = []
        for _ in range(4):
            executor.step(inputs, targets)
            taken.append((executor.pool.allocations, torch.cuda.memory_reserved()))
    assert len(set(taken[1:])) == 1


@needs_gpu
def test_the_manager_keeps_to_what_the_allocator_has():
    """GPipe without a budget, on an allocator that is said to have room for half of the microbatches."""
    m, config = 8, GPTConfig(layers=2, width=256, heads=4, context=256, vocabulary=256)
    order = [(Kind.F, s, j) for j in range(m) for s in range(2)]
    order += [(Kind.BW, s, j) for j in range(m) for s in (1, 0)]
    plan = plan_of_orders(model_problem(1, 2, microbatches=m), [order])
    plan = Plan(plan.problem.with_budgets([None]), plan.ops)
    stages = stages_on_gpu(2, config)
    tokens = torch.randint(0, 256, (m * 4, 257), device="cuda")
    inputs, targets = list(tokens[:, :-1].chunk(m)), list(tokens[:, 1:].chunk(m))
    with Executor(plan, stages, [TensorSpec((4, 256, 256))], loss_fn, device="cuda") as executor:
        free = executor.step(inputs, targets)
        assert not any(relief.action == "went on" for relief in free.reliefs)
        room = free.peak_bytes // 2
        executor.manager._headroom = lambda: room - executor.ledger.activation_bytes
        for number in range(2):
            held = executor.step(inputs, targets, number=number)
    assert held.reliefs and held.peak_bytes <= room
    assert held.loss == pytest.approx(free.loss, rel=1e-3)


class KeepsOnTheHost(torch.autograd.Function):
    """Saves a tensor that is not on the GPU, integers, and one that is."""

    @staticmethod
    def forward(ctx, x):
        order = torch.arange(x.shape[-1] - 1, -1, -1)
        ctx.save_for_backward(order, x.argmax(-1), x)
        return x[..., order.cuda()].tanh()

    @staticmethod
    def backward(ctx, g):
        order, index, x = ctx.saved_tensors
        assert order.device.type == "cpu" and index.dtype == torch.int64
        back = g * (1 - x[..., order.cuda()].tanh() ** 2)
        return back[..., order.cuda()]


class Turned(nn.Module):
    def forward(self, x):
        return KeepsOnTheHost.apply(x)


@needs_gpu
@pytest.mark.parametrize("seed", range(4))
def test_a_function_may_save_what_is_not_on_the_gpu(seed):
    count, m = 3, 4
    plan = random_plan(model_problem(1, count, microbatches=m), seed, offload=1.0)

    def build():
        stages = stages_on_gpu(count)
        return {**stages, 1: nn.Sequential(Turned(), stages[1], Turned())}

    stages, plain = build(), build()
    inputs, targets = ([tensor.cuda() for tensor in tensors] for tensors in batch(m))
    with Executor(plan, stages, boundaries(count), loss_fn, device="cuda") as executor:
        executor.step(inputs, targets)
    for x, target in zip(inputs, targets, strict=True):
        for stage in plain.values():
            x = stage(x)
        (loss_fn(x, target) / m).backward()
    for s in range(count):
        for one, other in zip(stages[s].parameters(), plain[s].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@needs_gpu
def test_an_evaluation_gives_the_loss_of_the_same_stages():
    count, m = 3, 4
    stages = stages_on_gpu(count)
    inputs, targets = ([tensor.cuda() for tensor in tensors] for tensors in batch(m))
    evaluator = Evaluator(model_problem(1, count, microbatches=m), stages, boundaries(count), loss_fn, device="cuda")
    found = evaluator.loss(inputs, targets)
    evaluator.close()
    assert found == pytest.approx(expected(count, m)[0], rel=1e-5)


@needs_gpu
def test_transfers_and_memory_are_as_the_benchmark_plans_them():
    size = offload_gpu.Size(GPTConfig(layers=4, width=1024, heads=8, context=512), 2, 6, 8)
    bench = offload_gpu.Bench(size, torch.device("cuda", torch.cuda.current_device()))
    plan = offload_gpu.plan_of(bench.problem(offloads=True), size, 3)
    results, peaks = bench.run(plan, 4)
    planned = memory.peaks(plan.problem, plan.ops)[0]
    assert all(result.peak_bytes <= planned for result in results)
    assert max(peaks) <= 1.1 * planned  # with the workspace of one op
    assert max(offload_gpu.speed_share(result, plan.problem) for result in results) > 0.8


def test_the_benchmark_of_offloads_runs_on_any_device():
    """On the CPU, tiny: its plan is valid, what is to be offloaded is, and peaks are the plan's."""
    rows = offload_gpu.table(offload_gpu.TINY, torch.device("cpu"), pace=1e9, steps=2)
    assert [row[0] for row in rows] == ["0 of 4", "1 of 4", "2 of 4"]
    assert rows[0][4] is None and rows[0][-1] == 0.0
    host = [row[-1] for row in rows]
    assert 0 < host[1] < host[2]
    assert all(row[7] <= row[6] for row in rows)
