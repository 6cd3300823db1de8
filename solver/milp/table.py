"""The ops that a formulation may schedule, as sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Kind
from optpipe.problem import Problem


@dataclass(frozen=True)
class OpTable:
    """Sequences of ops. A sequence is one kind of one stage; its m ops keep the order of the microbatches, and op
    ``q * m + j`` is microbatch j of sequence q.

    Sequences come in the order F, B, W of all stages, then O and R of the stages that may offload. How long an op
    takes: ``base[q]``, plus ``scale[q]`` times a decision where there is one: whether the pair O, R moves at all
    (then ``base`` is 0), whether B and W are fused into one BW (then B grows and W shrinks to nothing).

    Attributes
    ----------
    microbatches
        m.
    kind, stage, device
        int64 (sequences,).
    base, scale
        float64 (sequences,), ms.
    offloaded, fused
        Stages whose microbatches may be offloaded, whose B and W may be fused.
    """

    microbatches: int
    kind: Ints
    stage: Ints
    device: Ints
    base: Floats
    scale: Floats
    offloaded: tuple[int, ...]
    fused: tuple[int, ...]

    @cached_property
    def sequence(self) -> dict[tuple[Kind, int], int]:
        """(kind, stage) -> number of the sequence."""
        return {(Kind(k), s): q for q, (k, s) in enumerate(zip(self.kind.tolist(), self.stage.tolist(), strict=True))}

    @property
    def num_ops(self) -> int:
        return len(self.kind) * self.microbatches

    def ops(self, kind: Kind, stage: int) -> Ints:
        """int64 (m,): the ops of a sequence."""
        first = self.sequence[kind, stage] * self.microbatches
        return np.arange(first, first + self.microbatches)

    def per_op(self, values: Floats | Ints) -> Floats:
        """A value of each sequence, repeated for its ops."""
        return np.repeat(values, self.microbatches)

    @cached_property
    def shortest(self) -> Floats:
        """float64 (ops,): the least that each op takes, ms."""
        return self.per_op(self.base + np.minimum(self.scale, 0.0))

    @cached_property
    def work(self) -> Floats:
        """float64 (ops,): what each op takes of its device's time at least, ms, if a fused BW counts as B and, right
        after it, the rest as W."""
        work = self.base.copy()
        for s in self.fused:
            backward, weight = self.sequence[Kind.B, s], self.sequence[Kind.W, s]
            work[backward] += min(self.scale[backward], 0.0)
            work[weight] = max(self.scale[backward], 0.0)
        return self.per_op(work)

    @cached_property
    def longest(self) -> Floats:
        """float64 (ops,): the most that each op takes, ms."""
        return self.per_op(self.base + np.maximum(self.scale, 0.0))

    @cached_property
    def names(self) -> list[str]:
        """A name of each op, such as ``F_2_5``."""
        prefixes = [f"{Kind(k).name}_{s}_" for k, s in zip(self.kind.tolist(), self.stage.tolist(), strict=True)]
        return [f"{prefix}{j}" for prefix in prefixes for j in range(self.microbatches)]

    def compute_sequences(self, device: int) -> Ints:
        """The F, B and W sequences of a device."""
        return np.flatnonzero((self.device == device) & (self.kind < Kind.O))

    @cached_property
    def compute(self) -> Bools:
        """bool (ops,): runs on a device's compute."""
        return self.per_op(self.kind) < Kind.O


def op_table(problem: Problem, *, offload: bool, fuse: bool) -> OpTable:
    """The ops of a problem.

    Parameters
    ----------
    offload
        With O and R, where they can help: a channel carries them, and the device has a limit that all microbatches
        at once would break.
    fuse
        With the choice of one BW in place of B and W, where that is shorter.
    """
    stages, m = problem.stages, problem.num_microbatches
    tight = [
        budget is not None and m * sum(stages[s].activation_bytes for s in held) > budget
        for budget, held in zip((d.memory_bytes for d in problem.devices), problem.stages_of, strict=True)
    ]
    offloaded = tuple(s for s, stage in enumerate(stages) if offload and tight[stage.device] and problem.can_offload(s))
    fused = tuple(s for s, x in enumerate(stages) if fuse and x.bw_ms < x.backward_ms + x.weight_ms)
    rows: list[tuple[Kind, int, float, float]] = []
    rows += [(Kind.F, s, x.forward_ms, 0.0) for s, x in enumerate(stages)]
    rows += [(Kind.B, s, x.backward_ms, x.bw_ms - x.backward_ms if s in fused else 0.0) for s, x in enumerate(stages)]
    rows += [(Kind.W, s, x.weight_ms, -x.weight_ms if s in fused else 0.0) for s, x in enumerate(stages)]
    rows += [(Kind.O, s, 0.0, stages[s].offload_ms) for s in offloaded]
    rows += [(Kind.R, s, 0.0, stages[s].reload_ms) for s in offloaded]
    kind, stage, base, scale = zip(*rows, strict=True)
    return OpTable(
        microbatches=m,
        kind=np.array(kind, np.int64),
        stage=np.array(stage, np.int64),
        device=np.array([stages[s].device for s in stage], np.int64),
        base=np.array(base, np.float64),
        scale=np.array(scale, np.float64),
        offloaded=offloaded,
        fused=fused,
    )
