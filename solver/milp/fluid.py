"""What every schedule of a problem obeys, whatever leaves a device's memory, how much of it and in which order.

For bounds. The other families describe schedules whose microbatches ascend and whose transfers are whole; a better one
may let microbatches overtake an offloaded one, move a part, or recompute. Here, of each stage t only an amount is known
at each event x of its device (the start of an F or B): ``away[t, x]``, in microbatches, real. F's, B's and W's ascend
without loss: sort the starts of each kind of each stage; every dependency, and memory, which counts ops only, holds for
the sorted ones. The amount obeys, with nF(x) and nB(x) the F's ended and B's started at x (for x = B(t, j) itself too):

- ``away[t, x] <= nF(x) - nB(x)``: what is away has had its F, and whose B starts is there;
- ``tO away[t, x] <= start(x) - (end of the first F)``: it left one after the other;
- for a later event y, what is away at y was gone or going at x, or left in between: where x is B(t, j),
  ``tO (away[t, y] - (nF(x) - nB(x))) <= start(y) - start(x)``;
- what is away at x is on its way or away at a later y = B(t, j), or came back in between:
  ``tR (away[t, x] - (nF(y) - nB(y))) <= start(y) - start(x)``;
- what is away at the start of x comes back before the last B starts.

Recomputation is let off its compute time: the stage's activations down to the checkpoint may be away at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.ops import Floats, Ints, Kind
from optpipe.problem import Problem
from solver.milp.memory import DeviceMemory, add_fused_credit, before_events, device_memory
from solver.milp.model import DeviceOrder, Model
from solver.milp.sparse import INF


@dataclass(frozen=True)
class Leak:
    """How a stage's activations can leave: bytes of a microbatch, ms to move them out and back (0: at once)."""

    stage: int
    bytes: int
    out_ms: float
    back_ms: float


def leaks(problem: Problem, device: int) -> list[Leak]:
    """The stages of a device whose activations can leave between F and B."""
    found = []
    for s in problem.stages_of[device]:
        stage = problem.stages[s]
        offload = stage.offloadable_bytes if problem.can_offload(s) else 0
        dropped = 0 if stage.checkpoint_bytes is None else stage.activation_bytes - stage.checkpoint_bytes
        if dropped:
            found.append(Leak(s, max(offload, dropped), 0.0, 0.0))
        elif offload:
            found.append(Leak(s, offload, stage.offload_ms, stage.reload_ms))
    return found


def add_fluid(model: Model, device: DeviceOrder, number: int) -> None:
    """The memory of one device, and all that holds of what is away."""
    fluid = _DeviceFluid(model, device, number)
    fluid.add_rows()
    fluid.add_memory_rows(device_memory(model, device, number, parts=bool(fluid.leaks)))


