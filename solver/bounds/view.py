"""One device as the bounds see it: its stages, and how far they are from the start and the end of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from solver.tables import NO_LIMIT, Tables, paths


class View(NamedTuple):
    """A device between a first start and a last end that are measured, of which it sees only a delay at either side.

    Attributes
    ----------
    device, stages, m
        Its number, its stages (ascending) and the microbatches.
    head
        The device's first F starts at least this long after the step's first start, ms.
    tail
        Per stage of the device: from the end of a B to the last end that is measured, at least, ms.
    own_end
        Whether the device's own last end counts. False where the step is measured on another device.
    offset
        Per stage: from the start of F of the first stage to the start of its F, at least, ms.
    turn
        Per stage: from the start of F to the start of B, at least, ms.
    forward, split, weight, fused, input, whole
        Per stage times in ms: F; B; W; BW; the shorter of B and BW; the shorter of B + W and BW.
    budget
        Bytes; None without a limit.
    activation, context, movable, dropped
        Per stage bytes, as in :class:`solver.tables.Tables`.
    out_ms, back_ms
        Per stage times of a whole O and R in ms.
    """

    device: int
    stages: tuple[int, ...]
    m: int
    head: float
    tail: tuple[float, ...]
    own_end: bool
    offset: tuple[float, ...]
    turn: tuple[float, ...]
    forward: tuple[float, ...]
    split: tuple[float, ...]
    weight: tuple[float, ...]
    fused: tuple[float, ...]
    input: tuple[float, ...]
    whole: tuple[float, ...]
    budget: int | None
    activation: tuple[int, ...]
    context: tuple[int, ...]
    movable: tuple[int, ...]
    dropped: tuple[int, ...]
    out_ms: tuple[float, ...]
    back_ms: tuple[float, ...]

    @property
    def work(self) -> float:
        """Least compute time of all microbatches, ms."""
        return self.m * (sum(self.forward) + sum(self.whole))

    @property
    def after(self) -> tuple[float, ...]:
        """Per stage: from the start of a B to the last end that is measured, at least, ms."""
        own = self.whole if self.own_end else (0.0,) * len(self.stages)
        return tuple(max(o, b + t) for o, b, t in zip(own, self.input, self.tail, strict=True))

    @property
    def turnaround(self) -> float:
        """From the device's first F start to its first B start, at least, ms."""
        return min(o + t for o, t in zip(self.offset, self.turn, strict=True))


def views(tab: Tables, objective: str) -> Iterator[View]:
    """Every device, seen from the whole step (``makespan``), or from each device whose own time counts (``span``).

    The span is the largest, over devices d, of d's last end less d's first start. Seen from d, the first F of a
    device that holds later stages comes at least the way from d's first stage later, and d's last end comes at least
    the way back to d's first stage after a B there.
    """
    path = paths(tab)
    for d in range(tab.D):
        stages = tuple(tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]])
        if objective == "makespan":
            yield _view(tab, d, stages, path.head[stages[0]], tails(tab), True)
            continue
        yield _view(tab, d, stages, 0.0, tails_to(tab, stages[0]), True)
        for other in range(tab.D):
            first = tab.stage_list[tab.stage_ptr[other]]
            if other != d and first < stages[0]:
                yield _view(tab, d, stages, path.head[stages[0]] - path.head[first], tails_to(tab, first), False)


def tails(tab: Tables) -> list[float]:
    """Per stage, the least time (ms) from the end of its B to the end of all that earlier stages still have to do for
    that microbatch: B's down the pipeline, and at each stage on the way the rest of its backward.
    """
    found = [0.0] * tab.S
    for s in range(1, tab.S):
        found[s] = tab.comm[s - 1] + max(_input(tab, s - 1) + found[s - 1], _whole(tab, s - 1))
    return found


def tails_to(tab: Tables, end: int) -> list[float]:
    """The same to the end of the backward of stage ``end`` alone (0 for that stage and earlier ones)."""
    found = [0.0] * tab.S
    for s in range(end + 1, tab.S):
        last = _whole(tab, end) if s == end + 1 else _input(tab, s - 1) + found[s - 1]
        found[s] = tab.comm[s - 1] + last
    return found


def _input(tab: Tables, s: int) -> float:
    """Least time until the gradient for the stage below is there."""
    return min(tab.backward[s], tab.fused[s])


def _whole(tab: Tables, s: int) -> float:
    """Least time of a whole backward."""
    return min(tab.backward[s] + tab.weight[s], tab.fused[s])


def _view(tab: Tables, d: int, stages: tuple[int, ...], head: float, tail: list[float], own_end: bool) -> View:
    path = paths(tab)

    def column(values: list[float]) -> tuple[float, ...]:
        return tuple(values[s] for s in stages)

    def sizes(values: list[int]) -> tuple[int, ...]:
        return tuple(values[s] for s in stages)

    return View(
        device=d,
        stages=stages,
        m=tab.m,
        head=head,
        tail=column(tail),
        own_end=own_end,
        offset=tuple(path.head[s] - path.head[stages[0]] for s in stages),
        turn=column(path.turn),
        forward=column(tab.forward),
        split=column(tab.backward),
        weight=column(tab.weight),
        fused=column(tab.fused),
        input=tuple(_input(tab, s) for s in stages),
        whole=tuple(_whole(tab, s) for s in stages),
        budget=None if tab.budget[d] >= NO_LIMIT else tab.budget[d],
        activation=sizes(tab.activation),
        context=sizes(tab.context),
        movable=sizes(tab.movable),
        dropped=sizes(tab.dropped),
        out_ms=column(tab.offload),
        back_ms=column(tab.reload),
    )
