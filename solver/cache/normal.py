"""The normal form of a problem: what makes two problems alike, whatever their units.

Times are divided by the *reference*, the mean over the devices of the work of one microbatch; sizes are fractions of
the activations, budgets are counts of microbatches that fit. What cannot differ between a stored order and the problem
that takes it over (stages, placement, channels, what can be moved or recomputed) is the *structure*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optpipe.ops import Floats
from optpipe.problem import Problem
from solver.tables import Tables, least_work, tables

#: What to make small; part of the structure, since a schedule that is good for one is not for the other.
OBJECTIVES = ("makespan", "span")

#: Values of one cell differ by less than 1 / this: such problems share one entry.
_CELLS = 200

#: Names of the normalised times, each with one value a stage (``comm``: one fewer).
TIMES = ("forward", "backward", "weight", "fused", "offload", "reload", "comm")

#: Names of the sizes: ``slots`` has one value a device, the others one a stage.
SIZES = ("slots", "part", "context", "movable", "dropped")

#: How far apart two problems are for each microbatch that one has more.
_MICROBATCH_DISTANCE = 0.05


@dataclass(frozen=True)
class Normal:
    """A problem without units.

    Attributes
    ----------
    structure
        Digest of what must be equal, the objective included.
    microbatches
        m.
    reference_ms
        The unit of time.
    values
        Per name in ``TIMES`` and ``SIZES`` its values: times in units of the reference; ``slots`` how many
        microbatches fit on a device (at most m), ``part`` a stage's part of its device's activations, ``context``,
        ``movable`` and ``dropped`` parts of the stage's own activations.
    """

    structure: str
    microbatches: int
    reference_ms: float
    values: dict[str, list[float]]

    @property
    def cell(self) -> str:
        """Digest of the discretised values: problems of one cell and structure share an entry."""
        rounded = {name: [round(v * _CELLS) for v in values] for name, values in self.values.items()}
        return _digest([self.microbatches, rounded])


def normalise(problem: Problem, objective: str) -> Normal:
    """The normal form of a problem under an objective (one of ``OBJECTIVES``).

    Raises
    ------
    ValueError
        The objective is unknown.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: expected one of {', '.join(OBJECTIVES)}, not {objective!r}")
    tab = tables(problem)
    work = least_work(tab)
    reference = sum(work) / len(work) or 1.0
    times = {name: [t / reference for t in getattr(tab, name)] for name in TIMES[:-1]}
    values = {**times, "comm": [c / reference for c in tab.comm[:-1]], **_sizes(tab)}
    return Normal(
        structure=_structure(problem, tab, objective),
        microbatches=tab.m,
        reference_ms=reference,
        values={name: [round(v, 6) for v in column] for name, column in values.items()},
    )


def _sizes(tab: Tables) -> dict[str, list[float]]:
    def parts(sizes: list[int], of: list[int]) -> list[float]:
        return [size / max(1, whole) for size, whole in zip(sizes, of, strict=True)]

    return {
        "slots": [
            min(float(tab.m), budget / max(1, whole)) for budget, whole in zip(tab.budget, tab.whole, strict=True)
        ],
        "part": parts(tab.activation, [tab.whole[d] for d in tab.device]),
        "context": parts(tab.context, tab.activation),
        "movable": parts(tab.movable, tab.activation),
        "dropped": parts(tab.dropped, tab.activation),
    }


def _structure(problem: Problem, tab: Tables, objective: str) -> str:
    channels = sorted(sorted((t.device, t.direction) for t in channel.transfers) for channel in problem.channels)
    recomputes = [stage.checkpoint_bytes is not None for stage in problem.stages]
    return _digest([objective, tab.D, tab.device, channels, [size > 0 for size in tab.movable], recomputes])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def vector(values: Mapping[str, Sequence[float]]) -> Floats:
    """The values in one float64 vector, by name in the order of ``TIMES`` and ``SIZES``.

    Raises
    ------
    KeyError, TypeError, ValueError
        A name is missing, or its values are no finite numbers.
    """
    flat = np.array([v for name in (*TIMES, *SIZES) for v in values[name]], np.float64)
    if not np.isfinite(flat).all():
        raise ValueError("expected finite numbers")
    return flat


def distances(new: Normal, stored: Sequence[Floats], microbatches: Sequence[int]) -> Floats:
    """float64 (n,): how far n stored problems of the same structure are from a new one; 0 for an equal one.

    The mean deviation of the times relative to the mean time, plus that of the budgets, plus half the mean deviation
    of the other sizes, plus 0.05 a microbatch.

    Parameters
    ----------
    new
        The new problem.
    stored, microbatches
        Vectors of equal length and microbatch counts of the stored ones.
    """

    def total(names: Sequence[str]) -> float:
        return max(1e-9, sum(sum(new.values[name]) for name in names))

    others = sum(len(new.values[name]) for name in SIZES[1:])
    weight = dict.fromkeys(TIMES, 1.0 / total(TIMES)) | {"slots": 1.0 / total(["slots"])}
    weight |= dict.fromkeys(SIZES[1:], 0.5 / others)
    weights = np.repeat([weight[name] for name in (*TIMES, *SIZES)], [len(new.values[n]) for n in (*TIMES, *SIZES)])
    apart = np.abs(np.array(microbatches) - new.microbatches)
    return np.asarray(np.abs(np.array(stored) - vector(new.values)) @ weights + _MICROBATCH_DISTANCE * apart)
