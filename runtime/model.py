"""A small GPT as a list of layers: embedding, blocks, head. It knows nothing of pipelines.

Decoder-only, pre-norm, learned positions, causal attention, GELU; embedding and head have weights of their own, or two
copies of one weight that begin alike and are to be kept alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optpipe.errors import InputError

_SPREAD = 0.02  # standard deviation of initial weights, as in GPT-2


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Attributes
    ----------
    layers
        Transformer blocks; the model has two layers more, an embedding in front and a head behind.
    width, heads
        Width of the residual stream, and attention heads; ``heads`` divides ``width``.
    context
        The longest sequence, in tokens.
    vocabulary
        Number of tokens; 256 for bytes.
    dropout
        Of embeddings, attention weights and each branch of a block.
    tied
        The head's matrix begins as the embedding's: they are copies of one weight.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError("", f"model.{name}", f"is {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise InputError("", "model.heads", f"{self.heads} does not divide the width, {self.width}")
        if not 0 <= self.dropout < 1:
            raise InputError("", "model.dropout", f"is {self.dropout}, expected at least 0 and less than 1")

    @property
    def num_layers(self) -> int:
        """Layers that ``build_layers`` makes: the embedding, the blocks and the head."""
        return self.layers + 2


class Embedding(nn.Module):
    """Tokens (B, T) to vectors (B, T, width): a learned vector for the token plus one for its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return out


class Block(nn.Module):
    """One transformer block, (B, T, width) to the same: attention and a perceptron, each on a normed branch.

    ``query_key_value`` gives head after head, query, key and value of each: a rank that has some of its rows has whole
    heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.attention_dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention_out(self._attend(self.attention_norm(x))))
        out: Tensor = x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_width))  # as many as this rank has
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return y.transpose(1, 2).flatten(-2)


class Head(nn.Module):
    """Vectors (B, T, width) to logits (B, T, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build_layers(
    config: GPTConfig, seed: int = 0, layers: Iterable[int] | None = None, device: torch.device | str = "cpu"
) -> list[nn.Module]:
    """The layers of the model, or some of them, with their initial parameters.

    Each layer draws from a generator of its own (``seed`` and its index), on the CPU: a rank that builds only its own
    layers gets the parameters that a single process would get.

    Parameters
    ----------
    config
        Sizes.
    seed
        Of the initial parameters.
    layers
        Indices of the layers to build, 0 (embedding) to ``config.num_layers - 1`` (head); default all.
    device
        Where the layers live.

    Returns
    -------
    list of nn.Module
        In the order of ``layers``, in training mode.
    """
    indices = range(config.num_layers) if layers is None else layers
    return [_layer(config, index, seed).to(device) for index in indices]


def _layer(config: GPTConfig, index: int, seed: int) -> nn.Module:
    if not 0 <= index < config.num_layers:
        raise IndexError(f"layer {index} does not exist, the model has {config.num_layers}")
    # Built without storage first: the constructors' own initialisation would draw from the global generator.
    with torch.device("meta"):
        kind = Embedding if index == 0 else Head if index == config.num_layers - 1 else Block
        layer: nn.Module = kind(config)
    layer.to_empty(device="cpu")
    generator = _generator(seed, index)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                # Each block adds two branches to the residual stream; this keeps its variance from growing with depth.
                branch_out = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = _SPREAD / math.sqrt(2 * config.layers) if branch_out else _SPREAD
                parameter.normal_(0.0, scale, generator=generator)
        if config.tied and isinstance(layer, Head):
            # What the embedding draws first.
            layer.out.weight.normal_(0.0, _SPREAD, generator=_generator(seed, 0))
    return layer


def _generator(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """The rows of a ``query_key_value`` in their order of now, from one that had all queries, then all keys, then all
    values."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def tied_weights(config: GPTConfig) -> list[tuple[int, str]]:
    """The copies of one weight, as (layer, name in it), the first one in front; nothing where they are not tied."""
    return [(0, "token.weight"), (config.num_layers - 1, "out.weight")] if config.tied else []


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens of a microbatch.

    Parameters
    ----------
    logits
        (B, T, vocabulary).
    targets
        int64 (B, T).
    """
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))
