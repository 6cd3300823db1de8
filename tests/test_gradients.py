"""What a step's gradients are made of: shared weights, batches that are cut in any way, runs that add up to a step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from optpipe.errors import InputError
from runtime import optimizer
from runtime.boundary import TensorSpec, uneven
from runtime.executor import Executor
from runtime.gradients import Copy, TiedWeights
from runtime.stage import dropout_seed, measure_bytes, seeded
from tests.pipelines import (
    MODEL,
    batch,
    boundaries,
    gradients,
    in_processes,
    one_f_one_b,
    plan_of_orders,
    planned,
    problem_with,
    random_plan,
    stage_module,
)

SEQUENCES = 8


class TiedHead(nn.Module):
    """The last part of a language model, whose matrix is the embedding's."""

    def __init__(self, inner: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.inner, self.weight = inner, nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.weight.t()


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Over the tokens that count: those that are not -1."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def uneven_batch() -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which some sequences count hardly at all; one does not count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, MODEL.vocabulary, (SEQUENCES, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(SEQUENCES):
        targets[row, : row + 1] = -1
    return tokens[:, :-1], targets


def problem_of(modules: list[nn.Module], places: list[int], m: int, rows: int, loss_fn=summed_loss):
    sizes = []
    for s, module in enumerate(modules):
        x = torch.zeros(rows, 8, dtype=torch.long) if s == 0 else torch.randn(rows, 8, MODEL.width)
        target = torch.zeros(rows, 8, dtype=torch.long)
        sizes.append(measure_bytes(module, s, len(modules), x, target, loss_fn))
    return problem_with(sizes, places, m)


def whole(stages: list[nn.Module], inputs: Tensor, targets: Tensor, count: float) -> tuple[float, dict[str, Tensor]]:
    """One process and the batch in one piece."""
    x = inputs
    for stage in stages:
        x = stage(x)
    loss = summed_loss(x, targets) / count
    loss.backward()
    return float(loss.detach()), gradients(dict(enumerate(stages)))


def norms(rank: int, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm at several cuts of one batch."""
    inputs, targets = uneven_batch()
    counted = float((targets >= 0).sum())
    found = []
    for m in (1, 2, 8, 3):
        places = list(range(count))
        modules = [stage_module(s, count) for s in range(count)]
        specs = uneven(TensorSpec((SEQUENCES, 8, MODEL.width)), SEQUENCES, m)
        problem = problem_of(modules, places, m, -(-SEQUENCES // m))
        plan = plan_of_orders(problem, one_f_one_b(count, m, split=True))
        stages = {rank: stage_module(rank, count)}
        with Executor(plan, stages, [specs] * (count - 1), summed_loss) as executor:
            result = executor.step(torch.tensor_split(inputs, m), torch.tensor_split(targets, m), denominator=counted)
        assert result.peak_bytes <= executor.planned_peak_bytes
        loss = torch.tensor(result.loss or 0.0, dtype=torch.float64)
        dist.all_reduce(loss)
        found.append((float(loss), optimizer.clip(stages[rank].parameters(), 1e9)))
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_loss_and_norm_do_not_depend_on_the_cut_of_the_batch(count: int) -> None:
    inputs, targets = uneven_batch()
    stages = [stage_module(s, count) for s in range(count)]
    loss, grads = whole(stages, inputs, targets, float((targets >= 0).sum()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    for rank in in_processes(count, norms):
        for told in rank:
            assert told == pytest.approx((loss, norm), rel=1e-5)


def test_a_mean_of_means_would_depend_on_it() -> None:
    """What the denominator is for: the same batch with means of microbatches gives other gradients."""
    inputs, targets = uneven_batch()

    def mean(logits: Tensor, target: Tensor) -> Tensor:
        return summed_loss(logits, target) / (target >= 0).sum().clamp(min=1)

    found = []
    for m in (1, 8):
        problem = problem_of([stage_module(0, 1)], [0], m, SEQUENCES // m, mean)
        stages = {0: stage_module(0, 1)}
        with Executor(plan_of_orders(problem, one_f_one_b(1, m)), stages, [], mean) as executor:
            executor.step(inputs.chunk(m), targets.chunk(m))
        found.append(optimizer.clip(stages[0].parameters(), 1e9))
    assert found[0] != pytest.approx(found[1], rel=1e-2)


def test_an_uneven_batch_without_boundaries_for_it_is_refused() -> None:
    problem = problem_of([stage_module(s, 2) for s in range(2)], [0, 0], 3, 3)
    stages = {s: stage_module(s, 2) for s in range(2)}
    plan = random_plan(problem, 0)
    inputs, targets = uneven_batch()
    parts = torch.tensor_split(inputs, 3), torch.tensor_split(targets, 3)
    said = "different shapes, expected one shape, or boundaries for each"
    one_shape = [TensorSpec((3, 8, MODEL.width))]
    with Executor(plan, stages, one_shape, summed_loss) as executor, pytest.raises(InputError, match=said):
        executor.step(*parts)
    with pytest.raises(InputError, match=r"boundaries\[0\]: has 2 entries, expected 3: one a microbatch"):
        Executor(plan, stages, [[TensorSpec((3, 8, MODEL.width))] * 2], summed_loss)


def tied_stages(count: int) -> list[nn.Module]:
    stages = [stage_module(s, count) for s in range(count)]
    last = stages[-1]
    head = TiedHead(nn.Sequential(*last[:-1], last[-1].norm), stages[0][0].token.weight)
    return [*stages[:-1], head]


def shared(stages: dict[int, nn.Module], count: int, places: list[int]) -> TiedWeights:
    return TiedWeights([[Copy(0, "0.token.weight"), Copy(count - 1, "weight")]], stages, places)


def tied_training(rank: int, count: int) -> dict[str, list[float]]:
    """Three steps on ranks that each have a copy; those of the last rank start elsewhere, and do not stay there."""
    stages_of = {2: 2, 1: 2, 4: 4}[count]
    places = [s % count for s in range(stages_of)]
    plan = random_plan(problem_of(tied_stages(stages_of), places, 4, 2), 1, offload=0.5)
    modules = tied_stages(stages_of)
    with torch.no_grad():
        modules[-1].weight.add_(1.0)
    stages = {s: modules[s] for s in plan.problem.stages_of[rank]}
    tied = shared(stages, stages_of, places)
    found = optimizer.adamw(stages.values(), SETTINGS)
    inputs, targets = uneven_batch()
    with Executor(plan, stages, boundaries(stages_of), summed_loss, syncs=[tied]) as executor:
        for step in range(3):
            executor.step(inputs.chunk(4), targets.chunk(4), number=step, denominator=28.0)
            optimizer.apply(found, SETTINGS, step, counts=tied.counts)
    return {f"{s}.{n}": p.tolist() for s, module in stages.items() for n, p in module.named_parameters()}


SETTINGS = optimizer.OptimizerConfig(learning_rate=0.01, clip_norm=0.05, warmup_steps=2)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_weight_shared_by_first_and_last_stage_is_one_weight(count: int) -> None:
    found: dict[str, Tensor] = {}
    for part in in_processes(count, tied_training):
        found |= {name: torch.tensor(values) for name, values in part.items()}
    stages = tied_stages(max(count, 2))
    stages[-1].weight = stages[0][0].token.weight
    adamw = optimizer.adamw(stages, SETTINGS)
    inputs, targets = uneven_batch()
    for step in range(3):
        whole(stages, inputs, targets, 28.0)
        optimizer.apply(adamw, SETTINGS, step)
    last = f"{len(stages) - 1}.weight"
    assert torch.equal(found["0.0.token.weight"], found[last])
    for s, stage in enumerate(stages):
        for name, value in stage.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(found[f"{s}.{name}"], value.detach(), rtol=0, atol=2e-4)


def test_a_tied_weight_that_is_not_there_is_told() -> None:
    with pytest.raises(InputError, match=r"tied: stage 0 has no parameter 0\.tokens\.weight"):
        TiedWeights([[Copy(0, "0.tokens.weight"), Copy(1, "weight")]], dict(enumerate(tied_stages(2))), [0, 0])


def test_shared_weights_are_added_up_behind_what_replicas_do() -> None:
    """Whichever is named first: replicas would put their mean over the sum."""
    ours = {s: stage_module(s, 2, 0.0) for s in range(2)}
    calls: list[str] = []

    class Tied(TiedWeights):
        def finish(self) -> None:
            calls.append("shared")
            super().finish()

    tied = Tied([], ours, [0, 0])
    inputs, targets = batch(2)
    plan = random_plan(problem_of(list(ours.values()), [0, 0], 2, 2), 1)
    with Executor(plan, ours, boundaries(2), mean_loss, syncs=[tied, Notes(calls)]) as executor:
        executor.step(inputs, targets)
    assert calls[-2:] == ["finish", "shared"]


def test_runs_add_up_to_a_step() -> None:
    """Three runs of a plan of four microbatches are the step of a plan of twelve, dropout and averages too."""
    torch.manual_seed(0)
    m, runs = 4, 3

    def stages() -> dict[int, nn.Module]:
        first, last = stage_module(0, 2, 0.2), stage_module(1, 2, 0.2)
        torch.manual_seed(1)
        return {0: nn.Sequential(first, nn.BatchNorm1d(8)), 1: last}

    inputs, targets = batch(m * runs)
    plain = stages()
    for j in range(m * runs):
        x = inputs[j]
        for s, stage in plain.items():
            with seeded(dropout_seed(0, 7, s, j), torch.device("cpu")):
                x = stage(x)
        loss = F.cross_entropy(x.flatten(0, 1), targets[j].flatten()) / (m * runs)
        loss.backward()
    problem = problem_of(list(stages().values()), [0, 0], m, 2)
    plan, ours = planned(problem, random_plan(problem, 5).ops), stages()
    total = 0.0
    calls: list[str] = []
    with Executor(plan, ours, boundaries(2), mean_loss, syncs=[Notes(calls)]) as executor:
        for run in range(runs):
            part = slice(run * m, (run + 1) * m)
            result = executor.step(
                inputs[part],
                targets[part],
                number=7,
                denominator=m * runs,
                first_microbatch=run * m,
                is_last=run == runs - 1,
            )
            total += result.loss
            moved = int(ours[0][1].num_batches_tracked)
            assert moved == (run == runs - 1)
    assert calls[:-1].count("begin") == runs and calls[-1] == "finish"
    assert {"ready 0", "ready 1"} <= set(calls) and len(calls) == runs + 3
    expected = gradients(plain)
    found = gradients(ours)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_runs_of_different_plans_add_up_too() -> None:
    """Four microbatches under one plan and two under another, of the same stages: the gradients of six."""
    plain = {s: stage_module(s, 2, 0.2) for s in range(2)}
    inputs, targets = batch(6)
    for j in range(6):
        x = inputs[j]
        for s, stage in plain.items():
            with seeded(dropout_seed(0, 0, s, j), torch.device("cpu")):
                x = stage(x)
        (mean_loss(x, targets[j]) / 6).backward()
    ours = {s: stage_module(s, 2, 0.2) for s in range(2)}
    calls: list[str] = []
    for first, last, kind in ((0, 4, 1), (4, 6, 2)):
        plan = random_plan(problem_of(list(ours.values()), [0, 0], last - first, 2), kind)
        with Executor(plan, ours, boundaries(2), mean_loss, syncs=[Notes(calls)]) as executor:
            part = slice(first, last)
            executor.step(inputs[part], targets[part], denominator=6, first_microbatch=first, is_last=last == 6)
        for stage in ours.values():
            assert all(parameter.grad is not None for parameter in stage.parameters())
    assert calls.count("begin") == 2 and calls[-1] == "finish" and len(calls) == 5
    expected, found = gradients(plain), gradients(ours)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Notes:
    """Writes down what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def begin(self) -> None:
        self.calls.append("begin")

    def ready(self, stage: int) -> None:
        self.calls.append(f"ready {stage}")

    def finish(self) -> None:
        self.calls.append("finish")
