"""Which op of a device runs before which, as order bits; and the triangle rows that keep these free of cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optpipe.ops import Bools, Floats, Ints


class Orders(NamedTuple):
    """Order bits of some devices, flat, so that they can travel with a program: column ``column[k]`` is 1 where op
    ``ahead[k]`` of device ``device[k]`` runs before op ``behind[k]``, and 0 where it runs after it. Ops by their place
    on the device. int64 (pairs,), a device's pairs next to each other."""

    device: Ints
    ahead: Ints
    behind: Ints
    column: Ints


@dataclass
class OrderBits:
    """Order bits of one device: ``before[q, x] = const[q, x] + sign[q, x] * column[q, x]``, for ops q and x by their
    place on the device. Arrays (n, n); ``column`` is -1 where the order is not open."""

    const: Floats
    sign: Floats
    column: Ints


class Rows(NamedTuple):
    """Rows ``value[k] @ x[column[k]] <= upper[k]`` of three entries each: int64 and float64 (rows, 3), float64
    (rows,)."""

    column: Ints
    value: Floats
    upper: Floats


#: No order bits, no rows.
NO_ORDERS = Orders(*(np.zeros(0, np.int64) for _ in Orders._fields))
NO_ROWS = Rows(np.zeros((0, 3), np.int64), np.zeros((0, 3)), np.zeros(0))


def flat(number: int, bits: OrderBits) -> Orders:
    """The open pairs of device ``number``, in the direction in which the bit is 1."""
    ahead, behind = np.nonzero((bits.column >= 0) & (bits.sign > 0))
    return Orders(np.full(len(ahead), number), ahead, behind, bits.column[ahead, behind])


def joined_orders(parts: Sequence[Orders]) -> Orders:
    """The pairs of several devices."""
    return Orders(*(np.concatenate(part) for part in zip(NO_ORDERS, *parts, strict=True)))


def by_device(orders: Orders) -> list[OrderBits]:
    """The bits of each device; pairs that are not among ``orders`` are not open."""
    heads = np.flatnonzero(np.diff(orders.device, prepend=-1))
    return [
        _dense(*(part[first:last] for part in orders[1:]))
        for first, last in zip(heads, [*heads[1:], len(orders.device)], strict=True)
    ]


def _dense(ahead: Ints, behind: Ints, column: Ints) -> OrderBits:
    n = 1 + max(int(ahead.max()), int(behind.max()))
    bits = OrderBits(np.zeros((n, n)), np.zeros((n, n)), np.full((n, n), -1, np.int64))
    bits.column[ahead, behind] = bits.column[behind, ahead] = column
    bits.sign[ahead, behind], bits.sign[behind, ahead] = 1.0, -1.0
    bits.const[behind, ahead] = 1.0
    return bits


def triangle_rows(bits: OrderBits, x: Ints, y: Ints, z: Ints) -> Rows:
    """``before(x, y) + before(y, z) - before(x, z) <= 1``, for each three ops."""
    pairs, factors = ((x, y), (y, z), (x, z)), (1.0, 1.0, -1.0)
    column = np.stack([bits.column[pair] for pair in pairs], axis=1)
    value = np.stack([factor * bits.sign[pair] for factor, pair in zip(factors, pairs, strict=True)], axis=1)
    known = bits.const[x, y] + bits.const[y, z] - bits.const[x, z]
    return Rows(column, value, 1.0 - known)


def open_triples(bits: OrderBits) -> tuple[Ints, Ints, Ints]:
    """Triples x < y < z of which every pair is open."""
    is_open = np.triu(bits.column >= 0)
    x, y = np.nonzero(is_open)
    pair, z = np.nonzero(is_open[x] & is_open[y])
    return x[pair], y[pair], z


def broken_triangles(bits: OrderBits, x: Floats, least: float) -> tuple[Ints, Ints, Ints, Floats]:
    """The triangle rows that ``x`` breaks by more than ``least``, each once: ops (p, q, r) with ``before(p, q) +
    before(q, r) - before(p, r) > 1 + least``, and by how much."""
    is_open = bits.column >= 0
    before = bits.const + np.where(is_open, bits.sign * x[bits.column], 0.0)
    # The last two terms are at most 0 together, and so are the first one and the last: what is almost 0 breaks nothing.
    able = is_open & (before > least)
    found = [
        _broken_around(q, *ends, is_open, before, least)
        for q in range(len(before))
        # A cycle of three is (p, q, r), (q, r, p) and (r, p, q): taken where the middle one of its numbers is q.
        for ends in (
            (np.flatnonzero(able[:q, q]), q + 1 + np.flatnonzero(able[q, q + 1 :])),
            (q + 1 + np.flatnonzero(able[q + 1 :, q]), np.flatnonzero(able[q, :q])),
        )
        if len(ends[0]) and len(ends[1])
    ]
    p, q, r = (np.concatenate([np.zeros(0, np.int64), *(part[k] for part in found)]) for k in range(3))
    return p, q, r, np.concatenate([np.zeros(0), *(part[3] for part in found)])


def _broken_around(
    q: int, p: Ints, r: Ints, is_open: Bools, before: Floats, least: float
) -> tuple[Ints, Ints, Ints, Floats]:
    """Those with q in the middle."""
    ends = np.ix_(p, r)
    excess = np.where(is_open[ends], before[p, q][:, None] + before[q, r] - before[ends] - 1.0, 0.0)
    i, k = np.nonzero(excess > least)
    return p[i], np.full(len(i), q), r[k], excess[i, k]


def broken_rows(devices: Sequence[OrderBits], x: Floats, most: int, least: float) -> Rows:
    """The triangle rows of all devices that ``x`` breaks by more than ``least``: the most broken first, at most
    ``most``."""
    parts, excess = [NO_ROWS], [np.zeros(0)]
    for bits in devices:
        *ops, over = broken_triangles(bits, x, least)
        parts.append(triangle_rows(bits, *ops))
        excess.append(over)
    worst = np.argsort(-np.concatenate(excess), kind="stable")[:most]
    rows = joined_rows(parts)
    return Rows(rows.column[worst], rows.value[worst], rows.upper[worst])


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several."""
    return Rows(*(np.concatenate(part) for part in zip(NO_ROWS, *parts, strict=True)))
