"""Small things of every rank, on every rank, by gloo."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def barrier() -> None:
    """Wait until every rank is here. By gloo: torch's own would set up NCCL for it where there are GPUs."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def numbers(values: list[float]) -> list[list[float]]:
    """The same numbers of every rank, by rank (float64: integers up to 2^53 are exact)."""
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def objects(value: Any) -> list[Any]:
    """A JSON value of every rank, by rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(row[0]) for row in numbers([float(len(text))])]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = text
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]
