"""Sparse rows and columns with names: what a formulation is written into, a family at a time.

Columns and rows come in families (all forward starts, all big-M rows of one side, ...). A family is added with a few
numpy arrays, never with a loop over its members; names are spelled only when someone asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optpipe.ops import Bools, Floats, Ints
from solver.milp.orders import NO_ORDERS, Orders, Rows, joined_orders

INF = float("inf")
#: Before the names of ``Matrix.orders`` in a message.
_ORDERS = "orders."

#: A term of a family of rows: one column (-1: none) and one coefficient for each row.
Term = tuple[Any, Any]


class Family(NamedTuple):
    """Members ``first`` to ``first + size`` share a template for their names, such as ``"{}_before_{}"``, which takes
    one of ``labels`` (arrays of length ``size``: op numbers) for each pair of braces."""

    template: str
    first: int
    size: int
    labels: tuple[Ints, ...]


class Matrix(NamedTuple):
    """A mixed-integer linear program in arrays: minimise ``cost @ x``.

    Attributes
    ----------
    cost, lower, upper, integer
        Per column; bounds may be infinite.
    first, column, value
        Rows in compressed form: entries ``first[r]`` to ``first[r + 1]`` of ``column`` and ``value`` are row r's.
    row_lower, row_upper
        Per row.
    orders
        Order bits whose triangle rows may be added where a solution of the relaxation breaks them (see ``lazy``); they
        hold at every integer solution.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integer: Bools
    first: Ints
    column: Ints
    value: Floats
    row_lower: Floats
    row_upper: Floats
    orders: Orders = NO_ORDERS

    @property
    def num_columns(self) -> int:
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        return len(self.row_lower)

    @property
    def num_binaries(self) -> int:
        """Integer columns that are not fixed."""
        return int((self.integer & (self.upper > self.lower)).sum())

    def row_of_entry(self) -> Ints:
        """int64 (entries,): the row of each entry."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.first))

    def activities(self, x: Floats) -> Floats:
        """float64 (rows,): the left-hand sides at ``x``."""
        return np.asarray(np.bincount(self.row_of_entry(), self.value * x[self.column], self.num_rows), np.float64)

    def violation(self, x: Floats) -> float:
        """The most by which ``x`` breaks a row, a bound or integrality."""
        left = self.activities(x)
        parts = [
            self.row_lower - left,
            left - self.row_upper,
            self.lower - x,
            x - self.upper,
            np.abs(x - np.round(x))[self.integer],
        ]
        return max([0.0] + [float(part.max()) for part in parts if len(part)])

    def with_rows(self, more: Rows) -> Matrix:
        """The program with more rows, at its end."""
        return self._replace(
            first=np.concatenate([self.first, self.first[-1] + 3 * np.arange(1, len(more.upper) + 1)]),
            column=np.concatenate([self.column, more.column.ravel()]),
            value=np.concatenate([self.value, more.value.ravel()]),
            row_lower=np.concatenate([self.row_lower, np.full(len(more.upper), -INF)]),
            row_upper=np.concatenate([self.row_upper, more.upper]),
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name, for a message."""
        arrays = self._asdict()
        orders = arrays.pop("orders")
        return arrays | {_ORDERS + name: part for name, part in orders._asdict().items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> Matrix:
        """The program of ``arrays()``."""
        orders = Orders(*(arrays[_ORDERS + name] for name in Orders._fields))
        return cls(**{name: arrays[name] for name in cls._fields if name != "orders"}, orders=orders)


class Builder:
    """Collects families of columns and rows."""

    def __init__(self) -> None:
        self.num_columns = 0
        self.num_rows = 0
        self.column_families: list[Family] = []
        self.row_families: list[Family] = []
        self._columns: list[tuple[Floats, Floats, Floats, Bools]] = []
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._sides: list[tuple[Floats, Floats]] = []
        #: Of each device whose triangle rows are added lazily.
        self.orders: list[Orders] = []

    def columns(
        self,
        template: str,
        labels: Sequence[Ints],
        lower: npt.ArrayLike,
        upper: npt.ArrayLike,
        *,
        integer: bool = False,
        cost: npt.ArrayLike = 0.0,
    ) -> Ints:
        """Add a family of columns, as many as the labels are long (one without labels); their numbers."""
        count = len(labels[0]) if labels else 1
        self.column_families.append(Family(template, self.num_columns, count, tuple(labels)))
        shape = (count,)
        self._columns.append(
            (
                np.broadcast_to(np.asarray(cost, np.float64), shape),
                np.broadcast_to(np.asarray(lower, np.float64), shape),
                np.broadcast_to(np.asarray(upper, np.float64), shape),
                np.full(count, integer),
            )
        )
        self.num_columns += count
        return np.arange(self.num_columns - count, self.num_columns)

    def rows(
        self, template: str, labels: Sequence[Ints], lower: npt.ArrayLike, upper: npt.ArrayLike, terms: Sequence[Term]
    ) -> Ints:
        """Add a family of rows ``lower <= sum of terms <= upper``, with at most one entry a term; their numbers."""
        count = len(labels[0]) if labels else 1
        number = np.arange(self.num_rows, self.num_rows + count)
        for column, value in terms:
            columns = np.broadcast_to(np.asarray(column, np.int64), (count,))
            values = np.broadcast_to(np.asarray(value, np.float64), (count,))
            there = (columns >= 0) & (values != 0)
            self._entries.append((number[there], columns[there], values[there]))
        self._close(template, labels, count, lower, upper)
        return number

    def entries(self, rows: Ints, columns: Ints, values: npt.ArrayLike) -> None:
        """Add entries to rows that are there; several for one row and column add up."""
        spread = np.broadcast_to(np.asarray(values, np.float64), rows.shape)
        there = (columns >= 0) & (spread != 0)
        self._entries.append((rows[there], columns[there], spread[there]))

    def _close(
        self, template: str, labels: Sequence[Ints], count: int, lower: npt.ArrayLike, upper: npt.ArrayLike
    ) -> None:
        self.row_families.append(Family(template, self.num_rows, count, tuple(labels)))
        self._sides.append(
            (
                np.broadcast_to(np.asarray(lower, np.float64), (count,)),
                np.broadcast_to(np.asarray(upper, np.float64), (count,)),
            )
        )
        self.num_rows += count

    def matrix(self) -> Matrix:
        """Everything that was added, rows in compressed form."""
        cost, lower, upper, integer = (np.concatenate(part) for part in zip(*self._columns, strict=True))
        none = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        row, column, value = (np.concatenate(part) for part in zip(none, *self._entries, strict=True))
        sides = [(np.zeros(0), np.zeros(0)), *self._sides]
        row_lower, row_upper = (np.concatenate(part) for part in zip(*sides, strict=True))
        orders = joined_orders(self.orders)
        return compressed(Matrix(cost, lower, upper, integer, row, column, value, row_lower, row_upper, orders))


def compressed(loose: Matrix) -> Matrix:
    """The matrix with ``first`` made from the row of each entry, which ``loose.first`` holds; doubles summed."""
    width = max(1, loose.num_columns)
    key = loose.first * width + loose.column
    order = np.argsort(key, kind="stable")
    key, value = key[order], loose.value[order]
    heads = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    if len(heads) < len(key):
        key, value = key[heads], np.add.reduceat(value, heads)
        there = value != 0
        key, value = key[there], value[there]
    first = np.zeros(loose.num_rows + 1, np.int64)
    np.cumsum(np.bincount(key // width, minlength=loose.num_rows), out=first[1:])
    return loose._replace(first=first, column=key % width, value=value)


def spelled(families: Sequence[Family], op_names: Sequence[str]) -> list[str]:
    """The names of all members of all families, in order."""
    names: list[str] = []
    for family in families:
        if not family.labels:
            names.append(family.template)
            continue
        parts = [[op_names[op] for op in label.tolist()] for label in family.labels]
        names += [family.template.format(*words) for words in zip(*parts, strict=True)]
    return names
