"""A solver beside the training: ``optpipe solve`` as a process of its own, out of the training's way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optpipe.config import ReplanConfig
from optpipe.errors import InputError
from optpipe.plan import Plan
from optpipe.verify import verify_plan
from runtime import launch

#: Seconds that a solver has beyond its limit: to start, to read and to write.
_LATE_S = 60.0


class Solving:
    """Begins at once to look for a plan of the problem that ``start`` is of, from its schedule on.

    Parameters
    ----------
    start
        A valid plan.
    wanted
        Seconds, threads, and how much shorter a plan has to be to be of use.
    """

    def __init__(self, start: Plan, wanted: ReplanConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="optpipe-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._end = time.monotonic() + wanted.time_limit_s + _LATE_S
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        task, self._found = Path(self._folder.name, "start.json"), Path(self._folder.name, "plan.json")
        options = {"--time-limit": wanted.time_limit_s, "--threads": wanted.threads, "--gap": wanted.gain}
        command = [sys.executable, "-P", "-m", "runtime.tethered", "cli", "solve", str(task), "-o", str(self._found)]
        try:
            start.write(task)
            self._process = subprocess.Popen(
                [*command, *(str(part) for option in options.items() for part in option)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=launch.environment(),
            )
        except (InputError, OSError) as error:
            self._fault = str(error)

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or never will be."""
        return self._process is None or self._process.poll() is not None or time.monotonic() > self._end

    def result(self) -> tuple[Plan | None, str]:
        """The plan; or None and why there is none."""
        if self._process is None:
            return None, self._fault
        status = self._process.poll()
        if status != 0:
            return None, self._last_words() or ("did not end in time" if status is None else f"exit status {status}")
        try:
            plan = Plan.read(self._found)
        except InputError as error:
            return None, str(error)
        violations = verify_plan(plan)
        return (None, violations[0]) if violations else (plan, "")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._errors.close()
        self._folder.cleanup()
