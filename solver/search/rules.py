"""Search over policies of the list scheduler, for large problems on a sibling with fewer microbatches.

A policy says in numbers without a unit how the list scheduler chooses, so what is good for 128 microbatches is good for
1,024: the warm-up and the cool-down are the same, the steady phase repeats.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace

from optpipe import metrics, semantics
from optpipe.ops import Ops
from optpipe.problem import Problem
from solver.incumbent import Incumbent
from solver.list_scheduler import run, to_ops
from solver.policy import Policy, draw
from solver.tables import paths, tables

#: Policies kept as parents.
_POOL = 12
#: Ops of the sibling on which policies are compared.
_SIBLING_OPS = 6000


def sibling(problem: Problem, ops: int = _SIBLING_OPS) -> Problem:
    """The problem with as many microbatches as give about ``ops`` compute ops; itself where it is not larger."""
    wanted = max(4 * problem.num_devices, ops // (3 * problem.num_stages))
    return problem if problem.num_microbatches <= wanted else problem.changed(num_microbatches=wanted)


def search_rules(incumbent: Incumbent, rng: random.Random, *, runs: int, seconds: float) -> None:
    """Random policies, then changes of the best ones; what is good is offered to ``incumbent``.

    Parameters
    ----------
    runs
        List schedules to make at most.
    seconds
        Time to spend at most; also ends when the incumbent is at the bound.
    """
    end = incumbent.seconds + seconds
    problem = incumbent.problem
    small = sibling(problem)
    tab = tables(small)
    path = paths(tab)
    span = incumbent.options.objective == "span"
    pool: list[tuple[float, int, Policy]] = []
    for number in range(runs):
        if incumbent.at_bound or incumbent.seconds > end:
            break
        policy = _changed(rng.choice(pool)[2], draw(tab, rng), rng) if pool and rng.random() < 0.7 else draw(tab, rng)
        rule = policy.rule(tab, path)
        state = run(tab, rule)
        if state is None:
            return
        ops = to_ops(tab, rule, state)
        value = metrics.span(small, ops) if span else semantics.makespan(ops)
        better = not pool or value < pool[0][0]
        pool = sorted([*pool, (value, number, policy)], key=lambda entry: entry[:2])[:_POOL]
        if better:
            incumbent.offer(ops if small is problem else scheduled(problem, policy), "rules")


def scheduled(problem: Problem, policy: Policy) -> Ops | None:
    """The list schedule of a policy; None where not one microbatch fits."""
    tab = tables(problem)
    rule = policy.rule(tab, paths(tab))
    state = run(tab, rule)
    return None if state is None else to_ops(tab, rule, state)


def _changed(policy: Policy, other: Policy, rng: random.Random) -> Policy:
    """The policy with one to three of its numbers from another one."""
    names = rng.sample([f.name for f in fields(policy)], rng.choice([1, 1, 2, 3]))
    return replace(policy, **{name: getattr(other, name) for name in names})