class _DeviceFluid:
    """Amounts away of one device's leaks, and their rows."""

    def __init__(self, model: Model, device: DeviceOrder, number: int) -> None:
        self.model, self.device = model, device
        self.leaks = leaks(model.problem, number)
        kind = model.table.per_op(model.table.kind)[device.ops]
        self.kind = kind
        self.events = np.flatnonzero((kind == Kind.F) | (kind == Kind.B))
        n = len(device.ops)
        #: (leak, place of the event) -> column
        self.away = np.full((len(self.leaks), n), -1, np.int64)
        m = model.table.microbatches
        for index, leak in enumerate(self.leaks):
            labels = (np.full(len(self.events), model.table.ops(Kind.F, leak.stage)[0]), device.ops[self.events])
            self.away[index, self.events] = model.builder.columns("away_{}_{}", labels, 0.0, float(m))

    def add_rows(self) -> None:
        """All rows of the amounts."""
        for index, leak in enumerate(self.leaks):
            self._there(index, leak)
            if leak.out_ms > 0:
                self._left_in_turn(index, leak)
            if leak.out_ms > 0 or leak.back_ms > 0:
                self._between(index, leak)

    def add_memory_rows(self, memory: DeviceMemory) -> None:
        """What the device holds at each event, less what is away, fits."""
        device, events, weight = self.device, self.events, memory.weight
        own = np.where(self.kind[events] == Kind.F, weight[events], 0.0)
        level = own + weight @ device.const[:, events]
        swing = weight[:, None] * device.sign[:, events]
        crowded = level + np.maximum(swing, 0.0).sum(axis=0) > memory.budget + 1e-9
        events, level = events[crowded], level[crowded]
        terms = [(self.away[i, events], -leak.bytes / memory.unit) for i, leak in enumerate(self.leaks)]
        ops = device.ops[events]
        rows = self.model.builder.rows("memory_{}", (ops,), -INF, memory.budget - level, terms)
        q, k = np.nonzero(device.column[:, events] >= 0)
        columns, signs = device.column[q, events[k]], device.sign[q, events[k]]
        self.model.builder.entries(rows[k], columns, weight[q] * signs)
        add_fused_credit(self.model, device, memory, rows, ops, before_events(device, events))

    def _places(self, kind: Kind, stage: int) -> Ints:
        return self.device.place[self.model.table.ops(kind, stage)]

    def _add_count(self, rows: Ints, events: Ints, of: Ints, factor: float) -> Floats:
        """Add ``factor`` times the number of ops ``of`` before each event to its row; the constant part."""
        device = self.device
        columns = device.column[np.ix_(of, events)]
        q, k = np.nonzero(columns >= 0)
        self.model.builder.entries(rows[k], columns[q, k], factor * device.sign[of[q], events[k]])
        return np.asarray(factor * device.const[np.ix_(of, events)].sum(axis=0))

    def _constant(self, events: Ints, of: Ints) -> Floats:
        return np.asarray(self.device.const[np.ix_(of, events)].sum(axis=0))

    def _there(self, index: int, leak: Leak) -> None:
        """away <= nF - nB."""
        forward, backward = self._places(Kind.F, leak.stage), self._places(Kind.B, leak.stage)
        events = self.events
        started = np.isin(events, backward).astype(np.float64)
        side = self._constant(events, forward) - self._constant(events, backward) - started
        ops = self.device.ops[events]
        rows = self.model.builder.rows("there_{}", (ops,), -INF, side, [(self.away[index, events], 1.0)])
        self._add_count(rows, events, forward, -1.0)
        self._add_count(rows, events, backward, 1.0)

    def _left_in_turn(self, index: int, leak: Leak) -> None:
        """tO away <= start(x) - end of the stage's first F, where that has ended; nothing is away before."""
        model, device = self.model, self.device
        first = self._places(Kind.F, leak.stage)[0]
        sure = device.precedence.sure[first, self.events]
        events = self.events[sure]
        terms = [
            (model.start[device.ops[events]], 1.0),
            (np.full(len(events), model.start[device.ops[first]]), -1.0),
            (self.away[index, events], -leak.out_ms),
        ]
        side = model.base[device.ops[first]]
        model.builder.rows("left_{}", (device.ops[events],), side, INF, terms)

    def _between(self, index: int, leak: Leak) -> None:
        """What leaves or comes back between an event and a B of the stage."""
        forward, backward = self._places(Kind.F, leak.stage), self._places(Kind.B, leak.stage)
        x, j = (part.ravel() for part in np.meshgrid(self.events, np.arange(len(backward)), indexing="ij"))
        b = backward[j]
        apart = x != b
        x, b = x[apart], b[apart]
        sure = self.device.precedence.sure
        if leak.back_ms > 0:
            before = ~sure[b, x]
            self._timed("homewards_{}_{}", x[before], b[before], index, leak.back_ms, forward, backward, True)
        if leak.out_ms > 0:
            after = ~sure[x, b]
            self._timed("outwards_{}_{}", b[after], x[after], index, leak.out_ms, forward, backward, False)

    def _timed(
        self, template: str, x: Ints, y: Ints, index: int, took: float, forward: Ints, backward: Ints, home: bool
    ) -> None:
        """took (away[e] - (nF(b) - nB(b))) <= start(y) - start(x) where x is before y; of x and y one is the B b and
        the other the event e."""
        model, device = self.model, self.device
        e, b = (x, y) if home else (y, x)
        ops = device.ops
        gap = model.windows.latest[ops[x]] - model.windows.earliest[ops[y]]
        m = model.table.microbatches
        big = np.maximum(0.0, gap + took * m)
        # start(y) - start(x) - took away + took (nF - nB) + big (y before x) >= 0
        terms = [
            (model.start[ops[y]], 1.0),
            (model.start[ops[x]], -1.0),
            (self.away[index, e], -took),
            (device.column[y, x], big * device.sign[y, x]),
        ]
        known = took * (self._constant(b, forward) - self._constant(b, backward) - 1.0) + big * device.const[y, x]
        rows = model.builder.rows(template, (ops[x], ops[y]), -known, INF, terms)
        self._add_count(rows, b, forward, took)
        self._add_count(rows, b, backward, -took)
