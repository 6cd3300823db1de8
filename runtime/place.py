"""Where a rank stands: in which replica of the pipeline, at which device of it.

rank      0 1 2 3 | 4 5 6 7      two replicas of a pipeline of four devices:
device    0 1 2 3 | 0 1 2 3      neighbours in the pipeline are neighbours by rank, so on one machine
replica   0 0 0 0 | 1 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Place:
    """A rank's place.

    Attributes
    ----------
    replica, replicas
        Which pipeline, of how many.
    device, devices
        Which device of the plan, of how many.
    pipeline, across
        The ranks of this pipeline, and those that run the same device; None where there is one pipeline only.
    """

    replica: int
    replicas: int
    device: int
    devices: int
    pipeline: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> list[int]:
        """The global rank that runs each device of this pipeline."""
        return list(range(self.replica * self.devices, (self.replica + 1) * self.devices))

    @classmethod
    def of(cls, rank: int, devices: int, replicas: int, device: torch.device) -> Place:
        """The place of a rank; all ranks call it together.

        Parameters
        ----------
        rank
            Global.
        devices, replicas
            The world has their product of ranks.
        device
            Where the rank computes.
        """
        replica, number = divmod(rank, devices)
        if replicas == 1:
            return cls(0, 1, number, devices)
        mesh = init_device_mesh(device.type, (replicas, devices), mesh_dim_names=("data", "pipeline"))
        return cls(replica, replicas, number, devices, mesh.get_group("pipeline"), mesh.get_group("data"))
