"""A schedule as keys of the list scheduler, which reproduces it from them or shortens it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optpipe import semantics
from optpipe.ops import Floats, Kind, Ops
from optpipe.problem import Problem
from solver.list_scheduler import KEEP, OFFLOAD, RECOMPUTE, UNBOUNDED, Rule
from solver.tables import Tables

_Grid = npt.NDArray[Any]


class Keys(NamedTuple):
    """Start times per (stage, microbatch) as arrays (S, m), what becomes of the activations, and the part of the
    offloadable bytes that a transfer moves."""

    forward: Floats
    backward: Floats
    weight: Floats
    reload: Floats
    treatment: _Grid
    fused: _Grid
    part: Floats


def keys_of(problem: Problem, tab: Tables, ops: Ops) -> Keys:
    """A schedule as keys."""
    start = np.zeros((len(Kind), tab.S, tab.m))
    there = np.zeros((len(Kind), tab.S, tab.m), np.bool_)
    start[ops.kind, ops.stage, ops.microbatch] = ops.start
    there[ops.kind, ops.stage, ops.microbatch] = True
    fused = there[Kind.BW]
    backward = np.where(fused, start[Kind.BW], start[Kind.B])
    treatment = np.where(there[Kind.O], OFFLOAD, np.where(there[Kind.C], RECOMPUTE, KEEP))
    reload_ = np.where(there[Kind.R], start[Kind.R], unneeded_reloads(tab, backward))
    weight = np.where(fused, backward, start[Kind.W])
    return Keys(start[Kind.F], backward, weight, reload_, treatment, fused.astype(np.int64), _parts(problem, ops))


def rule_of(tab: Tables, keys: Keys, **steering: object) -> Rule:
    """The rule that reproduces a schedule from its keys."""
    rule = Rule(
        forward_key=keys.forward.ravel().tolist(),
        backward_key=keys.backward.ravel().tolist(),
        weight_key=keys.weight.ravel().tolist(),
        reload_key=keys.reload.ravel().tolist(),
        treatment=keys.treatment.ravel().tolist(),
        fused=keys.fused.ravel().tolist(),
        threshold=[UNBOUNDED] * tab.S,
        prefetch=[6] * tab.S,
        limit=[UNBOUNDED] * tab.S,
        reserve=[3] * tab.S,
        reserve_all=False,
        newest_first=False,
        reload_lead=0.0,
        evict=any(whole > budget for whole, budget in zip(tab.whole, tab.budget, strict=True)),
        share=keys.part.ravel().tolist() if (keys.part < 1).any() else None,
    )
    return rule.but(**steering) if steering else rule


def unneeded_reloads(tab: Tables, backward: Floats) -> Floats:
    """Keys of reloads that a schedule does not have, in case a neighbour does."""
    return np.asarray(backward - np.array(tab.reload)[:, None] - sum(tab.forward) / tab.S)


def _parts(problem: Problem, ops: Ops) -> Floats:
    """(S, m): the part that a transfer moves; where there is none, the largest of that stage, 1 if it has none."""
    shape = problem.num_stages, problem.num_microbatches
    out = np.flatnonzero(ops.kind == Kind.O)
    whole = np.array([max(1, stage.offloadable_bytes) for stage in problem.stages], np.float64)
    part = np.zeros(shape)
    part[ops.stage[out], ops.microbatch[out]] = semantics.moved_bytes(problem, ops)[out] / whole[ops.stage[out]]
    most = part.max(axis=1, keepdims=True)
    return np.where(part > 0, part, np.where(most > 0, most, 1.0))
