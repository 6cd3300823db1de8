"""What it costs to split a backward: B and W apart against both in one go, and torch's own way of splitting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.tables import Cell
from runtime.accounting import Ledger
from runtime.host_memory import HostPool
from runtime.model import GPTConfig, build_layers
from runtime.stage import Stage
from runtime.transport import Parcel

MODEL = GPTConfig(layers=4, width=256, heads=4, context=128)
MICROBATCH_SIZE = 4
WARM_UP = 2
HEADER = ("backward of four blocks", "CPU ms", "wall ms", "over torch's fused")
Timed = tuple[float, float]


def table(rounds: int) -> list[list[Cell]]:
    """A row a way to do it. Ratios are medians over rounds of CPU time, which other work on the machine moves less."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Tensor, Tensor], Timed]] = {
        "torch, fused": _torch_fused(_blocks()),
        "ours, fused (BW)": _ours(_blocks(), split=False),
        "ours, split (B + W)": _ours(_blocks(), split=True),
        "torch, split": _torch_split(_blocks()),
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MICROBATCH_SIZE, MODEL.context, MODEL.width, generator=generator)
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            timed = ways[name](x, torch.ones_like(x))
            if number >= WARM_UP:
                found[name].append(timed)
    base = [cpu for cpu, _ in found["torch, fused"]]
    return [
        [
            name,
            f"{statistics.median(cpu for cpu, _ in samples) * 1e3:.1f}",
            f"{statistics.median(wall for _, wall in samples) * 1e3:.1f}",
            f"{statistics.median(cpu / one for (cpu, _), one in zip(samples, base, strict=True)):.3f}",
        ]
        for name, samples in found.items()
    ]


def _blocks() -> nn.Sequential:
    return nn.Sequential(*build_layers(MODEL, 0, range(1, MODEL.layers + 1)))


def _clock() -> Timed:
    return time.thread_time(), time.perf_counter()


def _since(begin: Timed) -> Timed:
    end = _clock()
    return end[0] - begin[0], end[1] - begin[1]


def _ours(module: nn.Module, *, split: bool) -> Callable[[Tensor, Tensor], Timed]:
    ledger = Ledger()
    stage = Stage(module, 1, 3, lambda output, target: output.sum(), 1, torch.device("cpu"), ledger, HostPool())

    def run(x: Tensor, g: Tensor) -> Timed:
        stage.begin([])
        output = stage.forward(0, Parcel(x, ledger.hold(x)), None, 0, split=split, recomputed=False)
        assert isinstance(output, Parcel)
        output.hold.release()
        gradient = Parcel(g, ledger.hold(g))
        begin = _clock()
        given = stage.backward(0, gradient)
        if split:
            stage.weight(0)
        took = _since(begin)
        assert given is not None
        given.hold.release()
        module.zero_grad()
        return took

    return run


def _torch_fused(module: nn.Module) -> Callable[[Tensor, Tensor], Timed]:
    def run(x: Tensor, g: Tensor) -> Timed:
        output = module(x.detach().requires_grad_())
        begin = _clock()
        output.backward(g)
        took = _since(begin)
        module.zero_grad()
        return took

    return run


def _torch_split(module: nn.Module) -> Callable[[Tensor, Tensor], Timed]:
    def run(x: Tensor, g: Tensor) -> Timed:
        x = x.detach().requires_grad_()
        output = module(x)
        begin = _clock()
        _, groups = stage_backward_input([output], [g], [x], module.parameters())
        stage_backward_weight(module.parameters(), groups)
        took = _since(begin)
        module.zero_grad()
        return took

    return run
