"""Search around the best schedule: its start times as keys of the list scheduler, some of them disturbed.

The list scheduler reproduces a schedule from its own start times (or shortens it). Disturbed a little in a window of
time or on a few devices, and with a few microbatches more or fewer offloaded, it makes a neighbour of it.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from optpipe import metrics, semantics
from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.incumbent import SAME, Incumbent
from solver.list_scheduler import KEEP, OFFLOAD, RECOMPUTE, UNBOUNDED, Rule, run, to_ops
from solver.tables import Tables, tables


class _Keys(NamedTuple):
    """Start times per (stage, microbatch) as arrays (S, m), and what becomes of the activations."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    reload: np.ndarray
    treatment: np.ndarray
    fused: np.ndarray


def search_around(incumbent: Incumbent, rng: random.Random, *, runs: int, seconds: float) -> None:
    """Neighbours of the incumbent, and of the best neighbours in turn; the better ones are offered to it."""
    problem = incumbent.problem
    if incumbent.ops is None:
        return
    end = incumbent.seconds + seconds
    tab = tables(problem)
    noise = np.random.default_rng(rng.getrandbits(32))
    span = incumbent.options.objective == "span"
    present, value = keys_of(problem, tab, incumbent.ops), incumbent.value
    length = semantics.makespan(incumbent.ops)
    for _ in range(runs):
        if incumbent.at_bound or incumbent.seconds > end:
            break
        rule = _disturbed(tab, present, length, rng, noise)
        state = run(tab, rule)
        if state is None:
            return
        ops = to_ops(tab, rule, state)
        found = metrics.span(problem, ops) if span else semantics.makespan(ops)
        if found <= value * (1 + SAME):
            present, value, length = keys_of(problem, tab, ops), found, semantics.makespan(ops)
            if found < incumbent.value:
                incumbent.offer(ops, "around")


def keys_of(problem: Problem, tab: Tables, ops: Ops) -> _Keys:
    """A schedule as keys."""
    start = np.zeros((len(Kind), tab.S, tab.m))
    there = np.zeros((len(Kind), tab.S, tab.m), np.bool_)
    start[ops.kind, ops.stage, ops.microbatch] = ops.start
    there[ops.kind, ops.stage, ops.microbatch] = True
    fused = there[Kind.BW]
    backward = np.where(fused, start[Kind.BW], start[Kind.B])
    reload_ms = np.array(tab.reload)[:, None]
    treatment = np.where(there[Kind.O], OFFLOAD, np.where(there[Kind.C], RECOMPUTE, KEEP))
    reload_ = np.where(there[Kind.R], start[Kind.R], backward - 2 * reload_ms)
    weight = np.where(fused, backward, start[Kind.W])
    return _Keys(start[Kind.F], backward, weight, reload_, treatment, fused.astype(np.int64))


def rule_of(tab: Tables, keys: _Keys, **steering: object) -> Rule:
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
    )
    return rule.but(**steering) if steering else rule


def _disturbed(tab: Tables, keys: _Keys, length: float, rng: random.Random, noise: np.random.Generator) -> Rule:
    scale = sum(tab.forward) / tab.S
    spread = rng.choice([0.2, 0.5, 1.0, 2.0, 4.0]) * scale
    cells = 3 * tab.S * tab.m
    window = rng.choice([0.03, 0.1, 0.25, 0.5]) * length if rng.random() < 0.5 else None
    begin = rng.uniform(-window / 2, length - window / 2) if window else 0.0
    part = rng.choice([1.5 / cells, 4.0 / cells, 0.02, 0.1, 0.3]) * (min(10.0, length / window) if window else 1.0)
    device = np.array(tab.device)
    first = rng.randrange(tab.D)
    block = (device >= first) & (device < first + rng.choice([1, 2, 3]))
    everywhere = rng.random() < 0.5

    def shifted(times: np.ndarray) -> np.ndarray:
        hit = noise.random(times.shape) < part
        if window is not None:
            hit &= (times >= begin) & (times <= begin + window)
        if not everywhere:
            hit &= block[:, None]
        return np.where(hit, times + noise.normal(0.0, spread, times.shape), times)

    changed = keys._replace(forward=shifted(keys.forward), backward=shifted(keys.backward), weight=shifted(keys.weight))
    if not any(tab.movable):
        return rule_of(tab, changed, patience=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0]))
    treatment = keys.treatment.copy()
    if rng.random() < 0.4:
        for _ in range(rng.choice([1, 1, 2, 4])):
            s, j = rng.randrange(tab.S), rng.randrange(tab.m)
            if tab.movable[s]:
                treatment[s, j] = KEEP if treatment[s, j] == OFFLOAD else OFFLOAD
    changed = changed._replace(reload=shifted(keys.reload), treatment=treatment)
    return rule_of(
        tab,
        changed,
        patience=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0]),
        reload_lead=rng.choice([0.0, 0.0, 0.0, 0.5, 1.0, 2.0, float("inf")]) * scale,
        reserve=[rng.choice([0, 1, 2, 3, 3, 3])] * tab.S,
        reserve_all=rng.random() < 0.25,
        reload_first=rng.random() < 0.75,
        newest_first=rng.random() < 0.3,
    )
