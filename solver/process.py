"""A process of this package that takes and sends messages and can be ended at any time."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

import numpy.typing as npt

from solver.wire import read_message, write_message

Message = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]


class Process:
    """``python -m module``, which reads messages from its standard input and writes messages to its standard output.

    Ends at the latest with :meth:`close`; the module sees the end of its input when this process is gone.
    """

    def __init__(self, module: str) -> None:
        # It finds the same modules as this process, wherever it is started.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._inbox: queue.Queue[Message | None] = queue.Queue()
        self._outbox: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=_receive, args=(self._output, self._inbox), daemon=True).start()
        threading.Thread(target=_send, args=(self._input, self._outbox), daemon=True).start()

    def send(self, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]] | None = None) -> None:
        """Send a message; returns at once."""
        self._outbox.put((header, arrays or {}))

    def receive(self, timeout: float) -> Message | None:
        """The next message; None where the process has ended and there is none.

        Raises
        ------
        queue.Empty
            There is none within ``timeout`` seconds (0: at hand).
        """
        message = self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
        if message is None:
            self._inbox.put(None)
        return message

    def close(self) -> str:
        """End the process; the last line that it wrote to its standard error."""
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        return lines[-1] if lines else ""


def _receive(pipe: IO[bytes], inbox: queue.Queue[Message | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while (message := read_message(pipe)) is not None:
            inbox.put(message)
    inbox.put(None)


def _send(pipe: IO[bytes], outbox: queue.Queue[Message | None]) -> None:
    with contextlib.suppress(OSError, ValueError):  # the process is gone; its inbox says so
        while (message := outbox.get()) is not None:
            write_message(pipe, *message)
