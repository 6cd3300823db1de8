"""A solver beside the training: ``optpipe solve`` as a process of its own, out of the training's way."""

from __future__ import annotations

import contextlib
import shutil
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
#: Files in its folder.
_START, _FOUND, _ERRORS = "start.json", "plan.json", "errors.txt"


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
        self._end = time.monotonic() + wanted.time_limit_s + _LATE_S
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._fault = ""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="optpipe-"))
            start.write(self._folder / _START)
            self._process = _process(self._folder, wanted)
        except (InputError, OSError) as error:
            self._fault = str(error)

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or never will be."""
        return self._process is None or self._process.poll() is not None or time.monotonic() > self._end

    def result(self) -> tuple[Plan | None, str]:
        """The plan; or None and why there is none."""
        if self._process is None or self._folder is None:
            return None, self._fault
        status = self._process.poll()
        if status != 0:
            said = _last_line(self._folder / _ERRORS)
            return None, said or ("did not end in time" if status is None else f"exit status {status}")
        try:
            plan = Plan.read(self._folder / _FOUND)
        except InputError as error:
            return None, str(error)
        violations = verify_plan(plan)
        return (None, violations[0]) if violations else (plan, "")

    def close(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _process(folder: Path, wanted: ReplanConfig) -> subprocess.Popen[bytes]:
    """The solver. Not with the user's cache: every look would leave a schedule there."""
    options = {"--time-limit": wanted.time_limit_s, "--threads": wanted.threads, "--gap": wanted.gain}
    command = ["cli", "solve", str(folder / _START), "-o", str(folder / _FOUND), "--no-cache"]
    command += [str(part) for option in options.items() for part in option]
    with open(folder / _ERRORS, "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.tethered", "--folder", str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=launch.environment(),
        )


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
    return lines[-1] if lines else ""
