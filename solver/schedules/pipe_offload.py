"""PipeOffload (arXiv:2503.01328): offloads whole chunks by a fixed rule, those that wait longest for their backward.

The compute order is that of an interleaved schedule in groups, and its times stay as they are. The activations of the
first chunk live longest, those of the last one hardest: of the first ``n`` chunks every microbatch leaves for the host
as soon after its forward as the link allows, and comes back as late before its backward; one that would have to turn
back before it has left stays. Group size, W's apart or not, and ``n`` are chosen: the shortest that fits, and of these
the one that moves least.
"""

from __future__ import annotations

from collections.abc import Iterator

from optpipe import memory, metrics, semantics
from optpipe.ops import Kind, Op, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply, DoesNotFit
from solver.schedules.interleaved_zero_bubble import group_sizes, orders_of
from solver.schedules.orders import in_order
from solver.schedules.placement import looped_chunks
from solver.schedules.timeline import Timeline, earliest_gap, latest_gap
from solver.schedules.weights import with_weights
from solver.tables import NO_LIMIT

#: Ops placed at most, over all variants; the first order is tried in any case.
_WORK = 400_000
#: W's that may wait on a device, where they are apart.
_PENDING = (1, 2)


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
    best: Ops | None = None
    best_value = (float("inf"), 0)
    for ops in _variants(problem, chunks):
        length = metrics.span(problem, ops) if objective == "span" else semantics.makespan(ops)
        value = (length, int((ops.kind == Kind.O).sum()))
        if value < best_value and _fits(problem, ops):
            best, best_value = ops, value
    if best is None:
        raise DoesNotFit("needs more memory even with all chunks offloaded")
    return best


def _fits(problem: Problem, ops: Ops) -> bool:
    budgets = [NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices]
    return all(peak <= budget for peak, budget in zip(memory.peaks(problem, ops), budgets, strict=True))


def _variants(problem: Problem, chunks: int) -> Iterator[Ops]:
    work = _WORK
    for base in _bases(problem, chunks):
        for offloaded in range(chunks + 1):
            yield with_transfers(problem, base, range(offloaded * problem.num_devices))
        work -= (3 + 2 * chunks) * problem.num_stages * problem.num_microbatches
        if work <= 0:
            return


def _bases(problem: Problem, chunks: int) -> Iterator[Ops]:
    """Interleaved schedules in groups: W's with their B's; W's apart, but soon: what waits for its W cannot leave."""
    unlimited = [NO_LIMIT] * problem.num_devices
    for group in group_sizes(problem.num_devices):
        for extra in range(2):
            split = orders_of(problem, chunks, group, extra)
            whole = [[step._replace(kind=Kind.BW) if step.kind == Kind.B else step for step in row] for row in split]
            try:
                together = in_order(problem, whole)
            except ValueError:
                continue  # a device waits for another in a circle
            yield together
            for pending in _PENDING:
                yield in_order(problem, with_weights(problem, split, unlimited, lazy=False, most_pending=pending))


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
