"""The table over all instances: bounds, known schedules, the solver and other methods, and what has to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import tables
from benchmarks.lab import NOT_MEASURED, Reference, Results, Row, Trial, instance_file, instances, references
from optpipe.problem import Problem

#: Relative differences below this are none.
_SAME = 1e-6

Run = tuple[str, float]


@dataclass
class Line:
    """One instance of the table.

    ``schedules``: makespan of each known schedule that is valid. ``runs``: per (method, seconds) its result.
    ``trouble``: why the known schedules could not be measured.
    """

    name: str
    problem: Problem
    reference: Reference
    schedules: dict[str, float] = field(default_factory=dict)
    runs: dict[Run, Row] = field(default_factory=dict)
    trouble: str = ""

    @property
    def bound(self) -> float:
        """The best proven bound, the reference's or one of a run."""
        return max([self.reference.bound_ms, *(row["bound_ms"] for row in self.runs.values() if row.get("bound_ms"))])

    @property
    def shortest(self) -> float:
        """The shortest valid schedule that anybody has."""
        runs = [value for run in self.runs if (value := self.makespan(run)) is not None]
        return min([self.reference.best_ms, *self.schedules.values(), *runs])

    @property
    def best_schedule(self) -> tuple[str, float] | None:
        """The shortest known schedule and its makespan."""
        return min(self.schedules.items(), key=lambda item: item[1], default=None)

    @property
    def keeps_all(self) -> bool:
        """Whether it is a problem without offload and with one stage a device."""
        problem = self.problem
        one = problem.num_stages == problem.num_devices
        return one and not any(problem.can_offload(s) for s in range(problem.num_stages))

    def makespan(self, run: Run) -> float | None:
        """The makespan of a run's plan, if there is one and it is valid."""
        row = self.runs.get(run, {})
        return None if row.get("violations") or "makespan_ms" not in row else float(row["makespan_ms"])

    def gap(self, run: Run) -> float | None:
        """How far a run's plan is above the bound, relatively."""
        makespan = self.makespan(run)
        return None if makespan is None else max(0.0, makespan / self.bound - 1.0)


def main(
    results: Results, only: str, seconds: Sequence[float], methods: Sequence[str], threads: int, seed: int
) -> None:
    """Measure what is missing, print the table and the summary, and write both."""
    runs: list[Run] = [(method, limit) for method in methods if method != "schedules" for limit in seconds]
    lines = []
    known = references()
    for name in instances(only):
        line = Line(name, Problem.read(instance_file(name)), known[name])
        if "schedules" in methods:
            found = results.measured(Trial(name, "schedules"), line.problem)
            line.trouble = found.get("error", "")
            for schedule, row in found.get("schedules", {}).items():
                if "makespan_ms" in row:
                    line.schedules[schedule] = row["makespan_ms"]
        for method, limit in runs:
            line.runs[method, limit] = results.measured(Trial(name, method, limit, threads, seed), line.problem)
        lines.append(line)
    if not lines:
        raise SystemExit(f"no instance matches {only}")
    # With --known: a run that nothing is known of is no column.
    runs = [run for run in runs if any(_is_known(line, run) for line in lines)]
    _write(results, lines, runs)


def _write(results: Results, lines: list[Line], runs: list[Run]) -> None:
    header, rows = _short(lines, runs)
    tables.show("The solver, makespan in ms", header, rows)
    said = summary(lines, runs)
    print("\n".join(said))
    names = sorted({name for line in lines for name in line.schedules})
    header, rows = _whole(lines, runs, names)
    tables.write_csv(results.path.with_suffix(".csv"), header, rows)
    parts = [
        "Makespan in ms; blank: the schedule does not apply, or needs more memory than there is. Every plan was "
        "written, read back and verified. The gap is to the best proven bound.\n",
        tables.markdown(header, rows),
        "\n".join(f"- {text}" for text in said) + "\n",
    ]
    tables.write_markdown(results.path.with_suffix(".md"), "The solver on the benchmark problems", parts)


def _is_known(line: Line, run: Run) -> bool:
    return line.runs[run].get("error") != NOT_MEASURED


def _title(run: Run) -> str:
    return f"{run[0]} {run[1]:g} s"


def _short(lines: list[Line], runs: list[Run]) -> tuple[list[str], list[list[tables.Cell]]]:
    header = ["instance", "bound", "best known", "best schedule", ""]
    for run in runs:
        header += [_title(run), "gap"]
    rows: list[list[tables.Cell]] = []
    for line in lines:
        schedule, makespan = line.best_schedule or (None, None)
        row: list[tables.Cell] = [line.name, line.bound, line.reference.best_ms, schedule, makespan]
        for run in runs:
            row += [_value(line, run), tables.percent(line.gap(run))]
        rows.append(row)
    return header, rows


def _whole(lines: list[Line], runs: list[Run], names: list[str]) -> tuple[list[str], list[list[tables.Cell]]]:
    header = ["instance", "stages", "microbatches", "bound", "best known", *names]
    for run in runs:
        header += [_title(run), f"gap, {_title(run)}"]
    rows: list[list[tables.Cell]] = []
    for line in lines:
        problem = line.problem
        row: list[tables.Cell] = [line.name, problem.num_stages, problem.num_microbatches]
        row += [line.bound, line.reference.best_ms, *(line.schedules.get(name) for name in names)]
        for run in runs:
            row += [_value(line, run), tables.percent(line.gap(run))]
        rows.append(row)
    return header, rows


