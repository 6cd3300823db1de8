"""Small pipelines for tests: a model cut into stages, problems whose bytes are its own, known orders, one process's
answer to compare with, and groups of processes that run many plans each."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from optpipe import memory, timing
from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime.executor import Executor, StepResult, TensorSpec
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.stage import StageBytes, dropout_seed, measure_bytes, seeded
from tests.random_schedules import fitted, placement, random_schedule

SIZE, LENGTH = 2, 8  # sequences of a microbatch, tokens of a sequence
MODEL = GPTConfig(layers=6, width=16, heads=2, context=LENGTH, vocabulary=32)


def config(dropout: float = 0.0) -> GPTConfig:
    return GPTConfig(**{**MODEL.__dict__, "dropout": dropout})


def stage_module(stage: int, num_stages: int, dropout: float = 0.0) -> nn.Module:
    """A stage of the model: whole layers, as even as they go."""
    n = MODEL.num_layers
    return nn.Sequential(
        *build_layers(config(dropout), seed=3, layers=range(n * stage // num_stages, n * (stage + 1) // num_stages))
    )


def boundaries(num_stages: int) -> list[TensorSpec]:
    return [TensorSpec((SIZE, LENGTH, MODEL.width))] * (num_stages - 1)


def batch(microbatches: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets: views of one batch, as a data loader gives them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, MODEL.vocabulary, (microbatches * SIZE, LENGTH + 1), generator=generator)
    return list(tokens[:, :-1].chunk(microbatches)), list(tokens[:, 1:].chunk(microbatches))


@cache
def model_problem(
    devices: int, per_device: int = 1, kind: str = "linear", microbatches: int = 8, dropout: float = 0.0
) -> Problem:
    """A problem without limits whose bytes are those of the model's stages, as measured."""
    places = placement(kind, devices, per_device)
    return problem_of([stage_module(s, len(places), dropout) for s in range(len(places))], places, microbatches)


def problem_of(modules: Sequence[nn.Module], places: Sequence[int], microbatches: int) -> Problem:
    """The same for other stages; ``places``: the device of each."""
    count = len(places)
    inputs, targets = batch(1)
    sizes = []
    for s in range(count):
        x = inputs[0] if s == 0 else torch.randn(SIZE, LENGTH, MODEL.width)
        target = targets[0] if s == count - 1 else None
        sizes.append(measure_bytes(modules[s], s, count, x, target, loss_fn))
    return problem_with(sizes, places, microbatches)


def problem_with(sizes: Sequence[StageBytes], places: Sequence[int], microbatches: int) -> Problem:
    """The same with bytes that are known."""
    count, devices = len(places), max(places) + 1
    stages = []
    for found, device in zip(sizes, places, strict=True):
        stages.append(
            {
                "device": device,
                "forward_ms": 1.0,
                "backward_ms": 1.0,
                "weight_ms": 0.8,
                "fused_backward_ms": 1.7,
                "activation_bytes": found.activation_bytes,
                "weight_context_bytes": found.weight_context_bytes,
                "offloadable_bytes": found.offloadable_bytes,
                "checkpoint_bytes": found.checkpoint_bytes,
                "offload_ms": 0.5,
                "reload_ms": 0.5,
            }
        )
    channels = [
        {"name": f"{way}:{d}", "transfers": [{"device": d, "direction": way}]}
        for d in range(devices)
        for way in ("d2h", "h2d")
    ]
    return Problem.model_validate(
        {
            "name": "model",
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * devices,
            "stages": stages,
            "comm_ms": [0.1] * (count - 1),
            "channels": channels,
        }
    )


def planned(problem: Problem, ops: Ops) -> Plan:
    """The plan of these ops, as early as they can be, with budgets that it fills to the last byte."""
    ops = timing.earliest(problem, ops)
    return Plan(fitted(problem, ops), ops)


def random_plan(problem: Problem, seed: int, **options: float) -> Plan:
    ops = random_schedule(problem, random.Random(seed), **options)
    return Plan(fitted(problem, ops), ops)


Order = list[tuple[Kind, int, int]]


