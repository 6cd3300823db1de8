import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from optpipe.errors import RunFailed
from runtime.accounting import Ledger
from runtime.host_memory import HostPool
from runtime.model import GPTConfig, build_layers
from runtime.saved import InputGradient, Saved, enter, storages
from runtime.split_backward import WeightStore, convert, deferring
from tests.live import Live, parameters_and_gradients

CPU = torch.device("cpu")


def move(job):
    """What a copy lane does with a job."""
    pairs = job.start()
    for target, source in pairs:
        target.copy_(source)
    moved = sum(source.numel() for _, source in pairs)
    del pairs
    job.finish()
    return moved


class Books:
    """One microbatch's saved activations, and everything that counts them."""

    def __init__(self, module):
        self.ledger, self.pool = Ledger(), HostPool()
        self.saved = Saved(self.ledger, CPU, storages([*module.parameters(), *module.buffers()]), self.pool)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + x


class Views(nn.Module):
    """Slices, transposes, steps and expansions of one storage, all of them saved."""

    def forward(self, x):
        both = torch.cat((x, x * 2), -1)
        a, b = both.chunk(2, -1)
        return a * b + a.transpose(0, 1).sin().transpose(0, 1) + both[..., ::2] ** 2 + (x[:, :1].expand_as(x) * b)


