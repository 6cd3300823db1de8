"""The known schedules beside the same ones of other generators, on the same times and with the same memory.

    python benchmarks/peers.py [--only V-Half] [--rows] [--known] [--version LABEL]

``peers/peers.csv`` holds theirs. A schedule of theirs is compared with ours of the same name, or with the one that is
made for the same placement and memory. What no plan of the same problem can be is left out, each for a reason that the
tables name.

Every row is kept in ``results/peers.jsonl`` as soon as it is there: a run that was interrupted goes on where it
stopped; ``--known`` makes the tables of what is there. A row is measured anew when the sources of our schedule change;
``--version any`` takes the newest of any sources.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
import time
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import tables
from optpipe import metrics
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.schedules import SCHEDULES, DoesNotApply, generate

HERE = Path(__file__).resolve().parent

#: Their name begins with -> ours, and where the stages are.
_OURS = (
    ("1F1B-V", ("v-half", "v-min"), "v"),
    ("1F1B", ("1f1b",), "linear"),
    ("GPipe", ("gpipe",), "linear"),
    ("LoopedBFS", ("gpipe",), "looped"),
    ("interleaved-1F1B", ("interleaved-1f1b",), "looped"),
    ("group-interleaved-1F1B", ("zb-interleaved",), "looped"),
    ("InterleavedZeroBubble", ("zb-interleaved",), "looped"),
    ("ZB1P", ("zero-bubble",), "linear"),
    ("ZB-H", ("zero-bubble",), "linear"),
    ("ZB heuristic", ("zero-bubble",), "linear"),
    ("ILP", ("zero-bubble",), "linear"),
    ("ZB-V", ("zb-v",), "v"),
    ("ZBV", ("zb-v",), "v"),
    ("v_auto_schedule pattern search (V-ZB)", ("zb-v",), "v"),
    ("v_auto_schedule pattern search (V-Half)", ("v-half",), "v"),
    ("v_auto_schedule pattern search (V-Min)", ("v-min",), "v"),
    ("V-Half", ("v-half",), "v"),
    ("V-Min", ("v-min",), "v"),
    ("DualPipeV", ("dualpipe-v",), "v"),
    ("PipeOffload", ("pipe-offload",), "looped"),
)
#: Why schedules of theirs are left out.
_TWICE = "every device holds two stages, and every stage is on two devices: not a problem's placement"
_AT_ONCE = "a forward and a backward at once take less time than one after the other: no op of a plan"
#: What is added to the name of theirs where the first transfers are faster than the others, and where they are not.
_FASTER, _ONE_SPEED = " with faster first transfers", " at one speed"
#: Bytes of one microbatch's activations of a device; a multiple of the chunks.
_ACTIVATION = 1200
#: Relative differences below this are none.
_SAME = 1e-9


class Compared(NamedTuple):
    """One row of theirs beside the best of ours; infinite where ours does not fit."""

    theirs: str
    ours: str
    case: str
    their_makespan: float
    our_makespan: float
    their_span: float
    our_span: float


def problem_of(row: dict[str, str], placement: str) -> Problem:
    """The problem that a row's schedule solves, with the memory that it had, or else needs."""
    D, chunks = int(row["devices"]), int(row["chunks"])
    forward, backward, weight, comm = (float(row[name]) for name in ("F", "B", "W", "comm"))
    down = list(range(D))
    places = down + down[::-1] if placement == "v" else down * chunks
    limit = re.search(r"\(([\d.]+) activations", row["memory_limit"]) or re.match(r"([\d.]+)", row["peak_activations"])
    assert limit is not None
    size = _ACTIVATION // chunks
    offload = float(row["offload_time"] or 0) * (forward + backward + weight) / chunks
    stage: dict[str, Any] = {
        "forward_ms": forward / chunks,
        "backward_ms": backward / chunks,
        "weight_ms": weight / chunks,
        "activation_bytes": size,
        "weight_context_bytes": size // 2 if "half" in row["memory_limit"] else size,
    }
    channels = []
    if row["offload_time"]:
        stage |= {"offloadable_bytes": size, "offload_ms": offload, "reload_ms": offload}
        for first in range(0, D, 2):
            pair = [d for d in (first, first + 1) if d < D]
            for x in ("d2h", "h2d"):
                both = [{"device": d, "direction": x} for d in pair]
                channels.append({"name": f"link {first} {x}", "transfers": both})
        for d in range(D):
            both = [{"device": d, "direction": x} for x in ("d2h", "h2d")]
            channels.append({"name": f"device {d}", "transfers": both})
    return Problem.model_validate(
        {
            "num_microbatches": int(row["microbatches"]),
            "devices": [{"memory_bytes": int(_ACTIVATION * float(limit.group(1)))}] * D,
            "stages": [{**stage, "device": d} for d in places],
            "comm_ms": [0.0 if a == b else comm for a, b in pairwise(places)],
            "channels": channels,
        }
    )


