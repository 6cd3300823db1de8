"""An evaluation on ranks gives the loss of one process, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optpipe.errors import InputError, RunFailed
from runtime.boundary import TensorSpec, uneven
from runtime.evaluate import Evaluator
from runtime.model import loss_fn
from runtime.stage import StageBytes
from tests.odd_models import ODD, places_on
from tests.odd_models import loss_fn as odd_loss_fn
from tests.pipelines import MODEL, batch, boundaries, in_processes, model_problem, problem_with, stage_module
from tests.test_gradients import SEQUENCES, summed_loss, uneven_batch

M = 6


@torch.no_grad()
def in_one_process(stages: list[nn.Module], inputs, targets, loss, count: float) -> float:
    total = torch.zeros(())
    for x, target in zip(inputs, targets, strict=True):
        for stage in stages:
            x = stage.eval()(x)
        total = total + loss(x, target) / count
    return float(total)


def check(count: int, per_device: int, kind: str, rank: int) -> None:
    problem = model_problem(count, per_device, kind, M)
    total = problem.num_stages
    stages = {s: stage_module(s, total, dropout=0.3) for s in problem.stages_of[rank]}
    frozen_part = next(iter(stages.values()))[0].eval()
    evaluator = Evaluator(problem, stages, boundaries(total), loss_fn)
    for seed in range(2):
        inputs, targets = batch(M, seed)
        found = evaluator.loss(inputs, targets)
        if total - 1 in stages:
            assert found == in_one_process([stage_module(s, total) for s in range(total)], inputs, targets, loss_fn, M)
        else:
            assert found is None
        assert 0 <= evaluator.ledger.message_peak <= evaluator.program.message_bytes
        assert evaluator.ledger.message_bytes == evaluator.ledger.activation_bytes == 0
    evaluator.close()
    for stage in stages.values():
        for module in stage.modules():
            part = any(module is inner for inner in frozen_part.modules())
            assert module.training != part, "each module is in the mode that it was in"
        assert all(parameter.grad is None for parameter in stage.parameters())


def check_odd(name: str, count: int, rank: int) -> None:
    odd = ODD[name]
    places = places_on(name, odd, count)
    if max(places) + 1 != count:
        return
    modules = odd.make()
    problem = problem_with([StageBytes(1, 1, 1, 1, 1)] * len(modules), places, M)
    stages = {s: modules[s] for s in problem.stages_of[rank]}
    evaluator = Evaluator(problem, stages, odd.specs(), odd_loss_fn)
    found = evaluator.loss(*odd.batch(M))
    evaluator.close()
    if len(modules) - 1 in stages:
        assert found == in_one_process(odd.make(), *odd.batch(M), odd_loss_fn, M), name


def check_uneven(count: int, rank: int) -> None:
    inputs, targets = uneven_batch()
    problem = model_problem(count, microbatches=3)
    specs = uneven(TensorSpec((SEQUENCES, 8, MODEL.width)), SEQUENCES, 3)
    stages = {s: stage_module(s, count) for s in problem.stages_of[rank]}
    parts = torch.tensor_split(inputs, 3), torch.tensor_split(targets, 3)
    evaluator = Evaluator(problem, stages, [specs] * (count - 1), summed_loss)
    found = evaluator.loss(*parts, denominator=28.0)
    evaluator.close()
    if count - 1 in stages:
        plain = [stage_module(s, count) for s in range(count)]
        assert found == pytest.approx(in_one_process(plain, *parts, summed_loss, 28.0), rel=1e-6)
        whole = in_one_process(plain, [inputs], [targets], summed_loss, 28.0)
        assert found == pytest.approx(whole, rel=1e-5)


def on_ranks(rank: int, count: int) -> None:
    for per_device, kind in ((1, "linear"), (2, "v"), (2, "interleaved"), (2, "linear")):
        check(count, per_device, kind, rank)
    for name in ODD:
        check_odd(name, count, rank)
    check_uneven(count, rank)


@pytest.mark.parametrize("count", [2, 4])
def test_an_evaluation_on_several_ranks_gives_the_loss_of_one_process(count: int) -> None:
    in_processes(count, on_ranks)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # checkpoints under no_grad
def test_an_evaluation_on_one_rank_gives_the_loss_of_one_process() -> None:
    on_ranks(0, 1)


def test_what_goes_wrong_is_told() -> None:
    problem = model_problem(1, 2, microbatches=2)
    stages = {s: stage_module(s, 2) for s in range(2)}
    evaluator = Evaluator(problem, stages, boundaries(2), loss_fn)
    inputs, targets = batch(2)
    with pytest.raises(InputError, match="inputs: has 1 microbatches, expected 2"):
        evaluator.loss(inputs[:1], targets)
    stages[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a shape is wrong")))
    with pytest.raises(RunFailed, match=r"F\(1,0\) of an evaluation: ValueError: a shape is wrong"):
        evaluator.loss(inputs, targets)
    evaluator.close()
