"""Records when ops really ran, for ``optpipe train --trace``: the last steps of a run, all ranks on one clock."""

from __future__ import annotations

import statistics
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from optpipe import files, trace
from optpipe.ops import Ops
from optpipe.problem import Problem
from runtime import gather
from runtime.executor import StepResult

#: Steps that a trace holds: those before are forgotten, so that a long run costs no memory.
STEPS = 5
_ROUNDS = 5


class Tracer:
    """What one rank remembers of its last steps, which its executor runs with ``watch_memory``."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, dict[str, Any]]] = deque(maxlen=STEPS)
        self._offset = clock_offset()

    def record(self, number: int, result: StepResult) -> None:
        """Keep a step; its number counts from 1. Of several runs of the plan in a step the first, beside which the
        plan can be laid."""
        records = list({(r.kind, r.stage, r.microbatch): r for r in reversed(result.ops)}.values())[::-1]
        ops = Ops.columns(
            [r.kind for r in records],
            [r.stage for r in records],
            [r.microbatch for r in records],
            [r.start for r in records],
            [r.end for r in records],
            [r.bytes for r in records],
        )
        taken = sorted(result.memory, key=lambda sample: sample.time)
        samples = trace.Samples(
            np.array([sample.time for sample in taken], np.float64),
            np.array([sample.held for sample in taken], np.int64),
            np.array([sample.most for sample in taken], np.int64),
            np.array([sample.allocated for sample in taken if sample.allocated is not None], np.int64),
        )
        device = trace.device_json(
            ops,
            np.array([r.memory_wait_ms for r in records], np.float64),
            np.array([r.message_wait_ms for r in records], np.float64),
            samples,
            (result.peak_bytes, result.message_peak_bytes, result.host_peak_bytes),
        )
        self._steps.append((number, result.origin + self._offset, device))

    def begin_again(self) -> None:
        """Forget the steps so far: they were under another plan."""
        self._steps.clear()

    def write(self, path: str | Path, problem: Problem, ranks: Sequence[int]) -> None:
        """Gather the steps of all ranks; rank 0 writes those of ``ranks``, one a device. Every rank calls it."""
        mine = [{"step": number, "origin": origin, "device": device} for number, origin, device in self._steps]
        of_all = gather.objects(mine)
        if dist.get_rank() != 0:
            return
        steps = []
        rows = [of_all[rank] for rank in ranks]
        first = min((row[0]["origin"] for row in rows if row), default=0.0)
        for parts in zip(*rows, strict=True):
            begin = min(part["origin"] for part in parts)
            for part in parts:
                _shift(part["device"], (part["origin"] - begin) * 1e3)
            devices = [part["device"] for part in parts]
            steps.append({"step": parts[0]["step"], "begin_ms": (begin - first) * 1e3, "devices": devices})
        files.write_json(path, trace.trace_json(problem, steps))


def _shift(device: dict[str, Any], later_ms: float) -> None:
    """Move a device's times to the clock of the step."""
    for columns, names in ((device["ops"], ("start", "end")), (device["memory"], ("time",))):
        for name in names:
            columns[name] = [round(time_ms + later_ms, 6) for time_ms in columns[name]]


def clock_offset() -> float:
    """Seconds to add to this process's ``perf_counter`` for that of rank 0. Every rank calls it.

    Processes of one machine share the clock. Between machines it is the median of a few readings right after a
    barrier, good to about the time that a barrier takes to be left.
    """
    if not dist.is_initialized():
        return 0.0
    machine = Path("/proc/sys/kernel/random/boot_id")
    name = float(zlib.crc32(machine.read_bytes())) if machine.exists() else 0.0
    readings = []
    for _ in range(_ROUNDS):
        gather.barrier()
        rows = gather.numbers([name, time.perf_counter()])
        readings.append(rows)
    mine = dist.get_rank()
    if readings[0][mine][0] == readings[0][0][0]:
        return 0.0
    return statistics.median(rows[0][1] - rows[mine][1] for rows in readings)
