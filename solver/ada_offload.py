"""AdaOffload: the fill phase runs as many forwards as memory and the channel to the host allow.

    compute   F0 F1 F2 F3 F4 ........ B0 F5 B1 ...
    d2h          O0 O1 O2                O5
    h2d                          R0      R1

PipeOffload offloads by a fixed rule, whatever the fill leaves room for. Here a forward starts whenever the memory that
offloads have freed holds it, so how many run before the first backward follows from the budget and the speed of the
link. What is left to choose is how much the device keeps, when activations come back, and how forwards and backwards
take turns: a few policies of the list scheduler that between them were as good as 400 random ones on problems of 4 to
64 stages. For a large problem they are compared on one with fewer microbatches, which has the same fill and drain.
"""

from __future__ import annotations

import math
from dataclasses import replace

from optpipe import metrics, semantics, timing
from optpipe.ops import Ops
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.list_scheduler import run, to_ops
from solver.policy import Policy
from solver.schedules.errors import DoesNotFit
from solver.tables import Tables, paths, tables

#: Ops that all policies tried may place, together, before one is chosen on a smaller problem.
_WORK = 150_000

#: Policies that are tried where not even the smaller problem leaves time for all.
_FEW = 4

_ANY = math.inf
#: With offload, the most promising first.
_OFFLOADING = (
    Policy(lean=0.0, backward_ideal=False, alternation=1.0, flight=3.0, flight_extra=1, kept=2, prefetch=3, reserve=0),
    Policy(lean=1.0, forward_shift=2.0, backward_ideal=True, flight=3.0, kept=3, prefetch=1, reserve=0),
    Policy(
        lean=1.0, forward_shift=4.0, share_idle=True, flight=2.0, flight_extra=3, kept=2, prefetch=1, reserve=0,
        newest_first=False,
    ),
    Policy(
        lean=0.5, forward_shift=2.0, backward_ideal=True, patience=0.5, share_idle=True, alternation=0.5, flight=1.5,
        flight_extra=1, kept=3, prefetch=0, reserve=0,
    ),
    Policy(
        lean=-1.0, forward_shift=1.0, backward_ideal=True, flight=_ANY, kept=1, prefetch=0, reserve=0,
        newest_first=False,
    ),
    Policy(
        lean=-1.0, backward_ideal=True, weight_shift=8.0, patience=1.0, alternation=1.0, flight=3.0, flight_extra=4,
        kept=2, prefetch=0, reserve=0, newest_first=False,
    ),
    Policy(
        lean=0.5, patience=0.5, alternation=0.5, flight=3.0, flight_extra=2, kept=2, prefetch=0, reserve=0,
        newest_first=False,
    ),
    Policy(
        lean=0.0, forward_shift=-1.0, backward_ideal=True, weight_shift=8.0, patience=1.0, flight=_ANY, kept=2,
        prefetch=1, reserve=0, newest_first=False, reload_first=False,
    ),
    Policy(
        lean=-1.0, forward_shift=4.0, patience=1.0, alternation=0.5, flight=2.0, flight_extra=2, kept=1, prefetch=0,
        reserve=0,
    ),
    Policy(
        lean=0.0, backward_ideal=True, weight_shift=8.0, alternation=2.0, flight=2.0, flight_extra=2, kept=2,
        prefetch=2, reserve=0, newest_first=False,
    ),
    Policy(
        lean=0.5, backward_ideal=True, weight_shift=8.0, patience=1.0, share_idle=True, alternation=0.5, flight=2.0,
        flight_extra=2, kept=3, prefetch=0, reload_first=False,
    ),
    Policy(
        lean=1.0, backward_ideal=True, weight_shift=2.0, patience=1.0, flight=2.0, kept=3, prefetch=0, reserve=0,
        newest_first=False, reload_first=False,
    ),
)  # fmt: skip
#: With memory for one or two microbatches: everything leaves that has the time, and comes back no sooner than it is
#: known when it is needed. (Back at once, it would take the place of all that could run meanwhile.)
_CROWDED = tuple(
    replace(policy, kept=None, share=share, prefetch=0, flight=_ANY, reload_late=True, evict=True)
    for policy, share in ((_OFFLOADING[0], 0.8), (_OFFLOADING[0], 1.0), (_OFFLOADING[2], 9.0))
)
#: Where nothing can be offloaded.
_KEEPING = tuple(
    Policy(flight=flight, flight_extra=extra, share_idle=share_idle, patience=patience, kept=None)
    for flight, extra in ((1.0, 0), (_ANY, 0), (1.0, 1), (1.0, 2))
    for share_idle, patience in ((True, 0.0), (False, 1.0))
)


def ada_offload(problem: Problem, *, objective: str = "makespan", work: int = _WORK) -> Ops:
    """The best schedule of AdaOffload's policies.

    Parameters
    ----------
    problem
        Any problem. Where nothing can be offloaded the same rules without offloads remain.
    objective
        ``makespan`` or ``span``.
    work
        Ops to place; if that is too few for all policies, one is chosen on a problem with fewer microbatches.

    Raises
    ------
    DoesNotFit
        A device cannot hold one microbatch's activations of all its stages.
    """
    policies = _policies(tables(problem))
    affordable = work // (5 * len(policies) * problem.num_stages)
    if affordable < problem.num_microbatches:
        small = problem.changed(
            num_microbatches=min(problem.num_microbatches, max(affordable, 2 * problem.num_devices))
        )
        policies.sort(key=lambda policy: _value(small, scheduled(small, policy), objective))
        policies = policies[:2]
    found = [ops for policy in policies if (ops := scheduled(problem, policy)) is not None]
    if not found:
        raise DoesNotFit("needs room for one microbatch's activations of all stages of a device")
    return min(found, key=lambda ops: _value(problem, ops, objective))


def _policies(tab: Tables) -> list[Policy]:
    """Policies to try: also with evictions where devices hold several stages, with recomputation where it can be."""
    policies = list(_OFFLOADING if any(tab.movable) else _KEEPING)
    more = policies[:3] if any(tab.movable) and tab.S > tab.D else []
    policies += [replace(policy, evict=True) for policy in more]
    policies += _CROWDED if any(tab.movable) else ()
    if any(tab.dropped):
        policies += [replace(policy, recompute=part) for policy in policies[:2] for part in (0.5, 1.0)]
    return policies


def scheduled(problem: Problem, policy: Policy) -> Ops | None:
    """The list schedule of a policy; None where a device cannot hold one microbatch of all its stages at once."""
    tab = policy.tables_for(tables(problem))
    rule = policy.rule(tab, paths(tab))
    state = run(tab, rule)
    if state is None:
        return None
    ops = to_ops(tab, rule, state)
    return _retimed(problem, ops) if policy.reload_late else ops


def _retimed(problem: Problem, ops: Ops) -> Ops:
    """The same orders without the waits for announced gradients."""
    early = timing.earliest(problem, ops)
    return ops if verify(problem, early) else early


def _value(problem: Problem, ops: Ops | None, objective: str) -> float:
    if ops is None:
        return math.inf
    return metrics.span(problem, ops) if objective == "span" else semantics.makespan(ops)
