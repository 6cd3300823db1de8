"""Event-driven list scheduling: any placement, any channels, offload on the fly, memory never exceeded.

A list schedule is decided in the order of time: whenever a device falls free, it starts the op with the smallest
key of those that can start. The keys and limits come from a :class:`Rule`; ``memory_rule`` keeps a run from
painting itself into a corner. One run takes some 20 microseconds an op in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.list_scheduler.events import run
from solver.list_scheduler.records import State, moved_by
from solver.list_scheduler.rule import KEEP, OFFLOAD, ON_DEMAND, RECOMPUTE, UNBOUNDED, Rule, backward_first, ramp
from solver.tables import Tables, tables, with_parts

__all__ = [
    "KEEP",
    "OFFLOAD",
    "ON_DEMAND",
    "RECOMPUTE",
    "UNBOUNDED",
    "Rule",
    "State",
    "backward_first",
    "list_schedule",
    "makespan",
    "ramp",
    "run",
    "to_ops",
]


def list_schedule(problem: Problem, rule: Rule, parts: Sequence[float] | None = None) -> Ops | None:
    """The schedule that ``rule`` makes of ``problem``; None where it needs more memory than there is.

    Each microbatch by itself must be able to pass a device's stages: with the activations of all of them there at once,
    but for those that are recomputed and, under ``evict``, offloaded.

    Parameters
    ----------
    problem, rule
        The problem and how to schedule it.
    parts
        Per stage, the part (0 to 1) of its offloadable bytes that a transfer moves; None: all of them.
    """
    tab = tables(problem)
    if parts is not None:
        tab = with_parts(tab, parts)
    state = run(tab, rule)
    return None if state is None else to_ops(tab, rule, state)


def makespan(state: State) -> float:
    """First start to last end in ms. (The first F of stage 0 starts at 0.)"""
    return float(max(state.busy))


def to_ops(tab: Tables, rule: Rule, state: State) -> Ops:
    """The ops of a finished run, by kind, stage and microbatch."""
    fused = np.asarray(rule.fused, bool)
    b_start = np.asarray(state.b_start)
    columns = (
        (Kind.F, np.asarray(state.f_start), tab.forward),
        (Kind.B, np.where(fused, -1.0, b_start), tab.backward),
        (Kind.W, np.asarray(state.w_start), tab.weight),
        (Kind.BW, np.where(fused, b_start, -1.0), tab.fused),
        (Kind.C, np.asarray(state.c_start), tab.forward),
        (Kind.O, np.asarray(state.o_start), None),
        (Kind.R, np.asarray(state.r_start), None),
    )
    moves = moved_by(tab, rule)
    took_of = {Kind.O: moves["offload"], Kind.R: moves["reload"]}
    whole = np.repeat(tab.offloadable, tab.m)
    partial = np.where(moves["movable"] < whole, moves["movable"], -1)
    kinds, stages, microbatches, starts, ends, moved = [], [], [], [], [], []
    for kind, start, length in columns:
        k = np.flatnonzero(start >= 0)
        stage = k // tab.m
        kinds.append(np.full(len(k), int(kind)))
        stages.append(stage)
        microbatches.append(k % tab.m)
        starts.append(start[k])
        ends.append(start[k] + (took_of[kind][k] if length is None else np.asarray(length)[stage]))
        moved.append(partial[k] if length is None else np.full(len(k), -1))
    kind_column, stage_column, microbatch_column, start_column, end_column, moved_column = (
        np.concatenate(column) for column in (kinds, stages, microbatches, starts, ends, moved)
    )
    return Ops.columns(kind_column, stage_column, microbatch_column, start_column, end_column, moved_column)
