"""Errors that reach the user. Each class has the exit status that the command line gives for it."""

from __future__ import annotations

from pathlib import Path


class OptPipeError(Exception):
    """Base of all errors that are reported in one line. ``exit_code`` is the status of the command."""

    exit_code = 1


class RunFailed(OptPipeError):
    """A check found violations, or a run failed."""

    exit_code = 1


class InputError(OptPipeError):
    """Bad input: names the file, the key and what is expected.

    Parameters
    ----------
    file
        The file (or option) that holds the bad value; empty where there is none.
    key
        The key in it, such as ``stages[2].forward_ms``; empty where the file as a whole is wrong.
    message
        What is wrong and what is expected.
    """

    exit_code = 2

    def __init__(self, file: str | Path, key: str, message: str) -> None:
        self.file, self.key, self.message = str(file), key, message
        super().__init__(": ".join(part for part in (self.file, self.key, message) if part))


class Infeasible(OptPipeError):
    """No schedule fits the memory. ``smallest_budget`` is the least budget per device (bytes) that works, if any."""

    exit_code = 3

    def __init__(self, message: str, smallest_budget: list[int] | None = None) -> None:
        self.smallest_budget = smallest_budget
        super().__init__(message)
