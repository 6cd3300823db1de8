"""What it costs to split a backward: B and W apart against both in one go, and torch's own way of splitting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.tables import Cell
from runtime.accounting import Ledger
from runtime.allocator import keep_freed_memory
from runtime.host_memory import HostPool
from runtime.model import GPTConfig, build_layers
from runtime.stage import Stage
from runtime.transport import Parcel

BLOCKS = 4
WARM_UP = 4


@dataclass(frozen=True)
class Size:
    """Blocks of one width, a microbatch, and how many rounds are made of one that is asked for."""

    width: int
    context: int
    microbatch_size: int
    rounds: int

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(layers=BLOCKS, width=self.width, heads=self.width // 64 or 1, context=self.context)


SIZES = (Size(64, 64, 2, 40), Size(256, 128, 4, 4), Size(512, 128, 4, 1))
HEADER = (
    "width, microbatch",
    "four blocks",
    "F, CPU ms",
    "backward, CPU ms",
    "over torch's fused",
    "F and backward over torch's split",
)


@dataclass(frozen=True)
class Timed:
    """CPU time of a forward and its backward, s."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


Way = Callable[[Tensor, Tensor], Timed]


def table(rounds: int) -> list[list[Cell]]:
    """A row a size and way. Ratios are medians over rounds of CPU time, which other work on the machine moves less."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as an executor does; all ways have the good of it
    return [row for size in SIZES for row in _rows(size, size.rounds * rounds)]


def _rows(size: Size, rounds: int) -> list[list[Cell]]:
    ways: dict[str, Way] = {
        "torch, fused": _torch_fused(_blocks(size)),
        "torch, split": _torch_split(_blocks(size)),
        "ours, fused (BW)": _ours(_blocks(size), split=False, in_hand=False),
        "ours, split (B + W)": _ours(_blocks(size), split=True, in_hand=False),
        "ours, fused, saved tensors in hand": _ours(_blocks(size), split=False, in_hand=True),
        "ours, split, saved tensors in hand": _ours(_blocks(size), split=True, in_hand=True),
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.microbatch_size, size.context, size.width, generator=generator)
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for number in range(-WARM_UP, rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            timed = ways[name](x, torch.ones_like(x))
            if number >= 0:
                found[name].append(timed)
    fused, split = found["torch, fused"], found["torch, split"]
    return [
        [
            f"{size.width}, {size.microbatch_size} x {size.context}",
            name,
            f"{statistics.median(one.forward for one in samples) * 1e3:.2f}",
            f"{statistics.median(one.backward for one in samples) * 1e3:.2f}",
            _ratio([one.backward for one in samples], [one.backward for one in fused]),
            _ratio([one.both for one in samples], [one.both for one in split]),
        ]
        for name, samples in found.items()
    ]


def _ratio(times: list[float], base: list[float]) -> str:
    return f"{statistics.median(one / other for one, other in zip(times, base, strict=True)):.3f}"


def _blocks(size: Size) -> nn.Sequential:
    return nn.Sequential(*build_layers(size.model, 0, range(1, BLOCKS + 1)))


def _ours(module: nn.Module, *, split: bool, in_hand: bool) -> Way:
    """As a run does it; ``in_hand``: as where a budget or the plan needs to have saved tensors counted and movable."""
    ledger = Ledger()
    stage = Stage(module, 1, 3, lambda output, target: output.sum(), 1, torch.device("cpu"), ledger, HostPool())

    def run(x: Tensor, g: Tensor) -> Timed:
        stage.begin([], handled=None if in_hand else ())
        begin = time.thread_time()
        output = stage.forward(0, Parcel(x, ledger.hold(x)), None, 0, split=split, recomputed=False)
        assert isinstance(output, Parcel)
        output.hold.release()
        gradient = Parcel(g, ledger.hold(g))
        half = time.thread_time()
        given = stage.backward(0, gradient)
        if split:
            stage.weight(0)
        end = time.thread_time()
        assert given is not None
        given.hold.release()
        module.zero_grad()
        return Timed(half - begin, end - half)

    return run


def _torch_fused(module: nn.Module) -> Way:
    def run(x: Tensor, g: Tensor) -> Timed:
        begin = time.thread_time()
        output = module(x.detach().requires_grad_())
        half = time.thread_time()
        output.backward(g)
        end = time.thread_time()
        module.zero_grad()
        return Timed(half - begin, end - half)

    return run


def _torch_split(module: nn.Module) -> Way:
    def run(x: Tensor, g: Tensor) -> Timed:
        begin = time.thread_time()
        x = x.detach().requires_grad_()
        output = module(x)
        half = time.thread_time()
        _, groups = stage_backward_input([output], [g], [x], module.parameters())
        stage_backward_weight(module.parameters(), groups)
        end = time.thread_time()
        module.zero_grad()
        return Timed(half - begin, end - half)

    return run
