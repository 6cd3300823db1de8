"""An audit that knows nothing of the runtime's books: the storages made while it watches that are still alive."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                old = self.seen.get(storage._cdata)
                if old is None or old[0].expired():
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def nbytes(self, but: Iterable[Tensor | None] = ()) -> int:
        """Bytes alive, without the storages of the tensors given."""
        skip = {tensor.untyped_storage()._cdata for tensor in but if tensor is not None}
        return sum(size for key, (ref, size) in self.seen.items() if key not in skip and not ref.expired())


def parameters_and_gradients(module: torch.nn.Module) -> list[Tensor | None]:
    return [tensor for parameter in module.parameters() for tensor in (parameter, parameter.grad)]
