"""The known schedules beside the same ones of other generators, on the same times and with the same memory.

    python benchmarks/peers.py [--only V-Half] [--rows] [--known] [--version LABEL]

``peers/peers.csv`` holds theirs. A schedule of theirs is compared with ours of the same name, or with the one that is
made for the same placement and memory. DualPipe is left out: it holds every stage twice.

Every row is kept in ``results/peers.jsonl`` as soon as it is there: a run that was interrupted goes on where it
stopped; ``--known`` makes the tables of what is there. Rows are measured anew when the sources that known schedules are
made of change; ``--version any`` takes the newest of any sources.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import tables
from optpipe import metrics
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.schedules import DoesNotApply, generate

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
    ("DualPipeV (F&B pair", ("dualpipe-v",), "v"),
    ("DualPipeV [seq]", ("dualpipe-v",), "v"),
    ("PipeOffload", ("pipe-offload",), "looped"),
)
#: Bytes of one microbatch's activations of a device; a multiple of the chunks.
_ACTIVATION = 1200
#: Relative differences below this are none.
_SAME = 1e-6


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


def compared(row: dict[str, str]) -> Compared | None:
    """A row of theirs beside ours; None for a schedule that is left out."""
    match = next((entry for entry in _OURS if row["schedule"].startswith(entry[0])), None)
    if match is None:
        return None
    _, ours, placement = match
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


def version() -> str:
    """A digest of the sources of known schedules."""
    root, content = HERE.parent, hashlib.sha256()
    for path in (*sorted((root / "solver" / "schedules").glob("*.py")), root / "solver" / "tables.py"):
        content.update(path.read_bytes())
    return content.hexdigest()[:10]


class Kept:
    """Compared rows in a file of JSON lines.

    Parameters
    ----------
    path
        The file.
    label
        Version under which rows are looked up and kept; None: that of the sources; ``any``: the newest of any.
    """

    def __init__(self, path: Path, label: str | None) -> None:
        self.path, self.version = path, version() if label in (None, "any") else label
        self.rows: dict[str, list[Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            entry = json.loads(line)
            if label == "any" or entry["version"] == self.version:
                self.rows[entry["key"]] = entry["result"]

    def compared(self, row: dict[str, str], *, measure: bool) -> Compared | None:
        """``compared``, of which what is there is not measured again; None also for what is not there and not asked
        for."""
        key = json.dumps(list(row.values()))
        if key not in self.rows:
            began = time.process_time()
            if not measure or (found := compared(row)) is None:
                return None
            seconds = time.process_time() - began
            print(f"{found.theirs}: {found.case}: {seconds:.1f} s", file=sys.stderr, flush=True)
            self.rows[key] = [None if value == float("inf") else value for value in found]
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "version": self.version, "result": self.rows[key]}) + "\n")
        theirs, ours, case, *lengths = self.rows[key]
        return Compared(theirs, ours, case, *(float("inf") if length is None else length for length in lengths))


def summary(rows: list[Compared]) -> list[list[tables.Cell]]:
    """Per schedule of theirs: how often ours is shorter, as long, longer, does not fit; and the extremes."""
    lines: list[list[tables.Cell]] = []
    for theirs in dict.fromkeys(re.sub(r" ?\(?g=.*", "", row.theirs) for row in rows):
        group = [row for row in rows if re.sub(r" ?\(?g=.*", "", row.theirs) == theirs]
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
                len(group) - len(fit),
                tables.percent(min(ratios, default=None)),
                tables.percent(max(ratios, default=None)),
                tables.percent(max(spans, default=None)),
            ]
        )
    return lines


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
    if not wanted.known:
        for row in sorted(theirs, key=_size):
            kept.compared(row, measure=True)
    rows = [ours for row in theirs if (ours := kept.compared(row, measure=False)) is not None]
    header = ["theirs", "ours", "rows", "shorter", "same", "longer", "no fit", "best", "worst", "worst span"]
    lines = summary(rows)
    tables.show("Makespan of our schedules against theirs, same times and memory", header, lines)
    longer = [row for row in rows if row.our_makespan > row.their_makespan * (1 + _SAME)]
    if wanted.rows:
        for entry in longer:
            print(f"{entry.theirs}: {entry.case}: {entry.our_makespan:.3f} against {entry.their_makespan:.3f} ms")
    if not wanted.only:
        _write(rows, tables.markdown(header, lines), longer)


def _size(row: dict[str, str]) -> int:
    return int(row["devices"]) * int(row["microbatches"]) * int(row["chunks"])


def _write(rows: list[Compared], table: str, longer: list[Compared]) -> None:
    """The tables as files."""
    text = (
        "Shorter, same, longer: by makespan, in rows of `peers/peers.csv`; worst: ours / theirs - 1. Each row is in "
        "`peers.csv` beside this file.\n\n"
        "PipeOffload: in theirs a transfer takes 0.7 of its time before the first reload, while nothing comes the "
        "other way. A problem has one time for each transfer, so ours move at the slower speed throughout."
    )
    parts = [text, "", table]
    if longer:
        cells: list[list[tables.Cell]] = [
            [row.theirs, row.case, row.their_makespan, row.our_makespan] for row in longer
        ]
        parts += ["Longer:\n", tables.markdown(["theirs", "case", "ms", "ours"], cells)]
    tables.write_markdown(HERE / "results" / "peers.md", "Known schedules and their peers", parts)
    tables.write_csv(HERE / "results" / "peers.csv", list(Compared._fields), [list(row) for row in rows])


if __name__ == "__main__":
    main()
