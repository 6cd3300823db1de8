"""From a solution of a formulation to a verified schedule."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np

from optpipe import semantics, timing
from optpipe.metrics import span
from optpipe.ops import Floats, Kind, Ops
from optpipe.verify import verify
from solver.milp.formulation import Formulation


def schedule(formulation: Formulation, x: Floats) -> Ops | None:
    """The schedule of a solution: its orders with every op as early as they allow, or its own times where these are
    better (for the span a first op may be too early) or the only ones that hold (orders of ops without a duration).

    Parameters
    ----------
    x
        float64 (columns,): a solution within the solver's tolerances.

    Returns
    -------
    Ops or None
        None where the solution breaks a rule of the problem by more than the tolerance of times.
    """
    problem = formulation.problem
    found = _ops(formulation, x)
    candidates = [found]
    with contextlib.suppress(ValueError):
        candidates.insert(0, timing.earliest(problem, found))
    valid = [ops for ops in candidates if not verify(problem, ops)]
    value = semantics.makespan if formulation.options.objective == "makespan" else partial(span, problem)
    return min(valid, key=value, default=None)


def _ops(formulation: Formulation, x: Floats) -> Ops:
    """The ops of a solution at its times."""
    table = formulation.table
    m = table.microbatches
    kind, stage = (np.repeat(part, m) for part in (table.kind, table.stage))
    microbatch = np.tile(np.arange(m), len(table.kind))
    decision = formulation.decision
    chosen = (decision >= 0) & (x[np.maximum(decision, 0)] > 0.5)
    fused = chosen & table.compute
    there = (chosen | table.compute) & ~(fused & (kind == Kind.W))
    kind = np.where(fused & (kind == Kind.B), int(Kind.BW), kind)
    start = x[formulation.start]
    start = np.maximum(start - start[there].min(), 0.0)
    ops = Ops.columns(kind[there], stage[there], microbatch[there], start[there], start[there])
    return ops.at(ops.start, ops.start + semantics.durations(formulation.problem, ops))
