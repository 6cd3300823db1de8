"""Ranks: start one process a device here, or take the place that torchrun gave us.

Own processes rather than torch's elastic launcher: its word on the first cause goes by whole seconds, so a rank that
the system kills is often taken for one that lost its peer, and it hands back neither error types nor messages while
the work runs. Nothing is pickled, and the caller's main module is not imported again: the ranks are started with the
name of a function and JSON arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from optpipe.errors import Infeasible, InputError, RunFailed
from runtime import gather, worker
from runtime.worker import Rank

Message = dict[str, Any]
#: Seconds that the other ranks have to say what they saw, after the first one failed.
GRACE_S = 1.0
#: Seconds that a rank of torchrun which lost another one waits before it says so: what failed first is to be seen, and
#: to end the others, before.
LOST_PEER_WAIT_S = 3.0
#: Seconds between the request to end and the kill.
KILL_AFTER_S = 3.0
#: How often ranks are started that did not all get to meet: gloo's connections may pass each other under load.
STARTS = 3
#: What gloo says then.
_NOT_CONNECTED = "connectFullMesh failed"


def under_torchrun() -> bool:
    """Whether torchrun (or the like) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_chief() -> bool:
    """Whether this process prints and writes files: rank 0, or the one that launches."""
    return int(os.environ.get("RANK", "0")) == 0


def leave() -> None:
    """The end of a program that was a rank of torchrun's and is done; elsewhere nothing. Not by way of the
    interpreter's end: a thread that is still inside torch then would abort the process."""
    if under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def resolve_device(device: str, ranks: int, file: str = "") -> str:
    """'cpu' or 'cuda' for a config's ``device``; ``ranks``: how many of this machine's GPUs a run needs.

    Raises
    ------
    InputError
        'cuda' is asked for, but there are not enough GPUs.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun() else ranks
    if device == "cuda" and found < needed:
        raise InputError(file, "device", f"cuda needs {needed} GPUs, one a device, but torch finds {found} here")
    if device == "auto":
        return "cuda" if found >= needed > 0 else "cpu"
    return device


def launch(
    work: Callable[..., Any],
    arguments: Message,
    ranks: int,
    device: str,
    on_message: Callable[[Message], None] | None = None,
) -> Any:
    """Run ``work(rank, **arguments)`` on every rank; what rank 0 returned.

    Parameters
    ----------
    work
        A module's function; its first argument is a ``Rank``. What it returns must be JSON.
    arguments
        JSON.
    ranks
        How many; under torchrun it must be the world's size.
    device
        'cpu' or 'cuda'.
    on_message
        Called here with each object that a rank sends (under torchrun: that rank 0 sends).

    Returns
    -------
    Any
        The value of rank 0; under torchrun that of this rank.

    Raises
    ------
    InputError, Infeasible, RunFailed
        As raised on the rank that failed first. Any other error there is a ``RunFailed`` that carries the rank's
        traceback as a note. All ranks have ended.
    """
    if under_torchrun():
        return _join_and_work(work, arguments, ranks, device, on_message)
    with _terminated_in_order():
        starts = 0
        while True:
            crew = _Crew(work, arguments, ranks, device, on_message or (lambda message: None))
            starts += 1
            try:
                return crew.run()
            except RunFailed:
                if starts == STARTS or not crew.did_not_meet:
                    raise
            finally:
                crew.end()


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """A request to end (SIGTERM) raises inside, so that the ranks end first. Others' handlers are left alone."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _join_and_work(
    work: Callable[..., Any],
    arguments: Message,
    ranks: int,
    device: str,
    on_message: Callable[[Message], None] | None,
) -> Any:
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != ranks:
        raise InputError(
            "",
            "torchrun",
            f"started {world_size} ranks, but the run needs {ranks}: one a device of each replica and shard, "
            "times train.tensor_parallel",
        )
    local = worker.join(number, world_size, torch.device(device))

    def send(message: Message) -> None:
        if number == 0 and on_message is not None:
            on_message(message)

    with _member():
        try:
            result = work(Rank(number, world_size, local, send), **arguments)
            gather.barrier()
            return result
        except Exception as error:
            if not worker.lost_peer(error):
                get_error_handler().record_exception(error)  # for torchrun's report
                raise
            time.sleep(LOST_PEER_WAIT_S)
            if isinstance(error, RunFailed):
                raise
            raise RunFailed(f"rank {number} lost another rank: {error}") from error


