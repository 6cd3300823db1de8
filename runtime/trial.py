"""Schedules to measure under: 1F1B with a split or a fused backward, with offloads, with recomputation or with neither,
for any placement.

A profile is taken inside a schedule that is like the ones that will run. There is no profile yet when it is needed, so
the ops have nominal times here, and nothing is optimised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optpipe.ops import Kind, Op, Ops
from optpipe.plan import Plan
from optpipe.problem import Problem
from optpipe.timing import earliest

_TRANSFER_MS = 0.25  # nominal, beside 1 ms for F, B and W


@dataclass(frozen=True)
class Trial:
    """What a trial schedule is like.

    Attributes
    ----------
    stage_devices
        The device of each stage along the model.
    microbatches
        How many.
    split
        B and W apart, else BW.
    offload
        Every second microbatch of each stage goes to the host and back.
    recompute
        The forward of every microbatch is run again, right before its backward.
    in_flight
        Microbatches that a stage may hold at most, whatever 1F1B would hold; None: no limit.
    half_duplex
        A device's offloads and reloads share a channel.
    """

    stage_devices: Sequence[int]
    microbatches: int
    split: bool = True
    offload: bool = False
    recompute: bool = False
    in_flight: int | None = None
    half_duplex: bool = False

    def plan(self) -> Plan:
        """The schedule as a plan. Its problem has nominal times and no memory limit."""
        problem = self._problem()
        return Plan(problem, earliest(problem, Ops.of(_Greedy(self).run())), solver={"method": "trial"})

    def moves(self, microbatch: int) -> bool:
        """Whether a microbatch is offloaded."""
        return self.offload and (microbatch % 2 == 1 or self.microbatches == 1)

    def limit(self, stage: int) -> int:
        """Microbatches between F and the end of the backward, at most: 1F1B's warm-up."""
        depth = len(self.stage_devices) - stage
        return depth if self.in_flight is None else max(1, min(depth, self.in_flight))

    def _problem(self) -> Problem:
        stage = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0, "activation_bytes": 1}
        if self.recompute:
            stage |= {"checkpoint_bytes": 0}
        if self.offload:
            stage |= {"offloadable_bytes": 1, "offload_ms": _TRANSFER_MS, "reload_ms": _TRANSFER_MS}
        devices = sorted(set(self.stage_devices))
        return Problem.model_validate(
            {
                "name": "trial",
                "num_microbatches": self.microbatches,
                "devices": [{"memory_bytes": None} for _ in devices],
                "stages": [{"device": device, **stage} for device in self.stage_devices],
                "comm_ms": [0.0] * (len(self.stage_devices) - 1),
                "channels": [channel for device in devices for channel in self._channels(device)],
            }
        )

    def _channels(self, device: int) -> list[dict[str, Any]]:
        if not self.offload:
            return []
        groups = [("d2h", "h2d")] if self.half_duplex else [("d2h",), ("h2d",)]
        return [
            {"name": f"{group[0]}:{device}", "transfers": [{"device": device, "direction": d} for d in group]}
            for group in groups
        ]


@dataclass
class _Greedy:
    """List scheduling: W right after its B, else the backward that is ready, else a forward within the limit."""

    trial: Trial
    ops: list[Op] = field(default_factory=list)

    def run(self) -> list[Op]:
        """All ops, with times that tell their order."""
        devices, m = self.trial.stage_devices, self.trial.microbatches
        free = [0.0] * (max(devices) + 1)
        self.forward_end = [[-1.0] * m for _ in devices]
        self.backward_end = [[-1.0] * m for _ in devices]
        self.forwards, self.backwards = [0] * len(devices), [0] * len(devices)
        for _ in range(2 * m * len(devices)):
            start, _, stage, kind = min(
                (max(free[devices[stage]], ready), priority, stage, kind)
                for stage in range(len(devices))
                for ready, priority, kind in self._candidates(stage)
            )
            free[devices[stage]] = self._place(kind, stage, start)
        return self.ops

    def _candidates(self, stage: int) -> list[tuple[float, int, Kind]]:
        """What a stage can do next: (earliest start, priority, F or B)."""
        found = []
        j, m, stages = self.backwards[stage], self.trial.microbatches, len(self.trial.stage_devices)
        if j < self.forwards[stage]:
            moved = 4 * _TRANSFER_MS if self.trial.moves(j) else 0.0
            ready = self.forward_end[stage][j] + moved
            above = self.backward_end[stage + 1][j] if stage + 1 < stages else 0.0
            if above >= 0:
                found.append((max(ready, above), 0, Kind.B))
        j = self.forwards[stage]
        below = self.forward_end[stage - 1][j] if stage and j < m else 0.0
        if j < m and below >= 0 and j - self.backwards[stage] < self.trial.limit(stage):
            found.append((below, 1, Kind.F))
        return found

    def _place(self, kind: Kind, stage: int, start: float) -> float:
        """Put the next F, or the next backward with all that belongs to it, at ``start``; when the device is free."""
        if kind == Kind.F:
            j, end = self.forwards[stage], start + 1.0
            self.ops.append(Op(Kind.F, stage, j, start, end))
            if self.trial.moves(j):
                self.ops.append(Op(Kind.O, stage, j, end, end + _TRANSFER_MS))
            self.forward_end[stage][j] = end
            self.forwards[stage] += 1
            return end
        j = self.backwards[stage]
        if self.trial.moves(j):
            self.ops.append(Op(Kind.R, stage, j, start - _TRANSFER_MS, start))
        self.backwards[stage] += 1
        if self.trial.recompute:
            self.ops.append(Op(Kind.C, stage, j, start, start + 1.0))
            start += 1.0
        if not self.trial.split:
            self.ops.append(Op(Kind.BW, stage, j, start, start + 2.0))
            self.backward_end[stage][j] = start + 2.0
            return start + 2.0
        self.ops += [Op(Kind.B, stage, j, start, start + 1.0), Op(Kind.W, stage, j, start + 1.0, start + 2.0)]
        self.backward_end[stage][j] = start + 1.0
        return start + 2.0
