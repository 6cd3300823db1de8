"""Plans in Python and in Jupyter: short verbs, a table of ops, and a plan as the value of a cell."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe import draw, report, semantics
from optpipe.ops import Kind
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.task import read_plan, read_task
from optpipe.waits import Why, waits
from optpipe.words import explain

if TYPE_CHECKING:
    from rich.console import Console

#: Ops beyond which the value of a cell is words and figures without the picture.
_MOST_DRAWN = 20_000


def load(path: str | Path) -> Plan | Problem:
    """What a file holds: the plan of a plan file, else the problem that it asks to be solved.

    Parameters
    ----------
    path
        A plan; or a problem, a profile or a config, as ``optpipe solve`` takes them.

    Raises
    ------
    InputError
        The file is none of these, or something in it is wrong.
    """
    plan = read_plan(path)
    return read_task(path).problem if plan is None else plan


def show(
    plan: Plan,
    *,
    devices: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    start: float | None = None,
    end: float | None = None,
    ascii_only: bool = False,
    console: Console | None = None,
) -> None:
    """Print a plan as ``optpipe show`` does: its chart and, of a whole plan, what there is to say.

    Parameters
    ----------
    devices, stages
        Only these; None: all.
    start, end
        Only this part of the time, in ms.
    ascii_only
        Only characters that any terminal has.
    console
        Where it goes; default the terminal or the cell, in colours where there are any.

    Raises
    ------
    ValueError
        The part of the time is empty.
    """
    from rich.console import Console

    where = console or Console(highlight=False)
    literal: Any = {"soft_wrap": True, "markup": False, "emoji": False}
    chart = draw.gantt(plan, where.width, devices=devices, stages=stages, start=start, end=end, ascii_only=ascii_only)
    for line in report.facts(plan):
        where.print(line.replace(" ·", ",") if ascii_only else line, **literal)
    where.print(chart)
    if all(part is None for part in (devices, stages, start, end)):
        for line in explain(plan):
            text = textwrap.fill(line, where.width, initial_indent="- ", subsequent_indent="  ")
            where.print(text, **literal)


def frame(plan: Plan) -> Any:
    """The ops of a plan as a pandas DataFrame, in the plan's order.

    Returns
    -------
    pandas.DataFrame
        A row an op: ``kind``, ``stage``, ``microbatch``, ``device``; ``start``, ``end``, ``duration`` in ms; ``bytes``
        that a transfer moves (0: compute); ``waits_for``, the op that it waits for last (empty: none), and ``why``:
        data, lane, memory or nothing.

    Raises
    ------
    ImportError
        pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("a table of ops needs pandas: pip install pandas") from None
    ops = plan.ops
    order = semantics.rank(ops)
    found = waits(plan.problem, ops)
    labels = np.array([*(op.label for op in ops), ""])
    table = pandas.DataFrame(
        {
            "kind": pandas.Categorical.from_codes(ops.kind, [kind.name for kind in Kind]),
            "stage": ops.stage,
            "microbatch": ops.microbatch,
            "device": semantics.device_of(plan.problem, ops),
            "start": ops.start,
            "end": ops.end,
            "duration": ops.end - ops.start,
            "bytes": semantics.moved_bytes(plan.problem, ops),
            # The last label, of -1, is empty.
            "waits_for": labels[found.before],
            "why": [Why(why).name.lower() for why in found.why.tolist()],
        }
    )
    return table.iloc[order].reset_index(drop=True)


def html_of(plan: Plan) -> str:
    """A plan as the value of a notebook's cell: figures, the picture, and what there is to say."""
    from optpipe.page import svg

    facts = "<br>".join(html.escape(line) for line in report.facts(plan))
    picture = svg.render(plan) if len(plan.ops) <= _MOST_DRAWN else ""
    words = "".join(f"<li>{html.escape(line)}</li>" for line in explain(plan))
    return f"<div><p>{facts}</p>{picture}<ul>{words}</ul></div>"
