"""Saved activations of one (stage, microbatch): handles over storages, so that a storage can leave the device.

While F runs, ``saved_tensors_hooks`` hand every tensor that autograd saves to ``Saved.pack``. Autograd keeps the handle
that comes back, the handle owns the entry of the storage, and nothing else owns it:

    autograd node --> handle (number) --> entry --> storage on the device, or its copy on the host
                      handle ---------------^          ^ offload and reload swap these two

So memory goes when autograd drops what it saved, as without hooks, and a storage with many views moves once.

Two things at a stage's border would keep memory that no handle owns. A leaf input keeps its storage through its
AccumulateGrad node: ``enter`` puts a Function in front instead. The output keeps its own: drop it once it is sent and
keep its ``GradientEdge``.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from optpipe.errors import RunFailed
from runtime.accounting import Hold, Ledger
from runtime.host_memory import HostMemory

#: A view this many times smaller than its storage is copied when it is saved, so that it does not pin the whole.
COMPACT_RATIO = 8

_STRIDED = torch.strided


#: Storages on the device to their entries, weakly: handles own the entries. (A ``WeakValueDictionary`` takes longer.)
_Table = dict[int, "weakref.ref[_Entry]"]


class _Geometry(NamedTuple):
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Entry(Hold):
    """One storage: held while it is on the device, ``host`` while it is not; ``moving`` while neither is whole.

    It serves as the handle of the first tensor that is saved over it, number 0; most storages have no other.
    """

    __slots__ = ("__weakref__", "_host_memory", "_table", "host", "moving", "names", "versions")

    def __init__(self, saved: Saved, storage: torch.UntypedStorage, key: int, tensor: Tensor) -> None:
        super().__init__(saved._ledger, storage, key)
        self._host_memory, self._table = saved._pool, saved._table
        self._table[key] = weakref.ref(self)
        self.host: Tensor | None = None
        self.moving = False
        # What was saved: aliases, which share the version counter, and their versions then. Geometry once it has moved.
        self.names: list[Tensor | _Geometry] = [tensor.detach()]
        self.versions = [tensor._version]

    def add(self, tensor: Tensor) -> _Handle:
        """Another tensor over this storage."""
        self.names.append(tensor.detach())
        self.versions.append(tensor._version)
        return _Handle(self, len(self.names) - 1)

    def tensor(self, number: int) -> Tensor:
        """The tensor with this number, as it was saved.

        Raises
        ------
        RunFailed
            It is on the host, or it was changed in place since it was saved.
        """
        name = self.names[number]
        if isinstance(name, Tensor):  # then it has not moved
            if name._version != self.versions[number]:
                raise RunFailed("a tensor that the backward needs was changed in place after it was saved")
            return name
        if self._storage is None or self.moving:
            raise RunFailed("a saved activation is used while it is offloaded: its reload has not ended")
        view = torch.empty(0, dtype=name.dtype, device=self.storage.device)
        return view.set_(self.storage, name.offset, name.size, name.stride)

    def leave(self) -> Hold:
        """Out to the host, into ``host``: the hold on the device's memory, to be released once the copy is done."""
        for number, name in enumerate(self.names):
            if isinstance(name, Tensor):
                self.tensor(number)  # it has to be as it was saved
                # Geometry in place of aliases: they would keep the storage alive.
                self.names[number] = _Geometry(name.dtype, int(name.storage_offset()), name.size(), name.stride())
        self.host = self._host_memory.take(self.nbytes)
        self.moving = True
        del self._table[self._key]
        return self.split_off()

    def come_back(self, ledger: Ledger, target: Tensor) -> None:
        """Back to the device, into the memory of ``target``, which is held from now on."""
        storage = target.untyped_storage()
        super().__init__(ledger, storage, storage._cdata)
        self._table[self._key] = weakref.ref(self)

    def arrived(self) -> None:
        """The copy back is done."""
        host, self.host, self.moving = self.host, None, False
        assert host is not None
        self._host_memory.give(host)

    def __del__(self) -> None:
        known = self._table.get(self._key)
        # In a cycle of garbage the hold may have gone before, and another storage may be at the same address now.
        if known is not None and known() in (self, None):
            del self._table[self._key]
        self.release()
        if self.host is not None:
            self._host_memory.give(self.host)


