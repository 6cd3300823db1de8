"""Bounds without memory: the longest path, and the work of each device."""

from __future__ import annotations

from solver.bounds.view import View


def critical_path(view: View) -> float:
    """One microbatch goes down the pipeline and back: head + turn + what follows the start of its B."""
    return view.head + max(o + t + a for o, t, a in zip(view.offset, view.turn, view.after, strict=True))


def work(view: View) -> float:
    """A device starts at its head, and then has all its work to do (F and the shorter of B + W and BW)."""
    return view.head + view.work if view.own_end else 0.0
