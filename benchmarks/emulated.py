"""Stages that sleep in place of computing: how close a step comes to its plan's clock, and what its ops predict.

Messages are real, offloads copy real bytes at a set pace. A plan's ``comm_ms`` is what gloo takes for a message of that
size alone, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tables import Cell, percent
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from runtime import gather, launch, links, samples
from runtime.emulate import SleepStage, begin
from runtime.executor import Executor, StepResult, TensorSpec
from runtime.samples import Sample, Trace
from runtime.stage import measure_bytes
from runtime.worker import Rank
from solver.schedules import generate

#: ms of a device's forward and of each half of its backward, as a block-wise GPT on a CPU has them.
FORWARD_MS, HALF_BACKWARD_MS = 20.0, 18.5
#: By how much ops are longer. What host and messages add is the same for each, so it is the ops' length that says what
#: part of a step it is.
SCALES = (1.0, 2.0)
MICROBATCHES = 8
#: Of a device and microbatch; of a message.
SAVED_BYTES, SHAPE = 4 << 20, (4, 128, 256)
WARM_UP = 2
HEADER = (
    "ranks", "F ms", "plan", "makespan ms", "step ms", "over plan", "iqr", "over op times", "predicted ms", "off by",
    "late ms",
)  # fmt: skip


@dataclass(frozen=True)
class Emulated:
    """One plan to run. ``bytes_per_s``: of the host links; None: nothing is offloaded."""

    name: str
    schedule: str
    bytes_per_s: float | None = None


PLANS = (
    Emulated("1F1B", "1f1b"),
    Emulated("ZB-H1", "zb-h1"),
    Emulated("ZB-V", "zb-v"),
    Emulated("GPipe, 6 of 8 offloaded at 1 GB/s", "offload", 1e9),
    Emulated("GPipe, 6 of 8 offloaded at 0.2 GB/s", "offload", 0.2e9),
)


def table(ranks: int, iterations: int, scale: float) -> list[list[Cell]]:
    """A row a plan, from one launch of ranks."""
    found = launch.launch(measure_rank, {"iterations": iterations, "scale": scale}, ranks, "cpu")
    rows: list[list[Cell]] = []
    for row in found:
        plan, step = row["makespan_ms"], statistics.median(row["steps"])
        low, _, high = statistics.quantiles(row["steps"], n=4)
        rows.append(
            [
                ranks,
                round(FORWARD_MS * scale, 1),
                row["name"],
                round(plan, 1),
                round(step, 1),
                percent(step / plan - 1),
                percent((high - low) / step),
                percent(step / row["op_times_ms"] - 1),
                round(row["predicted_ms"], 1),
                percent(row["predicted_ms"] / step - 1),
                round(row["late_ms"], 2),
            ]
        )
    return rows


def measure_rank(rank: Rank, iterations: int, scale: float) -> list[dict[str, Any]]:
    """Run all plans on this rank; what rank 0 knows of them."""
    message = links.message_ms(0, 1, TensorSpec(SHAPE).nbytes, rank.device, 20)
    comm = max(statistics.median(row) if row else 0.0 for row in gather.objects(message))
    return [_run(rank, emulated, comm, iterations, scale) for emulated in PLANS]


def _run(rank: Rank, emulated: Emulated, comm_ms: float, iterations: int, scale: float) -> dict[str, Any]:
    plan = plan_of(emulated, rank.world_size, comm_ms, scale)
    problem = plan.problem
    stages = {s: _stage(problem, s) for s in problem.stages_of[rank.rank]}
    boundaries = [TensorSpec(SHAPE)] * (problem.num_stages - 1)
    pace = emulated.bytes_per_s
    traces: list[Trace] = []
    batch = [torch.zeros(SHAPE)] * MICROBATCHES
    loss = lambda y, _: y.view(-1)[0]  # noqa: E731 (no time for a loss)
    with Executor(plan, stages, boundaries, loss, bandwidth=(pace, pace), before_op=begin) as executor:
        for number in range(WARM_UP + iterations):
            gather.barrier()
            result = executor.step(batch, batch, number=number)
            if number >= WARM_UP:
                traces.append(_trace(gather.objects(_record(result))))
    placement = [stage.device for stage in problem.stages]
    times = samples.durations(traces, placement, with_host=True)
    lags = samples.message_lags(traces, placement)
    comm = [statistics.median(lags[s]) if s in lags else problem.comm_ms[s] for s in range(problem.num_stages - 1)]
    return {
        "name": emulated.name,
        "makespan_ms": plan.makespan_ms,
        "steps": [trace.step_ms for trace in traces],
        "predicted_ms": samples.predicted_ms(plan, times, comm),
        "late_ms": statistics.median(_late(traces, problem)),
        "op_times_ms": samples.predicted_ms(plan, times, problem.comm_ms),
    }


def _late(traces: list[Trace], problem: Problem) -> Iterator[float]:
    """By how much compute ops overslept: what the machine added to them."""
    names = {Kind.F: "forward_ms", Kind.B: "backward_ms", Kind.W: "weight_ms", Kind.BW: "bw_ms"}
    for trace in traces:
        for op in trace.ops:
            if op.kind in names:
                yield op.end - op.start - getattr(problem.stages[op.stage], names[op.kind])


def _record(result: StepResult) -> dict[str, Any]:
    origin = result.origin * 1e3
    ops = [
        (op.kind, op.stage, op.microbatch, origin + op.start, origin + op.end, op.cpu_ms, op.late_ms,
         op.memory_wait_ms, op.message_wait_ms)
        for op in result.ops
    ]  # fmt: skip
    return {"ops": ops, "begin": origin, "end": origin + result.step_ms}


def _trace(ranks: list[dict[str, Any]]) -> Trace:
    ops = tuple(Sample(Kind(kind), *rest) for record in ranks for kind, *rest in record["ops"])
    # From the first rank's begin to the last one's end: they share a clock.
    return Trace(ops, max(record["end"] for record in ranks) - min(record["begin"] for record in ranks))


def plan_of(emulated: Emulated, devices: int, comm_ms: float, scale: float = 1.0) -> Plan:
    """The plan with messages that take ``comm_ms``, and ops ``scale`` times as long."""
    problem = problem_of(devices, comm_ms, emulated.bytes_per_s, scale, v=emulated.schedule == "zb-v")
    ops = offloads(problem) if emulated.schedule == "offload" else generate(emulated.schedule, problem)
    return Plan(problem, earliest(problem, ops))


def problem_of(devices: int, comm_ms: float, bytes_per_s: float | None, scale: float, *, v: bool) -> Problem:
    """Equal stages, in a V two a device, each with half of the work."""
    placement = [*range(devices), *(reversed(range(devices)) if v else ())]
    chunks = len(placement) // devices
    times = {"forward_ms": FORWARD_MS, "backward_ms": HALF_BACKWARD_MS, "weight_ms": HALF_BACKWARD_MS}
    stage: dict[str, Any] = {name: scale * ms / chunks for name, ms in times.items()}
    channels = []
    sizes = measure_bytes(
        _sleeper(0.0, 0.0, 0.0, chunks), 1, 3, torch.zeros(SHAPE), None, lambda output, target: output.sum()
    )
    stage |= {"activation_bytes": sizes.activation_bytes, "weight_context_bytes": sizes.weight_context_bytes}
    if bytes_per_s is not None:
        moved = sizes.offloadable_bytes / bytes_per_s * 1e3
        stage |= {"offloadable_bytes": sizes.offloadable_bytes, "offload_ms": moved, "reload_ms": moved}
        channels = [
            {"name": f"{way}:{d}", "transfers": [{"device": d, "direction": way}]}
            for d in range(devices)
            for way in ("d2h", "h2d")
        ]
    return Problem.model_validate(
        {
            "name": "sleeping stages",
            "num_microbatches": MICROBATCHES,
            "devices": [{"memory_bytes": None}] * devices,
            "stages": [{"device": device, **stage} for device in placement],
            "comm_ms": [comm_ms] * (len(placement) - 1),
            "channels": channels,
        }
    )


def offloads(problem: Problem, stay: int = 2) -> Ops:
    """GPipe's order; all microbatches but the last ``stay`` go to the host, and two come back ahead of their backward.

    A device holds ``stay + 2`` microbatches at most: a forward waits for the offload ``stay + 2`` before it.
    """
    m, stages = problem.num_microbatches, problem.num_stages
    moved = range(m - stay)
    end: dict[tuple[Kind, int, int], float] = {}
    ops = []

    def put(kind: Kind, s: int, j: int, took: float, *after: tuple[tuple[Kind, int, int], float]) -> None:
        start = max((end[key] + lag for key, lag in after if key in end), default=0.0)
        end[kind, s, j] = start + took
        ops.append(Op(kind, s, j, start, start + took))

    for s in range(stages):
        stage, comm = problem.stages[s], problem.comm_ms[s - 1] if s else 0.0
        for j in range(m):
            room = (Kind.O, s, j - stay - 2), 0.0
            put(Kind.F, s, j, stage.forward_ms, ((Kind.F, s, j - 1), 0.0), ((Kind.F, s - 1, j), comm), room)
            if j in moved:
                put(Kind.O, s, j, stage.offload_ms, ((Kind.F, s, j), 0.0), ((Kind.O, s, j - 1), 0.0))
    for s in reversed(range(stages)):
        stage, comm = problem.stages[s], problem.comm_ms[s] if s + 1 < stages else 0.0
        free = ((Kind.O, s, moved[-1]), 0.0), ((Kind.F, s, m - 1), 0.0)
        for j in range(m):
            if j in moved:
                room = (Kind.BW, s, j - 2), 0.0
                put(Kind.R, s, j, stage.reload_ms, ((Kind.R, s, j - 1), 0.0), room, *free)
            above, before = ((Kind.BW, s + 1, j), comm), (((Kind.BW, s, j - 1) if j else (Kind.F, s, m - 1)), 0.0)
            put(Kind.BW, s, j, stage.bw_ms, above, before, ((Kind.R, s, j), 0.0))
    return Ops.of(ops)


def _stage(problem: Problem, number: int) -> SleepStage:
    stage = problem.stages[number]
    chunks = problem.num_stages // problem.num_devices
    return _sleeper(stage.forward_ms, stage.backward_ms, stage.weight_ms, chunks)


def _sleeper(forward_ms: float, backward_ms: float, weight_ms: float, chunks: int) -> SleepStage:
    return SleepStage(forward_ms, backward_ms, weight_ms, SHAPE, SAVED_BYTES // chunks)
