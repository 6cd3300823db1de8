"""The same model, ranks and order of ops under torch.distributed.pipelining and under the executor, in turns."""

from __future__ import annotations

import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

RANKS, MICROBATCHES = 2, 8
WARM_UP = 2
#: A round in which ranks' threads were ready to run for this share of the time, and other work ran, is disturbed.
DISTURBED = 0.05
#: Rounds that are tried, at most, for one that is asked for.
TRIES = 2


@dataclass(frozen=True)
class Size:
    """A model, how many of its sequences make a microbatch, and how many rounds are made of one that is asked for."""

    model: GPTConfig
    microbatch_size: int
    rounds: int = 1

    def __str__(self) -> str:
        model = self.model
        return f"{model.layers} x {model.width}, {self.microbatch_size} x {model.context}"


STANDARD = Size(GPTConfig(layers=8, width=256, heads=4, context=128), 4)
#: Narrow layers, where what the host does beside computing shows, and wide ones.
SIZES = (
    Size(GPTConfig(layers=8, width=64, heads=4, context=64), 2, rounds=4),
    STANDARD,
    Size(GPTConfig(layers=4, width=512, heads=8, context=64), 2),
)
HEADER = (
    "blocks x width, microbatch",
    "schedule",
    "rounds",
    "torch ms",
    "ours ms",
    "ours / torch",
    "iqr",
    "torch CPU ms",
    "ours CPU ms",
    "CPU, ours / torch",
    "faults, torch",
    "faults, ours",
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
#: Name; blocks of each stage in quarters of the model's, device of each stage.
SCHEDULES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "1F1B": ((2, 2), (0, 1)),
    "ZB-H1 (CSV)": ((2, 2), (0, 1)),
    "ZBV": ((1, 1, 1, 1), (0, 1, 1, 0)),
}
#: What is run: size, schedule, and what is special about it. ``apart``: each side in processes of its own, as each
#: comes; otherwise both in the same ones, with the allocator as the executor sets it up for torch too. ``budgets``:
#: devices have a budget, far above what they need: then the executor counts every byte that autograd saves, and can
#: move it, which torch's runtime cannot.
APART, TOGETHER, BUDGETS = "", "one allocator", "one allocator, budgets"
CASES = (
    *((size, name, APART) for size in SIZES for name in SCHEDULES),
    *((STANDARD, name, TOGETHER) for name in SCHEDULES),
    (STANDARD, "1F1B", BUDGETS),
    (STANDARD, "ZBV", BUDGETS),
)
_KINDS = {
    _ComputationType.FORWARD: Kind.F,
    _ComputationType.BACKWARD_INPUT: Kind.B,
    _ComputationType.BACKWARD_WEIGHT: Kind.W,
    _ComputationType.FULL_BACKWARD: Kind.BW,
}
Step = Callable[[], None]
#: Of a step: wall time, the longest over ranks; CPU time and page faults, means over ranks; how long the ranks' threads
#: were ready and did not run, less what their processes' other threads (gloo's, say) ran in all. In ms.
MEASURED = ("wall", "cpu", "faults", "held_up")
#: Two steps of either side, as measured.
Round = dict[str, list[dict[str, float]]]
SCHEDULING = Path("/proc/thread-self/schedstat")


def table(rounds: int) -> list[list[Cell]]:
    """A row a case."""
    rows: list[list[Cell]] = []
    for number, (size, _, special) in enumerate(CASES):
        given = {"case": number, "rounds": size.rounds * rounds}
        processes = 2 * RANKS if special == APART else RANKS
        row = _row(launch.launch(measure_rank, given, processes, "cpu"))
        print(*row, sep="  ", flush=True)
        rows.append(row)
    return rows


