"""A plan in words: where its devices idle and why, where memory is fullest, what decides its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe import memory, semantics
from optpipe.ops import Ints, Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.report import size_text
from optpipe.waits import Gap, Waits, Why, critical_path, gaps, waits

#: Of the idle time: a part below this is not worth a word.
_WORTH = 0.03
_DOES = {
    Kind.F: "the forward",
    Kind.B: "the backward",
    Kind.W: "the weight gradient",
    Kind.BW: "the backward",
    Kind.C: "the recomputation",
    Kind.O: "the offload",
    Kind.R: "the reload",
}


def explain(plan: Plan) -> list[str]:
    """A few sentences for someone who sees the plan for the first time: bubbles, memory, critical path."""
    problem, ops = plan.problem, plan.ops
    if not len(ops):
        return ["The plan is empty."]
    found = waits(problem, ops)
    return [*_bubbles(problem, ops, found), _fullest(problem, ops), _what_decides(problem, ops, found)]


def what_for(problem: Problem, ops: Ops, found: Waits, op: int) -> str:
    """What an op waits for last, such as ``its gradient, from B(1,0) on device 1``."""
    before, why = int(found.before[op]), found.why[op]
    if before < 0:
        return "nothing"
    this, other = ops[op], ops[before]
    if why == Why.LANE:
        return f"{other.label}, which its {'device' if op_computes(this) else 'link'} does first"
    if why == Why.MEMORY:
        return f"memory, which {other.label} frees"
    if other.kind == Kind.R:
        return f"its activations, back from the host by {other.label}"
    if other.stage == this.stage:
        return other.label
    what = "input" if this.kind == Kind.F else "gradient"
    return f"its {what}, from {other.label} on device {problem.stages[other.stage].device}"


def op_computes(op: Op) -> bool:
    """Whether it runs on the device, not on a link."""
    return op.kind < Kind.O


def in_words(op: Op) -> str:
    """Such as ``the forward of microbatch 3 on stage 1``."""
    return f"{_DOES[op.kind]} of microbatch {op.microbatch} on stage {op.stage}"


def _number(time: float) -> str:
    return f"{time:,.0f}" if abs(time) >= 1e4 else f"{time:.4g}"


def _ms(time: float) -> str:
    return f"{_number(time)} ms"


def _share(part: float, whole: float) -> str:
    """A percentage that is neither 0% nor 100% unless it is."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f}%" if 1 <= percent <= 99 or percent in (0.0, 100.0) else f"{percent:.1f}%"


def _bubbles(problem: Problem, ops: Ops, found: Waits) -> list[str]:
    """How much idle time there is, and where."""
    idle, begin = gaps(problem, ops), float(ops.start.min())
    total = sum(gap.length for gap in idle)
    length = semantics.makespan(ops)
    if total <= 0:
        return ["Bubbles: none, every device computes from start to end."]
    slack = semantics.tolerance(ops)
    each = [sum(gap.length for gap in idle if gap.device == d) for d in range(problem.num_devices)]
    most = max(each)
    worst = next(device for device, time in enumerate(each) if time >= most - slack)
    who = f"device {worst} most" if most - min(each) > slack else "each of them"
    share = _share(total, problem.num_devices * length)
    lines = [f"Bubbles: devices idle {share} of the time, {who}: {_ms(most)} of {_ms(length)}."]
    warm_up = [gap for gap in idle if gap.start <= begin and gap.until >= 0]
    cool_down = [gap for gap in idle if gap.until < 0]
    between = [gap for gap in idle if gap.start > begin and gap.until >= 0]
    parts = []
    if warm_up:
        latest = max(warm_up, key=lambda gap: gap.end)
        what = f"device {latest.device} gets its first microbatch at {_ms(latest.end)}"
        parts.append((sum(gap.length for gap in warm_up), f"warm-up ({what})"))
    if cool_down:
        first = min(cool_down, key=lambda gap: gap.start)
        parts.append(
            (sum(gap.length for gap in cool_down), f"cool-down (device {first.device} is done at {_ms(first.start)})")
        )
    if between:
        parts.append((sum(gap.length for gap in between), f"{_count(len(between), 'pause')} in between"))
    parts = [(part, text) for part, text in parts if part >= _WORTH * total]
    parts.sort(key=lambda part: -part[0])
    lines.append("Of that, " + ", ".join(f"{_share(part, total)} is {text}" for part, text in parts) + ".")
    if between and sum(gap.length for gap in between) >= _WORTH * total:
        lines.append(_pause(problem, ops, found, max(between, key=lambda gap: gap.length)))
    return lines


