"""The transport that fits a device and a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optpipe.problem import Problem
from runtime.accounting import Ledger
from runtime.boundary import Boundary
from runtime.events import Failure
from runtime.nccl import NcclTransport
from runtime.program import Program
from runtime.transport import GlooTransport, LocalTransport


def connect(
    problem: Problem,
    program: Program,
    boundaries: Sequence[Boundary],
    device: torch.device,
    ledger: Ledger,
    failure: Failure,
    ranks: Sequence[int],
    timeout_s: float,
) -> LocalTransport:
    """The transport of one device's program; all ranks of the world call it together (on NCCL it connects the
    links).

    Parameters
    ----------
    problem, program
        Whose stages and messages.
    boundaries
        What stage s hands to s+1.
    device
        Where this rank's tensors live.
    ledger, failure
        Count the buffers; the first thing that went wrong on this rank.
    ranks
        The global rank that runs each device.
    timeout_s
        The longest wait for a message (gloo).
    """
    if len(ranks) == 1:
        return LocalTransport()
    owners = [stage.device for stage in problem.stages]
    parts = (program, owners, boundaries, device, ledger, failure)
    if device.type == "cuda":
        return NcclTransport(*parts, ranks=ranks)
    # The memory manager, where there is a budget to keep, wants to know what is here.
    asks = problem.devices[program.device].memory_bytes is not None
    m = problem.num_microbatches
    return GlooTransport(*parts, ranks=ranks, timeout_s=timeout_s, num_microbatches=m, asks=asks)
