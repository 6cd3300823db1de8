"""Whether any schedule fits the memory, and the smallest budgets that work.

**The smallest budget of a device, exactly.** Let a device hold stages s1 < s2 < ... < sK with activations a1 .. aK. At
the start of F(si, j) the device takes ai; for each l < i the F of sl has run, its B has not (it comes after F(si, j)),
so what rests of (sl, j) is one of: all of it, what an offload leaves, or the checkpoint of a recomputation. With r_l
the least of these, *any* schedule holds at that instant at least

    ai + r_1 + ... + r_(i-1),

and so at least P = the maximum of that over i. One microbatch at a time reaches P on every device at once: between its
F and its B each (sl, j) is brought down to r_l before the next stage of the device starts, and is brought back just
before its B, when all later stages of the device are done; so every F, R, C and B runs beside exactly the r_l of the
earlier stages, and nothing of any other microbatch is there. The minima of the devices do not depend on each other.

(The argument takes ops to last longer than the tolerance within which instants count as one. Where stages take no time
at all, a schedule may slip below P on paper, since frees of an instant come before takes; no run could.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optpipe.errors import Infeasible
from optpipe.ops import Kind
from optpipe.problem import Problem


class RestingPlace(NamedTuple):
    """The least that rests of a stage's activations between F and B: how they leave (None: they stay), the bytes that
    stay, and the compute or channel time that it costs."""

    kind: Kind | None
    bytes: int
    cost_ms: float


def resting_place(problem: Problem, stage: int) -> RestingPlace:
    """How a stage's activations of one microbatch take the least memory between F and B."""
    data = problem.stages[stage]
    places = [RestingPlace(None, data.activation_bytes, 0.0)]
    if problem.can_offload(stage):
        left = data.activation_bytes - data.offloadable_bytes
        places.append(RestingPlace(Kind.O, left, data.offload_ms + data.reload_ms))
    if data.checkpoint_bytes is not None:
        places.append(RestingPlace(Kind.C, data.checkpoint_bytes, data.forward_ms))
    return min(places, key=lambda place: (place.bytes, place.cost_ms))


def sequential_peak(problem: Problem, held: Sequence[int], resting: Mapping[int, int]) -> int:
    """Most bytes that one microbatch needs on a device that holds the stages ``held`` (ascending), if of each one
    ``resting`` bytes stay between its F and its B."""
    return _peak(problem, held, resting)[0]


def smallest_budgets(problem: Problem) -> list[int]:
    """Per device the smallest budget (bytes) for which there is a schedule."""
    return [_need(problem, d)[0] for d in range(problem.num_devices)]


def check(problem: Problem) -> None:
    """Nothing, if some schedule fits.

    Raises
    ------
    Infeasible
        None does: it names the first device and stage that cannot fit, and carries the smallest budgets.
    """
    for d, device in enumerate(problem.devices):
        need, stage = _need(problem, d)
        if device.memory_bytes is not None and need > device.memory_bytes:
            smallest = smallest_budgets(problem)
            raise Infeasible(
                f"no schedule fits: device {d} needs at least {need} bytes when stage {stage} runs, its budget is "
                f"{device.memory_bytes}; smallest budget that works: {_spell(smallest)} bytes",
                smallest,
            )


def _spell(budgets: list[int]) -> str:
    return str(budgets[0]) if len(set(budgets)) == 1 else ", ".join(map(str, budgets)) + " (one a device)"


def _need(problem: Problem, device: int) -> tuple[int, int]:
    held = problem.stages_of[device]
    return _peak(problem, held, {s: resting_place(problem, s).bytes for s in held})


def _peak(problem: Problem, held: Sequence[int], resting: Mapping[int, int]) -> tuple[int, int]:
    """The peak and the stage that causes it."""
    below, peak, cause = 0, -1, held[0]
    for s in held:
        level = below + problem.stages[s].activation_bytes
        if level > peak:
            peak, cause = level, s
        below += resting[s]
    return peak, cause
