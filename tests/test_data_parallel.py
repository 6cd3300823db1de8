"""Pipelines with replicas, with shards (FSDP2) and with tensor parallel layers train as one process does."""

from __future__ import annotations

import copy
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optpipe import memory
from optpipe.config import OptimizerConfig
from optpipe.ops import Kind
from runtime import data_parallel, optimizer
from runtime.boundary import TensorSpec
from runtime.data_parallel import Replicas, Shards, ranks_of
from runtime.evaluate import Evaluator
from runtime.executor import Executor
from runtime.model import loss_fn
from runtime.stage import StageBytes, measure_bytes
from tests.pipelines import (
    MODEL,
    batch,
    boundaries,
    in_processes,
    one_f_one_b,
    plan_of_orders,
    problem_with,
    random_plan,
    stage_module,
    v_order,
)
from tests.test_evaluate import in_one_process

M, STEPS = 4, 3
SETTINGS = OptimizerConfig(learning_rate=0.01, clip_norm=0.05, warmup_steps=2)
#: Sums over ranks are made in another order, and AdamW divides by the gradient's size.
TOLERANCE = 2e-4


def problem(microbatches: int = M, places: tuple[int, ...] = (0, 1)):
    inputs, targets = batch(1)
    sizes = []
    for s in range(len(places)):
        x = inputs[0] if s == 0 else torch.randn(2, 8, MODEL.width)
        sizes.append(measure_bytes(stage_module(s, len(places)), s, len(places), x, targets[0], loss_fn))
    return problem_with(sizes, list(places), microbatches)


def whole(parameter: Tensor) -> list[float]:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()).tolist()


def train(plan, stages, ranks, group, syncs=(), counts=lambda p: True, part=slice(None), **options):
    """Some steps on this rank's part of a batch of twice M microbatches, with the names and values after them."""
    adamw = optimizer.adamw(stages.values(), SETTINGS)
    inputs, targets = batch(2 * M)
    norms, results = [], []
    number = plan.problem.num_stages
    specs = options.pop("specs", boundaries(number))
    with Executor(plan, stages, specs, loss_fn, ranks=ranks, syncs=list(syncs)) as executor:
        for step in range(STEPS):
            results.append(executor.step(inputs[part], targets[part], number=step))
            norms.append(optimizer.apply(adamw, SETTINGS, step, group, counts))
        planned = memory.peaks(plan.problem, plan.ops)[executor.program.device]
        assert all(0 < result.peak_bytes <= planned for result in results)
        assert executor.ledger.activation_bytes == executor.pool.in_use == 0
    return norms, {f"{s}.{n}": whole(p) for s, module in stages.items() for n, p in module.named_parameters()}, results


def expected(stages: list[nn.Module], microbatches: int = 2 * M) -> tuple[list[float], dict[str, Tensor]]:
    """One process, plain modules, the same optimiser: norms and parameters."""
    adamw = optimizer.adamw(stages, SETTINGS)
    inputs, targets = batch(2 * M)
    norms = []
    for step in range(STEPS):
        for x, target in zip(inputs[:microbatches], targets[:microbatches], strict=True):
            for stage in stages:
                x = stage(x)
            (loss_fn(x, target) / microbatches).backward()
        norms.append(optimizer.apply(adamw, SETTINGS, step))
    return norms, {f"{s}.{n}": p.detach() for s, module in enumerate(stages) for n, p in module.named_parameters()}


def compare(
    found: list[tuple[list[float], dict[str, list[float]]]], stages: list[nn.Module], microbatches: int
) -> None:
    norms, parameters = expected(stages, microbatches)
    seen = set()
    for own_norms, own in found:
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, value in own.items():
            torch.testing.assert_close(torch.tensor(value), parameters[name], rtol=0, atol=TOLERANCE)
            seen.add(name)
    assert seen == parameters.keys()


def replicas(mesh, split: bool):
    """Two replicas of a pipeline of two ranks, which start from other numbers than the first one."""
    row = mesh.get_local_rank("data")
    pipeline, across = mesh.get_local_rank("pipeline"), mesh.get_group("data")
    stages = {pipeline: stage_module(pipeline, 2)}
    if row:
        with torch.no_grad():
            for parameter in stages[pipeline].parameters():
                parameter.add_(1.0)
    plan = plan_of_orders(problem(), one_f_one_b(2, M, split=split), {(0, 1), (1, 2)})
    syncs = [Replicas(stages, across)]
    part = slice(row * M, (row + 1) * M)
    group = mesh.get_group("pipeline")
    return train(plan, stages, ranks_of(mesh, "pipeline"), group, syncs, part=part)[:2]


