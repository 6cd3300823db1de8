"""Triangle rows where they are needed: rounds on the relaxation, before branch and bound.

HiGHS takes no rows while it searches (its callback for them does nothing yet), so all that can be added is what
solutions of the relaxation break. Solve it, add the rows broken most, solve it again from where it was, until few are
broken. No integer solution needs the rows, since big-M rows order its ops; they are there to make the tree smaller.

Whether the bound still rises does not say when to end: on none of the problems tried does it rise at all, not even with
all triangle rows. Rows do end: ten or fewer are broken after two to six rounds, and in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from optpipe.ops import Floats
from solver.milp.orders import NO_ROWS, Orders, Rows, broken_rows, by_device, joined_rows
from solver.milp.sparse import INF

#: Rounds at most; rows that one adds at most, as a part of the program's and at least; by how much they are broken.
_ROUNDS, _PART, _FEWEST, _LEAST = 10, 0.1, 100, 0.02
#: So few broken rows are the last ones: it is not worth another round to see what they break.
_FEW = 10
#: Ops with open pairs that a device may have: a round looks at all threes, 0.2 s for 200 ops, 2 s for 400.
_MOST_OPS = 256


class Relaxation(Protocol):
    """A linear program that goes on from where it was when rows are added."""

    def solve(self, seconds: float) -> tuple[float, Floats] | None:
        """Its optimum and a solution; None where there is none, or none in time."""

    def add(self, rows: Rows) -> None:
        """Add rows."""


class Cut(NamedTuple):
    """Rows to add, and a lower bound of the program."""

    rows: Rows
    bound: float


def cut(
    relaxation: Relaxation, orders: Orders, num_rows: int, end: float, enough: Callable[[float], bool] | None
) -> Cut:
    """Rounds of solving and adding rows.

    Parameters
    ----------
    relaxation
        Of the program, without integrality. Rows are added to it.
    orders
        Order bits whose triangle rows may be added; those of devices with too many ops are not.
    num_rows
        Rows of the program.
    end
        On the monotonic clock: when to stop.
    enough
        Asked with the bound after each round whether to stop.
    """
    devices = [bits for bits in by_device(orders) if len(bits.column) <= _MOST_OPS]
    most = max(_FEWEST, round(_PART * num_rows))
    rows, bound = NO_ROWS, -INF
    for _ in range(_ROUNDS if devices else 0):
        solved = relaxation.solve(end - time.monotonic())
        if solved is None:
            break
        bound, x = solved
        if enough is not None and enough(bound):
            break
        more = broken_rows(devices, x, most, _LEAST)
        rows = joined_rows([rows, more])
        if len(more.upper) < _FEW:
            break
        relaxation.add(more)
    return Cut(rows, bound)