class _Handle:
    """A saved tensor that is not the first one over its storage: a number in the entry."""

    __slots__ = ("entry", "number")

    def __init__(self, entry: _Entry, number: int) -> None:
        self.entry, self.number = entry, number


class _Sharded(NamedTuple):
    """A saved DTensor: the handle of this rank's part, and what makes the whole of it."""

    part: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]


class Saved:
    """The saved activations of one (stage, microbatch).

    Parameters
    ----------
    ledger
        Counts what is on the device.
    device
        The stage's device; tensors elsewhere are none of ours.
    skip
        Storages that stay: parameters, buffers, the batch (``storages``).
    pool
        Host memory for offloads.
    """

    def __init__(self, ledger: Ledger, device: torch.device, skip: Container[int], pool: HostMemory) -> None:
        self._ledger, self._device, self._skip, self._pool = ledger, device, skip, pool
        # An entry leaves when its storage may be freed, so no address is ever stale.
        self._table: _Table = {}
        self._away: list[_Entry] = []

    def hooks(self) -> saved_tensors_hooks:
        """The context in which F runs."""
        return saved_tensors_hooks(self.pack, self.unpack)

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return sum(entry.nbytes for entry in self.entries())

    def entries(self) -> list[_Entry]:
        """Those whose storage is on the device, in the order in which they came there."""
        return [entry for entry in (one() for one in list(self._table.values())) if entry is not None]

    def pack(self, tensor: Tensor) -> Any:
        """A handle for a tensor that is to be kept; the tensor itself where it stays on the device anyway."""
        if type(tensor) is not Tensor or tensor.layout is not _STRIDED:
            if isinstance(tensor, DTensor):
                return _Sharded(
                    self.pack(_part(tensor)), tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()
                )
            return _passed(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._skip or tensor.is_conj() or tensor.is_neg() or tensor.device != self._device:
            return _passed(tensor)
        known = self._table.get(key)
        if known is not None and (entry := known()) is not None:
            return entry.add(tensor)
        if tensor.nbytes * COMPACT_RATIO <= storage.nbytes():
            tensor = tensor.detach().clone()
            storage = tensor.untyped_storage()
            key = storage._cdata
        return _Entry(self, storage, key, tensor)

    def unpack(self, handle: Any) -> Tensor:
        """The tensor of a handle. Autograd may ask several times.

        Raises
        ------
        RunFailed
            It is on the host, or it was changed in place since it was saved.
        """
        if type(handle) is _Entry:
            return handle.tensor(0)
        if type(handle) is _Handle:
            return handle.entry.tensor(handle.number)
        if isinstance(handle, Tensor):
            return handle
        part, mesh, placements, size, stride = handle
        with torch.no_grad():
            whole: Tensor = DTensor.from_local(
                self.unpack(part), mesh, placements, run_check=False, shape=size, stride=stride
            )
        return whole

    def offload(self, nbytes: int | None = None) -> Offload:
        """The job that moves activations to the host.

        Whole storages move. For the memory promise of a partial offload at least ``nbytes`` must leave the device, so
        the largest ones that fit into ``nbytes`` go, and then the smallest one that makes it full: what moves exceeds
        ``nbytes`` by less than that one storage. The choice depends on sizes only, so every step moves the same.

        Parameters
        ----------
        nbytes
            Bytes that must leave; None: everything.
        """
        return Offload(self, nbytes)

    def reload(self) -> Reload:
        """The job that brings back what the last offload moved."""
        return Reload(self)


class Offload:
    """Copies storages to the host; the device's memory is free when it has finished."""

    def __init__(self, saved: Saved, nbytes: int | None) -> None:
        self._saved, self._nbytes = saved, nbytes
        self._sources: list[Hold] = []

    def start(self) -> list[tuple[Tensor, Tensor]]:
        """Takes host memory; (destination, source) pairs to copy."""
        saved = self._saved
        pairs = []
        for entry in _chosen(saved.entries(), self._nbytes):
            source = entry.leave()
            assert entry.host is not None
            saved._away.append(entry)
            self._sources.append(source)
            pairs.append((entry.host, _raw(source, saved._device)))
        return pairs

    def finish(self) -> None:
        """Frees the device's memory; the copies are done."""
        for source in self._sources:
            source.release()
        self._sources.clear()


class Reload:
    """Copies storages back to the device, into memory that is taken when it starts: ``taken`` bytes so far."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self.taken = 0
        self._back: list[_Entry] = []

    def start(self) -> list[tuple[Tensor, Tensor]]:
        """Takes device memory; (destination, source) pairs to copy."""
        saved = self._saved
        away, saved._away = saved._away, []
        pairs = []
        for entry in away:
            assert entry.host is not None
            target = torch.empty(entry.nbytes, dtype=torch.uint8, device=saved._device)
            self.taken += entry.nbytes
            entry.come_back(saved._ledger, target)
            self._back.append(entry)
            pairs.append((target, entry.host))
        return pairs

    def finish(self) -> None:
        """Gives the host memory back; the copies are done."""
        for entry in self._back:
            entry.arrived()
        self._back.clear()


def _chosen(entries: list[_Entry], nbytes: int | None) -> list[_Entry]:
    """Whole storages of at least ``nbytes`` (all, where there are fewer), with little beyond."""
    # Sorted by size, equal sizes in the order in which they were saved (the table keeps it).
    entries = sorted(entries, key=lambda entry: -entry.nbytes)
    if nbytes is None:
        return entries
    chosen, left, missing = [], [], nbytes
    for entry in entries:
        if entry.nbytes <= missing:
            chosen.append(entry)
            missing -= entry.nbytes
        else:
            left.append(entry)
    if missing > 0 and left:
        chosen.append(left[-1])
    return chosen


def _passed(tensor: Tensor) -> Tensor:
    """A tensor that is kept as it is."""
    # A node that kept its own output would keep itself alive.
    return tensor if tensor.is_leaf else tensor.detach()


def _raw(hold: Hold, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(hold.storage)


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors that stay on the device, for ``Saved``'s ``skip``. They live as long as the table: were
    one freed and its address used again, what is there then would not be moved."""
    found = [(_part(t) if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return {storage._cdata: storage for storage in found}


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor is in, of a DTensor its part on this rank: told from others as long as it lives."""
    key: int = (_part(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata
    return key


@torch.no_grad()
def _part(tensor: DTensor) -> Tensor:
    """A DTensor's part on this rank, once it is there."""
    part = tensor.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


class InputGradient:
    """Where the backward leaves the gradient for a stage's input, counted as soon as it is there."""

    __slots__ = ("_ledger", "hold", "value")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.value: Tensor | None = None
        self.hold: Hold | None = None

    def put(self, gradient: Tensor) -> None:
        self.value, self.hold = gradient, self._ledger.hold(gradient)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Tensor, place: InputGradient) -> Tensor:
        ctx.place = place
        return x.detach()  # shares memory and version with x, yet is no view to autograd: it may be changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        ctx.place.put(g)
        return None, None, None


#: Makes autograd build a graph although the input needs no gradient.
_PROBE = torch.empty(0, requires_grad=True)


def enter(x: Tensor, place: InputGradient) -> Tensor:
    """The stage's input as the graph sees it: not a leaf, and its gradient goes to ``place``."""
    out: Tensor = _Enter.apply(x, _PROBE, place)
    return out
