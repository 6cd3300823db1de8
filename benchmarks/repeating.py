"""Patterns that repeat: whether microbatches can follow each other at some pace for ever, by CP-SAT.

Where a step has many microbatches, most of its time is a steady state. A pattern of n microbatches repeats every n
periods: all ops of a device and all transfers of a channel exclude each other and memory suffices in all repetitions.

If a pattern fits into a period it fits into every longer one: stretch all starts alike, and each op begins later after
what it waits for, and holds its memory for a smaller part of the period. So none at a period means none below it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from benchmarks.cpsat import ticks_a_millisecond
from optpipe.problem import Problem
from solver.tables import NO_LIMIT, Tables, tables

#: Equal parts of a transfer at least, of which it moves some, a tick each; how much finer ticks become for that.
_PARTS, _FINER = 10, (1, 10, 20)
#: Repetitions that a microbatch is in flight at most.
IN_FLIGHT = 12


class Cell(NamedTuple):
    """Variables of one microbatch of a stage, in ticks: starts of ops, ends of transfers; parts that move."""

    forward: Any
    out: Any
    gone: Any
    back: Any
    there: Any
    backward: Any
    weight: Any
    moved: Any


class Repeating:
    """The model of a pattern of ``microbatches`` microbatches, each ``period`` ms after the one before on average.

    B and W are two ops, and nothing is recomputed. All times of the problem are multiples of a tick.

    Attributes
    ----------
    cells
        Per microbatch of the pattern, per stage. The first F starts at 0.
    unit, cycle, parts
        Ticks a millisecond; ticks until the pattern repeats; equal parts of a transfer.
    """

    def __init__(self, problem: Problem, period: float, microbatches: int = 1) -> None:
        self.cp, self._tab = cp_model.CpModel(), tables(problem)
        tab = self._tab
        self.unit, self.parts = _unit_and_parts(tab)
        self.cycle = math.floor(period * microbatches * self.unit + 1e-9)
        self._longest = IN_FLIGHT * self.cycle
        self._compute: dict[int, list[Any]] = defaultdict(list)
        self._carried: dict[int, list[Any]] = defaultdict(list)
        self._held: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        self.cells = [[self._cell(s) for s in range(tab.S)] for _ in range(microbatches)]
        for row in self.cells:
            self._add_flow(row)
        self.cp.add(self.cells[0][0].forward == 0)
        for before, after in pairwise(self.cells):
            self.cp.add(after[0].forward >= before[0].forward)
        self.cp.add(self.cells[-1][0].forward <= self.cycle)
        self._add_resources()

    def _ticks(self, ms: float) -> int:
        found = round(ms * self.unit)
        assert abs(found - ms * self.unit) < 1e-6 * max(1.0, found), "times are whole ticks"
        return found

    def _instant(self) -> Any:
        return self.cp.new_int_var(0, self._longest, "")

    def _cell(self, s: int) -> Cell:
        """One microbatch of a stage, with all its repetitions on device, channels and in memory."""
        cp, tab, moved = self.cp, self._tab, self.cp.new_int_var(0, self.parts, "")
        forward, out, gone, back, there, backward, weight = (self._instant() for _ in range(7))
        f, b, w = self._ticks(tab.forward[s]), self._ticks(tab.backward[s]), self._ticks(tab.weight[s])
        out_tick, back_tick = self._ticks(tab.offload[s]) // self.parts, self._ticks(tab.reload[s]) // self.parts
        cp.add(out >= forward + f)
        cp.add(gone == out + out_tick * moved)
        cp.add(back >= gone)
        cp.add(there == back + back_tick * moved)
        cp.add(backward >= there)
        cp.add(weight >= backward + b)
        if not tab.movable[s]:
            cp.add(moved == 0)
        d, size, part = tab.device[s], tab.activation[s] * self.parts, tab.movable[s]
        for repetition in range(IN_FLIGHT + 2):
            later = repetition * self.cycle
            for start, length in ((forward, f), (backward, b), (weight, w)):
                self._compute[d].append(cp.new_fixed_size_interval_var(start + later, length, ""))
            for way, start, end, tick in ((0, out, gone, out_tick), (1, back, there, back_tick)):
                lane = 2 * d + way
                for channel in tab.lane_list[tab.lane_ptr[lane] : tab.lane_ptr[lane + 1]]:
                    self._carried[channel].append(cp.new_interval_var(start + later, tick * moved, end + later, ""))
            for start, end, bytes_ in (
                (forward, gone, size),
                (gone, back, size - part * moved),
                (back, backward + b, size),
                (backward + b, weight + w, tab.context[s] * self.parts),
            ):
                length = self._instant()
                self._held[d].append((cp.new_interval_var(start + later, length, end + later, ""), bytes_))
        return Cell(forward, out, gone, back, there, backward, weight, moved)

    def _add_flow(self, row: list[Cell]) -> None:
        tab, cp = self._tab, self.cp
        for s, (cell, above) in enumerate(pairwise(row)):
            comm = self._ticks(tab.comm[s])
            cp.add(above.forward >= cell.forward + self._ticks(tab.forward[s]) + comm)
            cp.add(cell.backward >= above.backward + self._ticks(tab.backward[s + 1]) + comm)

    def _add_resources(self) -> None:
        """From the first repetition on, which sees none before it; the later ones are as all others."""
        for intervals in (*self._compute.values(), *self._carried.values()):
            self.cp.add_no_overlap(intervals)
        for d, held in self._held.items():
            if self._tab.budget[d] < NO_LIMIT:
                demands = [bytes_ for _, bytes_ in held]
                self.cp.add_cumulative([interval for interval, _ in held], demands, self._tab.budget[d] * self.parts)


def _unit_and_parts(tab: Tables) -> tuple[float, int]:
    """Ticks a millisecond that make all times whole and every transfer so many equal parts of whole ticks."""
    base = ticks_a_millisecond(tab)
    for finer in _FINER:
        unit = base * finer
        parts = reduce(math.gcd, (round(ms * unit) for ms in tab.offload + tab.reload), 0)
        if parts >= _PARTS or parts == 0:
            break
    return unit, max(1, parts)


def repeats(problem: Problem, period: float, microbatches: int, seconds: float, threads: int) -> str:
    """Whether there is such a pattern: CP-SAT's status, in lower case."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_time_in_seconds = threads, seconds
    return str(solver.status_name(solver.solve(Repeating(problem, period, microbatches).cp)).lower())