def _pause(problem: Problem, ops: Ops, found: Waits, gap: Gap) -> str:
    op = ops[gap.until]
    reason = f"waits for {what_for(problem, ops, found, gap.until)}"
    if found.ready[gap.until] < gap.end - semantics.tolerance(ops):
        reason = "starts later than it has to"
    return (
        f"The longest pause: device {gap.device} idles from {_number(gap.start)} to {_ms(gap.end)}, until {op.label}, "
        f"{in_words(op)}, which {reason}."
    )


def _fullest(problem: Problem, ops: Ops) -> str:
    """Which device is filled most, when, and with what."""
    peaks = memory.peaks(problem, ops)

    def filled(device: int) -> tuple[float, int]:
        budget = problem.devices[device].memory_bytes
        return (peaks[device] / budget if budget else 0.0, peaks[device])

    device = max(range(problem.num_devices), key=filled)
    levels = memory.levels(problem, ops)
    mine = np.flatnonzero(levels.device == device)
    if not len(mine) or not peaks[device]:
        return "Memory: no device holds anything."
    at = int(mine[np.argmax(levels.level[mine])])
    op = ops[int(levels.op[at])]
    budget = problem.devices[device].memory_bytes
    limit = "no limit" if budget is None else f"{_share(peaks[device], budget)} of its {size_text(budget)}"
    line = (
        f"Memory: fullest on device {device} with {size_text(peaks[device])} ({limit}), at {_ms(levels.time[at])} when "
        f"{op.label} starts."
    )
    held = _held(problem, ops, device, levels.op[mine[: np.searchsorted(mine, at) + 1]])
    line += " It then holds activations of " + " and ".join(
        f"{_count(len(numbers), 'microbatch')} ({_numbers(numbers)}) on stage {stage}"
        + (f", {checkpoints} of them checkpoints only" if checkpoints else "")
        for stage, numbers, checkpoints in held
    )
    away = _away(problem, ops, device, float(levels.time[at]))
    return line + (f"; {_count(away, 'more microbatch')} on the host." if away else ".")


def _held(problem: Problem, ops: Ops, device: int, events: Ints) -> list[tuple[int, list[int], int]]:
    """(stage, microbatches that a device holds something of, of how many only what their forward runs again from),
    after the ops behind these events have had effect."""
    happened = np.zeros(len(ops), np.int64)
    np.add.at(happened, events, 1)
    change = np.zeros((problem.num_stages, problem.num_microbatches), np.int64)
    every = semantics.memory_events(problem, ops)
    own = np.flatnonzero(every.device == device)
    # An op has at most two events, in order of time: so many of them have happened.
    for index in own[np.argsort(every.time[own], kind="stable")].tolist():
        op = int(every.op[index])
        if happened[op] > 0:
            happened[op] -= 1
            change[ops.stage[op], ops.microbatch[op]] += every.delta[index]
    found = []
    for s in problem.stages_of[device]:
        later = np.setdiff1d(np.flatnonzero((ops.kind == Kind.C) & (ops.stage == s)), events)
        kept = change[s][ops.microbatch[later]]
        checkpoints = int(((kept > 0) & (kept == problem.stages[s].checkpoint_bytes)).sum())
        if (change[s] > 0).any():
            found.append((s, np.flatnonzero(change[s] > 0).tolist(), checkpoints))
    return found


def _away(problem: Problem, ops: Ops, device: int, time: float) -> int:
    """How many activations of a device are on the host at a time."""
    there = 0
    for stage in problem.stages_of[device]:
        own = ops.stage == stage
        there += int((own & (ops.kind == Kind.O) & (ops.end <= time)).sum())
        there -= int((own & (ops.kind == Kind.R) & (ops.start <= time)).sum())
    return max(there, 0)


def _what_decides(problem: Problem, ops: Ops, found: Waits) -> str:
    """What the critical path is made of."""
    path = critical_path(ops, found)
    device = semantics.device_of(problem, ops)
    took = ops.end - ops.start
    compute = np.zeros(problem.num_devices)
    transfers = 0.0
    for op in path:
        if ops.is_compute[op]:
            compute[device[op]] += took[op]
        else:
            transfers += took[op]
    length = semantics.makespan(ops)
    busiest = int(np.argmax(compute))
    parts = [(compute[busiest], f"compute on device {busiest}")]
    if (rest := float(compute.sum() - compute[busiest])) > 0:
        parts.append((rest, "compute on other devices"))
    parts.append((transfers, "transfers to and from the host"))
    parts.append((max(0.0, length - float(compute.sum()) - transfers), "messages between stages and slack"))
    if length <= 0:
        return "What decides the makespan: nothing, no op takes any time."
    shares = [f"{_share(part, length)} {text}" for part, text in parts if part > _WORTH / 3 * length]
    chain = f"a chain of {_count(len(path), 'op')} that wait for each other"
    return f"What decides the makespan: {chain}, {', '.join(shares)}."


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _numbers(numbers: Sequence[int]) -> str:
    """Runs of whole numbers, such as ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "..."])
