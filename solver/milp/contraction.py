"""A formulation of which only a part is free, with everything around that part contracted, exactly.

What is decided leaves rows between two starts only: ``start(b) - start(a) >= lag``. An op outside the free part can
come before it, after it, both or neither. Those that no free op can delay run at their earliest; what they ask of the
free part becomes lower bounds. Of those that delay no free op only the longest path to the end matters; it becomes one
row each for the ops that reach them. Only what lies between free ops stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.ops import Bools, Floats, Ints
from solver.milp.formulation import Formulation
from solver.milp.sparse import INF, Matrix, compressed


@dataclass(frozen=True)
class Contraction:
    """The program of a free part.

    Attributes
    ----------
    matrix
        Its columns and rows.
    columns
        int64 (columns of ``matrix``,): the column of the formulation that each one is.
    formulation
        What it was made from.
    """

    matrix: Matrix
    columns: Ints
    formulation: Formulation
    _heads: Floats
    _arcs: _Arcs
    _after: Bools

    def shrink(self, x: Floats) -> Floats:
        """A vector of the formulation, of the contraction's columns."""
        return x[self.columns]

    def expand(self, x: Floats) -> Floats:
        """A solution of the contraction as one of the formulation, the ops around as early as they can be."""
        full = self._heads.copy()
        full[self.columns] = x
        into = self._after[self._arcs.after]
        arcs = _Arcs(self._arcs.before[into], self._arcs.after[into], self._arcs.lag[into])
        return _longest(full, arcs)


@dataclass(frozen=True)
class _Arcs:
    """Rows ``x[after] - x[before] >= lag``."""

    before: Ints
    after: Ints
    lag: Floats

    def where(self, mask: Bools) -> _Arcs:
        return _Arcs(self.before[mask], self.after[mask], self.lag[mask])


def contract(formulation: Formulation) -> Contraction:
    """The contraction of a formulation that was made with ``known`` and ``free``."""
    matrix = formulation.matrix
    row, column, value, lower, upper, known = _without_fixed(matrix)
    end = formulation.objective_column
    count = np.bincount(row, minlength=matrix.num_rows)
    per_unit = formulation.per_unit
    arcs, is_arc = _arcs(matrix, row, column, value, lower, count, end, per_unit)
    # Starts in any other row stay, and so do the starts that such rows connect.
    entry = ~is_arc[row] & (count[row] > 0)
    start_column = np.zeros(matrix.num_columns, np.bool_)
    start_column[formulation.start] = True
    core = np.zeros(matrix.num_columns, np.bool_)
    core[column[entry]] = True
    core &= start_column
    inner = arcs.where(arcs.after != end)
    forwards, backwards = _reached(core, inner.before, inner.after), _reached(core, inner.after, inner.before)
    middle = forwards & backwards
    before, after = start_column & ~forwards, start_column & forwards & ~backwards
    heads = _longest(
        np.where(known, matrix.lower, np.where(np.isfinite(matrix.lower), matrix.lower, 0.0)),
        inner.where(before[inner.after]),
    )
    tails = _tails(arcs, after, end, matrix.num_columns)
    # To the end, or to something after: what is left from the start of ``arcs.before`` on.
    leads = arcs.where(after[arcs.after] | (arcs.after == end))
    rest = leads.lag + np.where(leads.after == end, 0.0, tails[leads.after])
    column_lower = matrix.lower.copy()
    push = inner.where(before[inner.before] & middle[inner.after])
    np.maximum.at(column_lower, push.after, heads[push.before] + push.lag)
    least = [matrix.lower[end] * per_unit]
    least += (heads[leads.before] + rest)[before[leads.before]].tolist()
    least += (matrix.lower + tails)[after & np.isfinite(tails)].tolist()
    column_lower[end] = max(least) / per_unit
    if matrix.integer[end]:
        column_lower[end] = np.ceil(column_lower[end] - 1e-6)
    longest = np.full(matrix.num_columns, -np.inf)
    np.maximum.at(longest, leads.before, rest)
    open_integer = matrix.integer & ~known
    kept = middle | open_integer
    kept[end] = True
    within = middle[arcs.before] & middle[arcs.after]
    kept_rows = ~is_arc & (count > 0)
    small = _assemble(
        matrix,
        row,
        column,
        value,
        lower,
        upper,
        kept,
        kept_rows,
        arcs.where(within),
        longest,
        middle,
        end,
        per_unit,
        column_lower,
    )
    return Contraction(small, np.flatnonzero(kept), formulation, np.where(known, matrix.lower, heads), inner, after)


