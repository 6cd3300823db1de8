"""The averages of BatchNorm are those of whole mini-batches, however they are cut into microbatches."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime import batch_norm
from runtime.stage import measure_bytes

SHAPES = {nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4, 3, 2), nn.BatchNorm3d: (4, 2, 2, 2)}


@given(
    st.sampled_from(list(SHAPES)),
    st.lists(st.integers(2, 5), min_size=1, max_size=4),
    st.sampled_from([0.1, 1.0, None]),
    st.booleans(),
)
def test_averages_are_those_of_one_large_batch(
    kind: type[nn.Module], sizes: list[int], momentum: float | None, affine: bool
) -> None:
    torch.manual_seed(len(sizes))
    plain = kind(4, momentum=momentum, affine=affine)
    ours = batch_norm.convert(copy.deepcopy(plain))
    for _ in range(3):
        parts = [torch.randn(size, *SHAPES[kind]) * 3 + 5 for size in sizes]
        plain(torch.cat(parts))
        for part in parts:
            torch.testing.assert_close(ours(part), copy.deepcopy(plain)(part))
        batch_norm.move_averages(ours)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    plain.eval(), ours.eval()
    torch.testing.assert_close(ours(parts[0]), plain(parts[0]), rtol=1e-4, atol=1e-5)


def test_gradients_are_the_plain_layers() -> None:
    plain = nn.BatchNorm1d(4)
    ours, x = batch_norm.convert(copy.deepcopy(plain)), torch.randn(6, 4)
    for layer in (plain, ours):
        layer(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_a_forward_that_is_run_again_counts_once() -> None:
    once = batch_norm.convert(nn.BatchNorm1d(4))
    again, x = copy.deepcopy(once), torch.randn(6, 4)
    once(x)
    y = checkpoint(again, x.clone().requires_grad_(), use_reentrant=False)
    with batch_norm.run_again():
        y.sum().backward()
        again(x * 2)
    for layer in (once, again):
        batch_norm.move_averages(layer)
    assert all(torch.equal(a, b) for a, b in zip(once.buffers(), again.buffers(), strict=True))


def test_evaluation_and_layers_without_averages_note_nothing() -> None:
    for layer in (nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False)):
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        batch_norm.convert(layer)(torch.randn(6, 4))
        batch_norm.move_averages(layer)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_subclasses_stay_as_they_are() -> None:
    assert type(batch_norm.convert(nn.SyncBatchNorm(4))) is nn.SyncBatchNorm


def test_measuring_moves_no_average() -> None:
    layer = nn.BatchNorm1d(4)
    measure_bytes(layer, 1, 3, torch.randn(6, 4), None, lambda output, target: output.sum())
    batch_norm.move_averages(layer)
    assert int(layer.num_batches_tracked) == 0 and not layer.running_mean.any()


def test_too_few_values_are_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value"):
        batch_norm.convert(nn.BatchNorm1d(4))(torch.randn(1, 4))
