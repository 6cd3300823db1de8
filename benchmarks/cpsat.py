"""The same problems for OR-tools CP-SAT, as a yardstick (`pip install ortools`, or the extra `bench`).

    python benchmarks/cpsat.py unit-s4-m8-memS2-off1 --seconds 10

The model has all that the solver may use: B and W or one BW, whole offloads, recomputation, memory, shared channels.
Times are integers: exact where a small factor makes them so, else rounded to a thousandth of the mean op. The order
that CP-SAT finds is timed again by `optpipe.timing` and checked by `optpipe.verify`, so that rounding costs nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `solver` is the package, not the file beside this one

from ortools.sat.python import cp_model

from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from optpipe.timing import earliest
from optpipe.verify import verify
from solver.list_scheduler import backward_first, list_schedule
from solver.tables import NO_LIMIT, Tables, least_work, paths, tables

#: Factors that may make times whole numbers, tried in this order.
_FACTORS = (1, 2, 4, 5, 10, 20, 40, 50, 100, 200, 400, 500, 1000)

Cell = tuple[int, int]


@dataclass
class Model:
    """A CP-SAT model and its variables, by (stage, microbatch).

    ``unit``: ticks a millisecond. ``parts``: equal parts of an activation, of which a transfer moves one or more.
    ``start``: start ticks by op. ``ended``: end of B or BW. ``moved``, ``again``, ``fused``: whether the cell is
    offloaded, recomputed, has one BW; absent where it is not possible. ``share``: how many parts of it are moved;
    ``gone``: when they are on the host.
    """

    cp: cp_model.CpModel
    tab: Tables
    unit: float
    horizon: int
    parts: int = 1
    start: dict[tuple[Kind, int, int], cp_model.IntVar] = field(default_factory=dict)
    moved: dict[Cell, cp_model.IntVar] = field(default_factory=dict)
    share: dict[Cell, Any] = field(default_factory=dict)
    gone: dict[Cell, Any] = field(default_factory=dict)
    again: dict[Cell, cp_model.IntVar] = field(default_factory=dict)
    fused: dict[Cell, cp_model.IntVar] = field(default_factory=dict)
    ended: dict[Cell, Any] = field(default_factory=dict)
    compute: dict[int, list[Any]] = field(default_factory=dict)
    carried: dict[int, list[Any]] = field(default_factory=dict)
    held: dict[int, list[tuple[Any, int, int, Any]]] = field(default_factory=dict)

    def ticks(self, ms: float) -> int:
        return round(ms * self.unit)

    def new_start(self, kind: Kind, cell: Cell, earliest_tick: int = 0) -> cp_model.IntVar:
        variable = self.cp.new_int_var(earliest_tick, self.horizon, f"{kind.name}{cell}")
        self.start[kind, *cell] = variable
        return variable


def ticks_a_millisecond(tab: Tables) -> float:
    """The factor that makes all times whole, or else a thousandth of the mean op one tick."""
    times = [
        t
        for column in (tab.forward, tab.backward, tab.weight, tab.fused, tab.offload, tab.reload, tab.comm)
        for t in column
    ]
    for factor in _FACTORS:
        if all(abs(t * factor - round(t * factor)) < 1e-6 for t in times):
            return float(factor)
    used = [t for t in tab.forward + tab.backward + tab.weight if t > 0]
    return 1000.0 * len(used) / sum(used)


def build(
    problem: Problem,
    *,
    hint: bool = False,
    longest: float = math.inf,
    ascending: Collection[Kind] = (Kind.F, Kind.B, Kind.W),
    parts: int = 1,
) -> Model:
    """The model. The horizon is the makespan of the plainest list schedule, or ``longest`` ms if that is less; with
    ``hint`` CP-SAT begins from that schedule.

    ``ascending``: the kinds of which microbatches keep their order on every stage, as in almost all good schedules. In
    the F's of the first stage they always do, which is only a matter of their numbers.
    """
    tab = tables(problem)
    unit = ticks_a_millisecond(tab)
    start = list_schedule(problem, backward_first(tab, paths(tab), max(least_work(tab))))
    one_by_one = sum(sum(column) for column in (tab.forward, tab.forward, tab.backward, tab.weight, tab.comm, tab.comm))
    latest = tab.m * (one_by_one + sum(tab.offload) + sum(tab.reload)) if start is None else float(start.end.max())
    latest = min(latest, longest)
    # Rounding may make the ops of the start longer, by half a tick each.
    slack = 0 if all(float(t * unit).is_integer() for t in tab.forward + tab.backward) else tab.m * tab.S * 5
    model = Model(cp_model.CpModel(), tab, unit, math.ceil(latest * unit) + slack, parts)
    for s in range(tab.S):
        for j in range(tab.m):
            _add_cell(model, (s, j))
    _add_data(model, ascending)
    _add_resources(model)
    makespan = model.cp.new_int_var(0, model.horizon, "makespan")
    for (kind, s, j), variable in model.start.items():
        if kind == Kind.W:
            model.cp.add(makespan >= variable + model.ticks(tab.weight[s]))
        elif kind == Kind.B:
            model.cp.add(makespan >= variable + _backward_ticks(model, (s, j)))
    model.cp.minimize(makespan)
    if hint and start is not None:
        _hint(model, start)
    return model


def _backward_ticks(model: Model, cell: Cell) -> Any:
    split, one = model.ticks(model.tab.backward[cell[0]]), model.ticks(model.tab.fused[cell[0]])
    return split if cell not in model.fused else split + (one - split) * model.fused[cell]


def _add_cell(model: Model, cell: Cell) -> None:
    """The ops of one stage and microbatch, on their device and channels, and what they hold."""
    tab, cp, (s, _) = model.tab, model.cp, cell
    d = tab.device[s]
    compute = model.compute.setdefault(d, [])
    forward, backward, weight = (model.new_start(kind, cell) for kind in (Kind.F, Kind.B, Kind.W))
    f, w = model.ticks(tab.forward[s]), model.ticks(tab.weight[s])
    if tab.fused[s] < tab.backward[s] + tab.weight[s]:
        model.fused[cell] = cp.new_bool_var(f"fused{cell}")
    length = _backward_ticks(model, cell)
    compute.append(cp.new_fixed_size_interval_var(forward, f, ""))
    if cell in model.fused:
        model.ended[cell] = cp.new_int_var(0, model.horizon, f"ended{cell}")
        compute.append(cp.new_interval_var(backward, length, model.ended[cell], ""))
        compute.append(cp.new_optional_fixed_size_interval_var(weight, w, model.fused[cell].negated(), ""))
        cp.add(weight >= backward + length).only_enforce_if(model.fused[cell].negated())
        cp.add(weight + w == backward + length).only_enforce_if(model.fused[cell])
    else:
        model.ended[cell] = backward + length
        compute.append(cp.new_fixed_size_interval_var(backward, length, ""))
        compute.append(cp.new_fixed_size_interval_var(weight, w, ""))
        cp.add(weight >= backward + length)
    limited = tab.budget[d] < tab.whole[d] * tab.m
    if limited and tab.movable[s] > 0:
        _add_transfers(model, cell)
    if limited and tab.dropped[s] > 0:
        _add_recompute(model, cell)
    if limited:
        _add_memory(model, cell)


def _add_transfers(model: Model, cell: Cell) -> None:
    tab, cp, (s, _) = model.tab, model.cp, cell
    moved = model.moved[cell] = cp.new_bool_var(f"moved{cell}")
    share = model.share[cell] = 1 if model.parts == 1 else cp.new_int_var(1, model.parts, f"share{cell}")
    out, back = model.new_start(Kind.O, cell), model.new_start(Kind.R, cell)
    o, r = (model.ticks(length / model.parts) for length in (tab.offload[s], tab.reload[s]))
    whole = model.ticks(tab.offload[s]), model.ticks(tab.reload[s])
    assert (o * model.parts, r * model.parts) == whole, "parts take whole ticks"
    cp.add(out >= model.start[Kind.F, *cell] + model.ticks(tab.forward[s])).only_enforce_if(moved)
    cp.add(back >= out + o * share).only_enforce_if(moved)
    cp.add(model.start[Kind.B, *cell] >= back + r * share).only_enforce_if(moved)
    cp.add(out == model.start[Kind.F, *cell]).only_enforce_if(moved.negated())
    cp.add(back == out).only_enforce_if(moved.negated())
    if model.parts > 1:
        cp.add(share == 1).only_enforce_if(moved.negated())
    for way, (variable, ticks) in enumerate(((out, o), (back, r))):
        end = _end_of(model, variable, ticks, share)
        if variable is out:
            model.gone[cell] = end
        lane = 2 * tab.device[s] + way
        for channel in tab.lane_list[tab.lane_ptr[lane] : tab.lane_ptr[lane + 1]]:
            interval = cp.new_optional_interval_var(variable, ticks * share, end, moved, "")
            model.carried.setdefault(channel, []).append(interval)


def _end_of(model: Model, start: cp_model.IntVar, ticks: int, share: Any) -> Any:
    """When a transfer of ``share`` parts that take so many ticks each ends."""
    if model.parts == 1:
        return start + ticks
    end = model.cp.new_int_var(0, model.horizon + ticks * model.parts, "")
    model.cp.add(end == start + ticks * share)
    return end


def _add_recompute(model: Model, cell: Cell) -> None:
    tab, cp, (s, _) = model.tab, model.cp, cell
    again = model.again[cell] = cp.new_bool_var(f"again{cell}")
    start, f = model.new_start(Kind.C, cell), model.ticks(tab.forward[s])
    cp.add(start >= model.start[Kind.F, *cell] + f).only_enforce_if(again)
    cp.add(model.start[Kind.B, *cell] >= start + f).only_enforce_if(again)
    model.compute[tab.device[s]].append(cp.new_optional_fixed_size_interval_var(start, f, again, ""))


def _add_memory(model: Model, cell: Cell) -> None:
    """What a cell holds: all of it until B ends, less while a part is away; then the context until W ends."""
    tab, cp, (s, _) = model.tab, model.cp, cell
    begin, end, size = model.start[Kind.F, *cell], model.ended[cell], tab.activation[s]
    moved, again = model.moved.get(cell), model.again.get(cell)
    choices = [choice for choice in (moved, again) if choice is not None]
    stays: Any = None
    if len(choices) == 2:
        stays = cp.new_bool_var("")
        cp.add_exactly_one([stays, *choices])
    elif choices:
        stays = choices[0].negated()
    _hold(model, s, begin, end, size, stays)
    if moved is not None:
        part, parts = tab.movable[s] // model.parts, model.parts
        assert part * parts == tab.movable[s], "parts are whole bytes"
        gone, back = model.gone[cell], model.start[Kind.R, *cell]
        _hold(model, s, begin, gone, size, moved)
        _hold(model, s, gone, back, size - tab.movable[s], moved, part if parts > 1 else 0, parts - model.share[cell])
        _hold(model, s, back, end, size, moved)
    if again is not None:
        ran, back = begin + model.ticks(tab.forward[s]), model.start[Kind.C, *cell]
        _hold(model, s, begin, ran, size, again)
        _hold(model, s, ran, back, size - tab.dropped[s], again)
        _hold(model, s, back, end, size, again)
    _hold(model, s, end, model.start[Kind.W, *cell] + model.ticks(tab.weight[s]), tab.context[s])


def _hold(
    model: Model, s: int, start: Any, end: Any, size: int, when: Any = None, part: int = 0, stay: Any = 0
) -> None:
    """The stage's device holds so many bytes, and ``stay`` parts, from start to end (if ``when`` is true)."""
    if size <= 0 and part <= 0:
        return
    length = model.cp.new_int_var(0, model.horizon, "")
    if when is None:
        interval = model.cp.new_interval_var(start, length, end, "")
    else:
        interval = model.cp.new_optional_interval_var(start, length, end, when, "")
    model.held.setdefault(model.tab.device[s], []).append((interval, size, part, stay))


