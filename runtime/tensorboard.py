"""The figures of a run as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from optpipe.errors import InputError
from optpipe.metrics import Metrics
from runtime.metrics_log import Step

_FIGURES = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_ms", "bubble_ratio", "validation_loss")


class Events:
    """Writes each step into a folder that ``tensorboard --logdir`` reads. Without a folder it does nothing.

    Parameters
    ----------
    folder
        Where they go.
    planned
        What the plan promises of one run.
    runs
        How often it runs in a step.

    Raises
    ------
    InputError
        TensorBoard is not installed, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None, planned: Metrics, runs: int = 1) -> None:
        self.makespan_ms, self.peak_bytes = planned.makespan_ms * runs, planned.peak_bytes
        self._writer = None if folder is None else _writer(folder)

    def add(self, step: Step) -> None:
        """One step: its figures, and its schedule and memory beside those of the plan. Those of the next step's plan
        are kept where another one takes over."""
        self._write(step)
        now = step.replanned
        if now is not None and now.planned_ms is not None and now.planned_peak_bytes is not None:
            self.makespan_ms, self.peak_bytes = now.planned_ms, now.planned_peak_bytes

    def _write(self, step: Step) -> None:
        if self._writer is None:
            return
        for name in _FIGURES:
            if (value := getattr(step, name)) is not None:
                self._writer.add_scalar(name, value, step.step)
        both = {"measured": step.pipeline_ms, "planned": self.makespan_ms}
        self._writer.add_scalars("schedule_ms", both, step.step)
        for device, (peak, plan) in enumerate(zip(step.peak_bytes, self.peak_bytes, strict=True)):
            self._writer.add_scalars(f"peak_bytes/device {device}", {"measured": peak, "planned": plan}, step.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard", "", "needs TensorBoard: pip install 'optpipe[tensorboard]'") from None
    try:
        return SummaryWriter(str(folder))
    except OSError as error:
        raise InputError(folder, "", f"cannot be written: {error.strerror or error}") from None
