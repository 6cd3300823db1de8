"""A plan in the terminal: a Gantt chart of every device, and its memory under it.

    dev 0   stage 0 · peak 1 MB, budget 2 MB · busy 86%
     s0    |F0──F1──F2──B0──W0──B1──W1──
     d2h   |    O0──O1──
     h2d   |            R0──R1──
     mem   |▃▃▃▃▅▅▅▅███████▅▅▅▅▃▃▃▃

A column is a slice of time. Three ways to fill it, by how many columns an op gets: its letter and microbatch in one
row; letters above the last digits of microbatches; or, where a column holds several ops, the letter of the kind that
they are, in lower case where the device idles for more than a quarter of the column, and a star where kinds alternate.
A device with several stages has a row more that says where none of them runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.text import Text

from optpipe import memory
from optpipe.ops import Bools, Floats, Ints, Kind, Ops
from optpipe.plan import Plan
from optpipe.report import size_text

#: One letter a kind, so that an op of one column still shows what it is.
LETTER = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "X", Kind.C: "C", Kind.O: "O", Kind.R: "R"}
MEANING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.W: "weight gradient",
    Kind.BW: "backward with weights",
    Kind.C: "recompute",
    Kind.O: "offload",
    Kind.R: "reload",
}
_STYLE = {
    Kind.F: "black on green",
    Kind.B: "white on blue",
    Kind.W: "black on yellow",
    Kind.BW: "black on cyan",
    Kind.C: "white on magenta",
    Kind.O: "black on bright_red",
    Kind.R: "black on bright_magenta",
}
_GUTTER = 7
_LEVELS = {False: " ▁▂▃▄▅▆▇█", True: " _.:-=+*#"}
_OVER = "!"
_MIXED = {True: "*", False: ":"}
#: Below this part of a column no kind stands for all of it.
_MAJORITY = 0.6
_IDLE = {False: "░", True: "."}


@dataclass(frozen=True)
class Window:
    """What part of a plan is drawn, and on how many columns.

    Parameters
    ----------
    columns
        Columns of the chart itself, without the labels on its left.
    start, end
        Times in ms.
    """

    columns: int
    start: float
    end: float

    @property
    def edges(self) -> Floats:
        """Times (ms) at which columns begin and end: columns + 1 of them."""
        return np.linspace(self.start, self.end, self.columns + 1)

    def column(self, times: Floats) -> Ints:
        """The column edge nearest to each time, within the window."""
        position = (times - self.start) * (self.columns / (self.end - self.start))
        return np.clip(np.rint(position), 0, self.columns).astype(np.int64)


def gantt(
    plan: Plan,
    width: int = 80,
    *,
    devices: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    start: float | None = None,
    end: float | None = None,
    ascii_only: bool = False,
) -> Text:
    """The chart of a plan.

    Parameters
    ----------
    plan
        A plan; its ops need not be valid.
    width
        Columns of the terminal.
    devices, stages
        Only these; None: all. A stage brings its device with it.
    start, end
        Only this part of the time, in ms; None: from the start, to the end.
    ascii_only
        Only characters that any terminal has.

    Returns
    -------
    Text
        Lines of at most ``width`` characters, coloured where the console has colours, readable where not. Of a plan
        without length a line that says so.

    Raises
    ------
    ValueError
        The part of the time that is asked for is empty.
    """
    problem, ops = plan.problem, plan.ops
    low = min(0.0, float(ops.start.min(initial=0.0))) if start is None else start
    high = float(ops.end.max(initial=0.0)) if end is None else end
    if high == low and start is None and end is None:
        return Text("No chart: nothing takes any time.")
    if high <= low:
        raise ValueError(f"nothing between {low:g} and {high:g} ms")
    window = Window(max(width - _GUTTER - 1, 8), low, high)
    chosen = np.ones(problem.num_stages, bool)
    if stages is not None:
        chosen = np.isin(np.arange(problem.num_stages), stages)
    device_of = np.array([stage.device for stage in problem.stages])
    if devices is not None:
        chosen &= np.isin(device_of, devices)
    picked = np.flatnonzero(chosen[ops.stage] & (ops.start < high) & (ops.end > low))
    shown = ops.take(picked[np.argsort(ops.start[picked], kind="stable")])
    fill = _filling(shown, window, problem.num_microbatches, ascii_only)

    levels, over, several = memory.levels(problem, ops), False, False
    chart = Text(no_wrap=True, overflow="crop")
    chart.append(_axis(window) + "\n", "dim")
    for device in sorted({int(d) for d in device_of[chosen]}):
        mine = levels.device == device
        time, level = levels.time[mine], levels.level[mine]
        facts = _headline(plan, device, int(level.max(initial=0)))
        chart.append(_clip((", " if ascii_only else " · ").join(facts), width) + "\n", "bold")
        for label, mask in _lanes(shown, device, [s for s in problem.stages_of[device] if chosen[s]]):
            for row_number, row in enumerate(fill.rows(shown.take(mask))):
                _add(chart, label if row_number == 0 else "", row)
        if len(problem.stages_of[device]) > 1:
            several = True
            _add(
                chart,
                "idle",
                Text(_idle(ops.take((device_of[ops.stage] == device) & ops.is_compute), window, ascii_only)),
            )
        budget = problem.devices[device].memory_bytes
        memory_row = _sparkline(time, level, budget, window, ascii_only)
        over |= _OVER in memory_row
        _add(chart, "mem", Text(memory_row))
    idle = f"{_IDLE[ascii_only]} the device idles" if several else "blank: idle"
    chart.append("\n".join(_wrapped(_legend(shown, fill.note, over, idle), width)), "dim")
    return chart


def _add(chart: Text, label: str, row: Text) -> None:
    row.rstrip()
    chart.append(f" {label:<{_GUTTER - 1}}|").append_text(row).append("\n")


def _clip(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 3, 0)] + "..."


def _lanes(ops: Ops, device: int, stages: list[int]) -> list[tuple[str, Bools]]:
    """Rows of a device: compute, one row a stage, then its two directions where they carry anything."""
    here = np.isin(ops.stage, stages)
    lanes = [(f"s{stage}", np.asarray((ops.stage == stage) & ops.is_compute)) for stage in stages]
    for label, kind in (("d2h", Kind.O), ("h2d", Kind.R)):
        carried = np.asarray(here & (ops.kind == kind))
        if carried.any():
            lanes.append((label, carried))
    return lanes


def _headline(plan: Plan, device: int, peak: int) -> list[str]:
    problem, ops = plan.problem, plan.ops
    stages = problem.stages_of[device]
    here = np.isin(ops.stage, stages)
    compute = here & ops.is_compute
    busy = float((ops.end - ops.start)[compute].sum()) / plan.makespan_ms if plan.makespan_ms > 0 else 0.0
    budget = problem.devices[device].memory_bytes
    offloads = int((here & (ops.kind == Kind.O)).sum())
    facts = [
        f"dev {device:<3} stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}",
        f"peak {size_text(peak)}" + (", no limit" if budget is None else f", budget {size_text(budget)}"),
        f"busy {busy:.0%}",
    ]
    if offloads:
        facts.append(f"{offloads} offload{'s' if offloads > 1 else ''}")
    return facts


def _axis(window: Window) -> str:
    """Times over the columns, as many as fit without touching."""
    span = window.end - window.start
    steps = [m * 10.0**e for e in range(-6, 10) for m in (1, 2, 5)]
    step = next((s for s in steps if s * window.columns / span >= 12), span)
    line = [" "] * (window.columns + _GUTTER + 1)
    first = int(np.ceil(window.start / step - 1e-9))
    for number in range(first, int(np.floor(window.end / step + 1e-9)) + 1):
        text = f"{number * step:g}" + (" ms" if number == first else "")
        at = _GUTTER + 1 + int(window.column(np.array([number * step]))[0])
        if at + len(text) <= len(line):
            line[at : at + len(text)] = text
    return "".join(line).rstrip()


class _Fill(NamedTuple):
    """How lanes are filled, and what a reader must know of it."""

    rows: Callable[[Ops], list[Text]]
    note: str


def _filling(ops: Ops, window: Window, microbatches: int, ascii_only: bool) -> _Fill:
    """How to fill the lanes: by the columns that the typical compute op gets."""
    lengths = (ops.end - ops.start)[ops.is_compute]
    lengths = lengths[lengths > 0]
    typical = float(np.median(lengths)) * window.columns / (window.end - window.start) if len(lengths) else 0.0
    if typical >= 1 + len(str(microbatches - 1)):
        dash = "-" if ascii_only else "─"
        return _Fill(lambda row: [_labelled(row, window, dash)], "a letter, then the microbatch")
    if typical >= 1:
        return _Fill(lambda row: _letters_and_digits(row, window), "below a letter the last digit of the microbatch")
    full, partly = _MIXED[True], _MIXED[False]
    note = f"several ops a column: their kind, {full} if kinds alternate; lower case or {partly} if it is partly idle"
    return _Fill(lambda row: [_majority(row, window)], note)


def _legend(ops: Ops, note: str, over: bool, idle: str) -> list[str]:
    kinds = [kind for kind in Kind if (ops.kind == kind).any()]
    names = {kind: "" if LETTER[kind] == kind.name else f" ({kind.name})" for kind in kinds}
    letters = ", ".join(f"{LETTER[kind]} {MEANING[kind]}{names[kind]}" for kind in kinds)
    marks = [f"{_OVER} over the budget"] if over else []
    return [letters, "; ".join([note, *marks, idle, "mem: bytes held of the budget"])]


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Beside the labels of the chart, or below them where it is too narrow for that."""
    indent = " " * (_GUTTER + 1 if width >= 40 else 0)
    return [
        part for line in lines for part in textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent)
    ]