class Masked(nn.Module):
    """Saves a registered buffer, and a small view of a large tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.randn(4, 6, 16))

    def forward(self, x):
        wide = x.repeat(1, 20, 1)
        return (x * self.mask) * wide[:, :1] ** 2


class OwnOutput(nn.Sequential):
    """Saves its own output, and a mask of booleans."""

    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.ReLU(), nn.Sigmoid())


class Carrier(torch.autograd.Function):
    """Saves integers, a parameter and its input."""

    @staticmethod
    def forward(ctx, x, weight):
        index = x.argmax(-1, keepdim=True)
        ctx.save_for_backward(x, index, weight)
        return x.gather(-1, index) * weight

    @staticmethod
    def backward(ctx, g):
        x, index, weight = ctx.saved_tensors
        gx = torch.zeros_like(x).scatter(-1, index, g * weight)
        return gx, (g * x.gather(-1, index)).sum().view(1)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return Carrier.apply(x, self.weight)


def block(dropout=0.0):
    config = GPTConfig(layers=1, width=16, heads=2, context=6, vocabulary=8, dropout=dropout)
    return build_layers(config, 0, [1])[0]


CASES = {
    "block": block,
    "dropout": lambda: block(0.3),
    "checkpoint": Checkpointed,
    "views": Views,
    "buffer": Masked,
    "own output": OwnOutput,
    "custom function": Custom,
}


def expected_gradients(module, x, g):
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    module(x).backward(g)
    found = [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_offloaded_and_reloaded_activations_give_the_same_gradients_and_hold_no_memory_between(case, split):
    torch.manual_seed(0)
    module = convert(CASES[case]())
    x, g = torch.randn(4, 6, 16), None
    with torch.no_grad():
        g = torch.randn_like(module(x))
    expected = expected_gradients(module, x, g)

    books, place = Books(module), InputGradient(Ledger())
    saved, store = books.saved, WeightStore(books.saved) if split else None
    torch.manual_seed(7)
    with Live() as live:
        mine = x.clone()
        with saved.hooks():
            y = module(enter(mine, place))
        edge = get_gradient_edge(y)
        del y, mine
        kept = [*parameters_and_gradients(module), *module.buffers()]
        held = live.nbytes(kept)
        assert saved.nbytes == books.ledger.activation_bytes > 0

        moved = move(saved.offload())
        assert moved == books.pool.in_use >= held - 64  # the probe of the input's gradient is no activation
        away = [buffer for buffers in books.pool._free.values() for buffer in buffers]
        hosts = [entry.host for entry in saved._away]
        assert live.nbytes([*kept, *away, *hosts]) == 0
        assert saved.nbytes == books.ledger.activation_bytes == 0

        assert move(saved.reload()) == moved
        assert saved.nbytes == books.ledger.activation_bytes == moved
        del hosts, away
        with deferring(store):
            torch.autograd.backward([edge], [g])
        del edge
        gx, place.value = place.value, None
        if store is not None:
            move(saved.offload())  # what waits for W can leave too
            assert books.ledger.activation_bytes == 0
            move(saved.reload())
            store.run()
        found = [gx, *(parameter.grad for parameter in module.parameters())]
        assert books.ledger.activation_bytes == books.pool.in_use == 0
        on_host = [buffer for buffers in books.pool._free.values() for buffer in buffers]
        place.hold = None
        assert live.nbytes([*parameters_and_gradients(module), *module.buffers(), *on_host, gx, g]) == 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def saved_run(module, x):
    books, place = Books(module), InputGradient(Ledger())
    with books.saved.hooks():
        y = module(enter(x, place))
    return books, get_gradient_edge(y), y.detach()


def test_views_of_one_storage_move_once():
    books, edge, _ = saved_run(Views(), torch.randn(4, 6, 16))
    one = 4 * 6 * 16 * 4
    # x; both (twice as wide); transpose's own copies hold no more than that again
    assert books.saved.nbytes <= 5 * one
    assert move(books.saved.offload()) == books.pool.in_use
    assert edge is not None


def test_parameters_and_buffers_stay():
    module = Masked()
    books, edge, _ = saved_run(module, torch.randn(4, 6, 16))
    kept = {entry.storage._cdata for entry in books.saved.entries()}
    assert kept and module.mask.untyped_storage()._cdata not in kept
    assert edge is not None


def test_a_small_view_does_not_keep_a_large_storage():
    books, edge, _ = saved_run(Masked(), torch.randn(4, 6, 16))
    # x, the product with the mask, the first row's square's input and result; not the tensor twenty times as large
    assert books.saved.nbytes < 4 * 120 * 16 * 4 / 2
    assert edge is not None


def test_a_change_in_place_is_caught_before_the_offload():
    x = torch.randn(4, 16)
    books, edge, _ = saved_run(nn.Linear(16, 16), x)
    x.add_(1)
    with pytest.raises(RunFailed, match="in place"):
        move(books.saved.offload())
    assert edge is not None


def test_a_change_in_place_is_caught_in_the_backward():
    module = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid())
    books, place = Books(module), InputGradient(Ledger())
    with books.saved.hooks():
        y = module(enter(torch.randn(4, 16), place))
        y.detach().mul_(2)
    with pytest.raises(RunFailed, match="in place"):
        y.sum().backward()


def test_an_operation_in_place_that_autograd_allows_is_allowed():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 1.0
            return F.relu_(y) + x

    x = torch.randn(4, 16)
    expected = expected_gradients(InPlace(), x, torch.ones(4, 16))
    books, place = Books(InPlace()), InputGradient(Ledger())
    with books.saved.hooks():
        y = InPlace()(enter(x, place))
    move(books.saved.offload())
    move(books.saved.reload())
    y.sum().backward()
    assert torch.equal(place.value, expected[0])


def test_use_while_offloaded_is_an_error_not_wrong_data():
    books, edge, y = saved_run(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(4, 16))
    move(books.saved.offload())
    with pytest.raises(RunFailed, match="reload has not ended"):
        torch.autograd.backward([edge], [torch.ones_like(y)])


def test_use_before_the_reload_has_ended_is_an_error_too():
    books, edge, y = saved_run(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(4, 16))
    move(books.saved.offload())
    reload = books.saved.reload()
    reload.start()
    with pytest.raises(RunFailed, match="reload has not ended"):
        torch.autograd.backward([edge], [torch.ones_like(y)])


def test_memory_goes_with_the_graph():
    books, edge, _ = saved_run(block(), torch.randn(4, 6, 16))
    assert books.ledger.activation_bytes > 0
    del edge
    assert books.ledger.activation_bytes == 0

    books, edge, _ = saved_run(block(), torch.randn(4, 6, 16))
    move(books.saved.offload())
    books.saved._away.clear()
    del edge
    assert books.pool.in_use == 0


def test_no_reference_cycles_keep_memory():
    gc.disable()
    try:
        with Live() as live:
            module = convert(block())
            _, edge, y = saved_run(module, torch.randn(4, 6, 16))
            torch.autograd.backward([edge], [torch.ones_like(y)])
            del edge, y
            assert live.nbytes(parameters_and_gradients(module)) == 0
    finally:
        gc.enable()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_a_partial_offload_moves_at_least_what_was_asked_and_little_more(sizes, nbytes):
    books = Books(nn.Identity())
    saved = books.saved
    tensors = [torch.full((size,), float(n)) for n, size in enumerate(sizes)]
    handles = [saved.pack(tensor) for tensor in tensors]
    values = [tensor.clone() for tensor in tensors]
    del tensors
    before = books.ledger.activation_bytes
    move(saved.offload(nbytes))
    moved = before - books.ledger.activation_bytes
    left = [entry.nbytes for entry in saved.entries()]
    assert moved == books.pool.in_use
    assert moved >= min(nbytes, before)
    # Without the last storage it would have been too little, and a smaller one that does is not left behind.
    assert moved - nbytes < max((*left, *(4 * size for size in sizes)))
    away = sorted(entry.nbytes for entry in saved._away)
    if moved > nbytes:
        assert not any(moved - away[0] + size >= nbytes for size in left if size < away[0])
    move(saved.reload())
    assert books.ledger.activation_bytes == before
    for handle, value in zip(handles, values, strict=True):
        assert torch.equal(saved.unpack(handle), value)


def test_tensors_that_are_none_of_ours_pass_through():
    saved = Books(nn.Identity()).saved
    for tensor in (torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), nn.Parameter(torch.ones(2))):
        handle = saved.pack(tensor)
        assert isinstance(handle, torch.Tensor)
        same = saved.unpack(handle)
        assert torch.equal(same.to_dense() if same.is_sparse else same, tensor.to_dense() if same.is_sparse else tensor)
    assert saved.nbytes == 0
