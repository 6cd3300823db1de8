"""One run of a program: the host goes through its items, and what each op needs and gives is passed on.

for each compute op:  wait for the transfers it comes after       memory rule, reload
see that there is room                      memory manager
wait for its message                        input or gradient
run it
give its output to the next stage
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optpipe.ops import Kind
from runtime import checks
from runtime import result as results
from runtime.boundary import Boundary
from runtime.channel import CopyJob, CopyLane
from runtime.events import Event, Failure, clock
from runtime.gradients import GradientSync
from runtime.memory_manager import MemoryManager
from runtime.memory_watch import MemoryWatch, WatchedJob
from runtime.program import Compute, Message, Move, Program
from runtime.result import Mark, OpRecord
from runtime.saved import Offload, Reload
from runtime.stage import Stage, dropout_seed
from runtime.transport import LocalTransport, Parcel

#: Called in an op's lane as the op begins, with its kind, stage and microbatch: for tests and emulation.
BeforeOp = Callable[[Kind, int, int], None]


@dataclass(frozen=True)
class Parts:
    """What the runs of an executor share."""

    device: torch.device
    program: Program
    stages: Mapping[int, Stage]
    boundaries: Sequence[Boundary]
    transport: LocalTransport
    lanes: Mapping[Kind, CopyLane]
    failure: Failure
    manager: MemoryManager
    syncs: Sequence[GradientSync]
    seed: int
    before_op: BeforeOp | None
    watch: MemoryWatch | None


class Run:
    """What belongs to one run only, and how its ops are done.

    Parameters
    ----------
    parts
        Of the executor.
    inputs, targets
        One tensor a microbatch, where this rank uses them.
    number, first_microbatch
        The optimiser's step, and how many of its microbatches came before: for the seeds.
    is_last
        Gradients are whole after this run.

    Attributes
    ----------
    losses
        Of the microbatches, on the rank that holds the last stage.
    """

    def __init__(
        self,
        parts: Parts,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        number: int,
        first_microbatch: int,
        is_last: bool,
    ) -> None:
        self._parts = parts
        self._inputs, self._targets = inputs, targets
        self._number, self._first_microbatch = number, first_microbatch
        self._at: Compute | Move | None = None
        self.losses: dict[int, Tensor] = {}
        self._transfers: dict[int, Event] = {}
        self._moves: dict[str, Move] = {}
        self._marks: list[Mark] = []
        # Weight gradients that a stage is still to get, before its gradients may travel.
        computes = [item for item in parts.program.items if isinstance(item, Compute)]
        self._left = Counter(item.stage for item in computes if is_last and item.kind in (Kind.W, Kind.BW))
        self._clock = clock(parts.device)
        if parts.watch is not None:
            parts.watch.begin(self._clock)
        self.origin = time.perf_counter()

    @property
    def doing(self) -> str:
        """The op that the host is at, for messages."""
        return "" if self._at is None else _label(self._at)

    def go(self) -> None:
        """Through the program, once."""
        manager = self._parts.manager
        manager.begin(self)
        for position, item in enumerate(self._parts.program.items):
            if not manager.reach(position):
                continue
            if isinstance(item, Compute):
                self.compute(item)
            else:
                manager.before_transfer(item)
                self.transfer(item)

    def compute(self, item: Compute) -> None:
        """Run a compute op."""
        parts, kind = self._parts, item.kind
        parts.failure.check()
        self._at = item
        begin = self._clock.mark()
        for transfer in item.waits:
            self._transfers[transfer].wait()
        parts.manager.before(item)
        if kind in (Kind.B, Kind.BW) and item.gives is not None:
            parts.transport.before_giving(item.gives)
        parts.transport.post(item.post)
        ready = self._clock.mark()
        parcel = None
        if item.takes is not None:
            parcel = parts.transport.take(item.takes)
            parcel.hold.as_activation()
        parts.transport.post(item.post_ahead)
        here = self._clock.mark()
        if parts.watch is not None:
            parts.watch.look()
        start, cpu = self._clock.mark(), time.thread_time()
        if parts.before_op is not None:
            parts.before_op(kind, item.stage, item.microbatch)
        output = self._do(item, parcel)
        del parcel
        used = (time.thread_time() - cpu) * 1e3 if parts.device.type == "cpu" else 0.0
        self._marks.append(Mark(item, begin, ready, here, start, self._clock.mark(), used))
        if parts.watch is not None:
            parts.watch.look()
        parts.manager.after(item)
        if output is not None and item.gives is not None:
            parts.transport.give(item.gives, output)
        if kind in (Kind.W, Kind.BW):
            self._count_backward(item.stage)

    def _do(self, item: Compute, parcel: Parcel | None) -> Parcel | None:
        """Run the op; what it gives to a neighbouring stage."""
        parts, kind, microbatch = self._parts, item.kind, item.microbatch
        stage = parts.stages[item.stage]
        if kind == Kind.F:
            target = self._targets[microbatch] if stage.is_last else None
            seed = dropout_seed(parts.seed, self._number, item.stage, self._first_microbatch + microbatch)
            x = self._inputs[microbatch] if parcel is None else parcel
            pair = item.stage, microbatch
            split, recomputed = pair in parts.program.split, pair in parts.program.recomputed
            output = stage.forward(microbatch, x, target, seed, split=split, recomputed=recomputed)
            if isinstance(output, Parcel):
                checks.check_output(item.stage, microbatch, output.tensor, parts.boundaries[item.stage])
                return output
            self.losses[microbatch] = output
        elif kind == Kind.C:
            stage.recompute(microbatch)
        elif kind == Kind.W:
            stage.weight(microbatch)
        else:
            return stage.backward(microbatch, parcel)
        return None

    def _count_backward(self, stage: int) -> None:
        """The stage has the weight gradients of one more microbatch; after the last one they may travel."""
        self._left[stage] -= 1
        if self._left[stage] == 0:
            for sync in self._parts.syncs:
                sync.ready(stage)

    def transfer(self, item: Move) -> Event:
        """Hand a transfer to its lane; the event of its end."""
        parts = self._parts
        stage, before_op = parts.stages[item.stage], parts.before_op
        self._at, label = item, _label(item)
        nbytes = 0
        if item.kind == Kind.O:
            if parts.manager.watches:
                nbytes = self.saved_bytes(item.stage, item.microbatch) if item.nbytes is None else item.nbytes
            job: Offload | Reload = stage.offload(item.microbatch, item.nbytes)
        else:
            job = stage.reload(item.microbatch)
        before = None
        if before_op is not None:
            before = lambda: before_op(item.kind, item.stage, item.microbatch)  # noqa: E731
        after = [self._transfers[i] for i in item.after]
        carried: CopyJob = job if parts.watch is None else WatchedJob(job, parts.watch)
        event = self._transfers[item.op] = parts.lanes[item.kind].submit(carried, after, label, before)
        self._moves[label] = item
        parts.manager.handed_over(item, event, job, nbytes)
        return event

    def arrived(self, message: Message) -> bool:
        """Whether a message can be taken without a wait."""
        return self._parts.transport.arrived(message)

    def saved_bytes(self, stage: int, microbatch: int) -> int:
        """What is saved of a microbatch, on the device."""
        return self._parts.stages[stage].saved_bytes(microbatch)

    def records(self) -> list[OpRecord]:
        """Of all ops, by start; the lanes have settled."""
        found = results.of_compute(self._marks, self._clock, self.origin)
        for lane in set(self._parts.lanes.values()):
            found += results.of_transfers(lane.take_log(self._clock), self._moves, self.origin)
        return sorted(found, key=lambda record: (record.start, record.end))

    def loss(self) -> float:
        """The sum over microbatches, in ascending order whatever the order of the ops: as in one process."""
        total = torch.zeros((), device=self._parts.device)
        for microbatch in sorted(self.losses):
            total = total + self.losses[microbatch]
        return float(total)


def _label(item: Compute | Move) -> str:
    return f"{item.kind.name}({item.stage},{item.microbatch})"
