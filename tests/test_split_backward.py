import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.split_backward import DeferredLinear, WeightStore, convert, defer, deferring
from tests.live import Live, parameters_and_gradients


class Raw(nn.Module):
    """A parameter used directly."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.line = nn.Linear(6, 6)

    def forward(self, x):
        return self.line(x * self.scale) * self.scale


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + x


class Frozen(nn.Sequential):
    """Only a bias here, only a weight there, nothing in a third."""

    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 6))
        self[0].weight.requires_grad_(False)
        self[1].bias.requires_grad_(False)
        for parameter in self[2].parameters():
            parameter.requires_grad_(False)


def floats():
    return torch.randn(3, 4, 6)


def tokens():
    return torch.randint(0, 10, (3, 4))


CASES = {
    "linear": (lambda: nn.Linear(6, 5), floats),
    "no bias": (lambda: nn.Linear(6, 5, bias=False), floats),
    "one row": (lambda: nn.Linear(6, 5), lambda: torch.randn(6)),
    "four dimensions": (lambda: nn.Linear(6, 5), lambda: torch.randn(2, 3, 2, 6)),
    "transposed input": (lambda: nn.Linear(6, 5), lambda: torch.randn(6, 7).t()),
    "embedding": (lambda: nn.Embedding(10, 6), tokens),
    "embedding with padding": (lambda: nn.Embedding(10, 6, padding_idx=3), tokens),
    "embedding by frequency": (lambda: nn.Embedding(10, 6, scale_grad_by_freq=True), tokens),
    "sparse embedding": (lambda: nn.Embedding(10, 6, sparse=True), tokens),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)), floats),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(4, 5, 3), nn.Linear(4, 3)), floats),
    "raw parameters": (Raw, floats),
    "checkpoint": (Checkpointed, floats),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), floats),
    "frozen": (Frozen, floats),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), floats),
}


def gradients_of(module, inputs, *, split):
    """Gradients after a few microbatches, and of the inputs; W of all after B of all where the backward is split."""
    torch.manual_seed(1)
    stores, found = [], []
    for x in inputs:
        x = x.clone().requires_grad_() if x.is_floating_point() else x
        store = WeightStore() if split else None
        y = module(x)
        g = torch.linspace(-1, 1, y.numel()).view(y.shape)
        with deferring(store):
            y.backward(g)
        stores.append(store)
        found.append(x.grad if x.is_floating_point() else None)
    for store in stores:
        if store is not None:
            store.run()
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return named, found


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_plain_ones_bit_for_bit(case, split):
    torch.manual_seed(0)
    make, sample = CASES[case]
    plain = make()
    ours = convert(copy.deepcopy(plain))
    inputs = [sample() for _ in range(3)]
    expected, expected_x = gradients_of(plain, inputs, split=False)
    found, found_x = gradients_of(ours, inputs, split=split)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            assert torch.equal(value.to_dense(), found[name].to_dense()), name
            assert not found[name].requires_grad
    for one, other in zip(expected_x, found_x, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("split", [True, False])
def test_bfloat16_autocast_gives_the_plain_gradients(split):
    plain = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4))
    ours = convert(copy.deepcopy(plain))
    inputs = [floats(), floats()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(inputs[0])
        assert y.dtype == plain(inputs[0]).dtype == torch.bfloat16
        expected, expected_x = gradients_of(plain, inputs, split=False)
        found, found_x = gradients_of(ours, inputs, split=split)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == torch.float32
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)
    for one, other in zip(expected_x, found_x, strict=True):
        assert torch.equal(one, other)


def test_a_weight_used_twice_is_within_rounding():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Embedding(10, 6)
            self.out = nn.Linear(6, 10, bias=False)
            self.out.weight = self.into.weight

        def forward(self, index):
            return self.out(torch.tanh(self.out(self.into(index)) @ self.out.weight))

    plain = Tied()
    ours = convert(copy.deepcopy(plain))
    assert ours.out.weight is ours.into.weight
    inputs = [tokens() for _ in range(3)]
    expected, _ = gradients_of(plain, inputs, split=False)
    found, _ = gradients_of(ours, inputs, split=True)
    torch.testing.assert_close(found["into.weight"], expected["into.weight"], rtol=1e-5, atol=1e-6)


def test_nothing_of_a_split_layer_is_computed_before_w():
    module = convert(nn.Linear(6, 5))
    store = WeightStore()
    y = module(floats())
    with deferring(store):
        y.sum().backward()
    assert module.weight.grad is None and module.bias.grad is None and len(store) == 1
    store.run()
    assert module.weight.grad is not None and module.bias.grad is not None and len(store) == 0


def test_nothing_stays_alive_after_w():
    module = convert(nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 6)))
    with Live() as live:
        store = WeightStore()
        y = module(floats())
        g = torch.ones_like(y)
        with deferring(store):
            y.backward(g)
        del y, g
        assert live.nbytes(parameters_and_gradients(module)) > 0
        store.run()
    assert live.nbytes(parameters_and_gradients(module)) == 0


def test_names_and_values_stay_and_only_plain_layers_are_converted():
    class Own(nn.Linear):
        pass

    module = nn.ModuleDict({"a": nn.Linear(2, 3), "b": Own(2, 3), "c": nn.Embedding(4, 2, max_norm=1.0)})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    convert(module)
    assert isinstance(module["a"], DeferredLinear) and isinstance(module["a"], nn.Linear)
    assert type(module["b"]) is Own and type(module["c"]) is nn.Embedding
    after = module.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_without_gradients_a_converted_layer_is_the_plain_one():
    plain, x = nn.Linear(6, 5), floats()
    ours = convert(copy.deepcopy(plain))
    with torch.no_grad():
        assert torch.equal(ours(x), F.linear(x, plain.weight, plain.bias))


def test_hooks_on_gradients_act_as_on_a_plain_layer():
    plain, x, seen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), floats(), []
    ours, store = convert(copy.deepcopy(plain)), WeightStore()
    for module in (plain, ours):
        module[0].weight.register_hook(lambda g: g * 2)
        module[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    plain(x).sum().backward()
    with deferring(store):
        ours(x).sum().backward()
    store.run()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert len(seen) == 2 and torch.equal(*seen)


def test_functions_of_ones_own_can_defer():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            weight = ctx.weight

            def work(x, g):
                weight.grad = (x * g).sum()

            return g * weight, None if defer(work, x.detach(), g) else (x * g).sum()

    weight, x, store = torch.tensor(3.0, requires_grad=True), torch.arange(4.0), WeightStore()
    with deferring(store):
        Scale.apply(x, weight).sum().backward()
    assert weight.grad is None
    store.run()
    assert float(weight.grad) == 6.0
    weight.grad = None
    Scale.apply(x, weight).sum().backward()
    assert float(weight.grad) == 6.0
