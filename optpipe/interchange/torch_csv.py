"""Schedules as torch.distributed.pipelining and torchtitan keep them: a CSV file, one row a rank, one op a cell.

A cell is ``STAGE KIND MICROBATCH``, such as ``2F0``: F forward, I backward for the input, W backward for the weights,
B both backwards in one; ``(0F3;3B1)OVERLAP_F_B`` two ops that torch overlaps; an empty cell an idle slot. Files with
communication also have cells such as ``1RECV_F0`` and ``0UNSHARD``: torch derives them from the rest, and so they are
checked and passed over. Files of torch 2.5 and before say BW for both backwards, and B for the one for the input: a B
that has a W of the same stage and microbatch is read so.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from optpipe import files
from optpipe.errors import Infeasible, InputError
from optpipe.interchange import orders
from optpipe.ops import Kind, Op
from optpipe.plan import Plan
from optpipe.problem import Problem

#: The plan's key that keeps the text of a compute-only file, which is written again while the plan still says the same.
KEPT = "torch_csv"

_CELL = re.compile(r"(\d+)(F|I|BW|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)\s*OVERLAP_F_B")
_KINDS = {"F": Kind.F, "I": Kind.B, "B": Kind.BW, "BW": Kind.BW, "W": Kind.W}
_LETTERS = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_PER_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_EXPECTED = "expected a cell such as 2F0: the stage, F, I, W or B, the microbatch"


class Cell(NamedTuple):
    """An op and where it stands; rows and columns count from 1. ``letters`` is what the file calls the kind."""

    op: Op
    letters: str
    row: int
    column: int

    @property
    def place(self) -> str:
        return f"row {self.row}, column {self.column}"

    @property
    def text(self) -> str:
        return f"{self.op.stage}{self.letters}{self.op.microbatch}"


def read(path: str | Path, problem: Problem) -> Plan:
    """The plan that a file describes: its orders, with the times of the problem.

    Parameters
    ----------
    path
        A compute-only or a compute-and-communication file. Row r is device r of the problem.
    problem
        With as many devices, stages and microbatches as the file.

    Raises
    ------
    InputError
        A cell is malformed or given twice, is not of the problem, or its rank; an op is missing, or waits for ever.
    Infeasible
        The schedule needs more memory than the problem has.
    """
    text = files.read_text(path, exact=True)
    cells, computes_only = _cells(text, problem, path)
    cells = [_settled(row) for row in cells]
    _check_complete(cells, problem, path)
    try:
        ops = orders.timed(problem, [[cell.op for cell in row] for row in cells])
    except orders.Stuck as stuck:
        device, position = stuck.place
        raise InputError(path, cells[device][position].place, f"{stuck}: the order cannot be run") from None
    if over := orders.over_budget(problem, ops):
        raise Infeasible(f"{path}: does not fit: " + "; ".join(_too_much(*device) for device in over))
    solver = {"method": "import", "source": Path(path).name, "status": "feasible"}
    return Plan(problem, ops, None, solver, extra={KEPT: text} if computes_only else {}).sorted()


def text_of(plan: Plan) -> str:
    """A plan without offload and recomputation as a compute-only file.

    What was imported from such a file is given back byte for byte, as long as the plan keeps its order.

    Raises
    ------
    ValueError
        The plan has ops that the file cannot say.
    """
    problem = plan.problem
    own = [[_text(op) for op in row] for row in orders.orders_of(problem, plan.ops)]
    if not all(kind in _LETTERS for kind in map(Kind, set(plan.ops.kind.tolist()))):
        raise ValueError("offloads, reloads and recomputation have no cells in a torch CSV")
    kept = plan.extra.get(KEPT)
    if isinstance(kept, str) and _same(kept, problem, own):
        return kept
    stream = io.StringIO()
    csv.writer(stream).writerows(own)
    return stream.getvalue()


def _text(op: Op) -> str:
    return f"{op.stage}{_LETTERS.get(op.kind, op.kind.name)}{op.microbatch}"


def _same(text: str, problem: Problem, own: Sequence[Sequence[str]]) -> bool:
    """Whether a file's text says the same orders."""
    try:
        cells, _ = _cells(text, problem, "")
    except InputError:
        return False
    return [[_text(cell.op) for cell in _settled(row)] for row in cells] == [list(row) for row in own]


def _too_much(device: int, peak: int, budget: int) -> str:
    return f"device {device} needs {peak} bytes, its budget is {budget}"


