"""From a problem to a plan: picks what to try, keeps the best schedule known, and never returns an unverified one."""

from __future__ import annotations

import random
from collections.abc import Callable

from optpipe.errors import Infeasible, InputError
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.verify import verify_plan
from solver import feasibility
from solver.ada_offload import ada_offload
from solver.annealing import anneal
from solver.bounds import lower_bound
from solver.incumbent import Incumbent, Progress
from solver.options import SolveOptions, physical_cores
from solver.schedules import SCHEDULES, DoesNotApply
from solver.search import search_around, search_rules

#: Methods that are no known schedule.
SEARCHES = ("auto", "search", "milp")

#: List schedules that the first search over rules may make, and ops that it may place in them.
_RUNS, _PLACED = 400, 2_000_000
#: Order bits up to which the MILP is worth its time.
_MILP_OPS = 420
#: Beyond the gap asked for, ``auto`` still polishes for this part of the time limit, and at most for so many seconds.
_POLISH_PART, _POLISH_SECONDS = 0.2, 10.0


def methods() -> tuple[str, ...]:
    """Names that ``SolveOptions.method`` may have."""
    return (*SEARCHES, "ada-offload", *SCHEDULES)


def solve(
    problem: Problem,
    options: SolveOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
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

    Raises
    ------
    Infeasible
        No schedule fits the memory (with the smallest budget that works), or the named schedule does not.
    InputError
        The method is unknown, or the schedule is not defined for such a problem.
    """
    options = options or SolveOptions()
    if options.method not in methods():
        raise InputError("", "method", f"'{options.method}' is unknown, expected one of {', '.join(methods())}")
    feasibility.check(problem)
    incumbent = Incumbent(problem, options, lower_bound(problem, options.objective), on_progress)
    try:
        if options.method in SEARCHES:
            _search(incumbent)
        else:
            _named(incumbent)
    except KeyboardInterrupt:
        incumbent.facts["interrupted"] = True
        if incumbent.ops is None:
            raise
    return _plan(incumbent)


def _named(incumbent: Incumbent) -> None:
    """A known schedule as it is; whether it fits is for the verifier to say."""
    name, problem = incumbent.options.method, incumbent.problem
    try:
        if name == "ada-offload":
            ops = ada_offload(problem, objective=incumbent.options.objective)
        else:
            ops = SCHEDULES[name](problem)
    except DoesNotApply as reason:
        raise InputError("", "method", f"'{name}' does not apply: it {reason}") from None
    if not incumbent.offer(ops, name):
        from optpipe.memory import peaks

        for device, peak in enumerate(peaks(problem, ops)):
            budget = problem.devices[device].memory_bytes
            if budget is not None and peak > budget:
                raise Infeasible(
                    f"'{name}' does not fit: device {device} needs {peak} bytes, its budget is {budget}; "
                    f"smallest budget that works with other schedules: {feasibility.smallest_budgets(problem)[device]}",
                    feasibility.smallest_budgets(problem),
                )
        raise AssertionError(f"the schedule '{name}' breaks rules other than memory: {_violations(problem, ops)}")


def _violations(problem: Problem, ops: object) -> str:
    from optpipe.verify import verify

    return "; ".join(verify(problem, ops)[:3])  # type: ignore[arg-type]


def _search(incumbent: Incumbent) -> None:
    """Known schedules, then search, then the MILP where the problem is small enough for it."""
    problem, options = incumbent.problem, incumbent.options
    rng = random.Random(options.seed)
    _starts(incumbent)
    ops = 3 * problem.num_stages * problem.num_microbatches
    runs = max(4, min(_RUNS, _PLACED // ops))
    polish = min(_POLISH_SECONDS, _POLISH_PART * options.time_limit)
    if options.method == "milp":
        search_rules(incumbent, rng, runs=min(runs, 60), seconds=min(polish, incumbent.left / 4))
        _milp(incumbent, incumbent.left)
        return
    search_rules(incumbent, rng, runs=runs, seconds=min(polish / 2, incumbent.left / 3))
    search_around(incumbent, rng, runs=runs, seconds=min(polish / 2, incumbent.left / 3))
    if options.method == "auto" and ops <= _MILP_OPS and not incumbent.at_bound:
        # A small problem is cheap to solve to the end, whatever gap would do.
        _milp(incumbent, polish if incumbent.good_enough else 0.6 * incumbent.left)
    while not incumbent.finished and not incumbent.at_bound:
        _deepen(incumbent, rng, min(incumbent.left, 10.0))


def _deepen(incumbent: Incumbent, rng: random.Random, seconds: float) -> None:
    """One more round of search around the best schedule."""
    assert incumbent.ops is not None
    if incumbent.ops.is_compute.all() and incumbent.options.objective == "makespan":
        found = anneal(
            incumbent.problem, incumbent.ops, seconds=seconds / 2, goal=incumbent.bound, seed=rng.getrandbits(32)
        )
        incumbent.offer(found, "annealing")
        seconds /= 2
    search_rules(incumbent, rng, runs=10**9, seconds=0.3 * seconds)
    search_around(incumbent, rng, runs=10**9, seconds=0.7 * seconds)


def _starts(incumbent: Incumbent) -> None:
    """The known schedules that fit. One microbatch at a time comes last: it fits where anything does."""
    problem, objective = incumbent.problem, incumbent.options.objective
    generators: dict[str, Callable[[], object]] = {
        "ada-offload": lambda: ada_offload(problem, objective=objective),
        **{name: (lambda generate=generate: generate(problem)) for name, generate in SCHEDULES.items()},
    }
    for name, generate in generators.items():
        if incumbent.at_bound or (incumbent.ops is not None and incumbent.left <= 0):
            return
        try:
            incumbent.offer(generate(), name)  # type: ignore[arg-type]
        except DoesNotApply:
            continue


def _milp(incumbent: Incumbent, seconds: float) -> None:
    """The MILP on HiGHS (or another solver), from the best schedule known."""
    from solver.milp.solve import solve_milp

    options = incumbent.options
    seconds = min(seconds, incumbent.left)
    if seconds <= 0 or incumbent.at_bound:
        return
    ops, bound, facts = solve_milp(
        incumbent.problem,
        incumbent.ops,
        objective=options.objective,
        time_limit=seconds,
        gap=options.gap if options.method == "milp" else 0.0,
        threads=options.threads or physical_cores(),
        seed=options.seed,
        lower_bound=incumbent.bound,
        on_improvement=lambda better: incumbent.offer(better, "milp"),
        backend=options.backend,
    )
    incumbent.offer(ops, "milp")
    if bound is not None:
        incumbent.raise_bound(bound)
    incumbent.facts["milp"] = facts


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
    plan = Plan(problem, incumbent.ops, bound, facts)
    if violations := verify_plan(plan):
        raise AssertionError(f"the solver's own plan is invalid: {violations[0]}")
    return plan.sorted()
