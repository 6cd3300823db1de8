"""A step under any plan gives what one process gives, whatever the model is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import RunFailed
from optpipe.ops import Kind
from runtime.boundary import TensorSpec
from runtime.executor import Executor, LossFn
from runtime.stage import StageBytes
from tests.odd_models import LENGTH, ODD, WIDTH, Calls, Odd, check, line, loss_fn, plan_of, without_budgets
from tests.pipelines import plan_of_orders, problem_with

M = 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a forward under no_grad
@pytest.mark.parametrize("name", ODD)
def test_odd_models_on_one_rank(name: str) -> None:
    count = len(ODD[name].make())
    for seed, m in enumerate((3, 2, 1)):
        check(name, [0] * count, 0, m, seed)


class Added(nn.Module):
    """``x + a + b`` over a microbatch of one sequence; ``size``: of the shape of the two parameters."""

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a.view(1, LENGTH, WIDTH) + self.b.view(1, LENGTH, WIDTH)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("size", [(LENGTH, WIDTH), (1, LENGTH, WIDTH), (LENGTH * WIDTH,)])
def test_no_gradient_is_added_to_that_something_else_uses(split: bool, limited: bool, size: tuple[int, ...]) -> None:
    """Every gradient of a parameter is a view of the one gradient that goes through all stages, and that W needs."""
    torch.manual_seed(0)
    ours = [nn.Sequential(line(), Added(size)) if s == 0 else Added(size) for s in range(3)]
    back = [(s, j) for s in (2, 1, 0) for j in range(M)]
    kinds = (Kind.B, Kind.W) if split else (Kind.BW,)
    order = [(Kind.F, s, j) for j in range(M) for s in range(3)] + [(kind, s, j) for kind in kinds for s, j in back]
    sizes = [StageBytes(10**6, 10**6, 10**6, 1, 1)] * 3
    plan = plan_of_orders(problem_with(sizes, [0] * 3, M), [order])
    inputs, targets = torch.randn(M, 1, LENGTH, WIDTH), torch.randn(M, 1, LENGTH, WIDTH)
    # Plain autograd adds up wrongly itself where two gradients share memory: so one microbatch at a time.
    expected = [torch.zeros_like(p) for stage in ours for p in stage.parameters()]
    for x, target in zip(inputs, targets, strict=True):
        loss = loss_fn(nn.Sequential(*ours)(x), target) / M
        parts = torch.autograd.grad(loss, [p for stage in ours for p in stage.parameters()])
        expected = [total + part for total, part in zip(expected, parts, strict=True)]
    specs = [TensorSpec((1, LENGTH, WIDTH))] * 2
    with Executor(plan if limited else without_budgets(plan), dict(enumerate(ours)), specs, loss_fn) as executor:
        for _ in range(3):
            for stage in ours:
                stage.zero_grad()
            executor.step(list(inputs), list(targets))
            found = [p.grad for stage in ours for p in stage.parameters()]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_what_no_process_could_differentiate_is_told() -> None:
    """A stage changes its input, which the stage before it saved: plain autograd refuses that too."""
    odd = Odd(lambda: [nn.Sequential(line(), nn.Sigmoid()), Calls(lambda m, x: m.layer(x.mul_(2)), layer=line())])
    plan = plan_of(odd, [0, 0], M, 0)
    inputs, targets = odd.batch(M)
    executor = Executor(plan, dict(enumerate(odd.make())), odd.specs(), loss_fn)
    with executor, pytest.raises(RunFailed, match="changed in place after it was saved"):
        executor.step(inputs, targets)


@pytest.mark.parametrize(
    ("stage", "loss", "said"),
    [
        (Calls(lambda m, x: (x, x)), loss_fn, "stage 0 gave a tuple, expected one tensor"),
        (line(), lambda y, t: (y - t) ** 2, r"the loss has shape \(2, 8, 16\), expected one number"),
    ],
)
def test_what_a_stage_or_a_loss_may_not_give_is_told(stage: nn.Module, loss: LossFn, said: str) -> None:
    odd = Odd(lambda: [line()])
    plan = plan_of(odd, [0], M, 0)
    with Executor(plan, {0: stage}, [], loss) as executor, pytest.raises(RunFailed, match=said):
        executor.step(*odd.batch(M))
