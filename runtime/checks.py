"""Whether what an executor is given fits its plan: refused in one line, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.errors import InputError, RunFailed
from optpipe.problem import Problem
from runtime.boundary import Boundary, TensorSpec, spec_of


def own_device(ranks: Sequence[int]) -> int:
    """The plan's device that this process runs; ``ranks``: the global rank of each.

    Raises
    ------
    InputError
        None of them.
    """
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else ranks[0]
    if own not in ranks:
        raise InputError("", "ranks", f"are {list(ranks)}, expected this rank, {own}, among them")
    return list(ranks).index(own)


def with_index(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:0``, or whichever is current: as tensors name their device."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def check_parts(
    problem: Problem, number: int, ranks: Sequence[int], stages: Iterable[int], boundaries: Sequence[Boundary]
) -> None:
    """Ranks, this device's stages, and what goes between stages.

    Raises
    ------
    InputError
        They are not those of the problem.
    """
    if len(ranks) != problem.num_devices:
        raise InputError("", "ranks", f"has {len(ranks)} entries, expected {problem.num_devices}")
    expected, found = problem.stages_of[number], tuple(sorted(stages))
    if found != expected:
        raise InputError("", "stages", f"are {list(found)}, expected {list(expected)}: those of this device")
    if len(boundaries) != problem.num_stages - 1:
        raise InputError("", "boundaries", f"has {len(boundaries)} entries, expected {problem.num_stages - 1}")
    for place, boundary in enumerate(boundaries):
        if not isinstance(boundary, TensorSpec) and len(boundary) != problem.num_microbatches:
            raise InputError(
                "",
                f"boundaries[{place}]",
                f"has {len(boundary)} entries, expected {problem.num_microbatches}: one a microbatch",
            )


def check_batch(name: str, tensors: Sequence[Tensor] | None, count: int, boundaries: Sequence[Boundary]) -> None:
    """One tensor a microbatch, all of one shape unless the boundaries are given microbatch by microbatch.

    Raises
    ------
    InputError
        It is not so.
    """
    given = list(tensors or [])
    if len(given) != count:
        raise InputError("", name, f"has {len(given)} microbatches, expected {count}")
    if not boundaries or not all(isinstance(boundary, TensorSpec) for boundary in boundaries):
        return
    if any(tensor.shape != given[0].shape for tensor in given):
        raise InputError(
            "", name, "has microbatches of different shapes, expected one shape, or boundaries for each microbatch"
        )


def check_output(stage: int, microbatch: int, output: Tensor, boundary: Boundary) -> None:
    """Between ranks a wrong size would end in a crash without a word.

    Raises
    ------
    RunFailed
        The stage gave something else than was agreed.
    """
    expected = spec_of(boundary, microbatch)
    if output.shape != expected.shape or output.dtype != expected.dtype:
        got = TensorSpec(tuple(output.shape), output.dtype)
        raise RunFailed(f"stage {stage} gave {got}, expected {expected}")