def _add_data(model: Model, ascending: Collection[Kind]) -> None:
    """What each op comes after; and, since microbatches are alike, an order of them."""
    tab, cp = model.tab, model.cp
    times = {Kind.F: tab.forward, Kind.B: tab.backward, Kind.W: tab.weight}
    lengths = {kind: [model.ticks(t) for t in column] for kind, column in times.items()}
    for (kind, s, j), variable in model.start.items():
        if kind == Kind.F and s:
            cp.add(
                variable
                >= model.start[Kind.F, s - 1, j] + model.ticks(tab.forward[s - 1]) + model.ticks(tab.comm[s - 1])
            )
        elif kind == Kind.B:
            if s + 1 < tab.S:
                above = model.start[Kind.B, s + 1, j] + _backward_ticks(model, (s + 1, j))
                cp.add(variable >= above + model.ticks(tab.comm[s]))
            else:
                cp.add(variable >= model.start[Kind.F, s, j] + model.ticks(tab.forward[s]))
        if j and kind in lengths and (kind in ascending or (kind == Kind.F and s == 0)):
            before = model.start[kind, s, j - 1]
            cp.add(variable >= before + (lengths[kind][s] if (s, j) not in model.fused else 0))


def _add_resources(model: Model) -> None:
    for intervals in (*model.compute.values(), *model.carried.values()):
        model.cp.add_no_overlap(intervals)
    for d, held in model.held.items():
        budget = model.tab.budget[d]
        common = reduce(math.gcd, (bytes_ for _, size, part, _ in held for bytes_ in (size, part)))
        if budget < NO_LIMIT:
            demands = [size // common + part // common * stay for _, size, part, stay in held]
            model.cp.add_cumulative([interval for interval, *_ in held], demands, budget // common)


def _hint(model: Model, start: Ops) -> None:
    there = {(op.kind, op.stage, op.microbatch): op.start for op in start}
    for (kind, s, j), variable in model.start.items():
        begin = there.get((kind, s, j))
        if begin is None and kind == Kind.B:
            begin = there.get((Kind.BW, s, j))
        if begin is not None:
            model.cp.add_hint(variable, model.ticks(begin))
    for kind, choices in ((Kind.O, model.moved), (Kind.C, model.again), (Kind.BW, model.fused)):
        for (s, j), choice in choices.items():
            model.cp.add_hint(choice, (kind, s, j) in there)


def solved_ops(model: Model, solved: cp_model.CpSolver) -> Iterator[Op]:
    """The ops of a solution, in ticks; ``earliest`` gives them their times."""
    tab = model.tab

    def is_on(choices: dict[Cell, cp_model.IntVar], cell: Cell) -> bool:
        return cell in choices and bool(solved.value(choices[cell]))

    lengths = {Kind.F: tab.forward, Kind.B: tab.backward, Kind.W: tab.weight, Kind.BW: tab.fused}
    lengths |= {Kind.O: tab.offload, Kind.R: tab.reload, Kind.C: tab.forward}
    for (kind, s, j), variable in model.start.items():
        cell = (s, j)
        if kind == Kind.W and is_on(model.fused, cell):
            continue
        if kind in (Kind.O, Kind.R) and not is_on(model.moved, cell):
            continue
        if kind == Kind.C and not is_on(model.again, cell):
            continue
        what = Kind.BW if kind == Kind.B and is_on(model.fused, cell) else kind
        begin, ticks, moved = solved.value(variable), model.ticks(lengths[what][s]), None
        if what in (Kind.O, Kind.R) and model.parts > 1:
            share = solved.value(model.share[cell])
            ticks = ticks // model.parts * share
            moved = None if share == model.parts else tab.movable[s] // model.parts * share
        yield Op(what, s, j, float(begin), float(begin + ticks), moved)


@dataclass(frozen=True)
class Solved:
    """What CP-SAT found: a valid schedule or None, the model's bound in ms, its status, seconds with building."""

    ops: Ops | None
    bound_ms: float
    status: str
    seconds: float


def solve_with_cpsat(
    problem: Problem, seconds: float, threads: int = 2, seed: int = 0, *, from_start: bool = False
) -> Solved:
    """Solve a problem with CP-SAT.

    Parameters
    ----------
    problem
        The problem.
    seconds
        Time limit, with building the model.
    threads
        Workers.
    seed
        Random seed.
    from_start
        Give it the plainest list schedule as a hint.
    """
    begin = time.perf_counter()
    model = build(problem, hint=from_start)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed
    solver.parameters.cp_model_probing_level = 0  # probing takes longer than the limit from 8 microbatches on
    solver.parameters.max_presolve_iterations = 1
    solver.parameters.max_time_in_seconds = max(0.1, seconds - (time.perf_counter() - begin))
    status = solver.solve(model.cp)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    ops = None
    if found:
        ops = earliest(problem, Ops.of(solved_ops(model, solver)))
        if violations := verify(problem, ops):
            raise AssertionError(f"the model allows what the rules do not: {violations[0]}")
    bound = solver.best_objective_bound / model.unit
    return Solved(ops, bound, solver.status_name(status).lower(), time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("instances", nargs="+", help="names of problems in benchmarks/instances")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", action="store_true", help="begin from the plainest list schedule")
    given = parser.parse_args()
    for name in given.instances:
        problem = Problem.read(Path(__file__).parent / "instances" / f"{name}.json")
        found = solve_with_cpsat(problem, given.seconds, given.threads, from_start=given.start)
        makespan = "no schedule" if found.ops is None else f"{found.ops.end.max():.3f} ms"
        print(f"{name}: {makespan}, bound {found.bound_ms:.3f} ms, {found.status}, {found.seconds:.1f} s")


if __name__ == "__main__":
    main()
