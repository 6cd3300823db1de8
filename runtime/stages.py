"""A config's model, cut into the stages of one rank."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from optpipe.config import Config
from runtime.boundary import TensorSpec
from runtime.gradients import Copy
from runtime.model import GPTConfig, build_layers, tied_weights


def gpt_config(config: Config) -> GPTConfig:
    """The model's sizes.

    Raises
    ------
    InputError
        The config has no model.
    """
    return GPTConfig(**config.gpt.model_dump())


def layer_ranges(config: Config) -> list[range]:
    """The layers (indices) of each stage; the config's partition must be settled."""
    counts = config.pipeline.partition
    assert counts != "balanced"
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def build_stages(config: Config, rank: int, device: torch.device) -> dict[int, nn.Sequential]:
    """The stages of a rank by number, with the parameters that a single process would start from.

    The layers of a stage keep their numbers along the model as names, so that a checkpoint does not depend on the cut.
    """
    sizes, stages = gpt_config(config), {}
    for stage, layers in enumerate(layer_ranges(config)):
        if config.pipeline.stage_devices[stage] == rank:
            module = nn.Sequential()
            for index, layer in zip(layers, build_layers(sizes, config.train.seed, layers, device), strict=True):
                module.add_module(str(index), layer)
            stages[stage] = module
    return stages


def tied(config: Config) -> list[list[Copy]]:
    """The weights that stages share, as ``gradients.TiedWeights`` takes them."""
    ranges = layer_ranges(config)
    copies = [
        Copy(stage, f"{layer}.{name}")
        for layer, name in tied_weights(gpt_config(config))
        for stage, layers in enumerate(ranges)
        if layer in layers
    ]
    return [copies] if copies else []


def boundaries(config: Config) -> list[TensorSpec]:
    """What each stage hands to the next one, per microbatch: (microbatch size, context, width)."""
    sizes = config.gpt
    spec = TensorSpec((config.batch.microbatch_size, sizes.context, sizes.width))
    return [spec] * (config.pipeline.num_stages - 1)
