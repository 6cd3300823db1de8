"""Whole training, five steps of AdamW with clipping, under a plan and in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from optpipe import memory
from optpipe.config import OptimizerConfig
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from runtime import batch_norm, optimizer
from runtime.executor import Executor
from runtime.run import BeforeOp
from runtime.stage import dropout_seed, seeded
from runtime.trial import Trial
from tests.odd_models import ODD, Odd, buffers, lengthened, loss_fn, places_on, plan_of, without_budgets
from tests.pipelines import planned
from tests.steps import Delays

STEPS = 5
#: A norm that clips every step, and a rate that moves every parameter.
SETTINGS = OptimizerConfig(learning_rate=0.01, clip_norm=0.02, warmup_steps=2)


def parameters_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {f"{s}.{name}": p.detach().clone() for s, stage in stages.items() for name, p in stage.named_parameters()}


class Alone(NamedTuple):
    """Training in one process: losses; parameters and buffers after it; parameters that never had a gradient."""

    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    unused: set[str]


def in_one_process(odd: Odd, m: int) -> Alone:
    """Microbatch after microbatch, plain autograd."""
    stages = dict(enumerate(odd.make()))
    adamw = optimizer.adamw(stages.values(), SETTINGS) if _trained(stages) else None
    unused = set(parameters_of(stages))
    for stage in stages.values():
        batch_norm.convert(stage)
    losses: list[float] = []
    for step in range(STEPS):
        inputs, targets = odd.batch(m)
        losses.append(0.0)
        for j in range(m):
            x = inputs[j]
            for s, stage in stages.items():
                with seeded(dropout_seed(0, step, s, j), torch.device("cpu")):
                    x = stage(x)
            loss = loss_fn(x, targets[j]) / m
            losses[-1] += float(loss.detach())
            if loss.requires_grad:
                with batch_norm.run_again():
                    loss.backward()
        for stage in stages.values():
            batch_norm.move_averages(stage)
        unused -= {f"{s}.{n}" for s, stage in stages.items() for n, p in stage.named_parameters() if p.grad is not None}
        if adamw is not None:
            _apply_alone(adamw, step)
    return Alone(losses, parameters_of(stages), buffers(stages), unused)


def _trained(stages: Mapping[int, nn.Module]) -> bool:
    return any(p.requires_grad for stage in stages.values() for p in stage.parameters())


def _apply_alone(adamw: torch.optim.Optimizer, step: int) -> None:
    """``optimizer.apply`` as in a process that knows of no others."""
    for group in adamw.param_groups:
        group["lr"] = optimizer.learning_rate(SETTINGS, step)
    gradients = [p.grad for group in adamw.param_groups for p in group["params"] if p.grad is not None]
    norm = math.fsum(float(norm) ** 2 for norm in torch._foreach_norm(gradients)) ** 0.5
    torch._foreach_mul_(gradients, SETTINGS.clip_norm / (norm + 1e-6))
    adamw.step()
    adamw.zero_grad()


def under(plan: Plan, odd: Odd, rank: int, before_op: BeforeOp | None = None) -> tuple[Alone, bool]:
    """The same for this rank's stages under a plan, and whether the losses are known here. No step holds more than
    planned or changes the batch, and nothing is left behind."""
    modules, problem = odd.make(), plan.problem
    stages = {s: modules[s] for s in problem.stages_of[rank]}
    adamw = optimizer.adamw(stages.values(), SETTINGS) if _trained(stages) else None
    peak = memory.peaks(problem, plan.ops)[rank]
    losses = []
    with Executor(plan, stages, odd.specs(), loss_fn, before_op=before_op) as executor:
        for step in range(STEPS):
            inputs, targets = odd.batch(problem.num_microbatches)
            result = executor.step(inputs, targets, number=step)
            losses.append(result.loss or 0.0)
            assert result.peak_bytes <= peak and result.message_peak_bytes <= executor.message_bytes
            if not odd.changes_batch:
                before = odd.batch(problem.num_microbatches)
                assert all(map(torch.equal, [*inputs, *targets], [*before[0], *before[1]])), "the batch was changed"
            if adamw is None:
                optimizer.clip([], SETTINGS.clip_norm)  # a collective of all ranks
            else:
                optimizer.apply(adamw, SETTINGS, step)
    assert executor.ledger.activation_bytes == executor.ledger.message_bytes == executor.pool.in_use == 0
    return Alone(losses, parameters_of(stages), buffers(stages), set()), problem.num_stages - 1 in stages


def ordered_plan(odd: Odd, places: Sequence[int], m: int, *, split: bool) -> Plan:
    """1F1B with offloads: every sum is made in the order of one process."""
    problem = plan_of(odd, places, m, 0).problem
    ops = Trial(places, m, split=split, offload=True).plan().ops
    return planned(problem, Ops.of([op for op in ops if op.kind not in (Kind.O, Kind.R) or problem.can_offload(op[1])]))


def check(name: str, count: int, rank: int, m: int, seed: int) -> None:
    """Under ordered plans, split and fused, with budgets and without, bit for bit; under random ones nearly so."""
    odd = lengthened(ODD[name], count)
    places = places_on(name, odd, count)
    if max(places) + 1 != count:
        return  # what stages share as one object is not for so many ranks
    expected = in_one_process(odd, m)
    plans = {
        "fused": (ordered_plan(odd, places, m, split=False), odd.exact, None),
        "split": (without_budgets(ordered_plan(odd, places, m, split=True)), odd.exact, None),
        "random": (plan_of(odd, places, m, seed, limited=seed % 2 == 0), False, Delays(seed, 5e-4)),
    }
    for kind, (plan, exact, delays) in plans.items():
        found, knows_losses = under(plan, odd, rank, delays)
        if knows_losses:
            assert found.losses == pytest.approx(expected.losses, rel=max(1e-4, odd.tolerance)), (name, kind)
        for key, value in found.buffers.items():
            torch.testing.assert_close(value, expected.buffers[key], rtol=1e-4, atol=1e-5)
        for key, value in found.parameters.items():
            if key in expected.unused:
                continue  # gradients of zero in place of none: only weight decay moves it
            where = f"{name}, {kind}: {key}"
            if exact:
                assert torch.equal(value, expected.parameters[key]), where
            else:
                # AdamW divides by the gradient's size: a last bit of a small one is worth more in a parameter.
                most = float((value - expected.parameters[key]).abs().max())
                assert most <= max(2e-4, odd.tolerance), f"{where} is {most} away"
