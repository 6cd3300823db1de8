"""The fractional knapsack that bounds what memory lets a device do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Item(NamedTuple):
    """``most`` times (or parts of it) ``value`` at the price of ``size`` each."""

    value: float
    size: float
    most: float


def most_value(items: Iterable[Item], room: float) -> float:
    """The largest sum of values of (parts of) items whose sizes add up to at most ``room``."""
    total = 0.0
    priced = []
    for item in items:
        if item.value <= 0:
            continue
        if item.size <= 0:
            total += item.value * item.most
        else:
            priced.append(item)
    for item in sorted(priced, key=lambda i: -i.value / i.size):
        count = min(item.most, max(0.0, room) / item.size)
        total += count * item.value
        room -= count * item.size
        if room <= 0:
            break
    return total