def _row(found: dict[str, Any]) -> list[Cell]:
    tried: list[Round] = found["rounds"]
    calm = [one for one in tried if not disturbed(one)]
    few = len(calm) < 2  # to say anything by themselves
    counted = tried if few else calm
    torchs, ours = ({what: _sums(counted, which, what) for what in MEASURED} for which in ("torch", "ours"))
    walls, cpus = (
        [one / other for one, other in zip(ours[what], torchs[what], strict=True)] for what in ("wall", "cpu")
    )
    low, middle, high = statistics.quantiles(walls, n=4)
    return [
        found["size"],
        found["name"],
        f"{len(counted)} of {len(tried)}" + (", disturbed" if few else ""),
        round(statistics.median(torchs["wall"]) / 2, 1),
        round(statistics.median(ours["wall"]) / 2, 1),
        f"{middle:.3f}",
        percent(high - low, 1),
        round(statistics.median(torchs["cpu"]) / 2, 1),
        round(statistics.median(ours["cpu"]) / 2, 1),
        f"{statistics.median(cpus):.3f}",
        round(statistics.median(torchs["faults"]) / 2),
        round(statistics.median(ours["faults"]) / 2),
        f"{found['difference']:.1e}",
    ]


def _sums(rounds: Sequence[Round], which: str, what: str) -> list[float]:
    """Of the two steps of each round: what drifts evenly over a round cancels out between the sides."""
    return [sum(step[what] for step in one[which]) for one in rounds]


def disturbed(one: Round) -> bool:
    """Whether other work held up this round, on whichever side."""
    steps = [*one["torch"], *one["ours"]]
    return sum(step["held_up"] for step in steps) > DISTURBED * sum(step["wall"] for step in steps)


def measure_rank(rank: Rank, case: int, rounds: int) -> dict[str, Any]:
    """Run a case on this rank, until there are so many rounds that nothing disturbed."""
    torch.set_num_threads(1)
    size, name, special = CASES[case]
    places = SCHEDULES[name][1]
    layers = _layers(size, name)
    group = dist.new_group(list(range(RANKS)))
    sides = ("torch", "ours") if special != APART else ("torch",) if rank.rank < RANKS else ("ours",)
    stages = {side: _stages(size, layers, places, rank.rank % RANKS) for side in sides}
    found: list[Round] = []
    with contextlib.ExitStack() as stack:
        steps: dict[str, Step] = {}
        rows: list[str] = []
        if "torch" in sides:
            schedule = _torch_schedule(name, stages["torch"], places, rank, group)
            steps["torch"] = _torch_step(schedule, size, stages["torch"], len(places))
            rows = _rows(name, schedule)
        plan = _plan(_actions(gather.objects(rows)[0]), places, special == BUDGETS)
        if "ours" in sides:
            # The executor sets up the process's allocator, which torch's steps here have the good of as well.
            ours = [r + RANKS * (special == APART) for r in range(RANKS)]
            spec = TensorSpec((size.microbatch_size, size.model.context, size.model.width))
            executor = Executor(plan, stages["ours"], [spec] * (len(places) - 1), loss_fn, ranks=ours)
            steps["ours"] = _our_step(stack.enter_context(executor), size)
        for number in range(-WARM_UP, TRIES * rounds):
            # A B B A, and the next time B A A B.
            first, second = ("torch", "ours") if number % 2 else ("ours", "torch")
            one: Round = {"torch": [], "ours": []}
            for which in (first, second, second, first):
                one[which].append(_timed(stages.get(which), steps.get(which)))
            if number >= 0:
                found.append(one)
            if sum(not disturbed(one) for one in found) == rounds:
                break
    return {
        "size": str(size),
        "name": f"{name}, {special}" if special else name,
        "rounds": found,
        "difference": _difference(stages, rank),
    }


def _torch_step(schedule: Any, size: Size, stages: dict[int, nn.Module], count: int) -> Step:
    """A step under torch's runtime."""
    inputs, targets = _batch(size)
    arguments = (inputs,) if 0 in stages else ()
    last = {"target": targets, "losses": []} if count - 1 in stages else {}
    return lambda: schedule.step(*arguments, return_outputs=False, **last)


def _our_step(executor: Executor, size: Size) -> Step:
    """A step under the executor."""
    parts = [list(part.chunk(MICROBATCHES)) for part in _batch(size)]
    return lambda: executor.step(*parts) and None


