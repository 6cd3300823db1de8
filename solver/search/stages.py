"""Search over what a policy leaves equal for all stages: keys, limits and offloads of each stage by itself.

Unequal stages, slow links and memory that is no whole number of activations want something else on each device. A
genome is a policy with small changes per stage, again without units, so that a large problem is searched on a sibling
with fewer microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from solver.incumbent import Incumbent
from solver.list_scheduler import KEEP, OFFLOAD, Rule, run, to_ops
from solver.policy import Policy, crowded, spread
from solver.search.rules import sibling
from solver.search.score import score
from solver.tables import Paths, Tables, least_work, paths, tables, with_parts


@dataclass(frozen=True)
class Genome:
    """A policy, and per stage what is different.

    Attributes
    ----------
    forward, backward, weight
        Periods added to the keys.
    limit, kept
        Microbatches added to the in-flight limit; taken off the threshold of offloads.
    share, phase
        The part of the microbatches that is offloaded, evenly spread, and where the spreading begins; a share below 0
        leaves it to the policy.
    spared
        The last so many microbatches are not offloaded.
    part
        The part of the offloadable bytes that a transfer moves.
    """

    policy: Policy
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    limit: tuple[int, ...]
    kept: tuple[int, ...]
    share: tuple[float, ...]
    phase: tuple[float, ...]
    spared: tuple[int, ...]
    part: tuple[float, ...]

    @classmethod
    def of(cls, policy: Policy, tab: Tables, path: Paths) -> Genome:
        """The policy as it is."""
        none, zero = (0.0,) * tab.S, (0,) * tab.S
        share = [-1.0] * tab.S
        if policy.kept is None:
            treatment = policy.rule(policy.tables_for(tab), path).treatment
            share = [treatment[s * tab.m : (s + 1) * tab.m].count(OFFLOAD) / tab.m for s in range(tab.S)]
        return cls(policy, none, none, none, zero, zero, tuple(share), none, zero, (policy.part,) * tab.S)

    def build(self, plain: Tables, path: Paths) -> tuple[Tables, Rule]:
        """Tables and rule for one problem."""
        tab = with_parts(plain, self.part) if any(p < 1 for p in self.part) else plain
        rule = self.policy.rule(tab, path)
        period = max(least_work(tab)) or 1.0

        def moved(keys: list[float], shifts: tuple[float, ...]) -> list[float]:
            if not any(shifts):
                return keys
            return [key + shifts[k // tab.m] * period for k, key in enumerate(keys)]

        return tab, rule.but(
            forward_key=moved(rule.forward_key, self.forward),
            backward_key=moved(rule.backward_key, self.backward),
            weight_key=moved(rule.weight_key, self.weight),
            limit=[max(1, x + more) for x, more in zip(rule.limit, self.limit, strict=True)],
            threshold=[max(1, x - less) for x, less in zip(rule.threshold, self.kept, strict=True)],
            treatment=self._treatment(tab, rule.treatment),
        )

    def _treatment(self, tab: Tables, given: list[int]) -> list[int]:
        treatment: list[int] = []
        for s in range(tab.S):
            row = given[s * tab.m : (s + 1) * tab.m]
            if tab.movable[s] and self.share[s] >= 0:
                row = spread(tab.m, min(1.0, self.share[s]), self.phase[s])
                row[max(0, tab.m - self.spared[s]) :] = [KEEP] * min(tab.m, self.spared[s])
            treatment += row
        return treatment


def search_stages(
    incumbent: Incumbent, rng: random.Random, starts: Sequence[Policy | Genome], *, runs: int, seconds: float
) -> list[tuple[float, Genome]]:
    """Evolve genomes by changes of single stages; what is good is offered to ``incumbent``.

    Half of the runs and of the time is shared out evenly; the other half goes to the best one.

    Parameters
    ----------
    starts
        Policies, or genomes of an earlier call, to begin from.
    runs, seconds
        List schedules to make, and time to spend, at most.

    Returns
    -------
    list
        The evolved genomes with their scores, best first.
    """
    evolution = _Evolution(incumbent, rng)
    found: list[tuple[float, Genome]] = []
    begin = incumbent.seconds
    for number, start in enumerate(starts):
        genome = start if isinstance(start, Genome) else Genome.of(start, evolution.plain, evolution.path)
        end = begin + 0.5 * seconds * (number + 1) / len(starts)
        found.append(evolution.go(genome, runs // (2 * len(starts)), end))
    found.sort(key=lambda entry: entry[0])
    if found:
        found[0] = evolution.go(found[0][1], runs // 2, begin + seconds)
        evolution.finish(found[0][1])
    return found


class _Evolution:
    """Genomes are tried on a sibling with fewer microbatches where the problem is large."""

    def __init__(self, incumbent: Incumbent, rng: random.Random) -> None:
        self.incumbent, self.rng = incumbent, rng
        self.small = sibling(incumbent.problem)
        self.plain = tables(self.small)
        self.path = paths(self.plain)

    def go(self, best: Genome, runs: int, end: float) -> tuple[float, Genome]:
        """Accept neighbours that are no worse, for so many runs or until ``end``."""
        incumbent, value = self.incumbent, float("inf")
        whole = self.small is incumbent.problem
        for turn in range(max(1, runs)):
            if turn and (incumbent.at_bound or incumbent.seconds > end):
                break
            genome = changed(best, self.plain, self.rng) if turn else best
            tab, rule = genome.build(self.plain, self.path)
            state = run(tab, rule)
            if state is None:
                continue
            found = score(tab, state, incumbent.options.objective)
            if found > value:
                continue
            if whole and found < min(value, incumbent.value):
                incumbent.offer(to_ops(tab, rule, state), "stages")
            best, value = genome, found
        return value, best

    def finish(self, genome: Genome) -> None:
        """Offer the genome's schedule of the whole problem, if it was tried on a smaller one."""
        problem = self.incumbent.problem
        if self.small is problem:
            return
        plain = tables(problem)
        tab, rule = genome.build(plain, paths(plain))
        state = run(tab, rule)
        if state is not None:
            self.incumbent.offer(to_ops(tab, rule, state), "stages")


