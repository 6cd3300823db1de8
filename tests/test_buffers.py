"""Buffers that a forward moves: each microbatch moves them once, also where its forward is run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe import memory
from optpipe.errors import RunFailed
from optpipe.ops import Kind
from runtime.buffers import Buffers, as_they_were, unmoved
from runtime.own_model import measure
from runtime.pipeline import Pipeline
from solver.solve import solve

M, STEPS = 4, 2


class Counting(nn.Module):
    """Weighs its input by how many forwards it has seen, counted in place or in a tensor anew."""

    count: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(6, 6), in_place
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return self.layer(x) * self.count.clone()


class Averaged(nn.BatchNorm1d):
    """A subclass of one's own: it moves its averages with every microbatch, as torch's does."""


MODELS = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm of old": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "counting in place": lambda: Counting(in_place=True),
    "counting anew": lambda: Counting(in_place=False),
    "batch norm of one's own": lambda: nn.Sequential(nn.Linear(6, 6), Averaged(6)),
}


def layers(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [MODELS[name]() for _ in range(4)]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 3 * M, 6, generator=generator)
    return x, y


def figures(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Gradients and buffers."""
    found = {f"{i}.{n}.grad": p.grad for i, part in enumerate(parts) for n, p in part.named_parameters()}
    found |= {f"{i}.{n}": b.clone() for i, part in enumerate(parts) for n, b in part.named_buffers()}
    return found


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    parts, losses = layers(name), []
    for step in range(STEPS):
        losses.append(0.0)
        for x, y in zip(*(part.chunk(M) for part in batch(step)), strict=True):
            for part in parts:
                x = part(x)
            loss = nn.functional.mse_loss(x, y) / M
            loss.backward()
            losses[-1] += float(loss.detach())
    return losses, figures(parts)


@pytest.mark.parametrize("method", ["gpipe", "gpipe-recompute"])
@pytest.mark.parametrize("name", MODELS)
def test_a_microbatch_moves_a_buffer_once_and_measuring_none(name: str, method: str) -> None:
    parts, (inputs, targets) = layers(name), batch(0)
    fresh = figures(layers(name))
    loss_fn = nn.functional.mse_loss
    problem, counts = measure(
        parts, loss_fn, inputs[:3], targets[:3], stage_devices=(0, 0), microbatches=M, counts=[2, 2]
    )
    assert all(torch.equal(value, fresh[key]) for key, value in figures(parts).items() if value is not None)
    plan = solve(problem, method=method)
    assert (Kind.C in plan.ops.kind) == (method == "gpipe-recompute")
    with Pipeline(plan, parts, loss_fn, inputs[:3], partition=counts) as pipeline:
        losses = [pipeline.step(*batch(step)) for step in range(STEPS)]
        assert pipeline.result is not None
        assert pipeline.result.peak_bytes <= memory.peaks(plan.problem, plan.ops)[0]
    expected_losses, expected = plain(name)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for key, value in figures(parts).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_a_buffer_that_moves_only_later_is_said():
    layer = Counting(in_place=True)
    buffers = Buffers([layer])
    assert not buffers.moved(buffers.before())
    before = buffers.before()
    layer(torch.zeros(1, 6))
    with pytest.raises(RunFailed, match="changes the buffer 'count' of a Counting"):
        buffers.moved(before)


def test_a_table_that_grows_later_is_as_it_was_where_it_runs_again():
    layer = Counting(in_place=False)
    buffers = Buffers([layer])
    assert not buffers.moved(buffers.before())
    before, tensor = buffers.before(), layer.count
    layer(torch.zeros(1, 6))
    (was,) = buffers.moved(before)
    with as_they_were([was]):
        assert layer.count is tensor and float(tensor) == 0.0
    assert float(layer.count) == 1.0


def test_what_runs_inside_leaves_the_values():
    for in_place in (True, False):
        layer = Counting(in_place=in_place)
        tensor = layer.count
        with unmoved([layer, layer]):
            layer(torch.zeros(1, 6))
            assert float(layer.count) == 1.0
        assert layer.count is tensor and float(tensor) == 0.0
