"""The tensors in a checkpoint's files, whole or in chunks, read without running anything.

    of one pipeline     stage-0.pt ...       {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, ...}}}
    of many ranks       part-0.pt ...        a list of tensors, one file a rank
                        index.json           of each tensor its size, and its chunks: offsets, file, place in the list

``torch.distributed.checkpoint`` plans which rank writes which chunk, and which chunks are read into which tensor, so
that a run may have another number of ranks than the one that wrote. Its own files would not do: it pickles their index,
and reading a pickle runs what is in it. Here the index is JSON, and tensors are read with ``weights_only``.

A tensor's key is ``model/3.mlp_in.weight``, or ``optimizer/3.mlp_in.weight/exp_avg``.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from optpipe import files
from optpipe.errors import InputError

_INDEX = "index.json"
#: Of one stage: parameters and buffers by name, and the optimiser's tensors by parameter and name.
State = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds: sizes and chunks by key, and the tensor of a chunk."""

    metadata: Metadata
    chunk: Callable[[MetadataIndex], Tensor]

    def size(self, key: str) -> torch.Size | None:
        """Of the whole tensor; None: there is none."""
        found = self.metadata.state_dict_metadata.get(key)
        return found.size if isinstance(found, TensorStorageMetadata) else None

    def empty(self, key: str, like: Tensor | None = None) -> Tensor:
        """Memory to read a tensor into: laid out as ``like`` where it is of its size, else whole, on the host."""
        found = self.metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        dtype = found.properties.dtype
        if like is not None and like.shape == found.size:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return torch.zeros(found.size, dtype=dtype)

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin so."""
        return (key for key in self.metadata.state_dict_metadata if key.startswith(prefix))

    def read(self, target: Mapping[str, Tensor]) -> None:
        """Fill tensors by key; of DTensors each rank reads its own part. No rank waits for another one."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(target), self.metadata, is_coordinator=True)
        for item in planner.create_local_plan().items:
            source = self.chunk(item.storage_index)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            planner.resolve_tensor(item).detach().copy_(source)


def open_(path: Path, change: Callable[[str, Tensor], Tensor] = lambda key, tensor: tensor) -> Stored:
    """The tensors in a checkpoint's folder; damaged files are InputErrors, now or when they are read.

    Parameters
    ----------
    path
        The folder.
    change
        Gives for a key and a tensor of a stage's file the one that is meant, of the same shape: for old files.
    """
    return _of_parts(path) if (path / _INDEX).exists() else _of_stages(path, change)


def flat(state: State) -> dict[str, Tensor]:
    """The tensors of a stage by key."""
    found = {f"model/{name}": value for name, value in state["model"].items()}
    for name, moments in state["optimizer"].items():
        found |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
    return found


def write_stage(folder: Path, number: int, state: State) -> None:
    """The file of a stage that one rank has whole."""
    _write(folder / f"stage-{number}.pt", state)


def write_parts(folder: Path, state: Mapping[str, Tensor]) -> None:
    """The files of a run whose tensors are spread over ranks; every rank calls it with what it has, by key.

    Raises
    ------
    OSError
        On all ranks, where one could not write.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may write as well
            save(dict(state), storage_writer=_Writer(folder), planner=DefaultSavePlanner(flatten_state_dict=False))
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Writer(StorageWriter):
    """One file a rank, and the index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"part-{rank}.pt") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, results = [], []
        for place, item in enumerate(plan.items):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors.append(_alone(tensor))
            results.append(WriteResult(item.index, tensor.nbytes, (plan.storage_data, place)))
        if tensors:
            _write(self._folder / plan.storage_data, tensors)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        tensors = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                file, place = places[MetadataIndex(key, chunk.offsets)]
                chunks.append(
                    {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "place": place}
                )
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        files.write_json(self._folder / _INDEX, {"tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _alone(tensor: Tensor) -> Tensor:
    """On the host, in memory of its own: a file would hold the memory of a view whole."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _write(path: Path, value: Any) -> None:
    with open(path, "wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())  # a rename must not come before what it names


def _read(file: Path) -> Any:
    """What a file of torch holds, mapped: only what is used of it is read."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> InputError:
    return InputError(file, "", f"is damaged: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _of_stages(path: Path, change: Callable[[str, Tensor], Tensor]) -> Stored:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("stage-*.pt")):
        part = _read(file)
        try:
            found = flat(part)
            if not all(isinstance(tensor, Tensor) for tensor in found.values()):
                raise TypeError("it holds something that is no tensor")
        except (KeyError, TypeError, AttributeError) as error:
            raise _damaged(file, error) from None
        tensors |= found
    known: dict[str, STORAGE_TYPES] = {
        key: _known(tensor.dtype, tensor.shape, [(torch.Size([0] * tensor.dim()), tensor.shape)])
        for key, tensor in tensors.items()
    }
    return Stored(Metadata(known), lambda index: change(index.fqn, tensors[index.fqn]))


def _of_parts(path: Path) -> Stored:
    known: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, tuple[str, int, torch.Size]] = {}
    index = files.read_json(path / _INDEX)
    try:
        for key, tensor in index["tensors"].items():
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{tensor['dtype']} is no dtype")
            boxes = [(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in tensor["chunks"]]
            known[key] = _known(dtype, torch.Size(tensor["size"]), boxes)
            if not _make_up(boxes, torch.Size(tensor["size"])):
                raise ValueError(f"{key} has chunks that do not make it up")
            for (offsets, sizes), chunk in zip(boxes, tensor["chunks"], strict=True):
                places[MetadataIndex(key, offsets)] = Path(chunk["file"]).name, int(chunk["place"]), sizes
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path / _INDEX, error) from None
    part = cache(lambda file: _read(path / file))

    def tensor_of(index: MetadataIndex) -> Tensor:
        file, place, sizes = places[index]
        try:
            tensor = part(file)[place]
            if not isinstance(tensor, Tensor) or tensor.shape != sizes:
                raise TypeError(f"entry {place} is no tensor of size {list(sizes)}")
        except (LookupError, TypeError) as error:
            raise _damaged(path / file, error) from None
        return tensor

    return Stored(Metadata(known), tensor_of)


def _make_up(boxes: Sequence[tuple[torch.Size, torch.Size]], size: torch.Size) -> bool:
    """Whether boxes (offsets, sizes) fill a tensor, and no place twice."""
    if sum(sizes.numel() for _, sizes in boxes) != size.numel():
        return False
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in boxes):
        return False
    boxes = [(offsets, sizes) for offsets, sizes in boxes if sizes.numel()]
    if not boxes or not size:
        return len(boxes) <= 1
    low = np.array([offsets for offsets, _ in boxes])
    high = low + np.array([sizes for _, sizes in boxes])
    if (low < 0).any() or (high > np.array(size)).any():
        return False
    together = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(-1)
    return int(together.sum()) == len(boxes)  # each with itself


def _known(dtype: torch.dtype, size: torch.Size, chunks: list[tuple[torch.Size, torch.Size]]) -> TensorStorageMetadata:
    found = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, found)
