"""Search over policies of the list scheduler, for large problems on a sibling with fewer microbatches.

A policy says in numbers without a unit how the list scheduler chooses, so what is good for 128 microbatches is good for
1,024: the warm-up and the cool-down are the same, the steady phase repeats.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace

from optpipe.problem import Problem
from solver.ada_offload import scheduled
from solver.incumbent import Incumbent
from solver.list_scheduler import run, to_ops
from solver.policy import Policy, draw
from solver.search.score import score
from solver.tables import paths, tables

#: Policies of a kind kept as parents.
POOL = 12
#: Ops of the sibling on which policies are compared.
_SIBLING_OPS = 6000


def sibling(problem: Problem, ops: int = _SIBLING_OPS) -> Problem:
    """The problem with as many microbatches as give about ``ops`` compute ops; itself where it is not larger."""
    wanted = max(2 * problem.num_devices, ops // (3 * problem.num_stages))
    return problem if problem.num_microbatches <= wanted else problem.changed(num_microbatches=wanted)


def search_rules(
    incumbent: Incumbent, rng: random.Random, *, runs: int, seconds: float
) -> list[tuple[float, int, Policy]]:
    """Random policies, then crossings of the best ones; what is good is offered to ``incumbent``.

    Parameters
    ----------
    runs
        List schedules to make at most.
    seconds
        Time to spend at most; also ends when the incumbent is at the bound.

    Returns
    -------
    list
        The best policies as (score on the sibling, number, policy), best first.
    """
    end = incumbent.seconds + seconds
    problem, objective = incumbent.problem, incumbent.options.objective
    small = sibling(problem)
    plain = tables(small)
    path = paths(plain)
    pool: list[tuple[float, int, Policy]] = []
    for number in range(runs):
        if incumbent.at_bound or incumbent.seconds > end:
            break
        policy = draw(plain, rng)
        if pool and rng.random() < 0.5:
            policy = _crossed(rng.choice(pool)[2], policy, rng)
        tab = policy.tables_for(plain)
        rule = policy.rule(tab, path)
        state = run(tab, rule)
        if state is None:
            continue
        value = score(tab, state, objective)
        better = not pool or value < pool[0][0]
        pool = best_of([*pool, (value, number, policy)])
        if better and (small is not problem or value < incumbent.value):
            incumbent.offer(to_ops(tab, rule, state) if small is problem else scheduled(problem, policy), "rules")
    return pool


def best_of(pool: list[tuple[float, int, Policy]]) -> list[tuple[float, int, Policy]]:
    """The best policies, best first: of those that offload on demand, and as many of those that offload a share."""
    ranked = sorted(pool, key=lambda entry: entry[:2])
    on_demand = [entry for entry in ranked if entry[2].kept is not None][:POOL]
    by_share = [entry for entry in ranked if entry[2].kept is None][:POOL]
    return sorted([*on_demand, *by_share], key=lambda entry: entry[:2])


def _crossed(policy: Policy, other: Policy, rng: random.Random) -> Policy:
    """The policy with one to three of its numbers from another one."""
    names = rng.sample([f.name for f in fields(policy)], rng.choice([1, 1, 2, 3]))
    return replace(policy, **{name: getattr(other, name) for name in names})