def changed(genome: Genome, tab: Tables, rng: random.Random) -> Genome:
    """A neighbour: a few numbers of a few stages, now and then one of the policy."""
    changes: dict[str, object] = {}
    for name in ("forward", "backward", "weight"):
        if rng.random() < 0.4:
            size, part = rng.choice([0.1, 0.3, 1.0, 2.0]), rng.choice([0.05, 0.2, 0.5])
            row = [x + rng.gauss(0, size) if rng.random() < part else x for x in getattr(genome, name)]
            changes[name] = tuple(row)
    for name, chance in (("limit", 0.4), ("kept", 0.2)):
        if rng.random() < chance:
            changes[name] = _stepped(getattr(genome, name), tab.S, rng)
    if any(tab.offloadable):
        changes |= _other_offloads(genome, tab, rng)
    policy = genome.policy
    if rng.random() < 0.1:
        policy = replace(policy, patience=rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]))
    if rng.random() < 0.1:
        policy = replace(policy, share_idle=not policy.share_idle)
    if rng.random() < 0.1:
        policy = replace(policy, reload_first=not policy.reload_first)
    if rng.random() < 0.1:
        policy = replace(policy, newest_first=not policy.newest_first)
    if any(tab.offloadable) and rng.random() < 0.05:
        policy = replace(policy, evict=not policy.evict)
    if crowded(tab) and rng.random() < 0.1:
        policy = replace(policy, reload_late=not policy.reload_late)
    if any(tab.dropped) and rng.random() < 0.2:
        policy = replace(policy, recompute=min(1.0, max(0.0, policy.recompute + rng.gauss(0, 0.2))))
    if rng.random() < 0.1:
        policy = replace(policy, prefetch=max(0, policy.prefetch + rng.choice([-1, 1])))
    if rng.random() < 0.1:
        policy = replace(policy, reserve=max(0, policy.reserve + rng.choice([-1, 1])))
    return replace(genome, policy=policy, **changes)  # type: ignore[arg-type]


def _stepped(row: tuple[int, ...], S: int, rng: random.Random) -> tuple[int, ...]:
    values = list(row)
    for _ in range(rng.choice([1, 1, 2])):
        values[rng.randrange(S)] += rng.choice([-1, 1])
    return tuple(values)


def _other_offloads(genome: Genome, tab: Tables, rng: random.Random) -> dict[str, object]:
    share, phase, spared, part = (list(row) for row in (genome.share, genome.phase, genome.spared, genome.part))
    if rng.random() < 0.05:  # all stages at once, from nothing to what the number in flight calls for
        level = rng.random()
        share = [rng.choice([level, level, level * (1 - s / tab.S)]) for s in range(tab.S)]
    if rng.random() < 0.6:
        for _ in range(rng.choice([1, 1, 2, 3])):
            s, kind = rng.randrange(tab.S), rng.random()
            if kind < 0.5:
                old = share[s] if share[s] >= 0 else rng.random()
                share[s] = min(1.0, max(0.0, old + rng.gauss(0, rng.choice([0.02, 0.05, 0.15]))))
            elif kind < 0.65:
                phase[s] = rng.random()
            elif kind < 0.8:
                spared[s] = max(0, spared[s] + rng.choice([-1, 1]))
            else:
                part[s] = min(1.0, max(0.05, part[s] + rng.gauss(0, rng.choice([0.05, 0.2]))))
    if rng.random() < 0.05:
        part = [rng.choice([1.0, 0.75, 0.5, 0.34])] * tab.S
    return {"share": tuple(share), "phase": tuple(phase), "spared": tuple(spared), "part": tuple(part)}
