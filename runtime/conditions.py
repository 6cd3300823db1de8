"""What a profile was taken on, and what makes its figures doubtful."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from optpipe.profile import TrialProfile
from runtime import machine
from runtime.worker import Rank

#: Wall over CPU time of compute above which a machine counts as loaded.
LOADED_ABOVE = 1.1
#: A trial whose step is further than this share from what its own figures predict makes a warning.
OFF_BY = 0.1


def warnings(
    load: Sequence[float | None],
    late: float,
    trials: Sequence[TrialProfile],
    crowding: float = 1.0,
    pipelines: int = 1,
) -> list[str]:
    """What makes the figures doubtful, in words.

    Parameters
    ----------
    load
        Wall over CPU time of compute, by device; None: not known.
    late
        The share of paced copies that missed their pace.
    trials
        Steps as predicted and as measured.
    crowding
        Threads of all ranks on this machine over its cores; above 1 the ranks slow each other down by that much.
    pipelines
        That train side by side.
    """
    found = []
    if pipelines > 1:
        found.append(
            f"{pipelines} pipelines side by side (train.replicas, train.shards): what they exchange, weights and "
            "gradients, is not measured, and comes on top of a plan's step"
        )
    expected = max(1.0, crowding)
    if crowding > 1.0:
        found.append(f"the ranks have {crowding:.3g} threads a core: times hold while all ranks are busy")
    busy = [(ratio, device) for device, ratio in enumerate(load) if ratio and ratio > LOADED_ABOVE * expected]
    if busy:
        ratio, device = max(busy)
        found.append(
            f"the machine was loaded: compute took up to {ratio:.2f} times its CPU time (device {device}), "
            f"expected {expected:.3g}: times are too long"
        )
    if late > 0.0:
        found.append(f"{late:.0%} of the copies missed the pace of offload.bandwidth_bytes_per_s")
    found += [
        f"{trial.name}: a step took {trial.measured_ms:.4g} ms, but its ops add up to {trial.predicted_ms:.4g} ms"
        for trial in trials
        if abs(trial.measured_ms / trial.predicted_ms - 1) > OFF_BY
    ]
    return found


def crowding(rank: Rank) -> float:
    """Compute threads of this machine's ranks over its cores; of GPUs none."""
    if rank.device.type == "cuda":
        return 1.0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
    return here * torch.get_num_threads() / machine.cores()


def facts(rank: Rank) -> dict[str, Any]:
    """The machine, for a profile's file."""
    found: dict[str, Any] = {
        "device": rank.device.type,
        "processor": platform.processor() or platform.machine(),
        "cores": machine.cores(),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if rank.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(rank.device)
    return found
