"""What goes from stage to stage: shapes and dtypes, of every microbatch alike or of each its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of what a stage hands to the next one, per microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"


#: What a stage hands to the next one: the same of every microbatch, or one entry a microbatch.
Boundary = TensorSpec | Sequence[TensorSpec]


def spec_of(boundary: Boundary, microbatch: int) -> TensorSpec:
    """What goes over a boundary in one microbatch."""
    return boundary if isinstance(boundary, TensorSpec) else boundary[microbatch]


def most_bytes(boundary: Boundary) -> int:
    """The largest message over a boundary, bytes."""
    return boundary.nbytes if isinstance(boundary, TensorSpec) else max(spec.nbytes for spec in boundary)


def uneven(spec: TensorSpec, sequences: int, microbatches: int) -> list[TensorSpec]:
    """A boundary for a batch that does not divide evenly: ``torch.tensor_split`` along the first dimension."""
    small, more = divmod(sequences, microbatches)
    return [TensorSpec((small + (j < more), *spec.shape[1:]), spec.dtype) for j in range(microbatches)]
