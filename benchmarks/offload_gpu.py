"""Offloads on a GPU: one rank with several stages, activations on their way to the host and back while it computes.

    python benchmarks/offload_gpu.py             the table, kept in benchmarks/results/offload_gpu.md
    python benchmarks/offload_gpu.py --cpu       a tiny model on the CPU, to see that it works; nothing is kept

The plan is made from what is measured here: times of each stage inside a schedule like the one that runs, its bytes,
and the speed of the host link. Three things are to come out: a step that takes what the plan says (within 2 %),
transfers at the link's speed (at least 90 % of it), and memory as planned (the allocator's peak within 3 %).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `runtime` is the package, not a file beside this one

import torch
from torch import nn

from benchmarks.tables import Cell, markdown, percent, show, write_markdown
from optpipe import memory, metrics, semantics
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from runtime.boundary import TensorSpec
from runtime.executor import Executor, StepResult
from runtime.links import HostLink, HostLinks
from runtime.model import GPTConfig, build_layers, loss_fn
from runtime.samples import Sample, Trace, durations
from runtime.stage import StageBytes, measure_bytes
from runtime.trial import Trial
from tests.pipelines import Order, plan_of_orders

RESULTS = Path(__file__).resolve().parent / "results"
HEADER = (
    "offloaded",
    "planned ms",
    "step ms",
    "over plan",
    "of the link's speed",
    "overlapped",
    "planned GB",
    "peak GB",
    "over plan",
    "host GB",
)
WARM_UP, STEPS = 3, 10


@dataclass(frozen=True)
class Size:
    """The model and its batch."""

    model: GPTConfig
    stages: int
    microbatches: int
    sequences: int


GPU = Size(GPTConfig(layers=8, width=2048, heads=16, context=1024), stages=4, microbatches=8, sequences=4)
TINY = Size(GPTConfig(layers=2, width=32, heads=2, context=16), stages=2, microbatches=4, sequences=2)


class Bench:
    """One model on one device, and what is measured of it.

    Parameters
    ----------
    size
        Of model and batch.
    device
        Where it lives.
    pace
        Bytes per second of the host link of a CPU device.
    """

    def __init__(self, size: Size, device: torch.device, pace: float | None = None) -> None:
        self.size, self.device, self.pace = size, device, pace
        n, layers = size.stages, size.model.num_layers
        self.stages: dict[int, nn.Module] = {
            s: nn.Sequential(*build_layers(size.model, 0, range(layers * s // n, layers * (s + 1) // n), device))
            for s in range(n)
        }
        self.spec = TensorSpec((size.sequences, size.model.context, size.model.width))
        generator = torch.Generator().manual_seed(0)
        shape = (size.microbatches, size.sequences, size.model.context)
        tokens = torch.randint(size.model.vocabulary, shape, generator=generator).to(device)
        self.inputs, self.targets = list(tokens), list(tokens.flip(-1))

    def bytes_of(self) -> list[StageBytes]:
        """Of every stage."""
        found = []
        for s, module in self.stages.items():
            x = self.inputs[0] if s == 0 else torch.randn(self.spec.shape, device=self.device)
            found.append(measure_bytes(module, s, self.size.stages, x, self.targets[0], loss_fn))
        return found

    def run(self, plan: Plan, steps: int) -> tuple[list[StepResult], list[int]]:
        """Steps of a plan behind the warm-up, and the allocator's peak above what lay there before each, bytes."""
        results, peaks = [], []
        with Executor(
            plan,
            self.stages,
            [self.spec] * (self.size.stages - 1),
            loss_fn,
            device=self.device,
            bandwidth=(self.pace, self.pace),
        ) as executor:
            for number in range(WARM_UP + steps):
                before = self._reset_peak()
                result = executor.step(self.inputs, self.targets, number=number)
                peak = torch.cuda.max_memory_allocated() - before if before is not None else result.peak_bytes
                for module in self.stages.values():
                    module.zero_grad(set_to_none=False)  # the gradients' memory is there in every step
                if number >= WARM_UP:
                    results.append(result)
                    peaks.append(peak)
        return results, peaks

    def _reset_peak(self) -> int | None:
        """Start the allocator's peak anew; what is allocated now. None on a CPU device, where the ledger counts."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def link(self) -> HostLink:
        """The host link's speed, by copies of nothing else."""
        host = HostLinks(self.device, (self.pace, self.pace), 256 << 20 if self.device.type == "cuda" else 1 << 20)
        found = host.measure(True, 10)
        host.close()
        assert found is not None
        return found

    def problem(self, offloads: bool) -> Problem:
        """The problem that this device poses, from a trial of 1F1B in place."""
        size, link, sizes = self.size, self.link(), self.bytes_of()
        places = [0] * size.stages
        results, _ = self.run(Trial(places, size.microbatches, split=False).plan(), STEPS)
        times = durations([_trace(result) for result in results], places, with_host=self.device.type == "cpu")
        stages = [
            {
                "device": 0,
                "forward_ms": statistics.median(times[s, Kind.F]),
                "backward_ms": statistics.median(times[s, Kind.BW]) / 2,
                "weight_ms": statistics.median(times[s, Kind.BW]) / 2,
                "activation_bytes": held.activation_bytes,
                "weight_context_bytes": held.weight_context_bytes,
                "offloadable_bytes": held.offloadable_bytes,
                "offload_ms": held.offloadable_bytes / link.d2h * 1e3,
                "reload_ms": held.offloadable_bytes / link.h2d * 1e3,
            }
            for s, held in enumerate(sizes)
        ]
        ways = ("d2h", "h2d") if offloads else ()
        return Problem.model_validate(
            {
                "name": "one GPU",
                "num_microbatches": size.microbatches,
                "devices": [{"memory_bytes": None}],
                "stages": stages,
                "comm_ms": [0.0] * (size.stages - 1),
                "channels": [{"name": way, "transfers": [{"device": 0, "direction": way}]} for way in ways],
            }
        )


