"""Whole training, five steps of AdamW with clipping, under a plan and in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from optpipe.config import OptimizerConfig
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from runtime import batch_norm, optimizer
from runtime.executor import Executor
from runtime.gradients import TiedWeights
from runtime.stage import dropout_seed, seeded
from runtime.trial import Trial
from tests.odd_models import ODD, Odd, lengthened, loss_fn, places_on, plan_of
from tests.pipelines import planned

STEPS = 5
#: A norm that clips every step, and a rate that moves every parameter.
SETTINGS = OptimizerConfig(learning_rate=0.01, clip_norm=0.02, warmup_steps=2)


def parameters_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {f"{s}.{name}": p.detach().clone() for s, stage in stages.items() for name, p in stage.named_parameters()}


def in_one_process(odd: Odd, m: int) -> tuple[dict[str, Tensor], set[str]]:
    """Parameters after training, and the names of those that never had a gradient."""
    stages = dict(enumerate(odd.make()))
    adamw = optimizer.adamw(stages.values(), SETTINGS) if _trained(stages) else None
    unused = set(parameters_of(stages))
    for stage in stages.values():
        batch_norm.convert(stage)
    for step in range(STEPS):
        inputs, targets = odd.batch(m)
        for j in range(m):
            x = inputs[j]
            for s, stage in stages.items():
                with seeded(dropout_seed(0, step, s, j), torch.device("cpu")):
                    x = stage(x)
            loss = loss_fn(x, targets[j]) / m
            if loss.requires_grad:
                with batch_norm.run_again():
                    loss.backward()
        for stage in stages.values():
            batch_norm.move_averages(stage)
        unused -= {f"{s}.{n}" for s, stage in stages.items() for n, p in stage.named_parameters() if p.grad is not None}
        if adamw is not None:
            _apply_alone(adamw, step)
    return parameters_of(stages), unused


def _trained(stages: Mapping[int, nn.Module]) -> bool:
    return any(p.requires_grad for stage in stages.values() for p in stage.parameters())


def _apply_alone(adamw: torch.optim.Optimizer, step: int) -> None:
    """``optimizer.apply`` as in a process that knows of no others."""
    for group in adamw.param_groups:
        group["lr"] = optimizer.learning_rate(SETTINGS, step)
    gradients = [p.grad for group in adamw.param_groups for p in group["params"] if p.grad is not None]
    norm = sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients)) ** 0.5
    torch._foreach_mul_(gradients, SETTINGS.clip_norm / (norm + 1e-6))
    adamw.step()
    adamw.zero_grad()


def under(
    plan: Plan,
    odd: Odd,
    rank: int,
    modules: Sequence[nn.Module] | None = None,
    syncs: Iterable[TiedWeights] = (),
) -> dict[str, Tensor]:
    """Parameters of this rank's stages after training under a plan."""
    syncs = list(syncs)
    modules = modules or odd.make()
    stages = {s: modules[s] for s in plan.problem.stages_of[rank]}
    adamw = optimizer.adamw(stages.values(), SETTINGS) if _trained(stages) else None
    with Executor(plan, stages, odd.specs(), loss_fn, syncs=syncs) as executor:
        for step in range(STEPS):
            executor.step(*odd.batch(plan.problem.num_microbatches), number=step)
            if adamw is None:
                optimizer.clip([], SETTINGS.clip_norm)  # a collective of all ranks
            else:
                optimizer.apply(adamw, SETTINGS, step, counts=lambda p: all(sync.counts(p) for sync in syncs))
    return parameters_of(stages)


def ordered_plan(odd: Odd, places: Sequence[int], m: int, *, split: bool) -> Plan:
    """1F1B with offloads: every sum is made in the order of one process."""
    problem = plan_of(odd, places, m, 0).problem
    ops = Trial(places, m, split=split, offload=True).plan().ops
    return planned(problem, Ops.of([op for op in ops if op.kind not in (Kind.O, Kind.R) or problem.can_offload(op[1])]))


def check(name: str, count: int, rank: int, m: int, seed: int) -> None:
    """Under ordered plans, split and fused, bit for bit; under a random one within tolerance."""
    odd = lengthened(ODD[name], count)
    places = places_on(name, odd, count)
    if max(places) + 1 != count:
        return  # what stages share as one object is not for so many ranks
    expected, unused = in_one_process(odd, m)
    plans = {
        "fused": (ordered_plan(odd, places, m, split=False), odd.exact),
        "split": (ordered_plan(odd, places, m, split=True), odd.exact),
        "random": (plan_of(odd, places, m, seed), False),
    }
    for kind, (plan, exact) in plans.items():
        for key, value in under(plan, odd, rank).items():
            if key in unused:
                continue  # gradients of zero in place of none: only weight decay moves it
            where = f"{name}, {kind}: {key}"
            if exact:
                assert torch.equal(value, expected[key]), where
            else:
                # AdamW divides by the gradient's size: a last bit of a small one is worth more in a parameter.
                most = float((value - expected[key]).abs().max())
                assert most <= max(2e-4, odd.tolerance), f"{where} is {most} away"