def _without_fixed(matrix: Matrix) -> tuple[Ints, Ints, Floats, Floats, Floats, Bools]:
    """Entries and row sides without the integer columns that are fixed; which these are."""
    known = matrix.integer & (matrix.upper - matrix.lower < 1e-9)
    row = matrix.row_of_entry()
    fixed = known[matrix.column]
    part = np.bincount(row[fixed], matrix.value[fixed] * matrix.lower[matrix.column[fixed]], matrix.num_rows)
    stay = ~fixed
    return row[stay], matrix.column[stay], matrix.value[stay], matrix.row_lower - part, matrix.row_upper - part, known


def _arcs(
    matrix: Matrix, row: Ints, column: Ints, value: Floats, lower: Floats, count: Ints, end: int, per_unit: float
) -> tuple[_Arcs, Bools]:
    """The rows between two starts, or between a start and the end (scaled to ms), as arcs; which rows these are."""
    weight = np.where(column == end, value / per_unit, value)
    plain = ~matrix.integer[column] | (column == end)
    ones = np.bincount(row, plain & (np.abs(np.abs(weight) - 1.0) < 1e-9), matrix.num_rows)
    total = np.abs(np.bincount(row, weight, matrix.num_rows))
    is_arc = (count == 2) & (ones == 2) & (total < 1e-9) & np.isfinite(lower) & ~np.isfinite(matrix.row_upper)
    first, second = np.full(matrix.num_rows, -1, np.int64), np.full(matrix.num_rows, -1, np.int64)
    up = weight > 0
    second[row[up]], first[row[~up]] = column[up], column[~up]
    index = np.flatnonzero(is_arc)
    return _Arcs(first[index], second[index], lower[index]), is_arc


def _reached(marked: Bools, first: Ints, second: Ints) -> Bools:
    """Everything that arcs lead to from ``marked``, and itself."""
    marked = marked.copy()
    while True:
        more = marked.copy()
        np.logical_or.at(more, second, marked[first])
        if (more == marked).all():
            return marked
        marked = more


def _longest(value: Floats, arcs: _Arcs) -> Floats:
    value = value.copy()
    while True:
        moved = value.copy()
        np.maximum.at(moved, arcs.after, value[arcs.before] + arcs.lag)
        if (moved <= value + 1e-9).all():
            return value
        value = moved


def _tails(arcs: _Arcs, after: Bools, end: int, count: int) -> Floats:
    """Longest paths (ms) from the ops ``after`` to the end; -inf where none leads there."""
    tails = np.full(count, -np.inf)
    tails[end] = 0.0
    mine = arcs.where(after[arcs.before] & (after[arcs.after] | (arcs.after == end)))
    tails = _longest(tails, _Arcs(mine.after, mine.before, mine.lag))
    tails[~after] = -np.inf
    return tails


def _assemble(
    matrix: Matrix,
    row: Ints,
    column: Ints,
    value: Floats,
    lower: Floats,
    upper: Floats,
    kept: Bools,
    kept_rows: Bools,
    arcs: _Arcs,
    longest: Floats,
    middle: Bools,
    end: int,
    per_unit: float,
    column_lower: Floats,
) -> Matrix:
    """The columns ``kept``, the rows ``kept_rows``, the arcs between kept starts, and one row to the end for each."""
    place = np.full(matrix.num_columns, -1, np.int64)
    index = np.flatnonzero(kept)
    place[index] = np.arange(len(index))
    rows = np.flatnonzero(kept_rows)
    number = np.full(matrix.num_rows, -1, np.int64)
    number[rows] = np.arange(len(rows))
    mine = kept_rows[row]
    ends = np.flatnonzero(middle & np.isfinite(longest))
    arc_rows = len(rows) + np.arange(len(arcs.lag))
    end_rows = len(rows) + len(arcs.lag) + np.arange(len(ends))
    one, last = np.ones(len(arcs.lag)), np.ones(len(ends))
    loose = Matrix(
        cost=matrix.cost[index],
        lower=column_lower[index],
        upper=np.maximum(matrix.upper[index], column_lower[index]),
        integer=matrix.integer[index],
        first=np.concatenate([number[row[mine]], arc_rows, arc_rows, end_rows, end_rows]),
        column=np.concatenate(
            [place[column[mine]], place[arcs.after], place[arcs.before], np.full(len(ends), place[end]), place[ends]]
        ),
        value=np.concatenate([value[mine], one, -one, last * per_unit, -last]),
        row_lower=np.concatenate([lower[rows], arcs.lag, longest[ends]]),
        row_upper=np.concatenate([upper[rows], np.full(len(arcs.lag) + len(ends), INF)]),
    )
    return compressed(loose)
