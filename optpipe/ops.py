"""The ops of a schedule, as numpy columns (a plan may hold hundreds of thousands)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Kind(IntEnum):
    """What an op does. F forward, B backward for the input, W backward for the weights, BW both in one go,
    C recompute, O offload, R reload."""

    F = 0
    B = 1
    W = 2
    BW = 3
    C = 4
    O = 5  # noqa: E741
    R = 6


NUM_KINDS = len(Kind)
COMPUTE_KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C)
TRANSFER_KINDS = (Kind.O, Kind.R)


class Op(NamedTuple):
    """One op. Times in ms; ``bytes`` of a transfer that moves only a part, else None."""

    kind: Kind
    stage: int
    microbatch: int
    start: float = 0.0
    end: float = 0.0
    bytes: int | None = None

    @property
    def label(self) -> str:
        """Its name in messages, such as ``F(2,5)``."""
        return f"{self.kind.name}({self.stage},{self.microbatch})"


@dataclass(frozen=True)
class Ops:
    """Ops as columns of equal length n.

    Attributes
    ----------
    kind, stage, microbatch
        int64 (n,).
    start, end
        float64 (n,), ms.
    bytes
        int64 (n,): bytes that a partial transfer moves; -1 where the op names none.
    extra
        Unknown keys of single ops, by index.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    start: Floats
    end: Floats
    bytes: Ints
    extra: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, ops: Iterable[Op]) -> Ops:
        """Columns from single ops, in their order."""
        rows = list(ops)
        return cls.columns(
            [o.kind for o in rows],
            [o.stage for o in rows],
            [o.microbatch for o in rows],
            [o.start for o in rows],
            [o.end for o in rows],
            [-1 if o.bytes is None else o.bytes for o in rows],
        )

    @classmethod
    def columns(
        cls,
        kind: npt.ArrayLike,
        stage: npt.ArrayLike,
        microbatch: npt.ArrayLike,
        start: npt.ArrayLike,
        end: npt.ArrayLike,
        moved: npt.ArrayLike | None = None,
        extra: dict[int, dict[str, Any]] | None = None,
    ) -> Ops:
        """Columns from sequences of equal length; ``moved`` None: no partial transfers."""
        kinds = np.asarray(kind, np.int64)
        return cls(
            kinds,
            np.asarray(stage, np.int64),
            np.asarray(microbatch, np.int64),
            np.asarray(start, np.float64),
            np.asarray(end, np.float64),
            np.full(len(kinds), -1, np.int64) if moved is None else np.asarray(moved, np.int64),
            extra or {},
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Op]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Op:
        moved = int(self.bytes[i])
        return Op(
            Kind(int(self.kind[i])),
            int(self.stage[i]),
            int(self.microbatch[i]),
            float(self.start[i]),
            float(self.end[i]),
            None if moved < 0 else moved,
        )

    def take(self, index: npt.NDArray[Any]) -> Ops:
        """The ops at ``index`` (positions or a mask), in that order."""
        picked = np.flatnonzero(index) if index.dtype == np.bool_ else index
        extra = {n: self.extra[int(i)] for n, i in enumerate(picked) if int(i) in self.extra} if self.extra else {}
        return Ops(
            self.kind[picked],
            self.stage[picked],
            self.microbatch[picked],
            self.start[picked],
            self.end[picked],
            self.bytes[picked],
            extra,
        )

    def at(self, start: Floats, end: Floats) -> Ops:
        """The same ops at other times."""
        return Ops(self.kind, self.stage, self.microbatch, start, end, self.bytes, self.extra)

    @property
    def is_compute(self) -> Bools:
        """bool (n,): runs on a device's compute, not on a channel."""
        return np.asarray(self.kind < Kind.O)
