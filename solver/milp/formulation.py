"""The scheduling problem as one mixed-integer linear program.

Columns: the objective, the start of every op, what is moved and fused, order bits. Rows, by family (see the module of
each): data dependencies, one op at a time on a device and on a channel by big-M rows, memory at every op that takes
some, offloads, the objective; and the valid rows that make it solvable (load, staircase, triangle).

Within a stage, microbatches keep their order in every kind. Without offloads that loses nothing (see
``incumbent.ascending``). With offloads it can: a microbatch that stays on the host while others overtake it is
outside. Recomputation (C) is outside too, and so are transfers of a part unless ``Options.parts`` has them: then what a
transfer moves is a real column, and how much is away at an event another one. ``Formulation.bound_holds`` says whether
the optimum of the program is the optimum of the problem, so that its dual bound is one of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from solver.milp import compute, cuts, fluid, memory, reload_memory, transfer_cuts, transfers
from solver.milp.incumbent import Incumbent, incumbent
from solver.milp.model import Bits, DeviceOrder, Model, Objective
from solver.milp.orders import flat
from solver.milp.precedence import (
    DevicePrecedence,
    Windows,
    by_structure,
    data_arcs,
    decide_by_order,
    decide_by_windows,
    windows,
)
from solver.milp.sparse import Family, Matrix, spelled
from solver.milp.table import OpTable, op_table

#: Triangle rows: none, all of them, or where a solution of the relaxation breaks them (see ``lazy``).
Triangles = Literal["none", "lazy", "all"]

#: How often windows and orders are derived from each other.
_ROUNDS = 3

#: ms: durations that are whole multiples of this are looked at for a common unit.
_TICK = 1e-6
#: Of the upper bound: a smaller unit is of no use.
_SMALLEST_UNIT = 1e-5


@dataclass(frozen=True)
class Options:
    """What a formulation contains.

    Attributes
    ----------
    objective
        ``makespan`` or ``span`` (the largest, over devices, of last compute end minus first compute start).
    offload
        With O and R where they can help.
    fuse
        With the choice of BW, where that is shorter than B and W.
    parts
        What a transfer moves is free too, up to all that can be offloaded.
    relaxed
        Rows that every schedule of the problem obeys (see ``fluid``), for bounds; its solutions are no schedules.
    devices
        With ``relaxed``: the devices that do one op at a time and have a budget; None: all. The others only delay.
    load, staircase
        Families of valid rows, see ``cuts``.
    triangles
        Of those rows none, all, or ``lazy``: HiGHS starts from those that the relaxation breaks. Other back ends, and
        files, have none of them then.
    """

    objective: Objective = "makespan"
    offload: bool = True
    fuse: bool = True
    parts: bool = False
    relaxed: bool = False
    devices: tuple[int, ...] | None = None
    load: bool = True
    staircase: bool = True
    # Neither way pays. Simplex iterations beside load and staircase rows for none, lazy and all of them: 9,300, 9,400
    # and 9,100 (4 devices, 5 microbatches, 18 seeds; the first 6 favour all, the other 12 none), 27,000, 29,600 and
    # 27,000 (6 microbatches, 6 seeds). Bounds at the root do not move, and what the root solves only takes longer.
    triangles: Triangles = "none"


@dataclass(frozen=True)
class Formulation:
    """A mixed-integer linear program of a problem.

    Attributes
    ----------
    matrix
        Columns and rows.
    start
        int64 (ops,): the column of the start of each op of ``table``.
    decision
        int64 (ops,): the column that says whether an O or R takes place, whether a B or W is fused; -1 elsewhere.
    objective_column, per_unit
        The objective's column, and what one unit of it is in ms.
    bits
        What the binary columns mean.
    upper
        The upper bound that the program was made for, ms.
    known
        The schedule that decides what is not free, where a part is free.
    """

    problem: Problem
    options: Options
    table: OpTable
    matrix: Matrix
    start: Ints
    decision: Ints
    objective_column: int
    per_unit: float
    bits: tuple[Bits, ...]
    devices: tuple[DeviceOrder, ...]
    windows: Windows
    upper: float
    known: Incumbent | None
    column_families: tuple[Family, ...]
    row_families: tuple[Family, ...]

    @cached_property
    def column_names(self) -> list[str]:
        """Names of the columns, such as ``F_0_3`` and ``B_0_1_before_F_0_3``."""
        return spelled(self.column_families, self.table.names)

    @cached_property
    def row_names(self) -> list[str]:
        """Names of the rows, such as ``order_B_0_1_F_0_3``."""
        names = spelled(self.row_families, self.table.names)
        seen: dict[str, int] = {}
        for index, name in enumerate(names):
            count = seen[name] = seen.get(name, 0) + 1
            if count > 1:
                names[index] = f"{name}_{count}"
        return names

    @property
    def bound_holds(self) -> bool:
        """Whether a lower bound of the program is one of the problem."""
        return self.known is None and (self.options.relaxed or not self.excludes)

    @property
    def excludes(self) -> str:
        """What schedules of the problem the program leaves out; empty if none that could be shorter."""
        return excluded(self.problem, self.options)

    def vector(self, found: Incumbent) -> Floats:
        """A schedule as a vector of columns: starts, decisions, all bits and the objective."""
        x = np.zeros(self.matrix.num_columns)
        x[self.start] = found.start
        for bits in self.bits:
            x[bits.columns] = found.number(bits.meaning, bits.a, bits.b)
        x[self.objective_column] = found.objective[self.options.objective] / self.per_unit
        return x

    def vector_of(self, ops: Ops) -> Floats | None:
        """The same from ops; None where the program has no such schedule (see ``incumbent``)."""
        found = incumbent(self.problem, self.table, ops, parts=self.options.parts)
        return None if found is None else self.vector(found)


def _add_memory(model: Model, device: DeviceOrder, number: int, options: Options) -> None:
    """The memory rows of one device where what leaves it are whole transfers in order."""
    held = memory.device_memory(model, device, number, parts=options.parts)
    away = memory.add_forward_rows(model, device, held)
    reload_memory.add_reload_rows(model, device, held, away)
    if options.load:
        transfer_cuts.add_transfer_loads(model, device, held, away)


def excluded(problem: Problem, options: Options) -> str:
    """What schedules a program that is not relaxed leaves out; empty if none that could be better."""
    held = [s for d, held in enumerate(problem.stages_of) if _tight(problem, d) for s in held]
    if any(problem.can_offload(s) for s in held):
        overtaken = "offloaded microbatches that others overtake"
        return overtaken if options.parts else f"{overtaken}, and transfers of a part"
    if any(problem.stages[s].checkpoint_bytes is not None for s in held):
        return "recomputation"
    if any(x.bw_ms < x.backward_ms + x.weight_ms for x in problem.stages) and not options.fuse:
        return "fused backwards"
    return ""


def estimated_bits(problem: Problem, *, offload: bool = True) -> int:
    """About how many order bits the program of a problem has, before windows decide some."""
    m = problem.num_microbatches
    offloaded = op_table(problem, offload=offload, fuse=False).offloaded
    bits = 0
    for held in problem.stages_of:
        moved = sum(s in offloaded for s in held)
        # Half of all pairs of compute sequences; F, B, W and O against every R, O against every F.
        bits += m * m * (3 * len(held) * (3 * len(held) - 1) // 2 + 5 * len(held) * moved) // 2
    return bits


def time_unit(problem: Problem, table: OpTable, upper: float) -> float:
    """The largest time (ms) of which all durations and lags are whole multiples, if it is not too small; else 0.

    Every start of some best schedule is a sum of durations and lags, so its objective is such a multiple too.
    """
    times = np.concatenate([table.base, table.base + table.scale, np.asarray(problem.comm_ms, np.float64)])
    ticks = np.round(times / _TICK)
    if (np.abs(ticks * _TICK - times) > 1e-9 * np.maximum(1.0, times)).any():
        return 0.0
    unit = math.gcd(*ticks.astype(np.int64).tolist()) * _TICK
    return unit if unit > upper * _SMALLEST_UNIT else 0.0


def _tight(problem: Problem, device: int) -> bool:
    """Whether the device's budget can bind."""
    budget = problem.devices[device].memory_bytes
    whole = sum(problem.stages[s].activation_bytes for s in problem.stages_of[device])
    return budget is not None and problem.num_microbatches * whole > budget


