"""Schedules to and from other tools: torch's CSV files, Megatron-like text, Chrome traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from optpipe import memory
from optpipe.errors import InputError
from optpipe.interchange import megatron, orders, torch_csv
from optpipe.ops import Kind, Ops
from optpipe.plan import Plan
from optpipe.verify import verify

#: Formats that say nothing but orders of compute ops.
ORDERS = {"torch-csv": torch_csv.text_of, "megatron": megatron.text_of}


def text_in(form: str, plan: Plan, file: str | Path, *, drop_offload: bool = False) -> tuple[str, list[str]]:
    """A plan in a format of ``ORDERS``.

    Parameters
    ----------
    file
        Where the plan comes from, for messages.
    drop_offload
        Leave out offloads, reloads and recomputation, which these formats do not have.

    Returns
    -------
    tuple
        The text, and warnings: what memory the schedule needs without its offloads.

    Raises
    ------
    InputError
        The plan has such ops, and they are not to be dropped; or it breaks a rule other than that of memory.
    """
    check_order(plan, file)
    moved, again = int((plan.ops.kind == Kind.O).sum()), int((plan.ops.kind == Kind.C).sum())
    if not moved and not again:
        return ORDERS[form](plan), []
    what = " and ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in _present(moved, again))
    if not drop_offload:
        raise InputError(file, "ops", f"has {what}, which {form} cannot say; --drop-offload leaves them out")
    ops = orders.only_plain(plan.problem, plan.ops)
    return ORDERS[form](replace(plan, ops=ops)), [f"without {what} " + "; ".join(_needs(plan, ops))]


def check_order(plan: Plan, file: str | Path) -> None:
    """Refuse what no other tool could run either. Memory is left out: elsewhere there may be more.

    Raises
    ------
    InputError
        The first violation.
    """
    roomy = plan.problem.with_budgets([None] * plan.problem.num_devices)
    if violations := verify(roomy, plan.ops):
        raise InputError(file, "ops", f"{violations[0]}, expected a valid plan")


def _needs(plan: Plan, ops: Ops) -> Iterator[str]:
    """What memory each device needs for other ops, where that is more than in the plan."""
    before, after = memory.peaks(plan.problem, plan.ops), memory.peaks(plan.problem, ops)
    if after == before:
        yield "every device needs as much memory as with them"
    for device, (old, new) in enumerate(zip(before, after, strict=True)):
        if new != old:
            budget = plan.problem.devices[device].memory_bytes
            over = f", over its budget of {budget}" if budget is not None and new > budget else ""
            yield f"device {device} needs {new} bytes in place of {old}{over}"


def _present(moved: int, again: int) -> list[tuple[int, str]]:
    return [(count, noun) for count, noun in ((moved, "offload"), (again, "recomputation")) if count]
