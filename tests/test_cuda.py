"""The runtime on a GPU: one rank, several stages. Skipped without one."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from optpipe import memory
from optpipe.ops import Kind
from runtime.accounting import Ledger
from runtime.channel import CudaLane
from runtime.executor import Executor
from runtime.host_memory import HostPool
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.saved import InputGradient, Saved, enter, storages
from runtime.stage import dropout_seed, seeded
from tests.pipelines import MODEL, batch, boundaries, model_problem, plan_of_orders, random_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
