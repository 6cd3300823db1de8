"""Proven lower bounds of makespan and span, each with its derivation.

A bound must hold for every schedule that the format allows: microbatches in any order, backwards split or fused, any
part of an activation moved away, recomputation. (It takes ops to last longer than the tolerance of the clock.)
"""

from __future__ import annotations

from optpipe.problem import Problem
from solver.bounds.area import area
from solver.bounds.backward_chain import backward_chain
from solver.bounds.path import critical_path, work
from solver.bounds.slots import slots
from solver.bounds.two_end import two_end
from solver.bounds.view import views
from solver.tables import tables

__all__ = ["all_bounds", "lower_bound"]

_OF_A_DEVICE = {
    "critical path": critical_path,
    "work": work,
    "two ends": two_end,
    "last backward": backward_chain,
    "slots": slots,
}


def all_bounds(problem: Problem, objective: str = "makespan") -> dict[str, float]:
    """Every bound by its name, ms.

    Parameters
    ----------
    problem
        A problem that some schedule fits.
    objective
        ``makespan``: first start to last end. ``span``: the largest, over devices, of last end less first start.
    """
    devices = list(views(tables(problem), objective))
    found = {name: max(bound(view) for view in devices) for name, bound in _OF_A_DEVICE.items()}
    if objective == "makespan":
        found["memory and channels"] = area(problem, devices)
    return found


def lower_bound(problem: Problem, objective: str = "makespan") -> float:
    """The best of all bounds, ms."""
    return max(all_bounds(problem, objective).values())
