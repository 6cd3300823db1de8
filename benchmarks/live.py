"""Memory against the plan: what is alive of an offloaded microbatch, and peaks of random plans whose ops come late."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.tables import Cell, percent
from optpipe import memory, metrics
from optpipe.ops import Kind, Op, Ops
from runtime import gather, launch
from runtime.executor import Executor
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.stage import measure_bytes
from runtime.worker import Rank
from tests.live import Live
from tests.pipelines import (
    batch,
    boundaries,
    model_problem,
    planned,
    problem_with,
    random_plan,
    stage_module,
)

RANKS = 2
OFFLOADED_HEADER = ("one stage, one microbatch", "activation bytes", "bytes on the host", "alive on the device")
PEAKS_HEADER = (
    "random plans",
    "peak / plan, median",
    "peak / plan, most",
    "messages / bound, most",
    "moved / planned, least",
    "host / planned, most",
)
MODEL = GPTConfig(layers=2, width=64, heads=4, context=8, vocabulary=32)


def offloaded() -> list[list[Cell]]:
    """Bytes alive on the device between offload and reload, by an audit that knows nothing of the runtime's books."""
    rows: list[list[Cell]] = []
    for name, (make, kinds) in {
        "embedding, blocks, head": (_model, (Kind.F, Kind.O, Kind.R, Kind.BW)),
        "the same, B and W apart": (_model, (Kind.F, Kind.O, Kind.R, Kind.B, Kind.W)),
        "with dropout": (lambda: _model(0.2), (Kind.F, Kind.O, Kind.R, Kind.B, Kind.W)),
        "blocks checkpointed": (_checkpointed, (Kind.F, Kind.O, Kind.R, Kind.BW)),
    }.items():
        rows.append([name, *_audit(make, kinds)])
    return rows


def _audit(make: Callable[[], nn.Module], kinds: tuple[Kind, ...]) -> tuple[int, int, int]:
    inputs, targets = batch(1)
    module = make()
    found = measure_bytes(make(), 0, 1, inputs[0], targets[0], loss_fn)
    plan = planned(
        problem_with([found], [0], 1), Ops.of([Op(kind, 0, 0, float(n), n + 1.0) for n, kind in enumerate(kinds)])
    )
    alive: list[int] = []

    def at_reload(kind: Kind, stage: int, microbatch: int) -> None:
        if kind == Kind.R:
            # The loss of the microbatch is a result, no activation.
            alive.append(live.nbytes([*module.parameters(), *executor._run.losses.values()]))

    with Executor(plan, {0: module}, [], loss_fn, before_op=at_reload) as executor, Live() as live:
        result = executor.step(inputs, targets)
    return found.activation_bytes, result.host_peak_bytes, alive[0]


def _model(dropout: float = 0.0) -> nn.Module:
    sizes = GPTConfig(**{**vars(MODEL), "dropout": dropout})
    return nn.Sequential(*build_layers(sizes, 0))


class _Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def _checkpointed() -> nn.Module:
    first, *blocks, last = build_layers(MODEL, 0)
    return nn.Sequential(first, *map(_Again, blocks), last)


def peaks(plans: int) -> list[list[Cell]]:
    """Peaks of random valid plans that fill their budgets to the last byte, all lanes delayed at random."""
    found = launch.launch(random_plans, {"plans": plans}, RANKS, "cpu")
    shares, messages, moved, host = ([row[n] for row in found] for n in range(4))
    return [
        [
            f"{plans} on {RANKS} ranks, {len(found)} peaks",
            percent(statistics.median(shares), 1),
            percent(max(shares), 1),
            percent(max(messages), 1),
            percent(min(moved), 1),
            percent(max(share for share in host if share is not None), 1),
        ]
    ]


def random_plans(rank: Rank, plans: int) -> list[Any]:
    """(peak / plan, messages / bound, bytes moved / planned, host bytes / planned) of each plan and rank; the last only
    where whole offloads are planned: a part of one is made up of whole storages, which may be a little more."""
    torch.set_num_threads(1)
    kinds = [(RANKS, 1, "linear", 6), (RANKS, 2, "v", 4), (RANKS, 2, "interleaved", 4)]
    rows = []
    for seed in range(plans):
        plan = random_plan(model_problem(*kinds[seed % len(kinds)]), seed, **({"parts": 0.0} if seed % 2 else {}))
        problem = plan.problem
        stages = {s: stage_module(s, problem.num_stages) for s in problem.stages_of[rank.rank]}
        rng = random.Random(RANKS * seed + rank.rank)

        def delay(*_: object, rng: random.Random = rng) -> None:
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.003)

        with Executor(plan, stages, boundaries(problem.num_stages), loss_fn, before_op=delay) as executor:
            result = executor.step(*batch(problem.num_microbatches))
        planned_bytes = metrics.measure(problem, plan.ops).offloaded_bytes[rank.rank]
        whole = int(plan.ops.bytes.max()) < 0
        moved = sum(op.bytes for op in result.ops if op.kind == Kind.O)
        rows.append(
            (
                result.peak_bytes / memory.peaks(problem, plan.ops)[rank.rank],
                result.message_peak_bytes / max(executor.message_bytes, 1),
                moved / planned_bytes if planned_bytes else 1.0,
                result.host_peak_bytes / executor.planned_host_bytes if planned_bytes and whole else None,
            )
        )
    return [row for part in gather.objects(rows) for row in part]
