"""Every violation of a plan, in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optpipe import memory, semantics
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem


def verify_plan(plan: Plan) -> list[str]:
    """Every violation of a plan: of its ops, and of what it says of itself. Empty: the plan is valid."""
    found = verify(plan.problem, plan.ops)
    actual = semantics.makespan(plan.ops)
    slack = semantics.TOLERANCE * max(actual, plan.makespan_ms)
    if abs(plan.makespan_ms - actual) > slack:
        found.append(f"makespan_ms says {_ms(plan.makespan_ms)}, but first start to last end is {_ms(actual)}")
    if plan.lower_bound_ms is not None and plan.lower_bound_ms > actual + slack:
        found.append(f"lower_bound_ms says {_ms(plan.lower_bound_ms)}, above the makespan of {_ms(actual)}")
    return found


def verify(problem: Problem, ops: Ops) -> list[str]:
    """Every violation of the rules by a schedule, in words. Empty: the schedule is valid.

    Parameters
    ----------
    problem
        The problem.
    ops
        Its schedule; stages and microbatches must be in range.
    """
    return [
        *_missing_and_extra(problem, ops),
        *_wrong_transfers(problem, ops),
        *_wrong_times(problem, ops),
        *_late_inputs(problem, ops),
        *_overlaps(problem, ops),
        *_over_budget(problem, ops),
    ]


def _ms(time: float) -> str:
    return f"{time:.6g} ms"


def _span(op: Op) -> str:
    return f"{op.label} [{op.start:.6g}, {op.end:.6g}]"


def _missing_and_extra(problem: Problem, ops: Ops) -> Iterator[str]:
    """Every (stage, microbatch) has one F, and either B and W or one BW; O and R come together; C or O, not both."""
    shape = (len(Kind), problem.num_stages, problem.num_microbatches)
    count = np.zeros(shape, np.int64)
    np.add.at(count, (ops.kind, ops.stage, ops.microbatch), 1)
    there = count > 0

    def name(kind: Kind, place: np.ndarray) -> str:
        return f"{kind.name}({place[0]},{place[1]})"

    for kind, stage, microbatch in np.argwhere(count > 1):
        label = Kind(kind).name
        yield f"{label}({stage},{microbatch}) is there {count[kind, stage, microbatch]} times, expected once"
    forward, backward, weight, fused = (there[kind] for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
    for place in np.argwhere(~forward):
        yield f"{name(Kind.F, place)} is missing"
    for place in np.argwhere(fused & (backward | weight)):
        yield f"{name(Kind.BW, place)} is there beside B or W, expected BW or both B and W"
    for place in np.argwhere(~fused & ~backward):
        yield f"{name(Kind.B, place)} is missing (and there is no BW)"
    for place in np.argwhere(~fused & ~weight):
        yield f"{name(Kind.W, place)} is missing (and there is no BW)"
    for place in np.argwhere(there[Kind.O] & ~there[Kind.R]):
        yield f"{name(Kind.O, place)} has no reload, expected {name(Kind.R, place)}"
    for place in np.argwhere(there[Kind.R] & ~there[Kind.O]):
        yield f"{name(Kind.R, place)} has no offload, expected {name(Kind.O, place)}"
    for place in np.argwhere(there[Kind.C] & there[Kind.O]):
        yield f"{name(Kind.C, place)} and {name(Kind.O, place)} are both there, expected one of them at most"
    for place in np.argwhere(there[Kind.C]):
        if problem.stages[int(place[0])].checkpoint_bytes is None:
            yield f"{name(Kind.C, place)}: stage {place[0]} cannot be recomputed, it has no checkpoint_bytes"


def _wrong_transfers(problem: Problem, ops: Ops) -> Iterator[str]:
    """A transfer has a channel, moves what can be moved, and comes back whole."""
    for kind, direction in ((Kind.O, "d2h"), (Kind.R, "h2d")):
        for stage in np.unique(ops.stage[ops.kind == kind]):
            device = problem.stages[int(stage)].device
            if not problem.channels_of[device, direction]:  # type: ignore[index]
                yield f"{kind.name} of stage {stage}: no channel carries {direction} of device {device}"
            if problem.stages[int(stage)].offloadable_bytes == 0:
                yield f"{kind.name} of stage {stage}: nothing of this stage can be offloaded"
    moved = semantics.moved_bytes(problem, ops)
    for index in np.flatnonzero(ops.bytes >= 0):
        op = ops[int(index)]
        most = problem.stages[op.stage].offloadable_bytes
        if ops.is_compute[index]:
            yield f"{op.label} names bytes, but only O and R move a part"
        elif not 0 < moved[index] <= most:
            yield f"{op.label} moves {moved[index]} bytes, expected 1 to {most}"
    table = semantics.op_table(problem, ops)
    out, back = table[Kind.O], table[Kind.R]
    for stage, microbatch in np.argwhere((out >= 0) & (back >= 0)):
        away, returned = moved[out[stage, microbatch]], moved[back[stage, microbatch]]
        if away != returned:
            yield f"R({stage},{microbatch}) reloads {returned} bytes, but O({stage},{microbatch}) moved {away}"


def _wrong_times(problem: Problem, ops: Ops) -> Iterator[str]:
    """Each op starts at 0 or later and takes the time that the problem says."""
    slack = semantics.tolerance(ops)
    expected = semantics.durations(problem, ops)
    for index in np.flatnonzero(ops.start < -slack):
        yield f"{ops[int(index)].label} starts at {_ms(ops.start[index])}, before 0"
    for index in np.flatnonzero(np.abs(ops.end - ops.start - expected) > slack):
        op = ops[int(index)]
        yield f"{_span(op)} takes {_ms(op.end - op.start)}, expected {_ms(expected[index])}"


def _late_inputs(problem: Problem, ops: Ops) -> Iterator[str]:
    """No op starts before what it needs is there."""
    edges = semantics.dependencies(problem, ops)
    ready = ops.end[edges.before] + edges.lag
    for e in np.flatnonzero(ops.start[edges.after] < ready - semantics.tolerance(ops)):
        first, second = ops[int(edges.before[e])], ops[int(edges.after[e])]
        lag = f" plus comm {_ms(edges.lag[e])}" if edges.lag[e] else ""
        yield f"{second.label} starts at {_ms(second.start)}, before {first.label} ends at {_ms(first.end)}{lag}"


def _overlaps(problem: Problem, ops: Ops) -> Iterator[str]:
    """A device computes, and a channel carries, one op at a time."""
    slack = semantics.tolerance(ops)
    order = semantics.rank(ops)
    lanes = semantics.compute_lanes(problem, ops, order) + semantics.channel_lanes(problem, ops, order)
    for lane in lanes:
        start, end = ops.start[lane.ops], ops.end[lane.ops]
        if len(end) < 2:
            continue
        latest = np.maximum.accumulate(end)
        for k in np.flatnonzero(start[1:] < latest[:-1] - slack):
            other = lane.ops[int(np.argmax(end[: k + 1]))]
            yield f"{lane.name}: {_span(ops[int(lane.ops[k + 1])])} overlaps {_span(ops[int(other)])}"


def _over_budget(problem: Problem, ops: Ops) -> Iterator[str]:
    """No op takes a device over its budget."""
    budget = np.array([2**62 if d.memory_bytes is None else d.memory_bytes for d in problem.devices], np.int64)
    found = memory.levels(problem, ops)
    takes = np.concatenate([[True], np.diff(found.level) > 0]) if len(found.level) else np.zeros(0, np.bool_)
    takes[np.concatenate([[False], np.diff(found.device) > 0])[: len(takes)].astype(bool)] = True
    for e in np.flatnonzero((found.level > budget[found.device]) & takes):
        device = int(found.device[e])
        yield (
            f"device {device} holds {found.level[e]} bytes at {_ms(found.time[e])} (start of "
            f"{ops[int(found.op[e])].label}), over its budget of {budget[device]} bytes"
        )
