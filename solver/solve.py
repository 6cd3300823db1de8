"""From a problem to a plan: picks what to try, keeps the best schedule known, and never returns an unverified one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optpipe import memory, semantics, timing
from optpipe.errors import Infeasible, InputError
from optpipe.ops import Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify, verify_plan
from solver import feasibility
from solver.ada_offload import ada_offload
from solver.bounds import lower_bound
from solver.cache import Cache
from solver.compiled import compile_beside
from solver.incumbent import Incumbent, Progress
from solver.options import SolveOptions, physical_cores
from solver.schedules import SCHEDULES, DoesNotApply, DoesNotFit, generate
from solver.search import Portfolio
from solver.search.exact import is_small, solve_exactly
from solver.search.lanes import Lanes, join
from solver.search.shares import with_least_moved

#: Methods that are no known schedule.
SEARCHES = ("auto", "search", "milp")

#: Compute ops from which on only the most promising of the known schedules are tried.
_LARGE_OPS = 20_000
#: Schedules that need not be tried where the other one fits; and those that are tried only if nothing else fits.
_NO_BETTER_THAN = {
    "v-half": "zb-v",
    "v-min": "zb-v",
    "dualpipe-v": "zb-v",
    "gpipe": "1f1b",
    "zb-h1": "zero-bubble",
    "zb-h2": "zero-bubble",
}
_LAST_RESORTS = ("sequential",)
#: Schedules that take long to make, and seconds that must be left for them where another one fits.
_SLOW, _SLOW_FROM = ("pipe-offload", "v-half", "v-min"), 30.0
#: The MILP's part of the time that is left, and seconds that it gets where the gap asked for is reached already.
_MILP_PART, _MILP_POLISH = 0.6, 10.0
#: Processes that search at most, and seconds that must be left for others to be worth their start.
_MOST_LANES, _LANES_FROM = 8, 2.0
#: Of the time limit: how long the search waits for the MILP beside it.
_PATIENCE = 0.15
#: Ops of the largest schedule that is tidied up in the end, and seconds that this may take.
_TIDIED, _TIDY_SECONDS = 10_000, 1.0
#: The first round of search, which is made whatever gap would do, takes at most this part of the time.
_FIRST_PART = 0.5


def methods() -> tuple[str, ...]:
    """Names that ``SolveOptions.method`` may have."""
    return (*SEARCHES, "ada-offload", *SCHEDULES)


def solve(
    problem: Problem,
    options: SolveOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    start: Ops | None = None,
    **changes: Any,
) -> Plan:
    """A verified plan of the problem, as good as the method and the time allow.

    Parameters
    ----------
    problem
        What is to be scheduled.
    options
        Method, limits, seed.
    on_progress
        Called with each better schedule or bound. Ctrl-C ends the search; the best schedule known is returned.
    start
        A schedule of these stages and microbatches to begin from, for searches; what comes out is no longer than it.
        One that is not valid for this problem is left aside.
    changes
        Single options, such as ``time_limit=30``; they go before ``options``.

    Raises
    ------
    Infeasible
        No schedule fits the memory (with the smallest budget that works), or the named schedule does not.
    InputError
        The method is unknown, or the schedule is not defined for such a problem.
    """
    options = replace(options or SolveOptions(), **changes)
    if options.method not in methods():
        raise InputError("", "method", f"'{options.method}' is unknown, expected one of {', '.join(methods())}")
    feasibility.check(problem)
    incumbent = Incumbent(problem, options, lower_bound(problem, options.objective), on_progress)
    cache = Cache() if options.cache and options.method in SEARCHES else None
    try:
        if options.method in SEARCHES:
            incumbent.offer(start, "start")
        if cache is not None and _answered(incumbent, cache):
            return _plan(incumbent)
        if options.method in SEARCHES:
            _search(incumbent)
        else:
            _named(incumbent)
    except KeyboardInterrupt:
        incumbent.facts["interrupted"] = True
        if incumbent.ops is None:
            raise
    _tidy(incumbent)
    plan = _plan(incumbent)
    if cache is not None:
        cache.store(plan, options.objective)
    return plan


def _answered(incumbent: Incumbent, cache: Cache) -> bool:
    """Take the cache's schedule as a start. Whether it will do as it is: proven optimal, or found for this very problem
    and good enough."""
    found = cache.lookup(incumbent.problem, incumbent.options.objective)
    if found is None:
        return False
    ops, facts = found
    incumbent.offer(ops, "cache")
    incumbent.facts["cache"] = facts
    return incumbent.at_bound or (facts["hit"] == "exact" and incumbent.good_enough)


def _named(incumbent: Incumbent) -> None:
    """A known schedule as it is; whether it fits is for the verifier to say."""
    name, problem = incumbent.options.method, incumbent.problem
    try:
        ops = _known(name, problem, incumbent.options.objective)
    except DoesNotFit as reason:
        raise Infeasible(f"'{name}' does not fit: it {reason}", feasibility.smallest_budgets(problem)) from None
    except DoesNotApply as reason:
        raise InputError("", "method", f"'{name}' does not apply: it {reason}") from None
    if incumbent.offer(ops, name):
        return
    smallest = feasibility.smallest_budgets(problem)
    for device, peak in enumerate(memory.peaks(problem, ops)):
        budget = problem.devices[device].memory_bytes
        if budget is not None and peak > budget:
            raise Infeasible(
                f"'{name}' does not fit: device {device} needs {peak} bytes, its budget is {budget}; "
                f"smallest budget that works with other schedules: {smallest[device]} bytes",
                smallest,
            )
    raise AssertionError(f"the schedule '{name}' breaks rules other than memory: {verify(problem, ops)[0]}")


def _known(name: str, problem: Problem, objective: str) -> Ops:
    if name == "ada-offload":
        return ada_offload(problem, objective=objective)
    return generate(name, problem, objective)


def _search(incumbent: Incumbent) -> None:
    """Known schedules, then search; the MILP where the problem is small enough for it."""
    problem, options = incumbent.problem, incumbent.options
    _starts(incumbent)
    if incumbent.at_bound:
        return
    compile_beside()
    threads = options.threads or physical_cores()
    compute_ops = 3 * problem.num_stages * problem.num_microbatches
    small = options.method == "auto" and is_small(problem)
    worth_it = options.method != "milp" and compute_ops <= _LARGE_OPS and incumbent.left > _LANES_FROM
    with Lanes(incumbent, min(threads, _MOST_LANES) - 1 if worth_it else 0) as lanes:
        portfolio = Portfolio(incumbent, random.Random(options.seed))
        joined = lanes.begin("round", incumbent.left * _FIRST_PART)
        portfolio.round(incumbent.left * _FIRST_PART)
        if not incumbent.at_bound and (small or not incumbent.good_enough):
            join(joined, incumbent)
        if options.method == "milp":
            solve_exactly(incumbent, incumbent.left, threads=threads)
            return
        if small and not incumbent.at_bound:
            # A small problem is cheap to solve to the end, whatever gap would do.
            seconds = _MILP_POLISH if incumbent.good_enough else _MILP_PART * incumbent.left
            if not lanes.idle:
                solve_exactly(incumbent, seconds, threads=threads)
            else:
                _beside(incumbent, lanes, portfolio, seconds)
        while not incumbent.finished and not incumbent.at_bound:
            joined = lanes.begin("round", incumbent.left)
            portfolio.round(incumbent.left)
            join(joined, incumbent)


def _beside(incumbent: Incumbent, lanes: Lanes, portfolio: Portfolio, seconds: float) -> None:
    """The MILP in one lane and a round of search in the others; time for the MILP to end, lest what is found depend on
    which of them is faster, and then more rounds until it does."""
    milp, others = lanes.idle[0], lanes.idle[1:]
    milp.begin("milp", seconds)
    patience = min(seconds, _PATIENCE * incumbent.options.time_limit)
    for lane in others:
        lane.begin("round", incumbent.left)
    portfolio.round(min(seconds, incumbent.left))
    join(others, incumbent)
    if milp.wait(min(patience, incumbent.left)):
        return
    while not incumbent.at_bound and incumbent.left > 0 and not milp.wait(0.0):
        if incumbent.good_enough and seconds < _MILP_PART * incumbent.left:
            milp.wait(min(seconds, incumbent.left))
            return
        joined = lanes.begin("round", incumbent.left)
        portfolio.round(incumbent.left)
        join(joined, incumbent)
    milp.offer()


def _starts(incumbent: Incumbent) -> None:
    """The known schedules that fit, the most promising first; for a large problem only a few of them."""
    problem, objective = incumbent.problem, incumbent.options.objective
    compute_ops = 3 * problem.num_stages * problem.num_microbatches
    offloads = any(problem.can_offload(s) for s in range(problem.num_stages))
    several = problem.num_stages > problem.num_devices
    first = ("ada-offload", "zero-bubble", "zb-v") if offloads or several else ("zero-bubble", "ada-offload")
    fit: set[str] = set()
    for number, name in enumerate(dict.fromkeys((*first, *SCHEDULES))):
        if incumbent.at_bound or (fit and (incumbent.left <= 0 or name in _LAST_RESORTS)):
            return
        # All of them together would take a large problem longer than the search needs to do better.
        if fit and compute_ops > _LARGE_OPS and (incumbent.good_enough or offloads or number >= len(first)):
            return
        if _NO_BETTER_THAN.get(name) in fit or (fit and name in _SLOW and incumbent.left < _SLOW_FROM):
            continue
        try:
            incumbent.offer(ops := _known(name, problem, objective), name)
        except DoesNotApply:
            continue
        if not verify(problem, ops):
            fit.add(name)


def _tidy(incumbent: Incumbent) -> None:
    """Leave out of the best schedule what need not be moved, where that takes no noticeable time."""
    ops, options = incumbent.ops, incumbent.options
    if ops is None or options.method not in SEARCHES or options.objective != "makespan" or ops.is_compute.all():
        return
    if len(ops) <= _TIDIED and incumbent.left > _TIDY_SECONDS:
        incumbent.offer(with_least_moved(incumbent.problem, ops, seconds=_TIDY_SECONDS), incumbent.source)


def _without_delays(problem: Problem, ops: Ops) -> Ops:
    """The same orders, each op as early as it can be: what does not decide the makespan is found anywhere in its slack,
    and a reader of the plan would ask what it waits for."""
    early = timing.earliest(problem, ops)
    as_short = semantics.makespan(early) <= semantics.makespan(ops) * (1 + 1e-12)
    return early if as_short and not verify(problem, early) else ops


def _plan(incumbent: Incumbent) -> Plan:
    """The best schedule as a verified plan with the facts of the search."""
    problem, options = incumbent.problem, incumbent.options
    assert incumbent.ops is not None, "one microbatch at a time fits wherever anything does"
    if incumbent.at_bound:
        status = "optimal"
    elif incumbent.good_enough:
        status = "within gap"
    else:
        status = "time limit" if incumbent.left <= 0 else "feasible"
    span = options.objective == "span"
    facts = {
        "method": options.method,
        "source": incumbent.source,
        "status": status,
        "seconds": round(incumbent.seconds, 3),
        "gap": incumbent.value / incumbent.bound - 1.0 if incumbent.bound > 0 else None,
        "seed": options.seed,
        **({"objective": "span", "span_ms": incumbent.value, "span_lower_bound_ms": incumbent.bound} if span else {}),
        **incumbent.facts,
    }
    bound = lower_bound(problem, "makespan") if span else incumbent.bound
    ops = incumbent.ops
    if options.method in SEARCHES and not span:
        ops = _without_delays(problem, ops)
    plan = Plan(problem, ops, bound, facts)
    if violations := verify_plan(plan):
        raise AssertionError(f"the solver's own plan is invalid: {violations[0]}")
    return plan.sorted()
