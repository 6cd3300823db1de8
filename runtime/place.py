"""Where a rank stands: at which device of the plan, in which of the pipelines that train side by side.

rank        0 1 2 3 | 4 5 6 7      two replicas of a pipeline of two devices, each of which is two ranks that share
replica     0 0 0 0 | 1 1 1 1      tensors. These are neighbours by rank, so on one machine; so are, next to that,
device      0 0 1 1 | 0 0 1 1      neighbours in the pipeline.
tensor      0 1 0 1 | 0 1 0 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from optpipe.config import Config

#: The dimensions of the mesh of ranks, the outermost first.
DIMENSIONS = ("data", "shard", "pipeline", "tensor")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh of all ranks.

    Attributes
    ----------
    devices
        Of the plan.
    pipelines
        How many train side by side, each on a batch of its own: replicas times shards.
    shards
        How many of these keep a part of the weights each; 1: every pipeline has whole ones.
    tensor_parallel
        Ranks that make up a device together.
    rank
        The global rank.
    mesh
        Of all ranks, with the dimensions ``DIMENSIONS``; None where there is one pipeline only.
    """

    devices: int
    pipelines: int
    shards: int
    tensor_parallel: int
    rank: int
    mesh: DeviceMesh | None = None

    @property
    def device(self) -> int:
        """Which device of the plan this rank is, or is a part of."""
        return self.device_of(self.rank)

    @property
    def pipeline(self) -> int:
        """Which of the pipelines side by side this rank is in."""
        return self.rank // (self.devices * self.tensor_parallel)

    @property
    def ranks(self) -> list[int]:
        """The global rank that runs each device of this rank's pipeline."""
        first = self.rank - self.device * self.tensor_parallel
        return list(range(first, first + self.devices * self.tensor_parallel, self.tensor_parallel))

    @property
    def is_sharded(self) -> bool:
        """Whether stages are under FSDP."""
        return self.shards > 1

    @property
    def copies(self) -> int:
        """How many ranks run one stage."""
        return self.pipelines * self.tensor_parallel

    def device_of(self, rank: int) -> int:
        """Which device of the plan a global rank is."""
        return rank // self.tensor_parallel % self.devices

    def of_first(self, rows: Sequence[Row]) -> list[Row]:
        """Of one entry a rank those of the first pipeline, one a device."""
        return list(rows[: self.devices * self.tensor_parallel : self.tensor_parallel])

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in a dimension only; None for all ranks of a single pipeline."""
        return None if self.mesh is None else self.mesh.get_group(dimension)

    @classmethod
    def of(cls, rank: int, config: Config, device: torch.device) -> Place:
        """The place of a rank; all ranks call it together.

        Parameters
        ----------
        rank
            Global.
        config
            The world has its ``num_ranks``.
        device
            Where the rank computes.
        """
        devices, train = config.pipeline.devices, config.train
        mesh = None
        if config.num_ranks > devices:
            shape = (train.replicas, train.shards, devices, train.tensor_parallel)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
        return cls(devices, train.pipelines, train.shards, train.tensor_parallel, rank, mesh)
