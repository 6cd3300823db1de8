"""A stage of the built-in model over several ranks, by torch's own parts: tensor parallel layers, and FSDP2.

    attention    query_key_value by rows (whole heads), attention_out by columns
    perceptron   mlp_in by rows, mlp_out by columns

Each of the two halves of a block ends in one sum over the ranks of a tensor parallel group (Megatron-LM,
arXiv:1909.08053, section 3). Norms, the embedding and the head are whole on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from runtime.model import Block
from runtime.place import Place


def parallelize(stages: Iterable[nn.Sequential], place: Place, *, sharded: bool = True) -> None:
    """Spread stages over the ranks of a mesh, in place; all ranks call it together.

    Parameters
    ----------
    stages
        Whole ones, with the same numbers on all ranks that hold them.
    place
        Of this rank. Without a mesh nothing happens.
    sharded
        Whether stages are to be under FSDP where the place asks for it.
    """
    if place.mesh is None:
        return
    for stage in stages:
        if place.tensor_parallel > 1:
            share_heads(stage, place.mesh["tensor"])
        if sharded and place.is_sharded:
            shard(stage, place.mesh)


def share_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a mesh of one dimension its heads and its part of the perceptron, in all blocks of a module."""
    for block in module.modules():
        if isinstance(block, Block):
            parallelize_module(
                block,
                mesh,
                {
                    "query_key_value": ColwiseParallel(),
                    "attention_out": RowwiseParallel(),
                    "mlp_in": ColwiseParallel(),
                    "mlp_out": RowwiseParallel(),
                },
            )


def shard(stage: nn.Sequential, mesh: DeviceMesh) -> None:
    """FSDP2 over the dimension 'shard'; with replicas, which 'data' counts, over both (HSDP). Layer by layer, so that
    what is gathered or summed at once is small."""
    ranks = mesh["shard"] if mesh["data"].size() == 1 else mesh["data", "shard"]
    for layer in stage:
        fully_shard(layer, mesh=ranks, reshard_after_forward=False)
    fully_shard(stage, mesh=ranks, reshard_after_forward=False)