def formulate(
    problem: Problem,
    options: Options | None = None,
    *,
    upper: float | None = None,
    lower: float = 0.0,
    known: Incumbent | None = None,
    free: Bools | None = None,
) -> Formulation:
    """The program of a problem.

    Parameters
    ----------
    upper
        The objective of a schedule that is known, ms: nothing longer is looked for. Default: one microbatch at a time.
    lower
        A proven lower bound of the objective, ms.
    known, free
        To free only a part of a known schedule: bool (ops of its table,), what may change its order. Pairs of ops of
        which not both are free keep their order; so do transfers (mark O and R of a pair alike) and memory events.

    Raises
    ------
    Contradiction
        No schedule (with ascending microbatches) is as short as ``upper``.
    """
    options = options or Options()
    offload = options.offload and not options.relaxed
    table = known.table if known is not None else op_table(problem, offload=offload, fuse=options.fuse)
    limit = _one_at_a_time(problem, table) if upper is None else upper
    by_device = options.objective == "span"
    leaky = [_leaky(problem, table, options, d) for d in range(problem.num_devices)]
    devices = by_structure(problem, table, leaky)
    if known is not None and free is not None:
        decide_by_order(devices, known.place, free)
    data = data_arcs(problem, table)
    found = windows(table, devices, data, limit, by_device=by_device)
    for _ in range(_ROUNDS):
        if not decide_by_windows(table, devices, found, limit):
            break
        found = windows(table, devices, data, limit, by_device=by_device)
    fluent = (options.relaxed and any(leaky)) or (options.parts and bool(table.offloaded))
    unit = 0.0 if fluent else time_unit(problem, table, limit)
    model = Model(problem, table, options.objective, limit, found, unit, options.parts, known, free)
    _write(model, devices, options, lower)
    return Formulation(
        problem=problem,
        options=options,
        table=table,
        matrix=model.builder.matrix(),
        start=model.start,
        decision=model.decision,
        objective_column=model.end_of_all,
        per_unit=model.per_unit,
        bits=tuple(model.bits),
        devices=tuple(model.devices),
        windows=found,
        upper=limit,
        known=known,
        column_families=tuple(model.builder.column_families),
        row_families=tuple(model.builder.row_families),
    )