def _cells(text: str, problem: Problem, file: str | Path) -> tuple[list[list[Cell]], bool]:
    """The compute ops of each rank, and whether there was nothing else."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise InputError(file, "", f"is not CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if len(rows) != problem.num_devices:
        raise InputError(
            file, "", f"has {len(rows)} rows, expected {problem.num_devices}: one for each device of the problem"
        )
    found: list[list[Cell]] = []
    computes_only = True
    for number, row in enumerate(rows, 1):
        found.append([])
        for column, cell in enumerate(row, 1):
            for part in _parts(cell, file, f"row {number}, column {column}"):
                compute = _cell(part, number, column, problem, file)
                if compute is None:
                    computes_only = False
                else:
                    found[-1].append(compute)
    return found, computes_only


def _parts(cell: str, file: str | Path, place: str) -> Iterator[str]:
    """The ops in a cell: none, one, or those that overlap."""
    text = cell.strip()
    if not text:
        return
    if not text.startswith("("):
        yield text
        return
    match = _OVERLAP.fullmatch(text)
    if not match:
        raise InputError(file, place, f"'{text:.40}' is malformed, expected a cell such as (0F3;1B2)OVERLAP_F_B")
    parts = [part.strip() for part in match.group(1).split(";") if part.strip()]
    if not parts:
        raise InputError(file, place, f"'{text:.40}' overlaps nothing, expected a cell such as (0F3;1B2)OVERLAP_F_B")
    yield from parts


def _cell(text: str, row: int, column: int, problem: Problem, file: str | Path) -> Cell | None:
    """The op of a cell; None where it is no compute op. Whatever it is, its stage and microbatch exist on this rank."""
    place = f"row {row}, column {column}"
    match = _CELL.fullmatch(text)
    if not match or (not match.group(3) and match.group(2) not in _PER_STAGE):
        raise InputError(file, place, f"'{text:.40}' is malformed, {_EXPECTED}")
    letters = match.group(2)
    stage = _number(match.group(1), "stage", problem.num_stages, text, file, place)
    microbatch = 0
    if match.group(3):
        microbatch = _number(match.group(3), "microbatch", problem.num_microbatches, text, file, place)
    if (device := problem.stages[stage].device) != row - 1:
        raise InputError(
            file, place, f"'{text}' is on rank {row - 1}, but the problem holds stage {stage} on device {device}"
        )
    return Cell(Op(_KINDS[letters], stage, microbatch), letters, row, column) if letters in _KINDS else None


def _number(digits: str, what: str, count: int, text: str, file: str | Path, place: str) -> int:
    if len(digits) > 9 or int(digits) >= count:
        hint = f" (the first {what} is 0)" if digits == str(count) else ""
        raise InputError(
            file, place, f"'{text:.40}': {what} {digits:.20} does not exist, expected 0 to {count - 1}{hint}"
        )
    return int(digits)


def _settled(row: Sequence[Cell]) -> list[Cell]:
    """With each B that has a W, and no I, read as the backward for the input alone."""
    weights = {(c.op.stage, c.op.microbatch) for c in row if c.letters == "W"}
    inputs = {(c.op.stage, c.op.microbatch) for c in row if c.letters == "I"}
    return [
        cell._replace(op=cell.op._replace(kind=Kind.B))
        if cell.letters == "B" and (place := (cell.op.stage, cell.op.microbatch)) in weights and place not in inputs
        else cell
        for cell in row
    ]


def _check_complete(cells: Sequence[Sequence[Cell]], problem: Problem, file: str | Path) -> None:
    """Every (stage, microbatch) has one F, and either I and W or one B."""
    for number, row in enumerate(cells, 1):
        seen: dict[tuple[Kind, int, int], Cell] = {}
        for cell in row:
            kind, stage, microbatch = cell.op[:3]
            if (first := seen.get((kind, stage, microbatch))) is not None:
                raise InputError(file, cell.place, f"'{cell.text}' is there a second time, after {first.place}")
            twin = {Kind.B: Kind.BW, Kind.W: Kind.BW, Kind.BW: Kind.B}.get(kind)
            other = None if twin is None else seen.get((twin, stage, microbatch))
            if other is not None or (kind == Kind.BW and (other := seen.get((Kind.W, stage, microbatch))) is not None):
                raise InputError(
                    file, cell.place, f"'{cell.text}' and '{other.text}' ({other.place}) do the same backward twice"
                )
            seen[kind, stage, microbatch] = cell
        _check_present(number, seen, problem, file)


def _check_present(row: int, seen: dict[tuple[Kind, int, int], Cell], problem: Problem, file: str | Path) -> None:
    for stage in problem.stages_of[row - 1]:
        for microbatch in range(problem.num_microbatches):
            there = {kind for kind in (Kind.F, Kind.B, Kind.W, Kind.BW) if (kind, stage, microbatch) in seen}
            if missing := _missing(there):
                text = f"{stage}{missing}{microbatch}"
                raise InputError(
                    file,
                    f"row {row}",
                    f"{text} is missing, expected all of microbatches 0 to "
                    f"{problem.num_microbatches - 1} for stage {stage}",
                )


def _missing(there: set[Kind]) -> str:
    if Kind.F not in there:
        return "F"
    if Kind.BW in there or {Kind.B, Kind.W} <= there:
        return ""
    return "W" if Kind.B in there else "I" if Kind.W in there else "B"
