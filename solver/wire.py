"""Messages between a process and its child: a JSON header and the raw bytes of arrays. Nothing is pickled."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

import numpy as np
import numpy.typing as npt

_LENGTH = struct.Struct("<Q")
#: Types that may travel.
_TYPES = ("float64", "int64", "int32", "bool")


def write_message(stream: IO[bytes], header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]] | None = None) -> None:
    """Write one message; ``arrays`` are one-dimensional, of float64, int64, int32 or bool."""
    parts = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    shapes = [[name, part.dtype.name, len(part)] for name, part in parts.items()]
    text = json.dumps({"header": header, "arrays": shapes}).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for part in parts.values():
        stream.write(part.tobytes())
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """Read one message; None at the end of the stream, also in the middle of a message."""
    prefix = _exactly(stream, _LENGTH.size)
    text = None if prefix is None else _exactly(stream, _LENGTH.unpack(prefix)[0])
    if text is None:
        return None
    message = json.loads(text)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, kind, count in message["arrays"]:
        if kind not in _TYPES:
            raise ValueError(f"array of type {kind} in a message")
        dtype = np.dtype(kind)
        data = _exactly(stream, count * dtype.itemsize)
        if data is None:
            return None
        arrays[name] = np.frombuffer(data, dtype).copy()
    return message["header"], arrays


def _exactly(stream: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
