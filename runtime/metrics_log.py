"""What a training run says of itself: a record a step, a summary at the end, and a file of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from optpipe.errors import InputError


@dataclass(frozen=True)
class Replanned:
    """What became of solving again beside the training (``runtime.replan``).

    Attributes
    ----------
    outcome
        ``asked``: a solver begins. ``taken``: another plan runs from the next step on. ``none better``: none that is
        worth it was found. ``confirmed``, ``given back``: the plan that was taken proved to be faster, or not, and then
        the one before runs again; so it does with ``no room``: a rank has too little host memory for the other one.
        ``failed``: the solver.
    before_ms, after_ms
        The schedule under the plan before and under the other one: of ``taken`` and ``none better`` as they are to be
        expected at the times that were measured, of ``asked``, ``confirmed`` and ``given back`` as measured; of ``no
        room`` as measured and as expected.
    message
        Where the plan was written; why the solver failed.
    planned_ms, planned_peak_bytes
        What the plan of the next step promises; None where it is that of this one.
    """

    outcome: str
    before_ms: float
    after_ms: float | None = None
    message: str = ""
    planned_ms: float | None = None
    planned_peak_bytes: list[int] | None = None

    def line(self) -> str:
        """For the log, without a line break."""
        times = f"{self.before_ms:.4g} ms" + ("" if self.after_ms is None else f", then {self.after_ms:.4g} ms")
        text = {
            "asked": f"is solved again beside the training: measured {times}",
            "taken": f"another plan takes over: at the times measured {times}",
            "none better": f"no other plan is worth it: at the times measured {times}",
            "confirmed": f"the plan that took over is faster: measured {times}",
            "given back": f"the plan before was faster, and takes over again: measured {times}",
            "no room": f"too little host memory for the one that was to take over, the one before stays: {times}",
            "failed": f"solving again failed, the plan stays (at the times measured {times})",
        }[self.outcome]
        return f"plan: {text}" + (f"; {self.message}" if self.message else "")


@dataclass(frozen=True)
class Step:
    """One optimiser step.

    Attributes
    ----------
    step
        Its number, from 1.
    loss
        Mean over the batch's tokens.
    learning_rate, grad_norm
        Of this step; the norm is that of all gradients together, before clipping (None: not clipped).
    pipeline_ms
        The schedule as it ran: start of the step to the end of the last op on any device.
    step_ms
        The whole step, with data, clipping and optimiser.
    tokens_per_s
        Tokens of the batch over ``step_ms``.
    bubble_ratio
        1 - (all compute time) / (devices x ``pipeline_ms``).
    peak_bytes, host_peak_bytes
        Per device: activation bytes as the plan counts them, and offloaded bytes on the host.
    load
        Wall time over CPU time of compute; above 1 the cores had other work. None on CUDA and of tensor parallel ranks,
        which wait for each other meanwhile.
    validation_loss
        On held-out text, after this step; None where it was not asked for. Its time is not part of ``step_ms``.
    reliefs
        What the memory managers of all devices had to do because the model held more than planned: how often each
        (``memory_manager.ACTIONS``); None where they did nothing.
    replanned
        What became of solving again, behind this step; None where there is nothing to say.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    pipeline_ms: float
    step_ms: float
    tokens_per_s: float
    bubble_ratio: float
    peak_bytes: list[int]
    host_peak_bytes: list[int]
    load: float | None = None
    validation_loss: float | None = None
    reliefs: dict[str, int] | None = None
    replanned: Replanned | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Step:
        """A step from its record."""
        replanned = value.get("replanned")
        return cls(**{**value, "replanned": replanned and Replanned(**replanned)})

    def line(self, total: int, planned_peak_bytes: list[int], planned_ms: float | None = None) -> str:
        """The log line, such as ``step 12/50  loss 3.214  8,130 tokens/s  504 ms, schedule 480 (plan 471)  bubble 31%
        peak 98% of plan``, without a line break."""
        shares = [real / plan for real, plan in zip(self.peak_bytes, planned_peak_bytes, strict=True) if plan]
        peak = f"  peak {max(shares):.0%} of plan" if shares else ""
        plan = "" if planned_ms is None else f", schedule {self.pipeline_ms:.0f} (plan {planned_ms:.0f})"
        held_out = "" if self.validation_loss is None else f"  validation {self.validation_loss:.4f}"
        return (
            f"step {self.step:{len(str(total))}}/{total}  loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{self.step_ms:.0f} ms{plan}  bubble {self.bubble_ratio:.0%}{peak}{held_out}{self._reliefs()}"
        )

    def _reliefs(self) -> str:
        if not self.reliefs:
            return ""
        deeds = ", ".join(f"{count} {action}" for action, count in self.reliefs.items() if count)
        return f"  above plan: {deeds}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """A run as a whole, beside its plan.

    Times, rates and bubble are medians over the steps behind a short warm-up; peaks are the largest of all steps;
    ``last_loss`` is the mean of the last few, ``validation_loss`` the last one taken, ``reliefs`` the sum over steps.

    Where another plan took over, the plan is the last one, and so are the steps that times, rates and bubble are of;
    ``planned_peak_bytes`` are the largest of the plans that ran. ``plans``: how many ran, one after the other.
    """

    name: str
    method: str
    steps: int
    device: str
    first_loss: float
    last_loss: float
    validation_loss: float | None
    planned_ms: float
    measured_ms: float
    step_ms: float
    tokens_per_s: float
    planned_bubble_ratio: float
    measured_bubble_ratio: float
    budget_bytes: list[int | None]
    planned_peak_bytes: list[int]
    measured_peak_bytes: list[int]
    planned_offloaded_bytes: list[int]
    host_peak_bytes: list[int]
    load: float | None
    checkpoint: str | None
    reliefs: dict[str, int] | None = None
    plans: int = 1

    @property
    def within_plan(self) -> bool:
        """Whether no device ever held more activation bytes than planned."""
        return all(real <= plan for real, plan in zip(self.measured_peak_bytes, self.planned_peak_bytes, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "within_plan": self.within_plan}


class MetricsLog:
    """A file of JSON lines, one a step, flushed as they come. Without a path it does nothing.

    Parameters
    ----------
    path
        The file. It is begun anew, but for the records of the steps before.
    steps
        How many steps have been done before: their records stay.
    """

    def __init__(self, path: str | Path | None, steps: int = 0) -> None:
        self._path = path
        self._stream: IO[str] | None = None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                kept = _end_of(Path(path), steps)
                self._stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed on exit)
                self._stream.truncate(kept)
            except OSError as error:
                raise InputError(path, "", f"cannot be written: {error.strerror or error}") from None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises
        ------
        InputError
            The disk is full, or the file is gone.
        """
        if self._stream is not None:
            try:
                self._stream.write(json.dumps(record) + "\n")
            except OSError as error:
                raise InputError(self._path or "", "", f"cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.close()


def _end_of(path: Path, steps: int) -> int:
    """Where the records of the first steps end in the file, in bytes."""
    end = 0
    if steps and path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if json.loads(line)["step"] > steps:
                    break
            except (ValueError, KeyError, TypeError):
                break  # cut off, or none of ours
            end += len(line)
    return end
