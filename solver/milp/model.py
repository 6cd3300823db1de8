"""The formulation while it is being written: columns of starts, decisions and order bits, and rows between starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from optpipe.ops import Bools, Floats, Ints, Kind
from optpipe.problem import Problem
from solver.milp.orders import OrderBits
from solver.milp.precedence import SLACK, DevicePrecedence, Windows
from solver.milp.sparse import INF, Builder, Term
from solver.milp.table import OpTable

Objective = Literal["makespan", "span"]

#: Of a unit: how far a bound of the objective may lie beyond a whole multiple because of rounding.
_ROUND = 1e-6


class Meaning(Enum):
    """What a binary column says of its ops a and b (both directions hold unless it says otherwise)."""

    ORDER = "a runs before b on their device"
    MOVED = "a, an O, and its R take place; with parts: how much of what they can move they do"
    FUSED = "a, a B, is fused with its W"
    AWAY = "1: the activations that a, an O, moves are away when b starts"
    AMOUNT = "with parts: how much of what a, an O, can move is away when b starts"
    STARTED = "0: a, an F, starts at or after the start of b, an R"
    FREED = "1: a, a B or W, has ended when b, an R, starts"
    GIVES_BACK = "1 at most: a, a B, is fused and has ended when b starts, and its W does not count as ended"
    AHEAD = "1: transfer a ends before transfer b starts, both on one channel"


@dataclass(frozen=True)
class Bits:
    """Binary columns of one meaning: ``columns``, ``a`` and ``b`` (op numbers; b is a where there is one op only).
    Those of ``GIVES_BACK``, ``AMOUNT`` and, with parts, ``MOVED`` are real."""

    meaning: Meaning
    columns: Ints
    a: Ints
    b: Ints


@dataclass
class DeviceOrder(OrderBits):
    """Order bits of one device, for places in ``precedence.ops``; where ``column`` is -1 the order is sure."""

    precedence: DevicePrecedence
    place: Ints

    @property
    def ops(self) -> Ints:
        return self.precedence.ops


class Known(Protocol):
    """A schedule that says what bits are (see ``Incumbent``)."""

    def value(self, meaning: Meaning, a: Ints, b: Ints) -> Bools: ...

    def number(self, meaning: Meaning, a: Ints, b: Ints) -> Floats: ...


@dataclass
class Model:
    """Everything that the families of rows are made from.

    Attributes
    ----------
    start
        int64 (ops,): the column of each op's start.
    decision
        int64 (ops,): the column that stretches the op (see ``OpTable.scale``), -1 where there is none.
    scale
        float64 (ops,): by how much, ms.
    end_of_all, per_unit
        The column of the objective, and what one unit of it is in ms.
    unit
        ms: the objective of some best schedule is a whole multiple of this; 0 where no such unit is known.
    first_op
        int64 (devices,): the first op of each device.
    parts
        What a transfer moves is real: its decision is a part of all that it can move.
    known, free
        Where only a part is free: the schedule that decides the rest, and bool (ops,) what is free.
    """

    problem: Problem
    table: OpTable
    objective: Objective
    upper: float
    windows: Windows
    unit: float = 0.0
    parts: bool = False
    known: Known | None = None
    free: Bools | None = None
    builder: Builder = field(default_factory=Builder)
    bits: list[Bits] = field(default_factory=list)
    devices: list[DeviceOrder] = field(default_factory=list)
    start: Ints = field(init=False)
    decision: Ints = field(init=False)
    scale: Floats = field(init=False)
    base: Floats = field(init=False)
    end_of_all: int = field(init=False)
    per_unit: float = field(init=False)
    first_op: Ints = field(init=False)

    def __post_init__(self) -> None:
        table = self.table
        self.scale, self.base = table.per_op(table.scale), table.per_op(table.base)
        self.decision = np.full(table.num_ops, -1, np.int64)
        self.first_op = np.array([held[0] * table.microbatches for held in self.problem.stages_of])

    @property
    def horizon(self) -> float:
        """A time by which everything ends. For the span: the first op of a device starts before the first device of
        the stage above is done, so no device starts later than ``upper`` after the one above."""
        return self.upper if self.objective == "makespan" else self.upper * self.problem.num_devices

    @property
    def slack(self) -> float:
        """ms within which windows decide nothing."""
        return SLACK * self.upper

    def decided(self, meaning: Meaning, a: Ints, b: Ints) -> Ints:
        """int64: 0 or 1 where the known schedule decides a bit of ops a and b, -1 where both are free."""
        if self.known is None or self.free is None:
            return np.full(len(a), -1, np.int64)
        return np.where(self.free[a] & self.free[b], -1, self.known.value(meaning, a, b).astype(np.int64))

    def indicator(self, template: str, meaning: Meaning, a: Ints, b: Ints) -> tuple[Ints, Floats]:
        """Bits of ops a and b where they are free, constants where the known schedule decides.

        Returns
        -------
        columns, const
            Each bit is ``const + x[column]``; the column is -1 where the bit is decided.
        """
        known = self.decided(meaning, a, b)
        columns = np.full(len(a), -1, np.int64)
        free = known < 0
        columns[free] = self.add_bits(template, meaning, a[free], b[free])
        return columns, np.maximum(known, 0).astype(np.float64)

    def may_move(self, transfer: Ints) -> Bools:
        """Whether each transfer may take place."""
        return self.decided(Meaning.MOVED, transfer, transfer) != 0

    def soonest_end(self, transfer: Ints) -> Floats:
        """ms: the earliest end of each transfer that takes place. (A reload comes after its offload.)"""
        table = self.table
        if self.parts:
            return self.windows.earliest[transfer]
        ends = self.windows.earliest[transfer] + table.longest[transfer]
        back = table.per_op(table.kind)[transfer] == Kind.R
        offload = np.where(back, transfer - table.microbatches * len(table.offloaded), 0)
        return ends + np.where(back, table.longest[offload], 0.0)

    def latest_moved(self, transfer: Ints) -> Floats:
        """ms: the latest start of each transfer that takes place."""
        table = self.table
        if self.parts:
            return self.windows.latest[transfer]
        rest = table.longest[transfer].copy()
        out = table.per_op(table.kind)[transfer] == Kind.O
        reload_ = np.where(out, transfer + table.microbatches * len(table.offloaded), 0)
        rest += np.where(out, table.longest[reload_], 0.0)
        return self.windows.latest[transfer] - rest

    def add_bits(
        self, template: str, meaning: Meaning, a: Ints, b: Ints, lower: npt.ArrayLike = 0.0, upper: npt.ArrayLike = 1.0
    ) -> Ints:
        """Binary columns; their numbers."""
        labels = (a,) if meaning in (Meaning.MOVED, Meaning.FUSED) else (a, b)
        columns = self.builder.columns(template, labels, lower, upper, integer=True)
        self.bits.append(Bits(meaning, columns, a, b))
        return columns

    def add_starts(self, lower_bound: float) -> None:
        """The columns of the objective and of all starts."""
        ops = np.arange(self.table.num_ops)
        window = self.windows
        lower = min(max(lower_bound, window.lower), self.upper)
        whole = self.unit > 0
        self.per_unit = self.unit if whole else 1.0
        low, high = lower / self.per_unit, self.upper / self.per_unit
        if whole:
            low, high = np.ceil(low - _ROUND), np.floor(high + _ROUND)
        column = self.builder.columns(self.objective, (), low, high, integer=whole, cost=self.per_unit)
        self.end_of_all = int(column[0])
        if self.objective == "makespan":
            self.start = self.builder.columns("{}", (ops,), window.earliest, window.latest)
        else:
            self.start = self.builder.columns("{}", (ops,), 0.0, self.horizon)

    def add_decisions(self) -> None:
        """The columns of what is moved and what is fused."""
        table = self.table
        for s in table.offloaded:
            offload = table.ops(Kind.O, s)
            known = self.decided(Meaning.MOVED, offload, offload)
            if self.parts:
                columns = self._add_parts(offload, known < 0)
            else:
                columns = self.add_bits("moved_{}", Meaning.MOVED, offload, offload, known == 1, known != 0)
            self.decision[offload] = self.decision[table.ops(Kind.R, s)] = columns
        for s in table.fused:
            backward = table.ops(Kind.B, s)
            known = self.decided(Meaning.FUSED, backward, backward)
            columns = self.add_bits("fused_{}", Meaning.FUSED, backward, backward, known == 1, known != 0)
            self.decision[backward] = self.decision[table.ops(Kind.W, s)] = columns

    def _add_parts(self, offload: Ints, free: Bools) -> Ints:
        """The columns of how much each pair moves."""
        part = np.zeros(len(offload)) if self.known is None else self.known.number(Meaning.MOVED, offload, offload)
        columns = self.builder.columns("moved_{}", (offload,), np.where(free, 0.0, part), np.where(free, 1.0, part))
        self.bits.append(Bits(Meaning.MOVED, columns, offload, offload))
        return columns

    def after(
        self,
        template: str,
        a: Ints,
        b: Ints,
        lag: float | Floats = 0.0,
        *,
        bit: Ints | None = None,
        when: int = 1,
        whole: bool = False,
    ) -> None:
        """Rows: b starts at least ``lag`` after the end of a; where there is a ``bit``, only if it is ``when``.

        Parameters
        ----------
        a, b
            Op numbers.
        lag
            ms, each row's.
        bit
            A binary column for each row. Rows that the windows imply are left out.
        whole
            a counts with its full duration (of a transfer that moves), not with its decision; not so with parts.
        """
        whole = whole and not self.parts
        took = self.table.longest[a] if whole else self.base[a]
        stretch = np.zeros(len(a)) if whole else self.scale[a]
        self._rows(template, a, b, took + lag, stretch, bit, when)

    def after_start(self, template: str, a: Ints, b: Ints, *, bit: Ints | None = None, when: int = 1) -> None:
        """Rows: b starts at or after the start of a; where there is a ``bit``, only if it is ``when``."""
        nothing = np.zeros(len(a))
        self._rows(template, a, b, nothing, nothing, bit, when)

    def _rows(self, template: str, a: Ints, b: Ints, lag: Floats, stretch: Floats, bit: Ints | None, when: int) -> None:
        terms: list[Term] = [(self.start[b], 1.0), (self.start[a], -1.0), (self.decision[a], -stretch)]
        if bit is None:
            self.builder.rows(template, (a, b), lag, INF, terms)
            return
        # A bit that is decided is a row without a bit, which the caller adds where it is needed.
        big = np.maximum(0.0, self._latest_gap(a, b) + lag + np.maximum(stretch, 0.0))
        needed = (big > 1e-9) & (bit >= 0)
        sides = lag - big if when else lag
        terms.append((bit, -big if when else big))
        picked = [(np.asarray(c)[needed], np.broadcast_to(v, len(a))[needed]) for c, v in terms]
        self.builder.rows(template, (a[needed], b[needed]), sides[needed], INF, picked)

    def _latest_gap(self, a: Ints, b: Ints) -> Floats:
        """The most by which a can start after b."""
        window = self.windows
        gap = window.latest[a] - window.earliest[b]
        if self.objective == "makespan":
            return gap
        device = np.repeat(self.table.device, self.table.microbatches)
        return np.where(device[a] == device[b], gap, self.horizon)


def joined(parts: Sequence[Ints]) -> Ints:
    """One array from several, empty from none."""
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
