"""A plan in each of the formats that need no solver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optpipe import interchange
from optpipe.errors import InputError
from optpipe.metrics import Metrics
from optpipe.plan import Plan
from optpipe.trace import Trace

FORMS = ("html", "svg", "trace", *interchange.ORDERS)
_TAKES = {"--against": ("html",), "--trace": ("html", "trace")}


def check_options(form: str, *, against: str | None = None, trace: str | None = None) -> None:
    """Refuse options that a format has no use for."""
    for option, given in (("--against", against), ("--trace", trace)):
        if given is not None and form not in _TAKES[option]:
            raise InputError(option, "", f"goes with --to {' and --to '.join(_TAKES[option])}")


def export(
    plan: Plan,
    form: str,
    file: str | Path = "",
    *,
    against: str | Path | None = None,
    trace: str | Path | None = None,
    schedules: Sequence[tuple[str, Metrics | None, str]] = (),
    drop_offload: bool = False,
) -> tuple[str, list[str]]:
    """A plan in a format of ``FORMS``.

    Parameters
    ----------
    form
        ``html``, ``svg``, ``trace``, ``torch-csv`` or ``megatron``.
    file
        Where the plan comes from, for messages.
    against
        html: the file of another plan, shown on the same clock.
    trace
        html, trace: the file of a run of the plan.
    schedules
        html: known schedules of the problem, each its name, figures, and why it cannot be used.
    drop_offload
        Leave out offloads and recomputation where the format has none.

    Returns
    -------
    tuple
        The text of the file, and warnings.

    Raises
    ------
    InputError
        A file is not what it should be, the format is unknown, or it cannot say what is in the plan.
    """
    if form not in FORMS:
        raise InputError("", "form", f"'{form}' is unknown, expected one of {', '.join(FORMS)}")
    run = None if trace is None else Trace.read(trace, plan.problem)
    if form == "html":
        from optpipe.page import render, tables

        more = [tables.of_schedules(plan.problem, schedules, plan)] if schedules else []
        return render(plan, against=None if against is None else Plan.read(against), trace=run, more=more), []
    if form == "svg":
        from optpipe.page import svg

        return svg.render(plan), []
    if form == "trace":
        from optpipe.interchange import chrome

        return chrome.text_of(plan, run), []
    return interchange.text_in(form, plan, file, drop_offload=drop_offload)
