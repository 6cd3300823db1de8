"""The same model, ranks and order of ops under torch.distributed.pipelining and under the executor, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from benchmarks.tables import Cell, percent
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest
from runtime import gather, launch
from runtime.executor import Executor, TensorSpec
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.worker import Rank

RANKS, MICROBATCHES, MICROBATCH_SIZE = 2, 8, 4
MODEL = GPTConfig(layers=8, width=256, heads=4, context=128)
WARM_UP = 1
HEADER = (
    "schedule",
    "torch ms",
    "ours ms",
    "ours / torch",
    "iqr",
    "torch CPU ms",
    "ours CPU ms",
    "gradients differ by",
)
#: ZB-H1 of two ranks and eight microbatches, as torch reads it: I for B, B for BW.
ZB_H1 = (
    "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0F4,0I3,0W3,0F5,0I4,0W4,0F6,0I5,0W5,0F7,0I6,0W6,0I7,0W7",
    "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1F4,1I4,1W3,1F5,1I5,1W4,1F6,1I6,1W5,1F7,1I7,1W6,1W7",
)
ONE_F_ONE_B = (
    "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0F4,0B3,0F5,0B4,0F6,0B5,0F7,0B6,0B7",
    "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4,1F5,1B5,1F6,1B6,1F7,1B7",
)
#: Name, layers of each stage, device of each stage.
SCHEDULES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "1F1B": ((5, 5), (0, 1)),
    "ZB-H1 (CSV)": ((5, 5), (0, 1)),
    "ZBV": ((3, 2, 2, 3), (0, 1, 1, 0)),
}
_KINDS = {
    _ComputationType.FORWARD: Kind.F,
    _ComputationType.BACKWARD_INPUT: Kind.B,
    _ComputationType.BACKWARD_WEIGHT: Kind.W,
    _ComputationType.FULL_BACKWARD: Kind.BW,
}
Step = Callable[[], None]


def table(rounds: int) -> list[list[Cell]]:
    """A row a schedule."""
    rows: list[list[Cell]] = []
    for row in launch.launch(measure_rank, {"rounds": rounds}, RANKS, "cpu"):
        ratios = [ours / theirs for theirs, ours in zip(row["torch"], row["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            [
                row["name"],
                round(statistics.median(row["torch"])),
                round(statistics.median(row["ours"])),
                f"{middle:.3f}",
                percent(high - low, 1),
                round(statistics.median(row["torch_cpu"])),
                round(statistics.median(row["ours_cpu"])),
                f"{row['difference']:.1e}",
            ]
        )
    return rows


def measure_rank(rank: Rank, rounds: int) -> list[dict[str, Any]]:
    """Run the schedules on this rank; steps in ms over all ranks."""
    torch.set_num_threads(1)
    return [_compare(rank, name, rounds) for name in SCHEDULES]


def _compare(rank: Rank, name: str, rounds: int) -> dict[str, Any]:
    layers, places = SCHEDULES[name]
    inputs, targets = _batch()
    theirs, ours = _stages(layers, places, rank.rank), _stages(layers, places, rank.rank)
    schedule, orders = _torch_schedule(name, theirs, places, rank)
    arguments = (inputs,) if 0 in theirs else ()
    last = {"target": targets, "losses": []} if len(places) - 1 in theirs else {}
    plan = _plan(orders, places)
    spec = TensorSpec((MICROBATCH_SIZE, MODEL.context, MODEL.width))
    parts = [list(part.chunk(MICROBATCHES)) for part in (inputs, targets)]
    found: dict[str, list[float]] = {"torch": [], "ours": [], "torch_cpu": [], "ours_cpu": []}
    with Executor(plan, ours, [spec] * (len(places) - 1), loss_fn) as executor:
        steps: dict[str, tuple[dict[int, nn.Module], Step]] = {
            "torch": (theirs, lambda: schedule.step(*arguments, return_outputs=False, **last)),
            "ours": (ours, lambda: executor.step(*parts) and None),
        }
        for number in range(WARM_UP + rounds):
            # In turns, and in turns first.
            for which in sorted(steps, reverse=number % 2 == 1):
                wall, cpu = _timed(*steps[which])
                if number >= WARM_UP:
                    found[which].append(wall)
                    found[f"{which}_cpu"].append(cpu)
    return {"name": name, **found, "difference": _difference(theirs, ours)}


def _timed(stages: dict[int, nn.Module], step: Step) -> tuple[float, float]:
    """Wall and CPU time of a step, ms: the longest, and the mean, over ranks."""
    for stage in stages.values():
        stage.zero_grad()
    gather.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    step()
    rows = gather.numbers([(time.perf_counter() - begin) * 1e3, (time.process_time() - cpu) * 1e3])
    return max(row[0] for row in rows), statistics.fmean(row[1] for row in rows)


def _difference(theirs: dict[int, nn.Module], ours: dict[int, nn.Module]) -> float:
    """The largest difference of a gradient, over all ranks."""
    most = 0.0
    for number, stage in theirs.items():
        for one, other in zip(stage.parameters(), ours[number].parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            most = max(most, float((one.grad - other.grad).abs().max()))
    return max(row[0] for row in gather.numbers([most]))


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES * MICROBATCH_SIZE, MODEL.context + 1)
    tokens = torch.randint(0, MODEL.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _stages(layers: Sequence[int], places: Sequence[int], rank: int) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    first = 0
    for stage, (count, place) in enumerate(zip(layers, places, strict=True)):
        if place == rank:
            found[stage] = nn.Sequential(*build_layers(MODEL, 0, range(first, first + count)))
        first += count
    return found


def _torch_schedule(
    name: str, stages: dict[int, nn.Module], places: Sequence[int], rank: Rank
) -> tuple[Any, list[list[_Action]]]:
    """torch's schedule, and the order of its compute ops on each rank."""
    parts = [pipelining.PipelineStage(module, s, len(places), rank.device) for s, module in stages.items()]
    if name == "1F1B":
        return pipelining.Schedule1F1B(parts[0], MICROBATCHES, loss_fn=loss_fn), _actions(ONE_F_ONE_B)
    if name == "ZBV":
        schedule = pipelining.ScheduleZBVZeroBubble(parts, MICROBATCHES, loss_fn=loss_fn)
        orders = [[a for a in schedule.pipeline_order[r] if a is not None] for r in range(RANKS)]
        return schedule, orders
    runtime = _PipelineScheduleRuntime(parts, MICROBATCHES, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text("\n".join(ZB_H1) + "\n")
        runtime._load_csv(str(path))
    return runtime, _actions(ZB_H1)


def _actions(rows: Sequence[str]) -> list[list[_Action]]:
    return [[action for cell in row.split(",") if (action := _Action.from_str(cell))] for row in rows]


def _plan(orders: Sequence[Sequence[_Action]], places: Sequence[int]) -> Plan:
    """The plan with these orders; its times are nominal and its memory is not limited."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1}
    problem = Problem.model_validate(
        {
            "num_microbatches": MICROBATCHES,
            "devices": [{"memory_bytes": None}] * RANKS,
            "stages": [{"device": place, **stage} for place in places],
            "comm_ms": [0.0] * (len(places) - 1),
        }
    )
    # Any times that put each device's ops in its order will do: what ops wait for follows from the data.
    ops = [
        Op(_KINDS[action.computation_type], action.stage_index, action.microbatch_index, float(n), n + 1.0)
        for order in orders
        for n, action in enumerate(order)
    ]
    return Plan(problem, earliest(problem, Ops.of(ops)))