def gpipe_order(size: Size) -> Order:
    """All forwards, then all backwards, microbatch by microbatch."""
    forwards = [(Kind.F, s, j) for j in range(size.microbatches) for s in range(size.stages)]
    return forwards + [(Kind.BW, s, j) for j in range(size.microbatches) for s in reversed(range(size.stages))]


def plan_of(problem: Problem, size: Size, offloaded: int) -> Plan:
    """GPipe in which the first ``offloaded`` microbatches go to the host."""
    pairs = {(s, j) for s in range(size.stages) for j in range(offloaded)}
    return plan_of_orders(problem, [gpipe_order(size)], pairs)


def _trace(result: StepResult) -> Trace:
    samples = (
        Sample(
            op.kind,
            op.stage,
            op.microbatch,
            op.start,
            op.end,
            op.cpu_ms,
            op.late_ms,
            op.memory_wait_ms,
            op.message_wait_ms,
        )
        for op in result.ops
    )
    return Trace(tuple(samples), result.step_ms)


def span_ms(result: StepResult) -> float:
    """From the first op's start to the last one's end, on the device's clock."""
    return max(op.end for op in result.ops) - min(op.start for op in result.ops)


def speed_share(result: StepResult, problem: Problem) -> float | None:
    """Transfers as fast as the link alone would do them, over what they took."""
    moves = [op for op in result.ops if op.kind in (Kind.O, Kind.R)]
    if not moves:
        return None
    rate = {
        kind: [stage.offloadable_bytes / ms for stage in problem.stages for ms in [getattr(stage, name)]]
        for kind, name in ((Kind.O, "offload_ms"), (Kind.R, "reload_ms"))
    }
    return sum(op.bytes / rate[op.kind][op.stage] for op in moves) / sum(op.end - op.start for op in moves)


def overlap_share(result: StepResult) -> float | None:
    """The share of the transfers' time during which the device computes."""
    moves = [op for op in result.ops if op.kind in (Kind.O, Kind.R)]
    computes = [op for op in result.ops if op.kind not in (Kind.O, Kind.R)]
    if not moves:
        return None
    both = sum(max(0.0, min(m.end, c.end) - max(m.start, c.start)) for m in moves for c in computes)
    return both / sum(m.end - m.start for m in moves)


def table(size: Size, device: torch.device, pace: float | None = None, steps: int = STEPS) -> list[list[Cell]]:
    """A row for each share of offloaded microbatches."""
    bench = Bench(size, device, pace)
    problem = bench.problem(offloads=True)
    rows: list[list[Cell]] = []
    for offloaded in (0, size.microbatches // 4, size.microbatches // 2):
        plan = plan_of(problem, size, offloaded)
        results, peaks = bench.run(plan, steps)
        rows.append(row(f"{offloaded} of {size.microbatches}", plan, results, peaks))
    return rows


def row(name: str, plan: Plan, results: Sequence[StepResult], peaks: Sequence[int]) -> list[Cell]:
    """Medians over the steps; of the peaks the largest."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    planned_ms, planned = semantics.makespan(plan.ops), memory.peaks(plan.problem, plan.ops)[0]
    step = statistics.median(span_ms(result) for result in results)
    assert metrics.measure(plan.problem, plan.ops).makespan_ms == planned_ms
    return [
        name,
        planned_ms,
        step,
        percent(step / planned_ms - 1),
        percent(median([speed_share(result, plan.problem) for result in results]), 1),
        percent(median([overlap_share(result) for result in results]), 1),
        planned / 1e9,
        max(peaks) / 1e9,
        percent(max(peaks) / planned - 1),
        max(result.host_peak_bytes for result in results) / 1e9,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Offloads on a GPU against their plan.")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU; nothing is kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        print("skipped: torch finds no GPU here (--cpu tries the benchmark on a tiny model)")
        return
    device = torch.device("cpu") if given.cpu else torch.device("cuda", torch.cuda.current_device())
    size = TINY if given.cpu else GPU
    rows = table(size, device, pace=1e9 if given.cpu else None)
    show("One rank, GPipe, offloads beside compute", HEADER, rows)
    if not given.cpu:
        about = (
            f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}. GPT, {size.model.layers} blocks, "
            f"width {size.model.width}, context {size.model.context}, {size.microbatches} microbatches of "
            f"{size.sequences}, float32, {size.stages} stages on one rank. Peaks are the allocator's, above weights "
            "and gradients; they contain the workspace of the op that runs, which no plan counts.\n"
        )
        write_markdown(given.output / "offload_gpu.md", "Offloads on a GPU", [about, markdown(HEADER, rows)])


if __name__ == "__main__":
    main()
