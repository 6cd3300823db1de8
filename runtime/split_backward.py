"""B and W apart: the weight gradients of Linear and Embedding layers are put off and computed later.

    B:  with deferring(store): backward        the input's gradient; (x, g) of every layer go to the store
    W:  store.run()                            weight.grad += g.T @ x, in the order in which B came by

Without a store (BW, or no pipeline at all) a converted layer computes its weight gradients within the backward, as the
plain one does. Other layers, LayerNorm among them, always do: their weight gradients cost next to nothing.

Deferred gradients equal the plain ones bit for bit where W runs over the microbatches in the order of B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Computes and accumulates weight gradients from the tensors that B put into the store.
WeightWork = Callable[..., None]


class Packer(Protocol):
    """Keeps tensors for later, such as ``saved.Saved``: there they can be counted and offloaded."""

    def pack(self, tensor: Tensor) -> Any:
        """A handle for the tensor."""

    def unpack(self, handle: Any) -> Tensor:
        """The tensor of a handle."""


class WeightStore:
    """What B leaves for W: of one stage and microbatch.

    Parameters
    ----------
    packer
        Keeps the tensors; None: they are kept as they are.
    """

    def __init__(self, packer: Packer | None = None) -> None:
        self._packer = packer
        self._work: deque[tuple[WeightWork, list[Any]]] = deque()

    def put(self, work: WeightWork, *tensors: Tensor) -> None:
        """Put off ``work(*tensors)``."""
        kept = [tensor if self._packer is None else self._packer.pack(tensor) for tensor in tensors]
        self._work.append((work, kept))

    def run(self) -> None:
        """Do what was put off, first in first out; what each piece held goes as soon as it is done."""
        # Without no_grad the gradient would carry a graph, and keep it alive.
        with torch.no_grad():
            while self._work:
                work, kept = self._work.popleft()
                tensors = [one if self._packer is None else self._packer.unpack(one) for one in kept]
                del kept
                work(*tensors)

    def tensors(self) -> Iterator[Tensor]:
        """What is kept, as long as all of it is on the device."""
        for _, kept in self._work:
            yield from (one if self._packer is None else self._packer.unpack(one) for one in kept)

    def __len__(self) -> int:
        return len(self._work)


# Plain and global, not thread-local: on CUDA a backward runs on a thread of autograd's.
_store: WeightStore | None = None
_together = False


# The two below are classes since they are entered and left for every op, and a generator takes twice the time.


class together:  # noqa: N801 (as a function would be called)
    """Forwards inside will have a backward that is not split: layers may run as the plain ones, which is faster."""

    def __enter__(self) -> None:
        global _together
        self._outer, _together = _together, True

    def __exit__(self, *_: object) -> None:
        global _together
        _together = self._outer


class deferring:  # noqa: N801
    """Backwards inside put their weight gradients into ``store``; None: they compute them."""

    def __init__(self, store: WeightStore | None) -> None:
        self._inner = store

    def __enter__(self) -> None:
        global _store
        self._outer, _store = _store, self._inner

    def __exit__(self, *_: object) -> None:
        global _store
        _store = self._outer


def defer(work: WeightWork, *tensors: Tensor) -> bool:
    """Put off ``work(*tensors)`` if weight gradients are being put off; for autograd Functions of one's own.

    Returns
    -------
    bool
        False where nothing is put off: then the caller computes its gradients itself. So it is where these are to be
        differentiated again.
    """
    if _store is None or torch.is_grad_enabled():
        return False
    _store.put(work, *tensors)
    return True


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``parameter.grad``, as autograd does, in the parameter's dtype; ``gradient`` is no one else's memory."""
    if gradient.dtype is not parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    kept = parameter.grad
    if kept is None:
        parameter.grad = gradient
    else:
        # Not addmm_ into .grad: it rounds otherwise than the product followed by the sum.
        kept.add_(gradient)