def _value(line: Line, run: Run) -> tables.Cell:
    row = line.runs[run]
    if not _is_known(line, run):
        return None
    if row.get("violations"):
        return "INVALID"
    return row.get("makespan_ms", row.get("status", "failed"))


def summary(lines: list[Line], runs: list[Run]) -> list[str]:
    """What has to hold, and how far it does, one line each."""
    said = _faults(lines, runs)
    for method in dict.fromkeys(method for method, _ in runs if not method.startswith("cpsat")):
        limits = [limit for name, limit in runs if name == method]
        first, last = (method, limits[0]), (method, limits[-1])
        said += _quality(lines, last)
        early = [line for line in lines if line.keeps_all]
        met = [line for line in early if (gap := line.gap(first)) is not None and gap <= _SAME]
        said.append(f"{_title(first)}: at the bound on {_share(met, early)} without offload, one stage a device")
        begun = [row["trace"][0][0] for line in lines if (row := line.runs[first]).get("trace") and _is_16_64(line)]
        if begun:
            said.append(f"{_title(first)}: a first plan of 16 x 64 within {max(begun):.2f} s")
        if len(limits) > 1:
            near = [line for line in lines if _within(line.makespan(first), line.makespan(last), 0.005)]
            said.append(f"{_title(first)}: within 0.5% of {_title(last)} on {_share(near, lines)}")
        for other in (run for run in runs if run[0].startswith("cpsat")):
            if (mine := (method, other[1])) in runs:
                said += _against(lines, mine, other)
    return said


def _is_16_64(line: Line) -> bool:
    return (line.problem.num_devices, line.problem.num_microbatches) == (16, 64)


def _faults(lines: list[Line], runs: list[Run]) -> list[str]:
    """What must never be: bounds above a schedule, invalid plans, trials that failed."""
    said = []
    for line in lines:
        if line.bound > line.shortest * (1 + _SAME):
            said.append(f"UNSOUND BOUND: {line.name}: {line.bound:.4f} is above a schedule of {line.shortest:.4f}")
        if line.trouble:
            said.append(f"FAILED: {line.name}, known schedules: {line.trouble}")
        for run in runs:
            row = line.runs[run]
            if row.get("violations"):
                said.append(f"INVALID: {line.name}, {_title(run)}: {row['violations'][0]}")
            elif "error" in row:
                said.append(f"FAILED: {line.name}, {_title(run)}: {row['error']}")
    return said


def _quality(lines: list[Line], run: Run) -> list[str]:
    def near(line: Line, most: float) -> bool:
        return (gap := line.gap(run)) is not None and gap <= most

    def near_whole(line: Line, most: float) -> bool:
        return _within(line.makespan(run), line.reference.whole_bound_ms, most)

    def count(most: float) -> str:
        return _share([line for line in lines if near(line, most)], lines)

    def count_whole(most: float) -> str:
        return _share([line for line in lines if near(line, most) or near_whole(line, most)], lines)

    shortest = [line.name for line in lines if near_whole(line, 0.01)]
    above, below, beaten = [], [], []
    for line in lines:
        makespan, best = line.makespan(run), line.reference.best_ms
        if not _within(makespan, best, 0.001):
            above.append(line.name)
        elif makespan is not None and makespan < best * (1 - 1e-5):  # the file has three decimals
            below.append(line.name)
        if line.best_schedule and not _within(makespan, line.best_schedule[1], _SAME):
            beaten.append(f"{line.name} ({line.best_schedule[0]})")
    title = _title(run)
    return [
        f"{title}: gap at most 0.5% on {count(0.005)}, at most 1% on {count(0.01)}, none on {count(_SAME)}",
        f"{title}: of the others within 1% of what plans that move activations whole are proven to take, of some with "
        f"microbatches in order: {_named(shortest)} (shorter.md); with these at most 0.5% on {count_whole(0.005)}, at "
        f"most 1% on {count_whole(0.01)}",
        f"{title}: more than 0.1% above the best known on {_named(above)}",
        f"{title}: below the best known on {_named(below)}",
        f"{title}: above a known schedule on {_named(beaten)}",
    ]


def _against(lines: list[Line], mine: Run, other: Run) -> list[str]:
    lines = [line for line in lines if _is_known(line, mine) and _is_known(line, other)]
    behind = [line.name for line in lines if _is_less(line.makespan(other), line.makespan(mine))]
    ahead = [line.name for line in lines if _is_less(line.makespan(mine), line.makespan(other))]
    none = [line.name for line in lines if line.makespan(other) is None and line.makespan(mine) is not None]
    return [
        f"{_title(mine)} against {_title(other)}: behind on {_named(behind)}; ahead on {len(ahead)}, of these on "
        f"{len(none)} where the other found no schedule"
    ]


def _within(value: float | None, other: float | None, part: float) -> bool:
    return value is not None and other is not None and value <= other * (1 + part)


def _is_less(value: float | None, other: float | None) -> bool:
    """Whether a makespan is less than another one; having one is better than having none."""
    return value is not None and (other is None or value < other * (1 - _SAME))


def _share(some: Sequence[object], of: Sequence[object]) -> str:
    return f"{len(some)} of {len(of)} rows" + (f" ({100 * len(some) / len(of):.0f}%)" if of else "")


def _named(names: list[str]) -> str:
    return f"{len(names)} rows" + (": " + ", ".join(names) if names else "")
