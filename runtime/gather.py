"""Small things of every rank, on every rank, by gloo."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

#: Every finite double is a whole multiple of 2 to the minus this.
_LOWEST = 1074
#: A sum of doubles in that unit, in words of 32 bits: those of the largest double, and one for what many make more.
_WORDS = (_LOWEST + 1024) // 32 + 2

# By world: of a world that is gone none is left.
_made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def everyone() -> dist.ProcessGroup:
    """The group of all ranks that carries what is on the host: the world, or, where that was started as plain NCCL (as
    another program's own loop may), one of gloo beside it. All ranks call it together the first time."""
    world = dist.group.WORLD
    assert world is not None
    if carries_host_tensors(world):
        return world
    if world not in _made:
        _made.clear()
        _made[world] = dist.new_group(backend="gloo", group_desc="small things")
    return _made[world]


def carries_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for tensors on the host."""
    return "cpu:" in dist.get_backend_config(group)


def barrier() -> None:
    """Wait until every rank is here. By gloo: torch's own would set up NCCL for it where there are GPUs."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1), group=everyone())


def numbers(values: list[float]) -> list[list[float]]:
    """The same numbers of every rank, by rank (float64: integers up to 2^53 are exact); a process alone is rank 0."""
    if not dist.is_initialized():
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine, group=everyone())
    return [row.tolist() for row in rows]


def objects(value: Any) -> list[Any]:
    """A JSON value of every rank, by rank; a process alone is rank 0."""
    if not dist.is_initialized():
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(row[0]) for row in numbers([float(len(text))])]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = text
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=everyone())
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def exact_sum(values: Iterable[float], group: dist.ProcessGroup | None = None) -> float:
    """The sum of all ranks' values (none negative) as if without rounding, then rounded once.

    So its bits do not depend on which rank holds which value, nor on the order.

    Parameters
    ----------
    values
        Of this rank.
    group
        The ranks, of a group that carries tensors on the host; default all.
    """
    values = list(values)
    total = sum(_in_units(value) for value in values if math.isfinite(value))
    words = [total >> 32 * k & 0xFFFFFFFF for k in range(_WORDS)]
    tensor = torch.tensor([*words, values.count(math.inf), sum(map(math.isnan, values))])
    if dist.is_initialized():
        dist.all_reduce(tensor, group=everyone() if group is None else group)
    *words, infinite, undefined = tensor.tolist()
    if undefined:
        return math.nan
    try:
        exact = sum(word << 32 * k for k, word in enumerate(words)) / (1 << _LOWEST)
    except OverflowError:
        return math.inf
    return math.inf if infinite else exact


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << _LOWEST) // denominator)
