"""Host memory for offloads: one block with a place for every offload of a plan, settled before the first step.

A step allocates nothing, and nothing is rounded up to powers of two, as torch's own pinned memory is. What does not fit
its place goes into memory of its own, which is kept too; ``settle`` then makes the places larger.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from optpipe.plan import Plan
from runtime.host_layout import Layout, Place, aligned, intervals, lay_out

_PAGE_BYTES = 4096
_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class HostMemory(Protocol):
    """Gives host memory and takes it back: a pool, or the place of one offload in it."""

    def take(self, nbytes: int) -> Tensor:
        """uint8 (nbytes,), with anything in it."""

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back."""


class HostPool:
    """Host memory, kept and used again.

    Parameters
    ----------
    pinned
        Page-locked memory, which CUDA copies from and to without the host.

    Attributes
    ----------
    allocated
        Bytes that the pool owns, in use or not.
    in_use, peak
        Bytes handed out now, and the most since ``reset_peak``.
    allocations
        How often memory was taken from the system.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._block: Tensor | None = None
        self._spaces: dict[Hashable, _Space] = {}
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may give buffers back
        self.allocated = self.in_use = self.peak = self.allocations = 0
        # Whoever holds a buffer holds the pool, so no one does by then.
        self._locked: dict[int, Tensor] = {}
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def lay_out(self, layout: Layout) -> None:
        """Take the block of a layout; nothing may be in use. What the pool had before it gives back to the system."""
        with self._lock:
            assert self.in_use == 0, "host memory is laid out anew while it is used"
            self._free.clear()
            self._block = None
            _unlock(self._locked)
            self._block = self._allocate(layout.nbytes) if layout.nbytes else None
            self.allocated = layout.nbytes
            self._spaces = {key: _Space(self, place) for key, place in layout.places.items()}

    def free(self) -> None:
        """Give everything back to the system, unless something is in use: then it goes with the pool."""
        with self._lock:
            if self.in_use == 0:
                self.lay_out(Layout({}, 0, 0))

    def space(self, key: Hashable) -> HostMemory:
        """The place of one offload; the pool itself where it has none."""
        return self._spaces.get(key, self)

    def needs(self) -> dict[Any, int]:
        """Bytes that each place should have had: the most that was taken of it at a time."""
        return {key: space.most for key, space in self._spaces.items() if space.most}

    @property
    def overflowed(self) -> bool:
        """Whether a place was too small."""
        return any(space.most > space.place.nbytes for space in self._spaces.values())

    def take(self, nbytes: int) -> Tensor:
        """uint8 (nbytes,), with anything in it, apart from all places."""
        with self._lock:
            self._count(nbytes)
            free = self._free.get(nbytes)
            if free:
                return free.pop()
            self.allocated += nbytes
            return self._allocate(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        with self._lock:
            self._count(-buffer.numel())
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def reset_peak(self) -> None:
        """Start the peak anew, from what is in use now."""
        with self._lock:
            self.peak = self.in_use

    def _count(self, nbytes: int) -> None:
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)

    def _allocate(self, nbytes: int) -> Tensor:
        self.allocations += 1
        return _page_locked(nbytes, self._locked) if self._pinned else torch.empty(nbytes, dtype=torch.uint8)


def reserved(plan: Plan, device: int, *, pinned: bool) -> HostPool:
    """Host memory laid out for all that a plan offloads from a device (its number).

    Raises
    ------
    MemoryError, RuntimeError
        There is not as much.
    """
    pool = HostPool(pinned=pinned)
    pool.lay_out(lay_out(intervals(plan, device)))
    return pool


class _Space:
    """The place of one offload: buffers one behind the other, free again once all have been given back."""

    def __init__(self, pool: HostPool, place: Place) -> None:
        self._pool, self.place = pool, place
        self._used = self._live = 0
        self._taken = 0  # with what did not fit
        self.most = 0

    def take(self, nbytes: int) -> Tensor:
        pool = self._pool
        with pool._lock:
            self._taken += aligned(nbytes)
            self.most = max(self.most, self._taken)
            if self._used + nbytes > self.place.nbytes:
                return pool.take(nbytes)
            assert pool._block is not None
            first = self.place.offset + self._used
            self._used += aligned(nbytes)
            self._live += 1
            pool._count(nbytes)
            return pool._block[first : first + nbytes]

    def give(self, buffer: Tensor) -> None:
        pool = self._pool
        with pool._lock:
            self._taken -= aligned(buffer.numel())
            block = pool._block
            if block is None or buffer.untyped_storage()._cdata != block.untyped_storage()._cdata:
                pool.give(buffer)
                return
            pool._count(-buffer.numel())
            self._live -= 1
            if self._live == 0:
                self._used = 0


def _page_locked(nbytes: int, locked: dict[int, Tensor]) -> Tensor:
    """uint8 (nbytes,) in pages that CUDA knows; ``locked`` keeps them, by address, until they are unlocked."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)  # CUDA takes no empty range
    memory = torch.empty(nbytes + _PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % _PAGE_BYTES
    pages = memory[first : first + nbytes]
    status = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), nbytes, _FOR_ALL_CONTEXTS))
    if status:
        raise MemoryError(f"{nbytes} bytes of host memory cannot be page-locked: CUDA error {status}")
    locked[pages.data_ptr()] = memory
    return pages


def _unlock(locked: dict[int, Tensor]) -> None:
    while locked:
        pointer, memory = locked.popitem()
        torch.cuda.cudart().cudaHostUnregister(pointer)
        del memory