def _spans(ops: Ops, window: Window) -> list[tuple[int, int, Kind, int]]:
    """(first column, column after the last, kind, microbatch) of each op; at least one column each, left to right."""
    first, last = window.column(ops.start), window.column(ops.end)
    spans, free = [], 0
    for a, b, kind, microbatch in zip(
        first.tolist(), last.tolist(), ops.kind.tolist(), ops.microbatch.tolist(), strict=True
    ):
        a = max(a, free)
        b = min(max(b, a + 1), window.columns)
        if b > a:
            spans.append((a, b, Kind(kind), microbatch))
            free = b
    return spans


def _labelled(ops: Ops, window: Window, dash: str) -> Text:
    row, at = Text(), 0
    for a, b, kind, microbatch in _spans(ops, window):
        text = f"{LETTER[kind]}{microbatch}"
        text = text.ljust(b - a, dash) if len(text) <= b - a else text[: b - a]
        row.append(" " * (a - at)).append(text, _STYLE[kind])
        at = b
    return row


def _letters_and_digits(ops: Ops, window: Window) -> list[Text]:
    letters, digits, at = Text(), Text(), 0
    for a, b, kind, microbatch in _spans(ops, window):
        letters.append(" " * (a - at)).append(LETTER[kind] * (b - a), _STYLE[kind])
        digits.append(" " * (a - at)).append(str(microbatch % 10).ljust(b - a))
        at = b
    return [letters, digits]


