"""From a solution of a formulation to a verified schedule."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np

from optpipe import semantics, timing
from optpipe.metrics import span
from optpipe.ops import Floats, Ints, Kind, Ops
from optpipe.verify import verify
from solver.milp.formulation import Formulation

#: What the solver's tolerance may make of all or of nothing, in parts; and of a whole number of bytes.
_EXACT, _BYTE = 1e-6, 1e-3


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
    valid: list[Ops] = []
    for more in (0, 1) if formulation.options.parts else (0,):  # a byte may be missing within the tolerance
        found = _ops(formulation, x, more)
        candidates = [found]
        with contextlib.suppress(ValueError):
            candidates.insert(0, timing.earliest(problem, found))
        valid = valid or [ops for ops in candidates if not verify(problem, ops)]
    value = semantics.makespan if formulation.options.objective == "makespan" else partial(span, problem)
    return min(valid, key=value, default=None)


def _ops(formulation: Formulation, x: Floats, more: int) -> Ops:
    """The ops of a solution at its times; ``more``: bytes that each transfer of a part moves beyond it."""
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
    moved = np.full(len(kind), -1, np.int64)
    if formulation.options.parts:
        transfers = kind >= Kind.O
        moved[transfers] = _moved(formulation, stage[transfers], x[decision[transfers]], more)
        there = np.where(transfers, moved != 0, there)
    start = np.maximum(start - start[there].min(), 0.0)
    ops = Ops.columns(kind[there], stage[there], microbatch[there], start[there], start[there], moved[there])
    return ops.at(ops.start, ops.start + semantics.durations(formulation.problem, ops))


def _moved(formulation: Formulation, stage: Ints, part: Floats, more: int) -> Ints:
    """int64: the bytes that transfers of these parts move; -1 for whole ones, 0 for none."""
    whole = np.array([each.offloadable_bytes for each in formulation.problem.stages], np.int64)[stage]
    moved = np.clip(np.ceil(part * whole - _BYTE) + more, 0, whole).astype(np.int64)
    return np.where((moved == whole) | (part > 1 - _EXACT), -1, np.where(part > _EXACT, moved, 0))