def plan_of_orders(problem: Problem, orders: Sequence[Order], offloads: set[tuple[int, int]] = frozenset()) -> Plan:
    """A plan from what each device computes in turn. The given (stage, microbatch) pairs are offloaded, and come back
    one compute op before their backward."""
    durations = {
        Kind.F: "forward_ms", Kind.C: "forward_ms", Kind.B: "backward_ms", Kind.W: "weight_ms", Kind.BW: "bw_ms",
    }  # fmt: skip
    ends: dict[tuple[Kind, int, int], float] = {}
    free: dict[object, float] = {}
    done: list[Op] = []

    def run(lane: object, kind: Kind, s: int, j: int, took: float, earliest: float) -> None:
        start = max(free.get(lane, 0.0), earliest)
        free[lane] = ends[kind, s, j] = start + took
        done.append(Op(kind, s, j, start, start + took))

    left = [list(order) for order in orders]
    while any(left):
        moved = False
        for device, order in enumerate(left):
            while order:
                kind, s, j = order[0]
                needs: list[tuple[Kind, int, int]] = []
                if kind == Kind.F and s:
                    needs = [(Kind.F, s - 1, j)]
                elif kind in (Kind.B, Kind.BW) and s + 1 < problem.num_stages:
                    above = Kind.BW if (Kind.BW, s + 1, j) in ends else Kind.B
                    needs = [(above, s + 1, j)]
                if any(need not in ends for need in needs):
                    break
                stage = problem.stages[s]
                if kind in (Kind.B, Kind.BW) and (s, j) in offloads:
                    run((device, "h2d"), Kind.R, s, j, stage.reload_ms, max(ends[Kind.O, s, j], free[device] - 1.0))
                    needs.append((Kind.R, s, j))
                ready = [ends[n] + (problem.comm_ms[min(n[1], s)] if n[1] != s else 0.0) for n in needs]
                run(device, kind, s, j, getattr(stage, durations[kind]), max(ready, default=0.0))
                if kind == Kind.F and (s, j) in offloads:
                    run((device, "d2h"), Kind.O, s, j, stage.offload_ms, ends[Kind.F, s, j])
                order.pop(0)
                moved = True
        assert moved, "these orders do not go together"
    return planned(problem, Ops.of(done))


def gpipe(devices: int, m: int) -> list[Order]:
    return [[(Kind.F, d, j) for j in range(m)] + [(Kind.BW, d, j) for j in range(m)] for d in range(devices)]


def one_f_one_b(devices: int, m: int, split: bool = False) -> list[Order]:
    """1F1B; ``split``: with W apart and as late as a zero-bubble schedule would have it."""
    orders = []
    for d in range(devices):
        warm = min(devices - d, m)
        order: Order = [(Kind.F, d, j) for j in range(warm)]
        w = 0
        for j in range(m):
            order.append((Kind.B if split else Kind.BW, d, j))
            if split and j >= d:
                order.append((Kind.W, d, w))
                w += 1
            if warm + j < m:
                order.append((Kind.F, d, warm + j))
        if split:
            order += [(Kind.W, d, j) for j in range(w, m)]
        orders.append(order)
    return orders


def v_order(devices: int, m: int) -> list[Order]:
    """Two stages a device in a V: microbatch by microbatch, two in flight."""
    orders: list[Order] = [[] for _ in range(devices)]
    count = 2 * devices
    device = placement("v", devices, 2)
    for first in range(0, m, 2):
        pair = range(first, min(first + 2, m))
        for s in range(count):
            orders[device[s]] += [(Kind.F, s, j) for j in pair]
        for s in reversed(range(count)):
            orders[device[s]] += [(Kind.B, s, j) for j in pair]
            orders[device[s]] += [(Kind.W, s, j) for j in pair]
    return orders


@dataclass
class Answer:
    """A step's loss, and the gradients of all stages by name."""

    loss: float
    gradients: dict[str, Tensor]


@cache
def one_process(num_stages: int, microbatches: int, dropout: float = 0.0, step: int = 0) -> Answer:
    """The same stages and batch without any of the pipeline."""
    return plain_training([stage_module(s, num_stages, dropout) for s in range(num_stages)], microbatches, step)


