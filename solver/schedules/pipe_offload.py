"""PipeOffload (arXiv:2503.01328): offloads whole chunks by a fixed rule, those that wait longest for their backward.

The compute order is that of an interleaved building block (:mod:`solver.schedules.group_block`), and its times stay as
they are. The activations of the first chunk live longest, those of the last one hardest: of the first ``n`` chunks
every microbatch leaves for the host as soon after its forward as the link allows, and comes back as late before its
backward; one that would have to turn back before it has left stays. A W follows its B at once, or lets one op pass:
what waits for its W cannot leave. Forwards may run as late as what comes after them allows, or everything at the pace
of the steady phase from the start: that takes less memory and gives the link more time.

Links that are too slow for whole chunks may still carry what memory asks for (:mod:`solver.schedules.on_demand`), with
the compute order of the building block, or that of an interleaved zero-bubble schedule which holds a few activations
more than there is room for. The shortest schedule that fits wins, of equal ones that which moves least.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.group_block import PERIOD, lags, timed_block
from solver.schedules.interleaved_zero_bubble import group_sizes, variants
from solver.schedules.link_load import links_carry
from solver.schedules.on_demand import with_transfers_on_demand
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import looped_chunks
from solver.schedules.timeline import Timeline, earliest_gap, latest_gap
from solver.schedules.weights import with_weights
from solver.tables import NO_LIMIT, tables

#: Ops placed at most, over all variants.
_WORK = 1_500_000
#: Activations that leave on demand: the oldest ones, those that are needed last.
_AGES = (1e3, 0.0)
#: Of schedules that are a little too short to fit so: random choices tried of each, and ops placed at most.
_TRIES, _DISTURBED_WORK, _DISTURBED_AGES = 60, 250_000, (0.3, 1.0, 2.0, 4.0, 8.0)
#: Ops placed at most for each size of memory that interleaved zero-bubble schedules are made for, and sizes tried.
_HOLDING_WORK, _MOST_SIZES = 60_000, 8


def pipe_offload(problem: Problem, *, objective: str = "makespan") -> Ops:
    """The shortest of the variants that fit the memory.

    Raises
    ------
    DoesNotApply
        Stages do not go round the devices several times in one order, or nothing can be offloaded.
    DoesNotFit
        No variant fits.
    """
    chunks = looped_chunks(problem)
    if chunks < 2:
        raise DoesNotApply("needs several stages a device")
    if not any(problem.can_offload(s) for s in range(problem.num_stages)):
        raise DoesNotApply("needs something to offload, and a link to the host")
    value = metrics.span if objective == "span" else lambda _, ops: semantics.makespan(ops)
    bases = [(value(problem, ops), ops) for ops in (*_bases(problem, chunks), *_holding_more(problem))]
    bases.sort(key=itemgetter(0))
    # Transfers leave the compute times as they are, so the first fit is the shortest.
    work = _WORK
    for place, (length, base) in enumerate(bases):
        for found in _with_transfers(problem, base, chunks):
            work -= len(base)
            if found is not None:
                return _disturbed(problem, [base for other, base in bases[:place] if other < length]) or found
        if work <= 0:
            break
    raise DoesNotFit("needs more memory even with all chunks offloaded")


def _with_transfers(problem: Problem, base: Ops, chunks: int) -> Iterator[Ops | None]:
    """Schedules that fit the memory; None for each that does not."""
    for late in (False, True):
        timed = forwards_late(problem, base) if late else base
        if not links_carry(problem, timed):
            yield None
            continue
        for offloaded in range(chunks + 1):
            moved = range(offloaded * problem.num_devices)
            if not _fits(problem, _with_transfers_of_no_other(problem, timed, moved)):
                continue
            ops = with_transfers(problem, timed, moved)
            yield ops if _fits(problem, ops) else None
        for age in _AGES:
            on_demand = with_transfers_on_demand(problem, timed, age)
            yield on_demand if on_demand is not None and _fits(problem, on_demand) else None


def _disturbed(problem: Problem, bases: list[Ops]) -> Ops | None:
    """The shortest of these schedules that fits with other choices of what leaves, as far as work goes; the longest
    are tried first."""
    rng, found, work = random.Random(0), None, _DISTURBED_WORK
    for base in reversed(bases):
        timed = forwards_late(problem, base)
        for _ in range(_TRIES if links_carry(problem, timed) else 0):
            if work <= 0:
                return found
            work -= len(base)
            ops = with_transfers_on_demand(problem, timed, rng.choice(_DISTURBED_AGES), rng)
            if ops is not None and _fits(problem, ops):
                found = ops
                break
    return found


def _fits(problem: Problem, ops: Ops) -> bool:
    budgets = [NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices]
    return all(peak <= budget for peak, budget in zip(memory.peaks(problem, ops), budgets, strict=True))


def _bases(problem: Problem, chunks: int) -> Iterator[Ops]:
    """The building blocks in groups of all sizes: with each W at once or a little later, with BW's, and paced."""
    unlimited = [NO_LIMIT] * problem.num_devices
    unit = max(stage.forward_ms + stage.backward_ms + stage.weight_ms for stage in problem.stages) / PERIOD
    fused = any(stage.bw_ms < stage.backward_ms + stage.weight_ms for stage in problem.stages)
    D, work = problem.num_devices, _WORK
    for group in (*range(D, (D + 1) // 2, -1), *group_sizes(D)[1:]):
        for lag in lags(D, group):
            work -= 12 * problem.num_stages * problem.num_microbatches
            if work < 0 and group < D:
                return
            timed = timed_block(problem, chunks, group, lag)
            orders = [[step for _, step in row] for row in timed]
            split = _backwards_as(orders, (Kind.B, Kind.W))
            try:
                yield in_order(problem, split)
            except ValueError:
                continue  # a device waits for another in a circle
            yield in_order(problem, with_weights(problem, orders, unlimited, lazy=False, most_pending=1))
            if fused:
                yield in_order(problem, _backwards_as(orders, (Kind.BW,)))
            pace = {step: unit * time for row in timed for time, step in row}
            yield in_order(problem, split, pace)


def _holding_more(problem: Problem) -> Iterator[Ops]:
    """Interleaved zero-bubble schedules that hold more activations than there is room for."""
    budgets = tables(problem).budget
    if max(budgets) >= NO_LIMIT:
        return
    size = max(1, *(stage.activation_bytes for stage in problem.stages))
    most = max(1, max(budgets) // size)
    for more in range(1, most + 1, -(-most // _MOST_SIZES)):
        yield from variants(problem, [budget + more * size for budget in budgets], _HOLDING_WORK)


def _backwards_as(orders: Sequence[Sequence[Step]], kinds: tuple[Kind, ...]) -> list[list[Step]]:
    """The orders with these ops in place of each B."""
    return [
        [part for step in order for part in ([step._replace(kind=k) for k in kinds] if step.kind == Kind.B else [step])]
        for order in orders
    ]


def forwards_late(problem: Problem, base: Ops) -> Ops:
    """The schedule with each F as late as what comes after it allows."""
    late: list[Op] = []
    start: dict[tuple[Kind, int, int], float] = {}
    next_start = [float("inf")] * problem.num_devices

    def depth(op: Op) -> tuple[int, int]:
        return op.kind, op.stage if op.kind == Kind.F else -op.stage

    # What takes no time begins and ends with what it waits for.
    for op in sorted(base, key=lambda op: (op.start, op.end, depth(op)), reverse=True):
        device = problem.stages[op.stage].device
        if op.kind == Kind.F:
            backward = min(start.get((kind, op.stage, op.microbatch), float("inf")) for kind in (Kind.B, Kind.BW))
            above = start.get((Kind.F, op.stage + 1, op.microbatch), float("inf"))
            lag = problem.comm_ms[op.stage] if op.stage + 1 < problem.num_stages else 0.0
            end = max(op.end, min(next_start[device], backward, above - lag))
            op = op._replace(start=op.start + end - op.end, end=end)
        start[op.kind, op.stage, op.microbatch] = op.start
        next_start[device] = op.start
        late.append(op)
    return Ops.of(late)


def _with_transfers_of_no_other(problem: Problem, base: Ops, stages: range) -> Ops:
    """As ``with_transfers`` if links were never busy: no schedule with transfers holds less, and this is quick."""
    movable = np.array([s in stages and problem.can_offload(s) for s in range(problem.num_stages)])
    offload = np.array([stage.offload_ms for stage in problem.stages])
    reload = np.array([stage.reload_ms for stage in problem.stages])
    shape = (problem.num_stages, problem.num_microbatches)
    out, back = np.zeros(shape), np.zeros(shape)
    forward = base.kind == Kind.F
    out[base.stage[forward], base.microbatch[forward]] = base.end[forward]
    backward = (base.kind == Kind.B) | (base.kind == Kind.BW)
    back[base.stage[backward], base.microbatch[backward]] = base.start[backward]
    there = movable[:, None] & (out + (offload + reload)[:, None] <= back)
    s, j = np.nonzero(there)
    return Ops.columns(
        np.concatenate([base.kind, np.full(len(s), Kind.O), np.full(len(s), Kind.R)]),
        np.concatenate([base.stage, s, s]),
        np.concatenate([base.microbatch, j, j]),
        np.concatenate([base.start, out[there], back[there] - reload[s]]),
        np.concatenate([base.end, out[there] + offload[s], back[there]]),
    )


def with_transfers(problem: Problem, base: Ops, stages: range) -> Ops:
    """The schedule with the activations of some stages on the host from soon after their F to just before their B."""
    lanes = [Timeline() for _ in problem.channels]
    forward_end: dict[tuple[int, int], float] = {}
    backward_start: dict[tuple[int, int], float] = {}
    for op in base:
        if op.kind == Kind.F:
            forward_end[op.stage, op.microbatch] = op.end
        elif op.kind in (Kind.B, Kind.BW):
            backward_start[op.stage, op.microbatch] = op.start
    cells = [cell for cell in forward_end if cell[0] in stages and problem.can_offload(cell[0])]
    back: dict[tuple[int, int], float] = {}
    for s, j in sorted(cells, key=lambda cell: -backward_start[cell]):
        stage = problem.stages[s]
        mine = [lanes[c] for c in problem.channels_of[stage.device, "h2d"]]
        back[s, j] = latest_gap(mine, backward_start[s, j], stage.reload_ms)
        for lane in mine:
            lane.take(back[s, j], back[s, j] + stage.reload_ms)
    transfers: list[Op] = []
    for s, j in sorted(cells, key=forward_end.__getitem__):
        stage = problem.stages[s]
        mine = [lanes[c] for c in problem.channels_of[stage.device, "d2h"]]
        out, reload_end = earliest_gap(mine, forward_end[s, j], stage.offload_ms), back[s, j] + stage.reload_ms
        if out + stage.offload_ms > back[s, j]:
            for c in problem.channels_of[stage.device, "h2d"]:
                lanes[c].give_back(back[s, j], reload_end)
            continue
        for lane in mine:
            lane.take(out, out + stage.offload_ms)
        transfers.append(Op(Kind.O, s, j, out, out + stage.offload_ms))
        transfers.append(Op(Kind.R, s, j, back[s, j], reload_end))
    return Ops.of([*base, *transfers])
