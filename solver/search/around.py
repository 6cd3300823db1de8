"""Search around the best schedule: its start times as keys of the list scheduler, some of them disturbed.

The list scheduler reproduces a schedule from its own start times (or shortens it). Disturbed a little in a window of
time or on a few devices, and with a few microbatches more or fewer offloaded, it makes a neighbour of it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

from optpipe import semantics
from optpipe.ops import Floats
from solver.incumbent import SAME, Incumbent
from solver.keys import Keys, keys_of, rule_of, unneeded_reloads
from solver.list_scheduler import KEEP, OFFLOAD, RECOMPUTE, Rule, State, run, to_ops
from solver.search.score import score
from solver.tables import Tables, tables

_Grid = npt.NDArray[Any]


def search_around(incumbent: Incumbent, rng: random.Random, *, runs: int, seconds: float) -> None:
    """Neighbours of the incumbent, and of the best neighbours in turn; the better ones are offered to it.

    Parameters
    ----------
    runs, seconds
        List schedules to make, and time to spend, at most.
    """
    problem, objective = incumbent.problem, incumbent.options.objective
    if incumbent.ops is None:
        return
    end = incumbent.seconds + seconds
    plain = tables(problem)
    noise = np.random.default_rng(rng.getrandbits(32))
    present, value = keys_of(problem, plain, incumbent.ops), float("inf")
    length = semantics.makespan(incumbent.ops)
    for turn in range(runs):
        if incumbent.at_bound or incumbent.seconds > end:
            break
        if turn and rng.random() < 0.05:
            tried = present._replace(part=_other_parts(plain, present.part, rng))
        else:
            tried = present
        rule = _disturbed(plain, tried, length, rng, noise) if turn else rule_of(plain, tried)
        state = run(plain, rule)
        if state is None:
            continue
        found = score(plain, state, objective)
        if found <= value * (1 + SAME):
            better = found < value
            present, value, length = _keys_of_run(plain, rule, state, tried.part), found, max(state.busy)
            if better and found < incumbent.value * (1 + 1e-3):
                incumbent.offer(to_ops(plain, rule, state), "around")


def _keys_of_run(tab: Tables, rule: Rule, state: State, part: Floats) -> Keys:
    def grid(values: list[float]) -> Floats:
        return np.array(values).reshape(tab.S, tab.m)

    backward, reload_, offload = grid(state.b_start), grid(state.r_start), grid(state.o_start)
    given = np.array(rule.treatment).reshape(tab.S, tab.m)
    treatment = np.where(offload >= 0, OFFLOAD, np.where(given == RECOMPUTE, RECOMPUTE, KEEP))
    fused = np.array(rule.fused).reshape(tab.S, tab.m)
    weight = np.where(fused == 1, backward, grid(state.w_start))
    reload_ = np.where(reload_ >= 0, reload_, unneeded_reloads(tab, backward))
    return Keys(grid(state.f_start), backward, weight, reload_, treatment, fused, part)


def _other_parts(tab: Tables, part: Floats, rng: random.Random) -> Floats:
    """The parts of a few stages or of a few microbatches of one changed."""
    changed = part.copy()
    for s in rng.sample(range(tab.S), min(tab.S, rng.choice([1, 1, 2, 4]))):
        first = rng.randrange(tab.m)
        some = slice(None) if rng.random() < 0.5 else slice(first, first + rng.choice([1, 2, 4]))
        changed[s, some] = 1.0 if rng.random() < 0.3 else np.clip(changed[s, some] + rng.gauss(0, 0.1), 0.05, 1.0)
    return changed


def _other_treatments(tab: Tables, treatment: _Grid, rng: random.Random) -> _Grid:
    found = treatment.copy()
    for _ in range(rng.choice([1, 1, 2, 4])):
        s, j = rng.randrange(tab.S), rng.randrange(tab.m)
        choices = [KEEP] + [OFFLOAD] * (tab.movable[s] > 0) + [RECOMPUTE] * (tab.dropped[s] > 0)
        others = [choice for choice in choices if choice != found[s, j]]
        if others:
            found[s, j] = rng.choice(others)
    return found


def _disturbed(tab: Tables, keys: Keys, length: float, rng: random.Random, noise: np.random.Generator) -> Rule:
    scale = sum(tab.forward) / tab.S
    deviation = rng.choice([0.2, 0.5, 1.0, 2.0, 4.0]) * scale
    cells = 3 * tab.S * tab.m
    window = rng.choice([0.03, 0.1, 0.25, 0.5]) * length if rng.random() < 0.5 else None
    begin = rng.uniform(-window / 2, length - window / 2) if window else 0.0
    part = rng.choice([1.5 / cells, 4.0 / cells, 0.02, 0.1, 0.3]) * (min(10.0, length / window) if window else 1.0)
    device = np.array(tab.device)
    first = rng.randrange(tab.D)
    block = (device >= first) & (device < first + rng.choice([1, 2, 3]))
    everywhere = rng.random() < 0.5

    def shifted(times: Floats) -> Floats:
        hit = noise.random(times.shape) < part
        if window is not None:
            hit &= (times >= begin) & (times <= begin + window)
        if not everywhere:
            hit &= block[:, None]
        return np.where(hit, times + noise.normal(0.0, deviation, times.shape), times)

    changed = keys._replace(forward=shifted(keys.forward), backward=shifted(keys.backward), weight=shifted(keys.weight))
    if rng.random() < 0.4:
        changed = changed._replace(treatment=_other_treatments(tab, keys.treatment, rng))
    if not any(tab.movable):
        return rule_of(tab, changed, patience=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0]))
    changed = changed._replace(reload=shifted(keys.reload))
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
