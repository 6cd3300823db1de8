"""Annealing of schedules with transfers: the order of everything on a device, what goes, and how much of it.

See ``clock`` for what a sequence means, and ``moves`` for the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optpipe import semantics
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.problem import Problem
from solver.annealing.clock import INFINITE, LANES, WAITS, Group, Item, Walk, Yard
from solver.annealing.graph import UNLIMITED
from solver.annealing.moves import BEST, BLOCK, LENGTH, PRESENT, SHORTEST, SLOTS, anneal_some, value_of
from solver.annealing.places import BACK, BACKWARD, FORWARD, OUT, UNDO, WEIGHT, set_moved
from solver.compiled import COMPILED, column, records

#: Proposals between two looks at the clock; of a first try: an op, and times ops, at most.
_CHUNK, _PROPOSALS, _TIMED = 1000, 60, 1e8
#: Chance of a move that has microbatches change places.
_EXCHANGES = 0.1
_ROLES = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.BW: BACKWARD, Kind.W: WEIGHT, Kind.O: OUT, Kind.R: BACK}
_ROLE = np.array([_ROLES.get(kind, -1) for kind in Kind])


def anneal_sequences(
    problem: Problem,
    ops: Ops,
    *,
    seconds: float,
    goal: float = 0.0,
    seed: int = 0,
    effort: float = 1.0,
    hot: float = 0.3,
    cold: float = 0.01,
    parts: bool = True,
    exchange: bool = False,
    on_improvement: Callable[[Ops], None] | None = None,
) -> Ops:
    """A schedule at least as short as ``ops``, of other orders and with other transfers.

    Parameters
    ----------
    problem, ops
        A valid schedule. One with recomputation, or whose transfers need more than two channels at once, is left as it
        is.
    seconds
        Time limit.
    goal
        A proven lower bound of the makespan, ms: reaching it ends the search.
    seed
        Of the random moves: the same seed gives the same schedule, as long as the time limit does not cut in.
    effort
        How much is tried, in units of a first try.
    hot, cold
        Temperatures in mean durations of a compute op at the start and at the end.
    parts
        Transfers may move a part of what can be moved; otherwise a microbatch goes as a whole or not at all.
    exchange
        Microbatches may change places too, so that others overtake one that is on the host. What can only be found so
        is found; in the same time, less of the rest.
    on_improvement
        Called with each better schedule (at most once between two looks at the clock).
    """
    if not len(ops) or (ops.kind == Kind.C).any() or any(len(lanes) > LANES for lanes in problem.channels_of.values()):
        return ops
    sequences = Sequences(problem, ops)
    walk, n = sequences.walk, len(sequences.ops)
    state = column([float(seed % 2**32), *[0.0] * (SLOTS - 1)], float)
    state[PRESENT] = state[BEST] = value_of(walk, INFINITE, state)
    state[SHORTEST] = state[LENGTH]
    if state[PRESENT] >= INFINITE:  # what happens at one instant cannot always be put into one order
        return ops
    best = (column(walk.order, int), column(sequences.moved, int))
    scratch = tuple(column(np.zeros(count), int) for count in (n, UNDO, n + UNDO, n + UNDO, BLOCK))
    mean = float(np.mean(sequences.full[sequences.ops.is_compute]))
    begin = time.monotonic()
    chunks = math.ceil(effort * proposals(sequences.ops) / _CHUNK)
    exchanges = _EXCHANGES if exchange else 0.0
    told = state[SHORTEST]
    spare: Sequences | None = None
    done = 0.0  # less is tried where there is no time for more, and cools down as far
    for chunk in range(chunks):
        heat = mean * hot * (cold / hot) ** done
        done = max((chunk + 1) / chunks, min(1.0, (time.monotonic() - begin) / max(seconds, 1e-9)))
        anneal_some(
            walk, best, scratch, state, _CHUNK, heat, mean * hot * (cold / hot) ** done, goal * (1 + 1e-9), parts,
            exchanges,
        )  # fmt: skip
        if on_improvement is not None and state[SHORTEST] < told * (1 - 1e-9):
            told = state[SHORTEST]
            spare = spare or Sequences(problem, ops)  # the walk goes on from where it is
            on_improvement(spare.schedule(*best))
        if state[SHORTEST] <= goal * (1 + 1e-9) or time.monotonic() - begin > seconds:
            break
    found = sequences.schedule(*best)
    return found if semantics.makespan(found) <= semantics.makespan(ops) else ops


def proposals(ops: Ops) -> float:
    """Moves of a first try."""
    return min(_PROPOSALS * len(ops), _TIMED / max(1, len(ops)))


class Sequences:
    """A schedule without recomputation as sequences: its ops, and transfers for each microbatch that could go.

    Attributes
    ----------
    ops
        All of them; transfers of what stays move 0 bytes.
    walk
        The sequences.
    moved, whole, full
        The bytes that a transfer moves and could move, int64 (n,) (others: 0); how long an op takes, a transfer if it
        moved everything, float64 (n,), ms.
    """

    def __init__(self, problem: Problem, ops: Ops) -> None:
        self.ops = ops = _with_all_transfers(problem, ops)
        n = len(ops)
        whole = Ops(ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, np.full(n, -1, np.int64), {})
        self.moved, self.full = semantics.moved_bytes(problem, ops), semantics.durations(problem, whole)
        device = semantics.device_of(problem, ops)
        group = _groups(problem)[device]
        order = _order(problem, ops, group)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        columns: dict[str, Any] = {
            "duration": self.full,
            "full": self.full,
            "device": device,
            "group": group,
            "place": place,
        }
        columns |= {"is_compute": ops.is_compute, "active": ops.is_compute | (self.moved > 0), "role": _ROLE[ops.kind]}
        columns["key"] = np.where(ops.is_compute, ops.stage * len(Kind) + ops.kind, -1 - np.arange(n))
        columns |= _memory(problem, whole) | _waits(problem, whole) | _lanes(problem, ops, device)
        relatives = _relatives(problem, ops)
        self.whole = relatives["whole"]
        columns |= relatives
        items = records(Item, n, columns)
        count = int(group.max()) + 1
        edges = np.searchsorted(group[order], np.arange(count + 1))
        self.walk = Walk(
            items,
            _yards(problem, ops, device, self.full),
            records(Group, count, {"first": edges[:-1], "end": edges[1:]}),
            column(order, int),
            column(np.zeros(problem.num_devices + len(problem.channels)), int),
            column(np.zeros(count + 1), int),
            column(np.zeros(n), int),
            column([0], int),
        )
        self._have_go(self.moved)

    def _have_go(self, moved: Ints) -> None:
        """Have each offload, and the reload after it, move so many bytes."""
        items: Any = self.walk.items
        out = np.flatnonzero(self.ops.kind == Kind.O)
        if not COMPILED:
            for u in out.tolist():
                set_moved(items, u, int(moved[u]))
            return
        back = items["back"][out]  # as in set_moved, all at once
        items["active"][out] = items["active"][back] = moved[out] > 0
        items["free"][out] = items["take"][back] = moved[out]
        for each in (out, back):
            items["duration"][each] = self.full[each] * moved[out] / self.whole[each]

    def schedule(self, order: Any, moved: Any) -> Ops:
        """The ops in this order, with so many bytes moved by each offload, at their earliest times."""
        items, ops = self.walk.items, self.ops
        self.walk.order[:] = order[:]
        self._have_go(np.asarray(moved))
        value_of(self.walk, INFINITE, column(np.zeros(SLOTS), float))
        if COMPILED:
            held: Any = items
            start, end, free, take, active = (held[name] for name in ("start", "end", "free", "take", "active"))
        else:
            rows = [(item.start, item.end, item.free, item.take, item.active) for item in items]
            start, end, free, take, active = (np.array(values) for values in zip(*rows, strict=True))
        part = np.where(ops.kind == Kind.O, free, take)
        amount = np.where(ops.is_compute | (part == self.whole), -1, part).astype(np.int64)
        stay = active > 0
        return Ops(ops.kind[stay], ops.stage[stay], ops.microbatch[stay], start[stay], end[stay], amount[stay], {})


def _with_all_transfers(problem: Problem, ops: Ops) -> Ops:
    """The schedule with transfers of 0 bytes for each microbatch that stays but could go."""
    table = semantics.op_table(problem, ops)
    can = np.array([problem.can_offload(s) for s in range(problem.num_stages)], np.bool_)
    stage, microbatch = np.nonzero((table[Kind.O] < 0) & can[:, None])
    backward = np.maximum(table[Kind.B], table[Kind.BW])
    times = np.concatenate([ops.end[table[Kind.F][stage, microbatch]], ops.start[backward[stage, microbatch]]])
    return Ops.columns(
        np.concatenate([ops.kind, np.repeat([int(Kind.O), int(Kind.R)], len(stage))]),
        np.concatenate([ops.stage, stage, stage]),
        np.concatenate([ops.microbatch, microbatch, microbatch]),
        np.concatenate([ops.start, times]),
        np.concatenate([ops.end, times]),
        np.concatenate([ops.bytes, np.zeros(2 * len(stage), np.int64)]),
    )


def _groups(problem: Problem) -> Ints:
    """int64 (devices,): a number that devices have in common that share channels, directly or not."""
    group = np.arange(problem.num_devices)
    for channel in problem.channels:
        members = group[[transfer.device for transfer in channel.transfers]]
        if len(members):
            group[np.isin(group, members)] = members.min()
    return np.asarray(np.unique(group, return_inverse=True)[1], np.int64)


def _order(problem: Problem, ops: Ops, group: Ints) -> Ints:
    """The ops by group, as they take memory when they start and give it back when they end."""
    grid = semantics.tolerance(ops) or 1.0
    takes = (ops.kind == Kind.F) | (ops.kind == Kind.R)
    instant = np.round(np.where(takes, ops.start, ops.end) / grid)
    rank = np.empty(len(ops), np.int64)
    rank[semantics.rank(ops)] = np.arange(len(ops))
    return np.lexsort((rank, takes, instant, group))


def _memory(problem: Problem, ops: Ops) -> dict[str, Ints]:
    """What each op takes and frees, bytes."""
    events = semantics.memory_events(problem, ops)
    found = {"take": np.zeros(len(ops), np.int64), "free": np.zeros(len(ops), np.int64)}
    takes = events.delta > 0
    np.add.at(found["take"], events.op[takes], events.delta[takes])
    np.add.at(found["free"], events.op[~takes], -events.delta[~takes])
    return found


def _waits(problem: Problem, ops: Ops) -> dict[str, Ints | Floats]:
    """What each op comes after by its data."""
    n = len(ops)
    found: dict[str, Ints | Floats] = {f"wait{k}": np.full(n, -1, np.int64) for k in range(WAITS)}
    found |= {f"lag{k}": np.zeros(n) for k in range(WAITS)}
    edges = semantics.dependencies(problem, ops)
    order = np.argsort(edges.after, kind="stable")
    after, before, lag = edges.after[order], edges.before[order], edges.lag[order]
    number = np.arange(len(after)) - np.searchsorted(after, after)  # among those of the same op
    for k in range(WAITS):
        found[f"wait{k}"][after[number == k]] = before[number == k]
        found[f"lag{k}"][after[number == k]] = lag[number == k]
    return found


def _lanes(problem: Problem, ops: Ops, device: Ints) -> dict[str, Ints]:
    """What each op keeps busy: its device, or channels."""
    found = {f"lane{k}": np.full(len(ops), -1, np.int64) for k in range(LANES)}
    found["lane0"][ops.is_compute] = device[ops.is_compute]
    for (number, direction), channels in problem.channels_of.items():
        kind = Kind.O if direction == "d2h" else Kind.R
        for k, channel in enumerate(channels):
            found[f"lane{k}"][(ops.kind == kind) & (device == number)] = problem.num_devices + channel
    return found


def _relatives(problem: Problem, ops: Ops) -> dict[str, Ints]:
    """The other ops of the same microbatch, and the same op of the next one."""
    table = semantics.op_table(problem, ops)
    stage, microbatch = ops.stage, ops.microbatch
    backward = np.maximum(table[Kind.B], table[Kind.BW])
    owner = np.where(ops.kind == Kind.O, table[Kind.F][stage, microbatch], backward[stage, microbatch])
    owned = ~ops.is_compute | (ops.kind == Kind.W)
    following = np.concatenate([table, np.full((*table.shape[:2], 1), -1)], axis=2)[ops.kind, stage, microbatch + 1]
    whole = np.array([each.offloadable_bytes for each in problem.stages], np.int64)[stage]
    above = np.where(ops.kind == Kind.F, table[Kind.F][stage - 1, microbatch], backward[stage - 1, microbatch])
    chained = (ops.kind == Kind.F) | (ops.kind == Kind.B) | (ops.kind == Kind.BW)
    return {
        "out": table[Kind.O][stage, microbatch],
        "back": table[Kind.R][stage, microbatch],
        "own": np.where(owned, owner, -1),
        "weight": np.where(ops.kind == Kind.B, table[Kind.W][stage, microbatch], -1),
        "following": following,
        "upstream": np.where(chained & (stage > 0), above, -1),
        "whole": np.where(ops.is_compute, 0, whole),
    }


def _yards(problem: Problem, ops: Ops, device: Ints, full: Floats) -> Sequence[Yard]:
    """The devices, with room for what each has freed."""
    devices = problem.num_devices
    counts = np.bincount(2 * device + ~ops.is_compute, minlength=2 * devices)
    first = np.cumsum([0, *counts])[:-1]
    work = np.bincount(device, np.where(ops.is_compute, full, 0.0), devices)
    budgets = [UNLIMITED if each.memory_bytes is None else each.memory_bytes for each in problem.devices]
    least = [min((problem.stages[s].activation_bytes for s in held), default=0) for held in problem.stages_of]
    alone = [budget < 2 * each for budget, each in zip(budgets, least, strict=True)]
    columns = {"budget": budgets, "alone": alone, "work": work, "computes": first[::2], "transfers": first[1::2]}
    return records(Yard, devices, columns)
