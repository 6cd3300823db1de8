"""A plan: a problem with a schedule that solves it, and its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe import files, semantics
from optpipe.errors import InputError
from optpipe.ops import Kind, Ops
from optpipe.problem import LONGEST_MS, Problem

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

FORMAT, VERSION = "optpipe-plan", 1
#: No instant of a plan is further from 0 than this, ms.
_LATEST_MS = 1000 * LONGEST_MS
_OP_KEYS = {"kind", "stage", "microbatch", "start", "end", "bytes"}


@dataclass(repr=False)
class Plan:
    """A problem with a schedule.

    Attributes
    ----------
    problem, ops
        The problem and the ops that solve it.
    lower_bound_ms
        A proven lower bound of the problem's makespan, or None.
    solver
        Facts about how it was found: ``method``, ``status``, ``seconds`` and more.
    training
        The training part of a config (model, data, batch, optimiser), so that the plan alone can be run.
    extra
        Unknown keys of the file, kept.
    makespan_ms
        What the plan says of itself; default the makespan of ``ops``.
    """

    problem: Problem
    ops: Ops
    lower_bound_ms: float | None = None
    solver: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    makespan_ms: float = -1.0

    def __post_init__(self) -> None:
        if self.makespan_ms < 0:
            self.makespan_ms = semantics.makespan(self.ops)

    def __repr__(self) -> str:
        problem, name = self.problem, f"{self.problem.name}: " if self.problem.name else ""
        sizes = f"{problem.num_devices} devices, {problem.num_stages} stages, {problem.num_microbatches} microbatches"
        return f"<Plan {name}{sizes}, {len(self.ops)} ops, {self.makespan_ms:.6g} ms>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """For rich's ``print``: figures and the chart, as wide as there is room."""
        from rich.text import Text

        from optpipe import draw, report

        yield from (Text(line) for line in report.facts(self))  # a name is no markup
        if len(self.ops):
            yield draw.gantt(self, options.max_width, ascii_only=options.ascii_only)

    def _repr_html_(self) -> str:
        """For Jupyter: figures, the picture, words."""
        from optpipe.notebook import html_of

        return html_of(self)

    def frame(self) -> Any:
        """The ops as a pandas DataFrame, see ``optpipe.notebook.frame``."""
        from optpipe.notebook import frame

        return frame(self)

    @property
    def gap(self) -> float | None:
        """(makespan - bound) / bound; None without a bound."""
        if not self.lower_bound_ms:
            return None
        return self.makespan_ms / self.lower_bound_ms - 1.0

    def sorted(self) -> Plan:
        """The same plan with its ops in the file's order: by device, lane and start."""
        ops = self.ops
        device, lane = semantics.device_of(self.problem, ops), semantics.lane_keys(self.problem, ops)
        place = np.empty(len(ops), np.int64)
        place[semantics.rank(ops)] = np.arange(len(ops))
        return Plan(
            self.problem,
            ops.take(np.lexsort((place, ops.start, lane, device))),
            self.lower_bound_ms,
            self.solver,
            self.training,
            self.extra,
            self.makespan_ms,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the plan file, ops sorted."""
        return {**self._head(), "ops": [json.loads(line) for line in _op_lines(self.sorted().ops)]}

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "problem": self.problem.to_json()}
        head |= {"makespan_ms": self.makespan_ms, "lower_bound_ms": self.lower_bound_ms, "solver": self.solver}
        if self.training is not None:
            head["training"] = self.training
        return {**self.extra, **head}

    def write(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all; one line an op, so that people and diffs can read it."""
        head = json.dumps(self._head(), allow_nan=False, indent=1)
        lines = _op_lines(self.sorted().ops)
        with files.whole_file(path) as stream:
            stream.write(head[: head.rindex("\n")] + ',\n "ops": [\n  ')
            stream.write(",\n  ".join(lines))
            stream.write("\n ]\n}\n")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """A plan from its file. What the ops break is left to ``verify``.

        Raises
        ------
        InputError
            The file is no plan: wrong format or version, a key missing or of a wrong type.
        """
        return cls.from_json(files.read_json(path), path)

    @classmethod
    def from_json(cls, value: Any, file: str | Path) -> Plan:
        """A plan from the JSON object of a plan file; ``file`` names it in errors."""
        if not isinstance(value, dict):
            raise InputError(file, "", "is not a plan, expected an object")
        if value.get("format") != FORMAT:
            raise InputError(file, "format", f"expected '{FORMAT}', not {value.get('format')!r}")
        if value.get("version") != VERSION or isinstance(value["version"], bool):
            raise InputError(file, "version", f"expected {VERSION}, not {value.get('version')!r}")
        for key in ("problem", "ops", "makespan_ms"):
            if key not in value:
                raise InputError(file, key, "is missing")
        problem = Problem.from_json(value["problem"], file, "problem", keep_unknown=True)
        for key in ("solver", "training"):
            if value.get(key) is not None and not isinstance(value[key], dict):
                raise InputError(file, key, f"expected a mapping, not {value[key]!r}")
        known = {"format", "version", "problem", "ops", "makespan_ms", "lower_bound_ms", "solver", "training"}
        return cls(
            problem=problem,
            ops=_read_ops(value["ops"], problem, file),
            lower_bound_ms=_number(value, "lower_bound_ms", file, optional=True),
            solver=value.get("solver") or {},
            training=value.get("training"),
            extra={key: item for key, item in value.items() if key not in known},
            makespan_ms=_number(value, "makespan_ms", file) or 0.0,
        )


def _number(value: dict[str, Any], key: str, file: str | Path, *, optional: bool = False) -> float | None:
    item = value.get(key)
    if item is None and optional:
        return None
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item <= _LATEST_MS:
        raise InputError(file, key, f"expected a number of at least 0, not {item!r}")
    return float(item)


def _op_lines(ops: Ops) -> list[str]:
    names = [kind.name for kind in Kind]
    columns = (c.tolist() for c in (ops.kind, ops.stage, ops.microbatch, ops.start, ops.end, ops.bytes))
    lines = [
        f'{{"kind": "{names[k]}", "stage": {s}, "microbatch": {j}, "start": {a!r}, "end": {b!r}'
        + (f', "bytes": {n}}}' if n >= 0 else "}")
        for k, s, j, a, b, n in zip(*columns, strict=True)
    ]
    for index, extra in ops.extra.items():
        lines[index] = json.dumps({**json.loads(lines[index]), **extra}, allow_nan=False)
    return lines


def _read_ops(value: Any, problem: Problem, file: str | Path) -> Ops:
    """Ops from the list of a plan file; each cell is checked, a fault names the op."""
    if not isinstance(value, list):
        raise InputError(file, "ops", f"expected a list, not {value!r:.40}")
    codes = {kind.name: int(kind) for kind in Kind}
    rows: list[tuple[int, int, int, float, float, int]] = []
    extra: dict[int, dict[str, Any]] = {}
    stages, microbatches = problem.num_stages, problem.num_microbatches
    for index, op in enumerate(value):
        if not isinstance(op, dict):
            raise InputError(file, f"ops[{index}]", f"expected an object, not {op!r:.40}")
        kind, stage, microbatch = op.get("kind"), op.get("stage"), op.get("microbatch")
        start, end, moved = op.get("start"), op.get("end"), op.get("bytes")
        good = (
            isinstance(kind, str)
            and kind in codes
            and type(stage) is int
            and 0 <= stage < stages
            and type(microbatch) is int
            and 0 <= microbatch < microbatches
            and isinstance(start, int | float)
            and isinstance(end, int | float)
            and not isinstance(start, bool)
            and not isinstance(end, bool)
            and -_LATEST_MS <= start <= _LATEST_MS
            and -_LATEST_MS <= end <= _LATEST_MS
            and (moved is None or (type(moved) is int and 0 <= moved < 2**62))
        )
        if not good:
            raise _bad_op(op, f"ops[{index}]", codes, stages, microbatches, file)
        rows.append((codes[kind], stage, microbatch, start, end, -1 if moved is None else moved))  # type: ignore
        if not op.keys() <= _OP_KEYS:
            extra[index] = {key: item for key, item in op.items() if key not in _OP_KEYS}
    kinds, op_stages, op_microbatches, starts, ends, sizes = zip(*rows, strict=True) if rows else ((),) * 6
    ops = Ops.columns(kinds, op_stages, op_microbatches, starts, ends, sizes, extra)
    return ops


def _bad_op(
    op: dict[str, Any], key: str, codes: dict[str, int], stages: int, microbatches: int, file: str | Path
) -> InputError:
    for part in ("kind", "stage", "microbatch", "start", "end"):
        if part not in op:
            return InputError(file, f"{key}.{part}", "is missing")
    kind = op["kind"]
    if not isinstance(kind, str) or kind not in codes:
        return InputError(file, f"{key}.kind", f"expected one of {', '.join(codes)}, not {kind!r:.40}")
    for part, count in (("stage", stages), ("microbatch", microbatches)):
        if type(op[part]) is not int or not 0 <= op[part] < count:
            return InputError(file, f"{key}.{part}", f"expected an integer from 0 to {count - 1}, not {op[part]!r:.40}")
    for part in ("start", "end"):
        if type(op[part]) not in (int, float):
            return InputError(file, f"{key}.{part}", f"expected a number, not {op[part]!r:.40}")
        if not -_LATEST_MS <= op[part] <= _LATEST_MS:
            return InputError(file, f"{key}.{part}", f"expected at most {_LATEST_MS:g} ms, not {op[part]!r:.40}")
    return InputError(file, f"{key}.bytes", f"expected a whole number of bytes, not {op['bytes']!r:.40}")
