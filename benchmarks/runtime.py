"""How good the runtime is: against its plans' clock and memory, and against torch.distributed.pipelining.

    python benchmarks/runtime.py                          all tables, kept in benchmarks/results/runtime.md
    python benchmarks/runtime.py --only clock,memory      some of them, in place of those kept there

clock    stages that sleep in place of computing: the step over the plan's makespan, and what the ops' times predict
torch    the same model, ranks and order of ops, in turns with torch's own schedules
split    what it costs to take the weight gradients out of the backward
memory   what is alive of an offloaded microbatch, and peaks of random plans
replan   machines that are not what the profile says: steps before and after solving again beside the training

Each table comes from one run, and stands beside the load of the machine: on a busy one the clock says little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `runtime` is the package, not this file
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread a rank: they share the cores

import torch

from benchmarks import backward, drifted, emulated, live, torch_schedules
from benchmarks.tables import Cell, markdown, show, write_markdown

RESULTS = Path(__file__).resolve().parent / "results"
Part = tuple[str, Sequence[str], list[list[Cell]], str]


def clock(rounds: int) -> Iterator[Part]:
    """Sleeping stages, two and four ranks."""
    with before_others() as first:
        runs = [(ranks, scale) for scale in emulated.SCALES for ranks in (2, 4)]
        rows = [row for ranks, scale in runs for row in emulated.table(ranks, 2 * rounds, scale)]
    yield (
        "The plan's clock",
        emulated.HEADER,
        rows,
        f"B and W {emulated.HALF_BACKWARD_MS:g} ms each where F takes {emulated.FORWARD_MS:g}, in a V half of that a "
        f"stage; {emulated.MICROBATCHES} microbatches. Ranks ran {_where(first)}. `over plan`: median step over "
        "makespan, in which messages take what gloo takes for them alone; `over op times`: over the makespan with ops "
        "as long as they were; `predicted`: that with messages as long as they were too, as a profile has it; `late`: "
        "what the host adds to an op, median. It adds the same to each op and message, so that longer ops keep the "
        "plan better.",
    )


def against_torch(rounds: int) -> Iterator[Part]:
    """torch.distributed.pipelining, in turns. Not ahead of other work: ranks would hold up gloo's threads."""
    rows = torch_schedules.table(2 * rounds)
    yield (
        f"Against torch.distributed.pipelining {torch.__version__}",
        torch_schedules.HEADER,
        rows,
        f"GPT, {torch_schedules.MICROBATCHES} microbatches, float32, two gloo ranks of one thread each. Each side has "
        "processes of its own, as it comes (ours sets up malloc, torch's has it as it is), and waits while the other "
        "one runs; with `one allocator` both are in the same processes, where torch too has malloc as the executor "
        "sets it up. A round is two steps of either, in the order A B B A, with torch first every second time; all "
        f"ranks begin a step together, without gradients, after {2 * torch_schedules.WARM_UP} steps that do not count. "
        "Nor do rounds in which other work held up the ranks' threads for more than "
        f"{torch_schedules.DISTURBED:.0%} of the time. Wall time is that of the slower rank; CPU time, of all "
        "threads, and page faults are means over ranks; ratios are medians over rounds, `iqr` is the "
        "interquartile range of `ours / torch`. `budgets`: devices have a limit, so that the executor counts all "
        "that autograd saves and could move it.\n\nWhat a schedule with a split backward can gain over torch is "
        "what torch's way of splitting costs, and that is little where layers are wide. The next table says how "
        "much (row `torch, fused`, last column: the share of torch's time that would be left on a stage if "
        "splitting cost nothing at all). And not every stage pays: torch's first stage does its whole backward in "
        "W (its I does nothing), so that of two stages only the second is split, of the four of a V three.\n\n"
        "With layers as narrow as 64 a step is the host's work for the most part: messages, ops that are timed, and "
        "where something is split torch's walks over the graph.",
    )


def split(rounds: int) -> Iterator[Part]:
    """B and W apart."""
    with before_others() as first:
        rows = backward.table(rounds)
    yield (
        "The price of a split backward",
        backward.HEADER,
        rows,
        f"{backward.BLOCKS} blocks, one thread, no pipeline, ways in turns; CPU time, ratios are medians over rounds. "
        f"It ran {_where(first)}, with the allocator as the executor sets it up, for all ways alike. `saved tensors in "
        "hand`: counted and movable, as where a budget or the plan asks for it; otherwise they are left to autograd.",
    )


def _where(first: bool) -> str:
    return "ahead of other work (real-time priority)" if first else "among other work"


def memory(rounds: int) -> Iterator[Part]:
    """Bytes."""
    yield "Between offload and reload", live.OFFLOADED_HEADER, live.offloaded(), ""
    yield "Peaks", live.PEAKS_HEADER, live.peaks(50), ""


def replan(rounds: int) -> Iterator[Part]:
    """Sleeping stages, two and four ranks, on machines unlike their profile; steps take as many as they need."""
    with before_others() as first:
        rows = [row for ranks in (2, 4) for row in drifted.table(ranks)]
    yield (
        "Solving again beside the training",
        drifted.HEADER,
        rows,
        "Sleeping stages as above, memory for half a microbatch more than half of those that 1F1B holds on its first "
        f"device, offloads at a set pace. Ranks ran {_where(first)}. The plan is solved for a profile "
        f"({drifted.SOLVE_S:g} s), the machine is another one, of which the training knows nothing: every "
        f"{drifted.WANTED.every} steps it looks at the times that ops took, and a solver of one thread beside it has "
        f"{drifted.SOLVE_S:g} s. `its step`: median as measured, before the solver began, and behind the change of "
        "plan.",
    )


PARTS: dict[str, Callable[[int], Iterator[Part]]] = {
    "clock": clock,
    "torch": against_torch,
    "split": split,
    "memory": memory,
    "replan": replan,
}


@contextlib.contextmanager
def before_others() -> Iterator[bool]:
    """Let this process and the ranks started inside run before other work, where the system allows it; whether it does.

    A sleeping stage uses little of a core, but needs it at once when it wakes up.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (OSError, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def load() -> str:
    """How busy the machine is."""
    one, five, _ = os.getloadavg()
    return f"load {one:.1f} (five minutes: {five:.1f}) on {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The runtime against its plans and against torch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(PARTS), help="which tables")
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each, more for the quick ones")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := set(wanted) - PARTS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    begin = time.monotonic()
    texts: dict[str, str] = {}
    for name in wanted:
        before = load()
        for title, header, rows, about in PARTS[name](given.rounds):
            show(title, header, rows)
            print(f"{before} before, {load()} after\n")
            texts[title] = f"## {title}\n\n{about}\n\n{markdown(header, rows)}\n{before} before, {load()} after.\n"
    print(f"{time.monotonic() - begin:.0f} s in all")
    keep(given.output / "runtime.md", texts)


def keep(path: Path, texts: dict[str, str]) -> None:
    """Put sections into the results, in place of those with the same title; the others stay."""
    about = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}.\n"
    kept: dict[str, str] = {}
    if path.exists():
        for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            kept[section.split("\n", 1)[0]] = f"## {section.rstrip()}\n"
    write_markdown(path, "The runtime", [about, *(kept | texts).values()])


if __name__ == "__main__":
    main()
