"""Schedules whose offloads move a part of the activations, as schedules of a problem in which that part is all."""

from __future__ import annotations

import numpy as np

from optpipe import semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem


def as_whole(problem: Problem, ops: Ops) -> tuple[Problem, Ops] | None:
    """The problem of which a stage can offload just what this schedule moves of it, and the schedule in it.

    None where the transfers of one stage move different amounts.
    """
    moved = semantics.moved_bytes(problem, ops)
    stages = list(problem.stages)
    for s, stage in enumerate(problem.stages):
        amounts = np.unique(moved[(ops.stage == s) & ~ops.is_compute])
        if len(amounts) > 1:
            return None
        if len(amounts) == 1 and 0 < amounts[0] < stage.offloadable_bytes:
            share = int(amounts[0]) / stage.offloadable_bytes
            times = {"offload_ms": stage.offload_ms * share, "reload_ms": stage.reload_ms * share}
            stages[s] = stage.model_copy(update={"offloadable_bytes": int(amounts[0]), **times})
    if stages == list(problem.stages):
        return problem, ops
    whole = problem.model_copy(update={"stages": tuple(stages)})
    return whole, _with_bytes(ops, np.full(len(ops), -1, np.int64))


def as_parts(problem: Problem, whole: Problem, ops: Ops) -> Ops:
    """A schedule of the other problem as one of ``problem``."""
    if whole is problem:
        return ops
    both = zip(problem.stages, whole.stages, strict=True)
    part = np.array([w.offloadable_bytes if w.offloadable_bytes < p.offloadable_bytes else -1 for p, w in both])
    return _with_bytes(ops, np.where(ops.kind >= Kind.O, part[ops.stage], -1))


def _with_bytes(ops: Ops, moved: np.ndarray) -> Ops:
    return Ops(ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, moved, ops.extra)