def _timed(stages: dict[int, nn.Module] | None, step: Step | None) -> dict[str, float]:
    """What ``MEASURED`` names, of a step on all ranks that take part; the others wait."""
    for stage in (stages or {}).values():
        stage.zero_grad()
    gather.barrier()
    begin = _now()
    if step is not None:
        step()
    took = [end - start for end, start in zip(_now(), begin, strict=True)]
    rows = [row[1:] for row in gather.numbers([float(step is not None), *took]) if row[0]]
    walls, cpus, faults, held_up, alone = zip(*rows, strict=True)
    return {
        "wall": max(walls),
        "cpu": statistics.fmean(cpus),
        "faults": statistics.fmean(faults),
        "held_up": max(0.0, sum(held_up) - (sum(cpus) - sum(alone))),
    }


def _now() -> list[float]:
    """Wall time, CPU time of all threads, page faults, how long this thread was ready and did not run, and its CPU
    time. In ms."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held_up = int(SCHEDULING.read_text().split()[1]) / 1e6 if SCHEDULING.exists() else 0.0
    return [time.perf_counter() * 1e3, time.process_time() * 1e3, float(faults), held_up, time.thread_time() * 1e3]


def _layers(size: Size, name: str) -> list[int]:
    """Layers of each stage: embedding and head go to the first and to the last one."""
    counts = [size.model.layers // 4 * quarters for quarters in SCHEDULES[name][0]]
    counts[0] += 1
    counts[-1] += 1
    return counts


def _difference(stages: dict[str, dict[int, nn.Module]], rank: Rank) -> float:
    """The largest difference of a gradient, over all ranks."""
    most = 0.0
    for number, stage in next(iter(stages.values())).items():
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            if len(stages) == 2:
                other = stages["ours"][number].get_parameter(name).grad
                assert other is not None
            elif "torch" in stages:
                dist.send(parameter.grad.contiguous(), rank.rank + RANKS)
                continue
            else:
                other = torch.empty_like(parameter.grad)
                dist.recv(other, rank.rank - RANKS)
            most = max(most, float((parameter.grad - other).abs().max()))
    return max(row[0] for row in gather.numbers([most]))


def _batch(size: Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES * size.microbatch_size, size.model.context + 1)
    tokens = torch.randint(0, size.model.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _stages(size: Size, layers: Sequence[int], places: Sequence[int], rank: int) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    first = 0
    for stage, (count, place) in enumerate(zip(layers, places, strict=True)):
        if place == rank:
            found[stage] = nn.Sequential(*build_layers(size.model, 0, range(first, first + count)))
        first += count
    return found


def _torch_schedule(
    name: str, stages: dict[int, nn.Module], places: Sequence[int], rank: Rank, group: dist.ProcessGroup
) -> Any:
    """torch's schedule."""
    parts = [pipelining.PipelineStage(module, s, len(places), rank.device, group=group) for s, module in stages.items()]
    if name == "1F1B":
        return pipelining.Schedule1F1B(parts[0], MICROBATCHES, loss_fn=loss_fn)
    if name == "ZBV":
        return pipelining.ScheduleZBVZeroBubble(parts, MICROBATCHES, loss_fn=loss_fn)
    runtime = _PipelineScheduleRuntime(parts, MICROBATCHES, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text("\n".join(ZB_H1) + "\n")
        runtime._load_csv(str(path))
    return runtime


def _rows(name: str, schedule: Any) -> list[str]:
    """The order of torch's compute ops, a row of cells a rank."""
    if name != "ZBV":
        return list(ONE_F_ONE_B if name == "1F1B" else ZB_H1)
    orders = [schedule.pipeline_order[r] for r in range(RANKS)]
    return [",".join(str(action) for action in order if action is not None) for order in orders]


def _actions(rows: Sequence[str]) -> list[list[_Action]]:
    return [[action for cell in row.split(",") if (action := _Action.from_str(cell))] for row in rows]


def _plan(orders: Sequence[Sequence[_Action]], places: Sequence[int], limited: bool = False) -> Plan:
    """The plan with these orders; its times are nominal, its memory ``limited`` to far more than it takes, or not."""
    stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1}
    problem = Problem.model_validate(
        {
            "num_microbatches": MICROBATCHES,
            "devices": [{"memory_bytes": 1 << 40 if limited else None}] * RANKS,
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
