"""One file of the cache: a schedule without units, and the normal form of the problem that it was made for.

Plain JSON in two lines. The first one is the head: everything but the ops, so that hundreds of entries can be looked
through without reading their ops. Whatever a file holds, reading it gives a sound value or None.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optpipe import files, semantics
from optpipe.errors import InputError
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.plan import Plan
from solver.cache.normal import Normal, vector
from solver.microbatches import Outline, shares

FORMAT, VERSION = "optpipe-schedule", 1

#: A head longer than this is not one of ours (64 stages take 10 kB).
_LONGEST_HEAD = 1 << 20

#: Files and times beyond these are not ours (64 stages x 1,024 microbatches: 10 MB, 2e3 references).
_LARGEST, _LATEST = 1 << 28, 1e12

_NAMES = [kind.name for kind in Kind]
_CODES = {name: code for code, name in enumerate(_NAMES)}


@dataclass(frozen=True)
class Entry:
    """The head of one entry.

    Attributes
    ----------
    path, size, used
        The file, its bytes, and when it was last of use (seconds since the epoch).
    name, objective, structure
        The problem's name, the objective, the digest of the structure.
    stages, devices, microbatches
        Sizes of the problem.
    makespan_ms, lower_bound_ms, method
        What the plan says of itself.
    order
        Digest of the order: entries of one order give one schedule.
    vector
        The normal form, see :func:`solver.cache.normal.vector`.
    """

    path: Path
    size: int
    used: float
    name: str
    objective: str
    structure: str
    stages: int
    devices: int
    microbatches: int
    makespan_ms: float
    lower_bound_ms: float | None
    method: str
    order: str
    vector: Floats


def text_of(plan: Plan, normal: Normal, objective: str) -> str:
    """The file of a plan."""
    problem, ops, unit = plan.problem, plan.sorted().ops, normal.reference_ms
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "objective": objective,
        "structure": normal.structure,
        "stages": problem.num_stages,
        "devices": problem.num_devices,
        "microbatches": problem.num_microbatches,
        "reference_ms": unit,
        "makespan_ms": plan.makespan_ms,
        "lower_bound_ms": plan.lower_bound_ms,
        "method": str(plan.solver.get("method", "")),
        "order": _order_digest(ops),
        "problem": normal.values,
    }
    columns: dict[str, list[Any]] = {
        "kind": [_NAMES[code] for code in ops.kind.tolist()],
        "stage": ops.stage.tolist(),
        "microbatch": ops.microbatch.tolist(),
        "start": np.round(ops.start / unit, 9).tolist(),
        "end": np.round(ops.end / unit, 9).tolist(),
    }
    if (ops.bytes >= 0).any():
        columns["share"] = np.round(shares(problem, ops), 9).tolist()
    first = json.dumps(head, allow_nan=False)
    return f"{first[:-1]},\n{json.dumps({'ops': columns}, allow_nan=False)[1:]}\n"


def _order_digest(ops: Ops) -> str:
    order = semantics.rank(ops)
    content = hashlib.sha256()
    for column in (ops.kind, ops.stage, ops.microbatch, ops.bytes):
        content.update(np.ascontiguousarray(column[order], "<i8").tobytes())
    return content.hexdigest()[:16]


def read_head(path: Path) -> Entry | None:
    """The head of an entry; None where the file is gone, broken or not one of ours."""
    try:
        with path.open(encoding="utf-8") as stream:
            line = stream.readline(_LONGEST_HEAD)
        status = path.stat()
        head = json.loads(line.rstrip().removesuffix(",") + "}", parse_constant=_refuse)
        if head["format"] != FORMAT or head["version"] != VERSION:
            return None
        return Entry(
            path=path,
            size=status.st_size,
            used=status.st_mtime,
            **{key: _text(head[key]) for key in ("name", "objective", "structure", "method", "order")},  # type: ignore
            **{key: _count(head[key]) for key in ("stages", "devices", "microbatches")},  # type: ignore
            makespan_ms=_number(head["makespan_ms"]),
            lower_bound_ms=None if head["lower_bound_ms"] is None else _number(head["lower_bound_ms"]),
            vector=vector(head["problem"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def read_ops(entry: Entry) -> Outline | None:
    """The ops of an entry; None where the file is gone or broken, or names ops that its problem does not have."""
    if entry.size > _LARGEST:
        return None
    try:
        columns = json.loads(files.read_text(entry.path), parse_constant=_refuse)["ops"]
        kind = np.array([_CODES[name] for name in columns["kind"]], np.int64)
        stage, microbatch = (_whole_numbers(columns[name]) for name in ("stage", "microbatch"))
        start, end = (_times(columns[name]) for name in ("start", "end"))
        share = _times(columns["share"]) if "share" in columns else np.ones(len(kind))
        if len({len(column) for column in (kind, stage, microbatch, start, end, share)}) != 1 or not len(kind):
            return None
        if stage.max() >= entry.stages or microbatch.max() >= entry.microbatches:
            return None
        return Outline(entry.stages, entry.microbatches, kind, stage, microbatch, start, end, share)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError, InputError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise TypeError("expected a count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise TypeError("expected a number of at least 0")
    return float(value)


def _whole_numbers(value: Any) -> Ints:
    column = np.array(value)
    if column.dtype != np.int64 or column.ndim != 1 or (len(column) and column.min() < 0):
        raise TypeError("expected whole numbers of at least 0")
    return column


def _times(value: Any) -> Floats:
    column = np.array(value, np.float64)
    if column.ndim != 1 or not ((column >= 0) & (column <= _LATEST)).all():
        raise TypeError("expected numbers of at least 0")
    return column
