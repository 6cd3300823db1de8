"""What the layers of the GPT compute, move and keep, from its sizes alone; ``runtime/model.py`` has the layers.

Everything is of one microbatch on one rank. With B sequences of T tokens, N = B T, width w, h heads on this rank and a
vocabulary of V, in float32 (Korthikanti et al., arXiv:2205.05198, count the same in 16 bits):

    embedding   adds two rows a token
    block       2 N (4 w w + 8 w w) / ranks FLOPs of products with weights, 4 N T w / ranks of attention
                keeps 16 w + 4 + h floats a token with an attention kernel that makes no matrix of weights, with
                dropout masks besides
    head        2 N w V FLOPs, keeps 2 w + 2 + V floats a token

What is kept is what torch 2.11 to 2.13 saves for these layers: tests count it beside the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe.config import Config
from optpipe.sections import VOCABULARY

#: Bytes of a number: the runtime trains in float32.
FLOAT = 4
#: Bytes of a position in the table of positions, int64.
_INDEX = 8
#: The memory-efficient attention of CUDA rounds the sums that it keeps up to so many tokens, and takes heads whose
#: width is a multiple of ``_HEAD_STEP``.
_SUMS_STEP, _HEAD_STEP = 32, 4


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes
    ----------
    nbytes
        What it reads and writes.
    flops
        Of matrix products, a multiplication and an addition each, as torch's flop counter has them.
    done
        The share of the FLOPs that are really computed: a causal attention kernel leaves out half.
    """

    nbytes: int
    flops: int = 0
    done: float = 1.0


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes
    ----------
    forward, backward, weight
        The kernels of F, B and W.
    saved_bytes
        Kept from F for the backward, the layer's input among it.
    context_bytes
        Kept from B for W.
    parameters
        Numbers in each parameter tensor.
    sums
        Tensors of N w numbers that tensor parallel ranks add up in F, and again in B.
    """

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight: tuple[Work, ...]
    saved_bytes: int
    context_bytes: int
    parameters: tuple[int, ...]
    sums: int = 0


def layers(config: Config) -> list[Layer]:
    """The layers of a config's model, along it.

    Raises
    ------
    InputError
        The config has no model.
    """
    shapes = _Shapes.of(config)
    block = _block(shapes)
    return [_embedding(shapes), *[block] * config.gpt.layers, _head(shapes)]


def message_bytes(config: Config) -> int:
    """What a stage hands to the next one, and gets back as its gradient."""
    return FLOAT * config.batch.microbatch_size * config.gpt.context * config.gpt.width


def kept_bytes(stage: Sequence[Layer], message: int, *, is_first: bool, is_last: bool) -> dict[str, int]:
    """The bytes of a stage, under the names of the problem, as ``runtime.stage.measure_bytes`` counts them.

    Parameters
    ----------
    stage
        Its layers.
    message
        ``message_bytes``.
    is_first, is_last
        Where in the model it is.
    """
    saved, context = (sum(getattr(layer, name) for layer in stage) for name in ("saved_bytes", "context_bytes"))
    taken, given = 0 if is_first else message, 0 if is_last else message
    return {
        # B begins with the output's gradient beside the output, and ends with the input's beside what W needs.
        "activation_bytes": max(saved + 2 * given, context + taken),
        "weight_context_bytes": context,
        "offloadable_bytes": saved,
        "checkpoint_bytes": taken + given,
    }


@dataclass(frozen=True)
class _Shapes:
    """Sizes of one microbatch on one of ``ranks`` tensor parallel ranks."""

    sequences: int
    context: int
    width: int
    heads: int  # on this rank
    ranks: int
    drops: bool
    on_cpu: bool

    @classmethod
    def of(cls, config: Config) -> _Shapes:
        model, ranks = config.gpt, config.train.tensor_parallel
        return cls(
            config.batch.microbatch_size,
            model.context,
            model.width,
            model.heads // ranks,
            ranks,
            model.dropout > 0,
            config.device == "cpu",
        )

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    def size(self, width: int, count: int = 1) -> int:
        """Bytes of ``count`` numbers of ``width`` a token."""
        return FLOAT * self.tokens * width * count

    @property
    def mask_bytes(self) -> int:
        """What dropout of N w numbers keeps: on a CPU factors, on CUDA flags."""
        return self.tokens * self.width * (FLOAT if self.on_cpu else 1) if self.drops else 0

    @property
    def makes_matrices(self) -> bool:
        """Whether attention makes its T x T weights, as where no fused kernel takes it."""
        if self.on_cpu:
            return self.drops
        return self.width // (self.heads * self.ranks) % _HEAD_STEP != 0

    @property
    def matrix_bytes(self) -> int:
        """Attention weights of all heads of this rank."""
        return FLOAT * self.sequences * self.heads * self.context**2

    # Kernels.

    def product(self, rows_in: int, rows_out: int) -> Work:
        """x (N, in) times a matrix (in, out), or one of the two products of its backward: they cost the same."""
        nbytes = self.size(rows_in + rows_out) + FLOAT * rows_in * rows_out
        return Work(nbytes, 2 * self.tokens * rows_in * rows_out)

    def simple(self, passes: int, width: int | None = None) -> Work:
        """A kernel that goes over ``passes`` tensors of ``width`` numbers a token."""
        return Work(self.size(self.width if width is None else width, passes))

    def dropout(self) -> tuple[Work, ...]:
        """Forward or backward: reads, masks, writes."""
        return (Work(self.size(self.width, 2) + self.mask_bytes),) if self.drops else ()

    def weight_work(self, rows_in: int, rows_out: int, *, bias: bool = True) -> tuple[Work, ...]:
        """W of a linear layer: the product, adding it up, and the same for the bias."""
        works = (self.product(rows_in, rows_out), _added(rows_in * rows_out))
        return (*works, Work(self.size(rows_out)), _added(rows_out)) if bias else works


def _added(numbers: int) -> Work:
    """A gradient added to the one that is there."""
    return Work(3 * FLOAT * numbers)


def _embedding(s: _Shapes) -> Layer:
    tables = VOCABULARY * s.width, s.context * s.width
    rows = FLOAT * s.context * s.width
    return Layer(
        forward=(s.simple(2), Work(2 * rows), Work(s.size(s.width, 2) + rows), *s.dropout()),
        backward=(*s.dropout(), Work(s.size(s.width) + rows)),  # the sum over sequences, for positions
        weight=(
            Work(s.size(s.width, 2) + FLOAT * tables[0]),
            _added(tables[0]),
            Work(2 * rows + FLOAT * tables[1]),
            _added(tables[1]),
        ),
        saved_bytes=_INDEX * s.context + s.mask_bytes,  # the tokens are the batch's
        context_bytes=_INDEX * s.context + s.size(s.width) + rows,
        parameters=tables,
    )


def _norm_forward(s: _Shapes) -> Work:
    return s.simple(2)


def _norm_backward(s: _Shapes) -> tuple[Work, ...]:
    """For the input, and for its weights, which B does."""
    return s.simple(3), s.simple(2)


def _block(s: _Shapes) -> Layer:
    w = s.width
    part, wide = w // s.ranks, 4 * w // s.ranks
    qkv, out, up, down = (w, 3 * part), (part, w), (w, wide), (wide, w)
    attention_forward, attention_backward, attention_bytes = _attention(s, part)
    add = s.simple(3)
    return Layer(
        forward=(
            _norm_forward(s),
            s.product(*qkv),
            *attention_forward,
            s.product(*out),
            *s.dropout(),
            add,
            _norm_forward(s),
            s.product(*up),
            s.simple(2, wide),
            s.product(*down),
            *s.dropout(),
            add,
        ),
        backward=(
            *s.dropout(),
            s.product(*down),
            s.simple(3, wide),
            s.product(*up),
            *_norm_backward(s),
            add,
            *s.dropout(),
            s.product(*out),
            *attention_backward,
            s.simple(2, 3 * part),  # queries, keys and values together again
            s.product(*qkv),
            *_norm_backward(s),
            add,
        ),
        weight=tuple(work for shape in (down, up, out, qkv) for work in s.weight_work(*shape)),
        # Both norms keep their input, mean and deviation, and give the input of a product.
        saved_bytes=s.size(4 * w + 4 + 2 * wide) + attention_bytes + 2 * s.mask_bytes,
        # Of each product the input and the gradient of the output.
        context_bytes=s.size(sum(map(sum, (qkv, out, up, down)))),
        parameters=(w, w, w * 3 * part, 3 * part, part * w, w, w, w, w * wide, wide, wide * w, w),
        sums=2,
    )


def _attention(s: _Shapes, part: int) -> tuple[tuple[Work, ...], tuple[Work, ...], int]:
    """F and B of attention over ``part`` numbers a token, and the bytes kept for it, the input of the product behind it
    among them."""
    product = 2 * s.tokens * s.context * part
    if not s.makes_matrices:
        # Its backward computes the weights again: five products for the two of F.
        forward = Work(s.size(part, 4), 2 * product, 0.5)
        backward = Work(s.size(part, 8), 5 * product, 0.5)
        tokens = s.context if s.on_cpu else -(-s.context // _SUMS_STEP) * _SUMS_STEP
        return (forward,), (backward,), s.size(part, 4) + FLOAT * s.sequences * s.heads * tokens
    matrix = s.matrix_bytes
    one = Work(s.size(part, 2) + matrix, product)
    masks = (Work(3 * matrix),) if s.drops else ()
    scaled = s.simple(2, part)
    # Values of one sequence or of one head are seen in place, within queries, keys and values, and keep these.
    values = part if min(s.sequences, s.heads, s.context) > 1 else 3 * part
    kept = s.size(3 * part + values) + matrix  # queries, keys, what goes to the product behind; weights
    if s.drops:
        kept += matrix + (matrix if s.on_cpu else matrix // FLOAT)
    forwards = (scaled, scaled, one, Work(3 * matrix), Work(2 * matrix), *masks, one, scaled)
    return forwards, (one, one, *masks, Work(3 * matrix), one, one, scaled, scaled), kept


def _head(s: _Shapes) -> Layer:
    w, tokens = s.width, VOCABULARY
    return Layer(
        forward=(_norm_forward(s), s.product(w, tokens), s.simple(2, tokens), s.simple(1, 1)),
        backward=(s.simple(1, tokens), s.simple(3, tokens), s.product(w, tokens), *_norm_backward(s)),
        weight=s.weight_work(w, tokens, bias=False),
        saved_bytes=s.size(2 * w + 2 + tokens) + FLOAT,  # the number of tokens, as a number
        context_bytes=s.size(w + tokens),
        parameters=(w, w, tokens * w),
    )
