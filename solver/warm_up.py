"""``python -m solver.warm_up``: have numba compile what it can, for all processes to come. Without numba: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from solver import compiled

_STAGES = 3


def main() -> None:
    """Compile, by using, everything that is marked ``compiled``."""
    if compiled.COMPILED and os.environ.get(compiled.COMPILING) == "1":
        _use_everything()
        compiled.mark_ready()
    elif compiled.possible() and not compiled.COMPILED:  # in a process in which functions are compiled
        environment = {**os.environ, compiled.COMPILING: "1"}
        subprocess.run([sys.executable, "-m", "solver.warm_up"], env=environment, check=True)


def _use_everything() -> None:
    from optpipe.problem import Problem
    from solver.annealing import anneal
    from solver.annealing.sequences import anneal_sequences
    from solver.list_scheduler import backward_first, list_schedule
    from solver.schedules import generate
    from solver.tables import paths, tables

    stage = {"forward_ms": 2.0, "backward_ms": 2.0, "weight_ms": 1.0, "activation_bytes": 4}
    stage |= {"offloadable_bytes": 4, "offload_ms": 1.0, "reload_ms": 1.0}
    lanes = [(device, direction) for device in range(_STAGES) for direction in ("d2h", "h2d")]
    problem = Problem.model_validate(
        {
            "num_microbatches": 4,
            "devices": [{"memory_bytes": 40}] * _STAGES,
            "stages": [{**stage, "device": device} for device in range(_STAGES)],
            "comm_ms": [0.5] * (_STAGES - 1),
            "channels": [{"name": f"{d}-{w}", "transfers": [{"device": d, "direction": w}]} for d, w in lanes],
        }
    )
    tab = tables(problem)
    list_schedule(problem, backward_first(tab, paths(tab), 5.0))
    anneal_sequences(problem, generate("gpipe", problem, "makespan"), seconds=1.0)
    anneal(problem, generate("gpipe", problem, "makespan"), seconds=1.0, rounds=1)


if __name__ == "__main__":
    os.nice(10)
    main()