def _write(model: Model, devices: Sequence[DevicePrecedence], options: Options, lower: float) -> None:
    """All columns and rows."""
    model.add_starts(lower)
    model.add_decisions()
    compute.add_dependencies(model)
    told = range(len(devices)) if options.devices is None else options.devices
    for number, precedence in enumerate(devices):
        if number in told:
            compute.add_exclusivity(model, precedence)
        else:
            compute.add_sure_order(model, precedence)
    compute.add_objective(model)
    transfers.add_transfer_chains(model)
    transfers.add_channels(model)
    for number in told:
        device = model.devices[number]
        if _tight(model.problem, number):
            if options.relaxed:
                fluid.add_fluid(model, device, number)
            else:
                _add_memory(model, device, number, options)
        if options.load:
            cuts.add_load_rows(model, device)
        if options.staircase:
            cuts.add_staircase_rows(model, device)
        if options.triangles == "all":
            cuts.add_triangle_rows(model, device)
        elif options.triangles == "lazy":
            model.builder.orders.append(flat(number, device))


def _leaky(problem: Problem, table: OpTable, options: Options, device: int) -> bool:
    """Whether activations may leave the device's memory otherwise than by backwards."""
    if options.relaxed:
        return bool(fluid.leaks(problem, device))
    return any(problem.stages[s].device == device for s in table.offloaded)


def _one_at_a_time(problem: Problem, table: OpTable) -> float:
    """How long a schedule takes that does one op after the other, each microbatch offloaded wherever it can be."""
    work = problem.num_microbatches * float((table.base + np.maximum(table.scale, 0.0)).sum())
    return work + 2.0 * problem.num_microbatches * sum(problem.comm_ms)


def free_window(
    found: Incumbent,
    problem: Problem,
    begin: float,
    end: float,
    *,
    devices: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
) -> Bools:
    """bool (ops,): the ops of a schedule that run, even in part, between two instants, on some of the devices and of
    some of the microbatches (default all). A pair O, R is free if its F or its B is."""
    table = found.table
    m = table.microbatches
    free = (found.end > begin) & (found.start < end) & table.compute
    if devices is not None:
        free &= np.isin(np.repeat(table.device, m), np.asarray(devices))
    if microbatches is not None:
        free &= np.isin(np.tile(np.arange(m), len(table.kind)), np.asarray(microbatches))
    for s in table.offloaded:
        pair = free[table.ops(Kind.F, s)] | free[table.ops(Kind.B, s)]
        free[table.ops(Kind.O, s)] = free[table.ops(Kind.R, s)] = pair
    return free