def shards(mesh, seed: int):
    """Two replicas that keep half of every parameter; activations are offloaded, parameters are not."""
    row, pipeline = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    module = stage_module(pipeline, 2)
    fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    stages = {pipeline: module}
    plan = random_plan(problem(), seed, offload=0.8)
    part = slice(row * M, (row + 1) * M)
    group = mesh.get_group("pipeline")
    norms, parameters, results = train(plan, stages, ranks_of(mesh, "pipeline"), group, [Shards(stages)], part=part)
    assert results[-1].peak_bytes > 0
    evaluator = Evaluator(plan.problem, stages, boundaries(2), loss_fn, ranks=ranks_of(mesh, "pipeline"))
    inputs, targets = batch(M, seed=9)
    loss = evaluator.loss(inputs, targets)
    evaluator.close()
    assert all(isinstance(p, DTensor) for p in module.parameters()), "between steps only the shards are kept"
    return norms, parameters, loss


class Layers(nn.Module):
    """Two matrices that ranks of a tensor parallel group share, and a norm that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = (
            nn.LayerNorm(MODEL.width),
            nn.Linear(MODEL.width, 64),
            nn.Linear(64, MODEL.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(torch.relu(self.wide(self.norm(x))))
        return out


def tensor_parallel_stages() -> list[nn.Module]:
    torch.manual_seed(2)
    first, last = stage_module(0, 4), stage_module(3, 4)
    return [nn.Sequential(first, Layers()), nn.Sequential(Layers(), Layers(), last)]


def shared(mesh):
    """A pipeline of two, each device of which is two ranks that share its matrices."""
    pipeline = mesh.get_local_rank("pipeline")
    module = tensor_parallel_stages()[pipeline]
    for layer in module:
        if isinstance(layer, Layers):
            parallelize_module(layer, mesh["tensor"], {"wide": ColwiseParallel(), "back": RowwiseParallel()})
    found = {}
    for kind in ("fused", "split"):
        sizes = [StageBytes(10**6, 10**6, 10**6, 1, 1)] * 2
        orders = one_f_one_b(2, M, split=kind == "split")
        plan = plan_of_orders(problem_with(sizes, [0, 1], M), orders, {(0, 1), (1, 2), (1, 3)})
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        norms, parameters, results = train(
            plan, {pipeline: module}, ranks_of(mesh, "pipeline"), mesh.get_group("pipeline"), part=slice(M)
        )
        found[f"shared, {kind}"] = norms, parameters
        # What is saved as a DTensor is counted, and moves, as any other.
        assert max(result.host_peak_bytes for result in results) > 0
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(start[name])
    return found


def a_weight_of_two_stages(rank: int, count: int) -> None:
    """Two stages of a rank hold the same parameter; the first one that is ready leaves it to the other one."""
    data_parallel.BUCKET_BYTES = 1  # each gradient travels alone
    for order in ([2, 1, 0], [1, 0, 2]):
        torch.manual_seed(0)
        ours = [nn.Linear(8, 8) for _ in range(3)]
        ours[1].weight = ours[2].weight
        plain = copy.deepcopy(nn.Sequential(*ours))
        plain[1].weight = plain[2].weight
        with torch.no_grad():
            ours[2].weight.add_(rank)
        inputs, targets = torch.randn(2, count, M, 4, 8)
        ops = [(Kind.F, s, j) for j in range(M) for s in range(3)]
        ops += [(Kind.B, s, j) for j in range(M) for s in (2, 1, 0)] + [(Kind.W, s, j) for s in order for j in range(M)]
        plan = plan_of_orders(problem_with([StageBytes(10**6, 10**6, 10**6, 1, 1)] * 3, [0] * 3, M), [ops])
        stages, specs = dict(enumerate(ours)), [TensorSpec((4, 8))] * 2
        syncs = [Replicas(stages, dist.group.WORLD)]
        mse = nn.functional.mse_loss
        with Executor(plan, stages, specs, mse, ranks=[rank], syncs=syncs) as executor:
            for _ in range(2):
                for module in (*ours, plain):
                    module.zero_grad()
                executor.step(list(inputs[rank]), list(targets[rank]))
                for x, target in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True):
                    (mse(plain(x), target) / (count * M)).backward()
                for one, other in zip(nn.Sequential(*ours).parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(one.grad, other.grad)


class Sometimes(nn.Module):
    """A norm that is used where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if float(x.detach().sum()) > 0 else x