def plain_training(stages: Sequence[nn.Module], microbatches: int, step: int = 0) -> Answer:
    """Microbatch after microbatch, plain autograd."""
    inputs, targets = batch(microbatches)
    total = torch.zeros(())
    for j in range(microbatches):
        x = inputs[j]
        for s, stage in enumerate(stages):
            with seeded(dropout_seed(0, step, s, j), torch.device("cpu")):
                x = stage(x)
        loss = loss_fn(x, targets[j]) / microbatches
        loss.backward()
        total += loss.detach()
    return Answer(float(total), gradients(dict(enumerate(stages))))


def gradients(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{s}.{name}": parameter.grad.clone()
        for s, module in stages.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def run_plan(
    plan: Plan,
    rank: int,
    *,
    modules: Sequence[nn.Module] | None = None,
    dropout: float = 0.0,
    steps: int = 1,
    **options: object,
) -> tuple[list[StepResult], dict[str, Tensor], Executor]:
    """Run the plan on this rank, with fresh stages of the model unless others are given; the results, and the
    gradients of the last step."""
    problem = plan.problem
    stages = {
        s: modules[s] if modules else stage_module(s, problem.num_stages, dropout) for s in problem.stages_of[rank]
    }
    executor = Executor(plan, stages, boundaries(problem.num_stages), loss_fn, **options)
    inputs, targets = batch(problem.num_microbatches)
    results = []
    for number in range(steps):
        for module in stages.values():
            module.zero_grad()
        results.append(executor.step(inputs, targets, number=number))
    executor.close()
    return results, gradients(stages), executor


def peak_of(plan: Plan, rank: int) -> int:
    return memory.peaks(plan.problem, plan.ops)[rank]


def in_processes(
    count: int,
    work: Callable[[int, int], object],
    timeout_s: float = 240.0,
    survivors: Sequence[int] | None = None,
) -> list[object]:
    """``work(rank, count)`` in a gloo group of new processes; what each returned.

    A failure anywhere fails the test with that process's traceback. Where not all are to survive, the others answer
    None, and no one waits for them.
    """
    for _ in range(2):
        with contextlib.suppress(_NotConnected):
            return _in_processes(count, work, timeout_s, survivors)
    return _in_processes(count, work, timeout_s, survivors)


class _NotConnected(AssertionError):
    """The ranks did not come together: where many processes start at once, gloo sometimes loses a connection."""


def _in_processes(
    count: int, work: Callable[[int, int], object], timeout_s: float, survivors: Sequence[int] | None
) -> list[object]:
    answering = range(count) if survivors is None else survivors
    context = mp.get_context("spawn")
    results: mp.SimpleQueue = context.SimpleQueue()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[int, object] = {}
    # They meet at a file: a port that is free now may be another's when they come to it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = f"{folder}/ranks"
        processes = [
            context.Process(target=_child, args=(rank, count, place, work, results, survivors is None), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + timeout_s
            while len(found) < len(answering):
                while results.empty():
                    assert time.monotonic() < deadline, f"no answer after {timeout_s} s; answered: {sorted(found)}"
                    dead = [code for rank in answering if (code := processes[rank].exitcode) not in (None, 0)]
                    assert not dead or not results.empty(), f"a process ended with status {dead[0]}"
                    processes[0].join(0.05)
                rank, error, value = results.get()
                if error is not None:
                    lost = "connectFullMesh failed" in error
                    raise (_NotConnected if lost else AssertionError)(f"rank {rank}:\n{error}")
                found[rank] = value
        finally:
            for process in processes:
                process.join(10 if len(found) == count else 0)
                if process.is_alive():
                    process.kill()
    return [found.get(rank) for rank in range(count)]


def _child(
    rank: int, count: int, place: str, work: Callable[[int, int], object], results: mp.SimpleQueue, together: bool
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=60),
        )
        value = work(rank, count)
        if together:
            dist.barrier()
            dist.destroy_process_group()
        results.put((rank, None, value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
