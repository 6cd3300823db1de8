"""A step under any plan gives what one process gives, whatever the model is made of."""

from __future__ import annotations

import pytest
from torch import nn

from optpipe.errors import RunFailed
from runtime.executor import Executor, LossFn
from tests.odd_models import ODD, Calls, Odd, check, line, loss_fn, plan_of

M = 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a forward under no_grad
@pytest.mark.parametrize("name", ODD)
def test_odd_models_on_one_rank(name: str) -> None:
    count = len(ODD[name].make())
    for seed, m in enumerate((3, 2, 1)):
        check(name, [0] * count, 0, m, seed)


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