@contextlib.contextmanager
def _member() -> Iterator[None]:
    """What a member of the world does, which it leaves then."""
    try:
        yield
    except BaseException:
        # Destroyed, NCCL would wait for what is enqueued; without the other ranks that never ends, and no one would
        # hear of the error.
        with contextlib.suppress(Exception):
            _abort_process_group()
        raise
    dist.destroy_process_group()


@dataclass
class _Process:
    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    text: bytes = b""
    error: Message | None = None
    ended: float | None = None  # when its pipe closed
    result: Any = None
    done: bool = False


@dataclass
class _Crew:
    """The processes of one launch."""

    work: Callable[..., Any]
    arguments: Message
    ranks: int
    device: str
    on_message: Callable[[Message], None]
    processes: list[_Process] = field(default_factory=list)

    def run(self) -> Any:
        """Start them, pass on what they say, until all are done or one fails."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for number in range(self.ranks):
            self.processes.append(self._start(number, store.port))
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.pipe, selectors.EVENT_READ, process)
            deadline: float | None = None
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                for key, _ in selector.select(0.1):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                failed = any(p.error is not None or (p.ended is not None and not p.done) for p in self.processes)
                if failed and deadline is None:
                    deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            if process.done and deadline is None:
                process.process.wait()
        if deadline is not None:
            raise self._first_cause()
        return self.processes[0].result

    @property
    def did_not_meet(self) -> bool:
        """Whether all that failed is that gloo could not connect the ranks: no one has begun with the work."""
        failed = [p for p in self.processes if p.error is not None or (p.ended is not None and not p.done)]
        errors = [p.error for p in failed if p.error is not None and not p.error["met"]]
        return len(errors) == len(failed) and any(_NOT_CONNECTED in error["message"] for error in errors)

    def end(self) -> None:
        """End whatever still runs."""
        running = [p.process for p in self.processes if p.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + KILL_AFTER_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for p in self.processes:
            os.close(p.pipe)
            with contextlib.suppress(OSError):
                p.process.stdin.close()  # type: ignore[union-attr]

    def _start(self, number: int, port: int) -> _Process:
        module, function = self.work.__module__, self.work.__qualname__
        if module == "__main__" or "." in function:
            raise ValueError(f"{module}.{function} cannot be imported by name, expected a function of a module")
        task = {"module": module, "function": function, "arguments": self.arguments, "port": port}
        task |= {"rank": number, "world_size": self.ranks, "device": self.device}
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.worker"],
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends them
            )
        finally:
            os.close(writing)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: its pipe says so
            process.stdin.write(json.dumps(task | {"pipe": writing}).encode() + b"\n")
            process.stdin.flush()
        return _Process(number, process, reading)

    def _hear(self, process: _Process) -> bool:
        """Take in what a rank says; False where it has closed its pipe."""
        chunk = os.read(process.pipe, 1 << 16)
        if not chunk:
            process.ended = time.time()
            return False
        *lines, process.text = (process.text + chunk).split(b"\n")
        for line in lines:
            for kind, value in json.loads(line).items():
                if kind == "message":
                    self.on_message(value)
                elif kind == "error":
                    process.error = value
                else:
                    process.result, process.done = value, True
        return True

    def _first_cause(self) -> Exception:
        """The error to raise: the earliest that is not just the loss of a peer."""
        told: list[tuple[float, Exception]] = []
        lost: list[tuple[float, Exception]] = []
        for p in self.processes:
            if p.error is not None:
                (lost if p.error["lost_peer"] else told).append((p.error["time"], _error(p.number, p.error)))
            elif p.ended is not None and not p.done:
                told.append((p.ended, RunFailed(f"rank {p.number} {_death(p.process)}")))
        return min(told or lost, key=lambda pair: pair[0])[1]


def _error(number: int, report: Message) -> Exception:
    error: Exception
    if report["kind"] == "InputError":
        error = InputError(report["file"], report["key"], report["message"])
    elif report["kind"] == "Infeasible":
        error = Infeasible(report["message"])
    else:
        error = RunFailed(f"rank {number}: {report['message']}")
    error.add_note(f"on rank {number}:\n{report['traceback']}")
    return error


def _death(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    code = process.returncode
    if code is not None and code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended without a word, exit status {code}"


def environment() -> dict[str, str]:
    """The environment of processes that this one starts: its own, with its module paths. What it says goes first.

    gloo on the loopback: local ranks need no network.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    loopback = next(_loopbacks(), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def _loopbacks() -> Iterator[str]:
    return (name for _, name in socket.if_nameindex() if name.startswith("lo"))