def _majority(ops: Ops, window: Window) -> Text:
    """The kind of the ops in each column: capital where the lane is busy for three quarters of it or more."""
    edges = window.edges
    share = np.zeros((len(Kind), window.columns))
    for kind in Kind:
        mask = ops.kind == kind
        if mask.any():
            share[kind] = np.diff(_busy_until(edges, ops.start[mask], ops.end[mask]))
    busy = share.sum(0) * (window.columns / (window.end - window.start))
    row = Text()
    mixed = share.max(0) < _MAJORITY * share.sum(0)
    for fraction, kind, several in zip(busy.tolist(), share.argmax(0).tolist(), mixed.tolist(), strict=True):
        if fraction < 0.05:
            row.append(" ")
        elif several:
            row.append(_MIXED[fraction >= 0.75], "black on white")
        else:
            letter = LETTER[Kind(kind)]
            row.append(letter if fraction >= 0.75 else letter.lower(), _STYLE[Kind(kind)])
    return row


def _idle(computes: Ops, window: Window, ascii_only: bool) -> str:
    """A mark in each column that the device, which these are the compute ops of, idles in for half or more."""
    order = np.argsort(computes.start, kind="stable")
    busy = np.diff(_busy_until(window.edges, computes.start[order], computes.end[order]))
    length = (window.end - window.start) / window.columns
    return "".join(_IDLE[ascii_only] if part < 0.5 * length else " " for part in busy.tolist())


def _busy_until(times: Floats, start: Floats, end: Floats) -> Floats:
    """Time (ms) spent in the intervals up to each of ``times``; the intervals follow one another."""
    knots = np.maximum.accumulate(np.column_stack([start, end]).ravel())
    done = np.column_stack([np.r_[0.0, np.cumsum(end - start)[:-1]], np.cumsum(end - start)]).ravel()
    return np.interp(times, knots, done, left=0.0)


def _sparkline(times: Floats, levels: Ints, budget: int | None, window: Window, ascii_only: bool) -> str:
    """The highest memory level within each column, against the budget (or the peak, where there is no limit)."""
    highest = highest_within(times, levels, window.edges)
    full = budget if budget else int(levels.max(initial=0))
    if full <= 0:
        return ""
    glyphs = _LEVELS[ascii_only]
    steps = np.clip(np.ceil(highest * (len(glyphs) - 1) / full), 0, len(glyphs) - 1).astype(int)
    over = highest > full
    return "".join(_OVER if o else glyphs[s] for s, o in zip(steps.tolist(), over.tolist(), strict=True))


def highest_within(times: Floats, levels: Ints, edges: Floats) -> Floats:
    """The highest value of a step function within each slice of time.

    Parameters
    ----------
    times, levels
        The function takes ``levels[i]`` from ``times[i]`` on, and 0 before the first; times ascend.
    edges
        Slice c reaches from ``edges[c]`` to ``edges[c + 1]``.

    Returns
    -------
    Floats
        One value a slice.
    """
    if not len(levels):
        return np.zeros(len(edges) - 1)
    # A free counts a hair before a take of the same instant, so times may step back by that hair.
    first = np.searchsorted(np.maximum.accumulate(times), edges, "right")
    highest = np.where(first > 0, levels[np.maximum(first - 1, 0)], 0).astype(np.float64)[:-1]
    for slice_number in np.flatnonzero(first[1:] > first[:-1]).tolist():
        highest[slice_number] = max(
            highest[slice_number], float(levels[first[slice_number] : first[slice_number + 1]].max())
        )
    return highest
