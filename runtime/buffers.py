"""Buffers that a forward moves, such as the vectors of a spectral norm.

A forward that is run again (C) starts from them as they were when it ran first, and leaves them as they are now: each
microbatch moves them once, as without recomputation. BatchNorm's averages are not among them (``batch_norm``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import RunFailed


class Was(NamedTuple):
    """A buffer before a forward: whose it is, the tensor, its version, and, where it may move, a copy."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None


class Buffers:
    """The buffers of some modules; which of them a forward moves is learnt from the first one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._moving: set[tuple[int, str]] | None = None

    def before(self) -> list[Was]:
        """What they are, right before a forward."""
        moving = self._moving
        return [
            Was(
                module,
                name,
                buffer,
                buffer._version,
                buffer.clone() if moving is None or (id(module), name) in moving else None,
            )
            for module, name, buffer in _all(self._modules)
        ]

    def moved(self, before: Sequence[Was]) -> list[Was]:
        """Those that a forward has moved, as they were.

        Raises
        ------
        RunFailed
            One has moved that did not in the first forward: there is no copy.
        """
        if self._moving is None:
            found = [was for was in before if _is_other(was)]
            self._moving = {(id(was.module), was.name) for was in found}
            return found
        for was in before:
            if was.copy is None and was.tensor._version != was.version:
                layer = type(was.module).__name__
                raise RunFailed(
                    f"the forward changes the buffer '{was.name}' of a {layer}, but did not before: it cannot run again"
                )
        # Those that move are taken to have moved: to compare them a GPU would have to be waited for.
        # Of a buffer that was replaced, such as a table that grows, the one before is as it was.
        return [
            was if was.copy is not None else was._replace(copy=was.tensor)
            for was in before
            if was.copy is not None or was.module._buffers.get(was.name) is not was.tensor
        ]


def _all(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    seen: set[int] = set()
    for part in modules:
        for module in part.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield from ((module, name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def _is_other(was: Was) -> bool:
    now = was.module._buffers.get(was.name)
    if now is not was.tensor or now._version != was.version:
        return True
    # BatchNorm's kernel moves its averages without a word.
    return was.copy is not None and not torch.equal(now, was.copy)


@contextmanager
def as_they_were(before: Sequence[Was]) -> Iterator[None]:
    """Inside, the copies are in the buffers' places; what moves meanwhile are the copies. (Copied into the buffers they
    would be changes in place, of what a forward inside may have saved.)"""
    now = [was.module._buffers.get(was.name) for was in before]
    for was in before:
        was.module._buffers[was.name] = was.copy
    try:
        yield
    finally:
        for was, buffer in zip(before, now, strict=True):
            was.module._buffers[was.name] = buffer


@contextmanager
def unmoved(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever runs inside, the buffers have the same values afterwards."""
    before = Buffers(modules).before()
    try:
        yield
    finally:
        with torch.no_grad():
            for was in before:
                if _is_other(was):
                    assert was.copy is not None
                    was.tensor.copy_(was.copy)
                    was.module._buffers[was.name] = was.tensor
