"""What single layers cost, to cut the model into stages before anything of it is measured in place."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from optpipe.config import Config
from runtime.data import VOCABULARY
from runtime.model import build_layers, loss_fn
from runtime.parallel import parallelize
from runtime.place import Place
from runtime.stages import gpt_config

_WARM_UP, _REPEATS = 2, 7


def layers(config: Config, device: torch.device, place: Place) -> list[float]:
    """Forward and backward of each layer of the model, ms per microbatch; ranks that share tensors call it together.

    The blocks are alike, so one stands for all of them.
    """
    sizes = gpt_config(config)
    kinds = [0, 1, sizes.num_layers - 1]
    embedding, block, head = build_layers(sizes, config.train.seed, kinds, device)
    parallelize([nn.Sequential(block)], place, sharded=False)
    shape = (config.batch.microbatch_size, sizes.context)
    tokens = torch.randint(VOCABULARY, shape, device=device)
    x = torch.randn(*shape, sizes.width, device=device, requires_grad=True)
    cost = [_cost(embedding, tokens, None), _cost(block, x, None), _cost(head, x, tokens)]
    return [cost[0], *[cost[1]] * sizes.layers, cost[2]]


def _cost(layer: nn.Module, x: Tensor, target: Tensor | None) -> float:
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        _wait_for(x.device)
        start = time.perf_counter()
        output = layer(x)
        if target is not None:
            output = loss_fn(output, target)
        output.backward(torch.ones_like(output))
        _wait_for(x.device)
        times.append((time.perf_counter() - start) * 1e3)
        layer.zero_grad(set_to_none=True)
        x.grad = None
    return statistics.median(times[_WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