def convert(module: nn.Module) -> nn.Module:
    """Let the Linear and Embedding layers of ``module`` put off their weight gradients, in place.

    Subclasses of the two, and embeddings that are sparse or renormalise their weights, stay as they are: all of their
    backward is done by B. So is that of layers whose parameters have hooks. Parameters, their names and the numbers
    computed do not change.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = DeferredLinear
        elif type(layer) is nn.Embedding and layer.max_norm is None and not layer.sparse:
            layer.__class__ = DeferredEmbedding
    return module


class DeferredLinear(nn.Linear):
    """``nn.Linear`` whose weight gradients can be put off."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, dtype = self.weight, self.bias, None
        casts = torch.is_autocast_enabled(x.device.type)
        # Under autocast the plain one saves a copy of its weight for each microbatch.
        if (_together and not casts) or not _deferrable(weight, bias):
            return F.linear(x, weight, bias)
        if casts:
            # The cast stays outside of the Function, so that autograd casts the input's gradient back.
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        out: Tensor = _apply_linear(x, weight, bias, dtype)
        return out


class DeferredEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight gradient can be put off."""

    def forward(self, index: Tensor) -> Tensor:
        if _together or not _deferrable(self.weight):
            return super().forward(index)
        out: Tensor = _Embedding.apply(index, self.weight, self.padding_idx, self.scale_grad_by_freq)
        return out


def _deferrable(*parameters: Tensor | None) -> bool:
    """Whether there is a gradient to put off. Hooks on a gradient would be called by the backward without one, and a
    weight that is computed (by weight norm, say) hands its gradient on at once."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # under vmap only plain layers run
        return False
    trained = False
    for parameter in parameters:
        if parameter is not None:
            if not parameter.is_leaf or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return False
            trained |= parameter.requires_grad
    return trained


class _Linear(torch.autograd.Function):
    """``y = x W.T + b`` computed in ``dtype``, None: as it comes; x of any leading shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x)
        # Only parameters may stand on ctx: they stay on the device anyway, and W needs the very objects.
        ctx.parameters = weight, bias, dtype
        if dtype is None:
            out = F.linear(x, weight, bias)
        else:
            with torch.autocast(x.device.type, enabled=False):
                out = F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        return out.detach()  # it may be a view, which no one may change in place behind a Function

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,), (weight, bias, dtype) = ctx.saved_tensors, ctx.parameters
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gx = None
        if needs_x:
            factor = weight if dtype is None else weight.to(dtype)
            gx = _rows(g).mm(factor).view(*g.shape[:-1], weight.shape[1])
        trained, trained_bias = weight if needs_weight else None, bias if needs_bias else None
        # Detached, else what is put off would keep this microbatch's graph.
        if defer(_linear_work(trained, trained_bias), x.detach(), g.detach()):
            return gx, None, None, None
        gw = None if trained is None else _weight_gradient(x, g).to(weight.dtype)
        gb = None if trained_bias is None else _rows(g).sum(0).to(trained_bias.dtype)
        return gx, gw, gb, None


#: ``_Linear.apply`` without what it does about functorch's transforms: under these only plain layers run.
_apply_linear = super(torch.autograd.Function, _Linear).apply


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    return _rows(g).t().mm(_rows(x))


def _linear_work(weight: Tensor | None, bias: Tensor | None) -> WeightWork:
    def work(x: Tensor, g: Tensor) -> None:
        rows = _rows(g)
        if weight is not None:
            accumulate(weight, rows.t().mm(_rows(x)))
        if bias is not None:
            accumulate(bias, rows.sum(0))

    return work


class _Embedding(torch.autograd.Function):
    """Rows of the weight by index."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding_idx: int | None, scale_by_freq: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight = weight
        ctx.options = (-1 if padding_idx is None else padding_idx, scale_by_freq)
        return F.embedding(index, weight).detach()  # as in _Linear

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, None, None]:
        (index,) = ctx.saved_tensors
        weight, options = ctx.weight, ctx.options

        def gradient(index: Tensor, g: Tensor) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(g, index, weight.shape[0], *options)

        if defer(lambda index, g: accumulate(weight, gradient(index, g)), index, g.detach()):
            return None, None, None, None
        return None, gradient(index, g), None, None
