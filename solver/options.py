"""What the solver may be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Objective = Literal["makespan", "span"]


def physical_cores() -> int:
    """Cores of this machine that are no hyperthreads of each other, as far as it says; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.is_file() else str(cpu))
    return max(1, len(siblings))


@dataclass(frozen=True)
class SolveOptions:
    """Options of ``solver.solve.solve``.

    Attributes
    ----------
    method
        ``auto``, ``search``, ``milp``, or the name of a schedule (``solver.schedules.SCHEDULES``).
    objective
        ``makespan``, or ``span``: the largest, over devices, of last end minus first start of compute.
    time_limit
        Seconds.
    gap
        Good enough: (objective - bound) / bound.
    threads
        Of HiGHS; None: physical cores.
    seed
        Same seed, same threads and no time pressure: same plan.
    backend
        ``highs``, or the name of a solver that PuLP finds.
    cache
        Take schedules of similar problems solved before as starts, and keep what is found (``solver.cache``). Searches
        only; what is found then depends on what was solved before.
    """

    method: str = "auto"
    objective: Objective = "makespan"
    time_limit: float = 300.0
    gap: float = 0.05
    threads: int | None = None
    seed: int = 0
    backend: str = "highs"
    cache: bool = False