def why_left_out(row: dict[str, str]) -> str | None:
    """Why a row of theirs is not compared; None: it is."""
    if re.match(r"DualPipe\b", row["schedule"]):
        return _TWICE
    work = int(row["microbatches"]) * (float(row["F"]) + float(row["B"]) + float(row["W"]))
    if row["schedule"].startswith("DualPipeV [fused F&B=2") or float(row["span"]) < work * (1 - _SAME):
        return _AT_ONCE
    return None


def at_one_speed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows that are compared; those whose first transfers are faster than the others twice: as they are, and with
    the memory that they need where all transfers are as fast."""
    found = []
    for row in rows:
        if why_left_out(row) is not None:
            continue
        slower = row["peak_one_speed"] or row["peak_activations"]
        if float(slower or 0) == float(row["peak_activations"] or 0):
            found.append(row)
        else:
            found.append({**row, "schedule": row["schedule"] + _FASTER})
            found.append({**row, "schedule": row["schedule"] + _ONE_SPEED, "peak_activations": slower})
    return found


def ours_of(schedule: str) -> tuple[tuple[str, ...], str]:
    """Our schedules that one of theirs is compared with, and the placement."""
    return next((ours, placement) for name, ours, placement in _OURS if schedule.startswith(name))


def compared(row: dict[str, str]) -> Compared:
    """A row of theirs beside ours."""
    ours, placement = ours_of(row["schedule"])
    problem = problem_of(row, placement)
    found: list[tuple[float, float, str]] = []
    for own in ours:
        lengths = []
        for objective in ("makespan", "span"):
            try:
                ops = generate(own, problem, objective)
            except DoesNotApply:
                break
            if verify(problem, ops):
                break
            measured = metrics.measure(problem, ops)
            lengths.append(measured.makespan_ms if objective == "makespan" else measured.span_ms)
        if len(lengths) == 2:
            found.append((lengths[0], lengths[1], own))
    makespan, span, own = min(found, default=(float("inf"), float("inf"), ours[0]))
    case = f"{row['profile']} {row['devices']}x{row['microbatches']} {row['memory_limit'] or row['peak_activations']}"
    if row["offload_time"]:
        case += f" offload {row['offload_time']}"
    return Compared(row["schedule"], own, case, float(row["makespan"]), makespan, float(row["span"]), span)


@lru_cache
def version(ours: tuple[str, ...]) -> str:
    """A digest of the sources that these schedules of ours are made of."""
    new, seen, content = {SCHEDULES[name].__module__ for name in ours}, set[str](), hashlib.sha256()
    while new:
        module = min(new)
        seen.add(module)
        path = HERE.parent.joinpath(*module.split("."))
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        content.update(text.encode())
        new = (new | set(re.findall(r"^from (solver\.\S+) import", text, re.MULTILINE))) - seen
    return content.hexdigest()[:10]


class Kept:
    """Compared rows in a file of JSON lines.

    Parameters
    ----------
    path
        The file.
    label
        Version under which rows are looked up and kept; None: that of the sources of each; ``any``: the newest of any.
    """

    def __init__(self, path: Path, label: str | None) -> None:
        self.path, self.label = path, label
        self.rows: dict[tuple[str, str], list[Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            entry = json.loads(line)
            self.rows[entry["key"], "" if label == "any" else entry["version"]] = entry["result"]

    def compared(self, row: dict[str, str], *, measure: bool) -> Compared | None:
        """``compared``, of which what is there is not measured again; None for what is not there and not asked for."""
        key = json.dumps(list(row.values()))
        label = version(ours_of(row["schedule"])[0]) if self.label in (None, "any") else self.label
        at = key, "" if self.label == "any" else label
        if at not in self.rows:
            if not measure:
                return None
            began = time.process_time()
            found = compared(row)
            seconds = time.process_time() - began
            print(f"{found.theirs}: {found.case}: {seconds:.1f} s", file=sys.stderr, flush=True)
            self.rows[at] = [None if value == float("inf") else value for value in found]
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "version": label, "result": self.rows[at]}) + "\n")
        theirs, ours, case, *lengths = self.rows[at]
        return Compared(theirs, ours, case, *(float("inf") if length is None else length for length in lengths))


def summary(rows: list[Compared]) -> list[list[tables.Cell]]:
    """Per schedule of theirs: how often ours is shorter, as long, longer, does not fit; and the extremes."""
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    lines: list[list[tables.Cell]] = []
    for theirs, group in groups.items():
        fit = [row for row in group if row.our_makespan < float("inf")]
        ratios = [row.our_makespan / row.their_makespan - 1 for row in fit]
        spans = [row.our_span / row.their_span - 1 for row in fit]
        lines.append(
            [
                theirs,
                ", ".join(sorted({row.ours for row in group})),
                len(group),
                sum(r < -_SAME for r in ratios),
                sum(abs(r) <= _SAME for r in ratios),
                sum(r > _SAME for r in ratios),
                sum(r > _SAME for r in spans),
                len(group) - len(fit),
                tables.percent(min(ratios, default=None)),
                tables.percent(max(ratios, default=None)),
                tables.percent(max(spans, default=None)),
            ]
        )
    return lines


def _group(row: Compared) -> str:
    """Their schedule, without what its rows differ in."""
    return re.sub(r" ?\(?(group_interleaved )?g=[^)]*\)?", "", row.theirs).removesuffix(_ONE_SPEED)


def longer(row: Compared) -> bool:
    """Whether ours is longer than theirs, from start to end or on a device, or does not fit."""
    return row.our_makespan > row.their_makespan * (1 + _SAME) or row.our_span > row.their_span * (1 + _SAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="schedules of theirs whose name contains this")
    parser.add_argument("--rows", action="store_true", help="print every row where ours is longer")
    parser.add_argument("--known", action="store_true", help="measure nothing")
    parser.add_argument("--version", metavar="LABEL", help="of the results")
    wanted = parser.parse_args()
    with (HERE / "peers" / "peers.csv").open() as stream:
        theirs = [row for row in csv.DictReader(stream) if wanted.only in row["schedule"]]
    kept = Kept(HERE / "results" / "peers.jsonl", wanted.version)
    chosen = at_one_speed(theirs)
    if not wanted.known:
        for row in sorted(chosen, key=_size):
            kept.compared(row, measure=True)
    rows = [ours for row in chosen if (ours := kept.compared(row, measure=False)) is not None]
    table = summary(rows)
    tables.show("Makespan of our schedules against theirs, same times and memory", _HEADER, table)
    if wanted.rows:
        for entry in filter(longer, rows):
            print(
                f"{entry.theirs}: {entry.case}: {entry.our_makespan:.3f} against {entry.their_makespan:.3f} ms, "
                f"span {entry.our_span:.3f} against {entry.their_span:.3f} ms"
            )
    if not wanted.only:
        left_out = Counter((row["schedule"], why) for row in theirs if (why := why_left_out(row)) is not None)
        _write(rows, tables.markdown(_HEADER, table), left_out)


_HEADER = [
    "theirs", "ours", "rows", "shorter", "same", "longer", "longer span", "no fit", "best", "worst", "worst span",
]  # fmt: skip


def _size(row: dict[str, str]) -> int:
    return int(row["devices"]) * int(row["microbatches"]) * int(row["chunks"])


def _write(rows: list[Compared], table: str, left_out: dict[tuple[str, str], int]) -> None:
    """The tables as files."""
    text = (
        "Shorter, same, longer: by makespan, in rows of `peers/peers.csv`; longer span: of a schedule made for that; "
        "worst: ours / theirs - 1."
    )
    cells: list[list[tables.Cell]] = [
        [row.theirs, row.case, row.their_makespan, row.our_makespan, row.their_span, row.our_span]
        for row in rows
        if longer(row) and not row.theirs.endswith(_FASTER)
    ]
    header = ["theirs", "case", "ms", "ours", "span", "our span"]
    parts = [text, "", table, "## Longer, or no fit", "", tables.markdown(header, cells) if cells else "None.\n"]
    pairs: list[list[tables.Cell]] = [
        [
            faster.theirs.removesuffix(_FASTER),
            faster.case,
            faster.their_makespan,
            faster.our_makespan,
            peak,
            same.our_makespan,
        ]
        for faster, same in pairwise(rows)
        if faster.theirs.endswith(_FASTER) and same.theirs.endswith(_ONE_SPEED)
        for peak in same.case.split()[2:3]
    ]
    if pairs:
        header = ["theirs", "case", "ms", "ours", "its peak at one speed", "ours there"]
        parts += ["## Another problem: faster first transfers", "", _WHY_FASTER, "", tables.markdown(header, pairs)]
    if left_out:
        cells = [[name, number, why] for (name, why), number in left_out.items()]
        parts += ["## Left out", "", tables.markdown(["theirs", "rows", "why"], cells)]
    tables.write_markdown(HERE / "results" / "peers.md", "Known schedules and their peers", parts)
    tables.write_csv(HERE / "results" / "peers.csv", list(Compared._fields), [list(row) for row in rows])


_WHY_FASTER = (
    "PipeOffload's generator lets transfers take 0.7 of their time until the first reload. A problem has one time for "
    "each transfer, and ours take it throughout. Where that generator reports a higher peak once its 0.7 is 1 (column "
    "`peak_one_speed`), its schedule is none of the problem that ours solve: it counts above with that higher peak. "
    "Below is what ours take in the memory that theirs needs with the faster transfers, and in that of the higher peak."
)


if __name__ == "__main__":
    main()
