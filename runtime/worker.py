"""What one rank does first and last: join the others, run the work, say how it ended.

Started by ``runtime.launch`` as ``python -m runtime.worker``. Its task comes as one JSON line on stdin; what it has to
say goes as JSON lines into a pipe. Stdin stays open for as long as the launcher lives: when it ends, so does the rank.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import torch
import torch.distributed as dist

from optpipe.errors import InputError, OptPipeError
from runtime import gather, machine
from runtime.events import PeerLost

#: A rank that waits this long for another one gives up.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Attributes
    ----------
    rank, world_size
        Its number and how many there are.
    device
        Where it computes.
    send
        Hands a JSON object to the launcher's ``on_message``.
    """

    rank: int
    world_size: int
    device: torch.device
    send: Callable[[dict[str, Any]], None]


def join(rank: int, world_size: int, device: torch.device, store: Any = None) -> torch.device:
    """Set up this process: its threads, its GPU, its place among the ranks (by ``store``, or torchrun's variables).

    Returns
    -------
    torch.device
        The device; of ``cuda`` the one with this process's number on its machine.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, machine.cores() // local))
    if device.type == "cuda":
        if device == torch.device("cuda"):
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    # Small things (norms, losses, clocks) go by gloo on either device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return device


def lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone: never the first cause."""
    words = ("connection closed by peer", "connection reset", "connection refused", "broken pipe", "read error")
    link: BaseException | None = error
    while link is not None:
        text = str(link).lower()
        if isinstance(link, dist.DistError | PeerLost) or any(word in text for word in words):
            return True
        link = link.__cause__
    return False


def report_of(error: BaseException) -> dict[str, Any]:
    """An error as the launcher needs it to raise it again."""
    report: dict[str, Any] = {
        "kind": type(error).__name__ if isinstance(error, OptPipeError) else "",
        "message": str(error) if isinstance(error, OptPipeError) else _one_line(error),
        "lost_peer": lost_peer(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    if isinstance(error, InputError):
        report |= {"file": error.file, "key": error.key, "message": error.message}
    return report


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _end_with_the_launcher(stdin: IO[str]) -> None:
    while stdin.read(4096):
        pass
    os._exit(1)


def main() -> None:
    """Run the task that stdin names."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_launcher, args=(sys.stdin,), daemon=True).start()
    pipe = os.fdopen(task["pipe"], "w", buffering=1, encoding="utf-8")
    lock = threading.Lock()

    def say(kind: str, value: Any) -> None:
        line = json.dumps({kind: value})
        with lock:
            pipe.write(line + "\n")

    met = False
    try:
        rank, world_size = task["rank"], task["world_size"]
        device = torch.device("cuda", rank) if task["device"] == "cuda" else torch.device("cpu")
        address = "127.0.0.1", task["port"]
        store = dist.TCPStore(*address, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
        join(rank, world_size, device, store)
        gather.barrier()  # no one begins before all have met: a meeting that fails can be held again
        met = True
        work = getattr(importlib.import_module(task["module"]), task["function"])
        me = Rank(rank, world_size, device, lambda message: say("message", message))
        say("result", work(me, **task["arguments"]))
        # All reach this point or none: whoever leaves early closes the others' connections under their last messages.
        gather.barrier()
    except BaseException as error:
        say("error", report_of(error) | {"met": met})
        # The others learn of it from the launcher; a clean-up that waits for them could last for ever.
        pipe.flush()
        os._exit(1)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: a thread that is still inside torch then would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
