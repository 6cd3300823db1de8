"""The report page: one HTML file that needs nothing else, with everything there is to see of a plan."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from optpipe import colours, draw
from optpipe.ops import Kind
from optpipe.page import tables, view
from optpipe.page.tables import PageTable
from optpipe.plan import Plan
from optpipe.trace import Trace

__all__ = ["PageTable", "render"]


def render(
    plan: Plan, *, against: Plan | None = None, trace: Trace | None = None, more: Sequence[PageTable] = ()
) -> str:
    """The page of a plan.

    Parameters
    ----------
    plan
        What is shown.
    against
        Another plan, shown under it on the same clock.
    trace
        A run of the plan, shown the same way: its step of median length.
    more
        Further tables, such as the known schedules side by side.

    Returns
    -------
    str
        HTML that reads nothing from anywhere else, in light and in dark.
    """
    charts = [view.of_plan(plan, "plan")]
    lists = [*more]
    if against is not None:
        charts.append(view.of_plan(against, "other plan"))
        lists.insert(0, tables.of_plans(plan, against))
    if trace is not None:
        step = trace.typical
        charts.append(view.of_run(plan, step))
        lists = [*tables.of_run(plan, step), *lists]
    data = {
        "kinds": [
            {
                "name": kind.name,
                "letter": kind.name,
                "meaning": draw.MEANING[kind],
                "fill": colours.FILL[kind],
                "ink": colours.INK[kind],
            }
            for kind in Kind
        ],
        "charts": charts,
    }
    title = plan.problem.name or "plan"
    page = _file("page.html")
    parts = {
        "title": html.escape(title),
        "style": _file("page.css"),
        "tables": "\n".join(table.html() for table in lists),
        "data": embedded(data),
        "script": "\n".join(_file(name) for name in ("chart.js", "page.js")),
    }
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text, 1)
    return page


def embedded(value: Any) -> str:
    """JSON that can stand in a script element: no name that it holds ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
