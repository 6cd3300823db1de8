import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import InputError
from runtime.model import GPTConfig, build_layers, loss_fn

CONFIG = GPTConfig(layers=3, width=16, heads=4, context=12, vocabulary=20)


def whole(config=CONFIG, seed=0):
    return torch.nn.Sequential(*build_layers(config, seed))


@given(st.integers(0, 5), st.lists(st.integers(0, CONFIG.num_layers - 1), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_a_layer_built_alone_has_the_parameters_that_it_has_in_the_whole_model(seed, indices):
    every = build_layers(CONFIG, seed)
    for index, layer in zip(indices, build_layers(CONFIG, seed, indices), strict=True):
        expected = every[index].state_dict()
        assert layer.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in layer.state_dict().items())


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build_layers(CONFIG, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_and_layers_differ():
    one, other = whole(seed=0), whole(seed=1)
    assert not torch.equal(one[1].mlp_in.weight, other[1].mlp_in.weight)
    assert not torch.equal(one[1].mlp_in.weight, one[2].mlp_in.weight)


def test_every_parameter_is_set():
    # Built without storage first: a forgotten one would hold whatever was in memory.
    with torch.no_grad():
        for name, parameter in whole().named_parameters():
            assert parameter.isfinite().all()
            assert parameter.abs().max() <= 1.0, name


def test_a_new_model_knows_nothing():
    tokens = torch.randint(0, CONFIG.vocabulary, (4, CONFIG.context))
    loss = loss_fn(whole()(tokens), tokens.roll(-1, 1)).detach()
    assert abs(float(loss) - math.log(CONFIG.vocabulary)) < 0.1


def test_no_token_sees_a_later_one():
    model = whole()
    tokens = torch.randint(0, CONFIG.vocabulary, (1, CONFIG.context))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % CONFIG.vocabulary
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :7], other[:, :7])
    assert not torch.allclose(one[:, 7:], other[:, 7:])


def test_attention_is_that_of_each_head_alone():
    block = build_layers(CONFIG)[1]
    x = torch.randn(2, 5, CONFIG.width)
    size = CONFIG.width // CONFIG.heads
    later = torch.ones(5, 5).triu(1).bool()
    found = []
    for head in range(CONFIG.heads):
        rows = slice(3 * head * size, 3 * (head + 1) * size)
        q, k, v = (x @ block.query_key_value.weight[rows].T + block.query_key_value.bias[rows]).split(size, -1)
        weights = (q @ k.transpose(1, 2) / size**0.5).masked_fill(later, -math.inf).softmax(-1)
        found.append(weights @ v)
    torch.testing.assert_close(block._attend(x), torch.cat(found, -1))


def test_loss_is_the_mean_over_all_tokens():
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss_fn(logits, targets), by_hand)


def test_dropout_is_on_in_training_only():
    model = whole(GPTConfig(layers=1, width=16, heads=2, context=8, vocabulary=20, dropout=0.5))
    tokens = torch.randint(0, 20, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("key", "changed"),
    [("heads", {"heads": 3}), ("layers", {"layers": 0}), ("dropout", {"dropout": 1.0}), ("context", {"context": -1})],
)
def test_sizes_that_make_no_model_are_refused(key, changed):
    with pytest.raises(InputError, match=f"model.{key}"):
        GPTConfig(**{**CONFIG.__dict__, **changed})
