"""What ranks do in tests of the launcher: functions that a rank imports by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from optpipe.errors import Infeasible, InputError
from runtime.worker import Rank


def add_up(rank: Rank, value: int) -> dict[str, Any]:
    """All ranks add their number to ``value``; each sends its own."""
    total = torch.tensor(rank.rank + value)
    dist.all_reduce(total)
    rank.send({"rank": rank.rank})
    return {"total": int(total), "threads": torch.get_num_threads(), "pid": os.getpid()}


def sleep(rank: Rank) -> None:
    """Say who it is, and do not end."""
    rank.send({"pid": os.getpid()})
    time.sleep(100)


def fail_alone(rank: Rank) -> None:
    """Rank 0 fails after its last word to the others, who have ended."""
    dist.barrier()
    if rank.rank == 0:
        time.sleep(0.5)
        raise InputError("out.json", "", "cannot be written: No space left on device")


def fail(rank: Rank, how: str) -> None:
    """Rank 1 fails while the others wait for it."""
    dist.barrier()
    if rank.rank == 1:
        if how == "error":
            raise ValueError("boom\nwith details")
        if how == "input":
            raise InputError("some.yaml", "some.key", "is wrong")
        if how == "infeasible":
            raise Infeasible("does not fit")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "gone":
            os._exit(0)
        if how == "unjson":
            return torch.nn  # type: ignore[return-value]
    if how == "asleep":
        if rank.rank == 1:
            raise ValueError("boom")
        rank.send({"pid": os.getpid()})
        time.sleep(100)
    dist.barrier()