def norms(rank: int, count: int) -> dict[str, list[float]]:
    """Two stages with BatchNorm, one of whose layers both hold, on this rank's part of the batch: their averages."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=0.3)
    stages = {0: nn.Sequential(nn.BatchNorm1d(8), norm), 1: nn.Sequential(norm, Sometimes(), nn.Linear(8, 8))}
    plan = plan_of_orders(problem_with([StageBytes(10**6, 10**6, 10**6, 1, 1)] * 2, [0] * 2, M), [v_order(1, M)[0]])
    inputs, targets = torch.randn(2, STEPS, count, 2, M, 6, 8)
    inputs += torch.arange(count).view(count, 1, 1, 1, 1) * 3
    syncs = [Replicas(stages, dist.group.WORLD)]
    with Executor(plan, stages, [TensorSpec((6, 8))], nn.functional.mse_loss, ranks=[rank], syncs=syncs) as executor:
        for x, target in zip(inputs[:, rank], targets[:, rank], strict=True):
            executor.step(list(x[0]), list(target[0]), is_last=False)
            executor.step(list(x[1]), list(target[1]), first_microbatch=M)
    first = nn.BatchNorm1d(8)
    for x in inputs:
        first(x.flatten(0, -2))
    torch.testing.assert_close(stages[0][0].running_mean, first.running_mean)
    torch.testing.assert_close(stages[0][0].running_var, first.running_var)
    assert int(norm.num_batches_tracked) == int(stages[0][0].num_batches_tracked) == STEPS
    return {f"{s}.{name}": value.tolist() for s, module in stages.items() for name, value in module.named_buffers()}


def on_ranks(rank: int, count: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    return {
        "fused": replicas(mesh, split=False),
        "split": replicas(mesh, split=True),
        "shards": shards(mesh, seed=3),
        **shared(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))),
    }


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """Of each rank."""
    return in_processes(4, on_ranks)


@pytest.mark.parametrize("name", ["fused", "split", "shards"])
def test_pipelines_side_by_side_train_as_one_process(found: list[dict], name: str) -> None:
    stages = [stage_module(s, 2) for s in range(2)]
    parts = [rank[name] for rank in found]
    compare([part[:2] for part in parts], stages, 2 * M)
    losses = [part[2] for part in parts if len(part) > 2 and part[2] is not None]
    assert len(losses) == 2 * (name == "shards")
    for loss in losses:
        assert loss == pytest.approx(in_one_process(stages, *batch(M, seed=9), loss_fn, M), rel=1e-4)


@pytest.mark.parametrize("kind", ["fused", "split"])
def test_tensor_parallel_layers_train_as_one_process(found: list[dict], kind: str) -> None:
    compare([rank[f"shared, {kind}"] for rank in found], tensor_parallel_stages(), M)


def test_only_modules_under_fsdp_have_shards() -> None:
    with pytest.raises(TypeError, match="stage 3 is a Linear, expected one after fully_shard"):
        Shards({3: nn.Linear(2, 2)})


def test_a_weight_of_two_stages_of_a_rank_is_averaged_once() -> None:
    in_processes(2, a_weight_of_two_stages)


def test_averages_of_batch_norm_are_those_of_all_replicas() -> None:
    first, second = in_processes(2, norms)
    assert first == second and any(any(value) for name, value in first.items() if name == "1.1.norm.running_mean")


class Sends:
    """In place of ``all_reduce``: what was sent."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, flat: Tensor, **_: object) -> None:
        self.sizes.append(len(flat))


def test_replicas_send_the_same_whichever_stage_is_ready_first(monkeypatch) -> None:
    stages = {s: nn.Linear(2, s, bias=False) for s in (1, 3, 5)}
    for name, value in (("get_world_size", 2), ("get_process_group_ranks", [0, 1]), ("broadcast", None)):
        monkeypatch.setattr(dist, name, lambda *_, value=value, **__: value)
    for order in permutations(stages):
        monkeypatch.setattr(dist, "all_reduce", sends := Sends())
        replicas = Replicas(stages, None)
        for _ in range(2):
            replicas.begin()
            for stage in order:
                replicas.ready(stage)
        assert sends.sizes == [10, 6, 2] * 2


def test_gradients_travel_in_buckets_of_one_dtype(monkeypatch) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 100)
    gradients = [torch.zeros(n, dtype=d) for n, d in ((10, torch.float32), (8, torch.float64), (20, torch.float32))]
    gradients += [torch.zeros(5, dtype=torch.float64)]
    buckets = list(data_parallel._buckets(gradients))
    assert [[len(part) for part in bucket] for bucket in buckets] == [[10, 20], [8, 5]]
    assert all(len({part.dtype for part in bucket}) == 1 for bucket in buckets)
    assert not dist.is_initialized() and TensorSpec((1,)).nbytes == 4
