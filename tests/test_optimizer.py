"""The optimiser over ranks does what torch's does in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optpipe.config import OptimizerConfig
from runtime import optimizer


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 100.0))
def test_clipping_is_torchs(seed: int, most: float) -> None:
    torch.manual_seed(seed)
    ours, theirs = ([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = optimizer.clip([*ours, nn.Parameter(torch.zeros(2))], most)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, most)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_steps_are_adamws_with_warm_up_and_without_decay_of_vectors() -> None:
    settings = OptimizerConfig(learning_rate=0.01, weight_decay=0.3, clip_norm=0.5, warmup_steps=3)
    ours, theirs = model(0), model(0)
    adamw = optimizer.adamw([ours], settings)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=settings.betas,
    )
    for step in range(5):
        for module in (ours, theirs):
            module(torch.tensor([[0, 1, 2]])).square().mul(100).sum().backward()
        optimizer.apply(adamw, settings, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = 0.01 * min(1.0, (step + 1) / 3)
        reference.step()
        reference.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.grad is None


def test_a_copy_of_a_weight_is_clipped_but_not_counted() -> None:
    first, copied = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    for parameter in (first, copied):
        parameter.grad = torch.full((4,), 3.0)
    assert optimizer.clip([first, copied], 1.0, counts=lambda p: p is first) == pytest.approx(6.0)
    assert torch.equal(first.grad, copied.grad)
    assert float(first.grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_without_a_clip_norm_nothing_is_clipped() -> None:
    settings = OptimizerConfig(clip_norm=None)
    module = model(1)
    module(torch.tensor([[0, 1, 2]])).sum().backward()
    before = copy.deepcopy([p.grad for p in module.parameters()])
    assert optimizer.apply(optimizer.adamw([module], settings), settings, 0) is None
    assert before[0] is not None


def test_warm_up() -> None:
    settings = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [optimizer.learning_rate(settings, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert optimizer.learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 0) == 1.0


def test_state_bytes_are_what_adamw_allocates() -> None:
    module = model(2)
    adamw = optimizer.adamw([module], OptimizerConfig())
    module(torch.tensor([[0, 1]])).sum().backward()
    adamw.step()
    weights, gradients, state = optimizer.state_bytes([module])
    assert weights == sum(p.numel() * 4 for p in module.parameters())
    assert gradients == sum(p.grad.numel() * 4 for p in module.parameters() if p.grad is not None)
    assert state == sum(t.numel() * t.element_size() for s in adamw.state.values() for t in s.values())
    # Under FSDP half of everything is kept, and during a step weights and gradients are whole besides.
    counts = 4 * len(adamw.state)
    half = optimizer.state_bytes([module], shards=2)
    assert half == (weights * 3 // 2, gradients * 3 // 2, (state - counts) // 2 + counts)
