"""The MILP, from the best schedule known."""

from __future__ import annotations

from optpipe.problem import Problem
from solver.incumbent import Incumbent
from solver.milp.formulation import Options, estimated_bits

#: Order bits up to which the whole MILP gets anywhere.
_MOST_BITS = 2_500


def is_small(problem: Problem) -> bool:
    """Whether the MILP of the whole problem is worth its time."""
    return estimated_bits(problem) <= _MOST_BITS


def solve_exactly(incumbent: Incumbent, seconds: float, *, threads: int) -> None:
    """Solve the MILP on HiGHS, or on the solver that the options name; schedules and bounds go to ``incumbent``.

    Transfers are whole in it first; where no such schedule is better, what they move is free too.

    Parameters
    ----------
    seconds
        Time to spend at most.
    threads
        Of HiGHS.
    """
    from solver.milp.solve import solve_milp

    options = incumbent.options
    seconds = min(seconds, incumbent.left)
    if seconds <= 0 or incumbent.at_bound:
        return
    end = incumbent.seconds + seconds
    for parts in (False, True):
        ops, bound, facts = solve_milp(
            incumbent.problem,
            incumbent.ops,
            objective=options.objective,
            time_limit=end - incumbent.seconds,
            gap=options.gap if options.method == "milp" else 0.0,
            threads=threads,
            seed=options.seed,
            lower_bound=incumbent.bound,
            on_improvement=incumbent.taker("milp"),
            backend=options.backend,
            options=Options(parts=parts),
        )
        incumbent.offer(ops, "milp")
        if bound is not None:
            incumbent.raise_bound(bound)
        incumbent.facts["milp"] = {"solver": options.backend, **facts}
        # No schedule of whole transfers is as short as one that is known, which moves parts.
        if facts.get("status") != "infeasible" or end <= incumbent.seconds:
            return
