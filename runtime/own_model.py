"""Your own model as a scheduling problem: a list of layers, cut into stages and measured in this process.

``optpipe profile`` measures a config's model in place, on all its ranks at once. Here one process runs the stages one
after another, which is simpler, needs no config, and leaves out what ranks do to each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe import partition
from optpipe.errors import InputError
from optpipe.problem import Problem
from runtime import batch_norm
from runtime.accounting import Ledger
from runtime.buffers import unmoved
from runtime.host_memory import HostPool
from runtime.stage import LossFn, Stage, measure_bytes, own_random_numbers, parameters_of
from runtime.transport import Parcel

_WARM_UP, _REPEATS = 2, 5


class Measured(NamedTuple):
    """A model as a problem, and how many layers each stage holds."""

    problem: Problem
    partition: list[int]


def measure(
    layers: Sequence[nn.Module],
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    *,
    stage_devices: Sequence[int],
    microbatches: int,
    counts: Sequence[int] | None = None,
    budget_bytes: int | None = None,
    bandwidth: float | None = None,
    message_ms: float = 0.0,
    name: str = "",
) -> Measured:
    """Cut a model into stages and measure each of them.

    Parameters
    ----------
    layers
        The model: each takes one tensor, the output of the one before, and gives one. All on the device of ``inputs``.
        Linear, Embedding and BatchNorm layers in them are converted in place, as the executor does it.
    loss_fn
        ``loss_fn(output, targets)``: the scalar loss of one microbatch.
    inputs, targets
        Of one microbatch; any values will do.
    stage_devices
        The device of each stage along the model: ``(0, 1)``, or ``(0, 1, 1, 0)`` for a V.
    microbatches
        How many a step has.
    counts
        Layers of each stage; default so that the largest device load is least.
    budget_bytes
        Activation memory of a device; None: no limit.
    bandwidth
        Bytes per second between a device and the host, each way; None: nothing is offloaded.
    message_ms
        Time of a message between stages, ms.

    Raises
    ------
    InputError
        The counts do not fit the layers and stages.
    """
    layers = list(layers)
    parts = [*layers, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    with batch_norm.run_again(), unmoved(parts), own_random_numbers(inputs.device):  # what is measured is no training
        if counts is None:
            if len(layers) < len(stage_devices):
                raise InputError("", "layers", f"are {len(layers)}, expected at least one for each stage")
            counts = partition.balanced(_layer_costs(layers, loss_fn, inputs, targets), stage_devices)
        stages = [nn.Sequential(*part) for part in cut(layers, counts, len(stage_devices))]
        found, x = [], inputs
        for number, (module, device) in enumerate(zip(stages, stage_devices, strict=True)):
            last = number == len(stages) - 1
            stage = _Measurement(module, number, len(stages), loss_fn, x, targets if last else None)
            found.append({"device": device, **stage.figures(bandwidth)})
            x = _handed_on(module, x)
    devices = max(stage_devices) + 1
    problem = Problem.model_validate(
        {
            "name": name,
            "num_microbatches": microbatches,
            "devices": [{"memory_bytes": budget_bytes}] * devices,
            "stages": found,
            "comm_ms": [message_ms if a != b else 0.0 for a, b in pairwise(stage_devices)],
            "channels": [
                {"name": f"{way}:{d}", "transfers": [{"device": d, "direction": way}]}
                for d in range(devices if bandwidth else 0)
                for way in ("d2h", "h2d")
            ],
        }
    )
    return Measured(problem, list(counts))


def cut(layers: Sequence[Any], counts: Sequence[int], stages: int) -> list[Sequence[Any]]:
    """Layers in runs of these lengths.

    Raises
    ------
    InputError
        The counts do not add up, or are not one a stage.
    """
    if len(counts) != stages or min(counts, default=0) < 1 or sum(counts) != len(layers):
        raise InputError(
            "", "partition", f"is {list(counts)}, expected {stages} counts that add up to {len(layers)} layers"
        )
    ends = list(accumulate(counts))
    return [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]


class _Measurement:
    """One stage on one microbatch."""

    def __init__(
        self, module: nn.Module, index: int, stages: int, loss_fn: LossFn, x: Tensor, target: Tensor | None
    ) -> None:
        self.module, self.index, self.stages, self.loss_fn = module, index, stages, loss_fn
        self.x, self.target = x, target

    def figures(self, bandwidth: float | None) -> dict[str, Any]:
        """Times and sizes as the problem names them."""
        held = measure_bytes(self.module, self.index, self.stages, self.x, self.target, self.loss_fn)
        split, fused = self._median(split=True), self._median(split=False)
        found = {
            "forward_ms": split[0],
            "backward_ms": split[1],
            "weight_ms": split[2],
            "fused_backward_ms": fused[1],
            "activation_bytes": held.activation_bytes,
            "weight_context_bytes": held.weight_context_bytes,
            "checkpoint_bytes": held.checkpoint_bytes,
        }
        if bandwidth:
            moved = held.offloadable_bytes / bandwidth * 1e3
            found |= {"offloadable_bytes": held.offloadable_bytes, "offload_ms": moved, "reload_ms": moved}
        return found

    def cost(self) -> float:
        """Forward and backward, ms."""
        return sum(self._median(split=False)[:2])

    def _median(self, *, split: bool) -> list[float]:
        """Of F, B or BW, and W, ms. Gradients are left as they were."""
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(self.module, self.loss_fn)]
        try:
            rows = [self._once(split=split) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def _once(self, *, split: bool) -> tuple[float, float, float]:
        """Times of F, of B or BW, and of W, ms."""
        ledger = Ledger()
        stage = Stage(self.module, self.index, self.stages, self.loss_fn, 1, self.x.device, ledger, HostPool())
        batch = (self.x if self.index == 0 else None, self.target)
        stage.begin([tensor for tensor in batch if tensor is not None])
        source = self.x if self.index == 0 else Parcel(self.x, ledger.hold(self.x))
        begin = self._now()
        output = stage.forward(0, source, self.target, 0, split=split, recomputed=False)
        forward = self._now() - begin
        gradient = None
        if isinstance(output, Parcel):
            value = torch.ones_like(output.tensor)
            gradient = Parcel(value, ledger.hold(value))
            output.hold.release()
        begin = self._now()
        given = stage.backward(0, gradient)
        backward = self._now() - begin
        if given is not None:
            given.hold.release()
        begin = self._now()
        if split:
            stage.weight(0)
        return forward, backward, self._now() - begin

    def _now(self) -> float:
        """ms, with everything done that was asked of the device."""
        if self.x.device.type == "cuda":
            torch.cuda.synchronize(self.x.device)
        return time.perf_counter() * 1e3


def _layer_costs(layers: Sequence[nn.Module], loss_fn: LossFn, inputs: Tensor, targets: Tensor) -> list[float]:
    """Forward and backward of each layer, ms."""
    costs, x = [], inputs
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1
        measurement = _Measurement(layer, number, len(layers), loss_fn, x, targets if last else None)
        costs.append(measurement.cost())
        x = _handed_on(layer, x)
    return costs


def _handed_on(module: nn.Module, x: Tensor) -> Tensor:
    """What the next stage gets, laid out as in a run, where it is received into memory of its own."""
    with torch.no_grad():
        return module(x).detach().clone(memory_format=torch.contiguous_format)
