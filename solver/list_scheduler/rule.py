"""What a list schedule is steered by: keys, limits and what becomes of each microbatch's activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from solver.tables import Paths, Tables

#: What becomes of one microbatch's activations of one stage between F and B.
KEEP, OFFLOAD, ON_DEMAND, RECOMPUTE = range(4)

#: A limit that never binds.
UNBOUNDED = 1 << 30


@dataclass
class Rule:
    """Steers :func:`solver.list_scheduler.run`. Of what can start on a free device, the smallest key does.

    Columns of length S m are indexed ``stage * m + microbatch``.

    Attributes
    ----------
    forward_key, backward_key, weight_key, reload_key
        (S m): the smaller, the sooner. Any unit; start times of a known schedule reproduce it.
    treatment
        (S m): KEEP, OFFLOAD, ON_DEMAND (offload if at least ``threshold`` are in flight) or RECOMPUTE.
    fused
        (S m): 1 where the backward is one BW.
    threshold
        (S): see ON_DEMAND.
    prefetch
        (S): reload at most so many microbatches ahead of the next backward.
    limit
        (S): most microbatches between their F and their B.
    reserve
        (S): a forward leaves room for that many coming reloads (never so that the oldest microbatch would wait).
    reserve_all
        Leave room for all of these reloads, not only for those with a smaller key than the forward's.
    patience
        Stay idle for a smaller key that arrives within this fraction of the chosen op's time.
    share_idle
        Stay idle rather than start a W that does not fit, as long as no device becomes the idlest by it.
    reload_lead
        A reload starts at most so long before its key (ms); infinite: whenever it fits.
    reload_late
        A reload starts only once it is known when the gradient arrives: until then others use the memory.
    reload_first
        Reloads before offloads on a channel that carries both.
    newest_first
        Offload the newest microbatch rather than the oldest.
    alternation
        Added to the key of a forward after a forward, and of a backward after a backward.
    share
        (S m): the part of what a transfer of the stage moves that is moved; None: all of it.
    evict
        Take memory also where the oldest microbatch can only go on if others are moved away, and move them when it
        has to; otherwise nothing is offloaded but what ``treatment`` says.
    """

    forward_key: list[float]
    backward_key: list[float]
    weight_key: list[float]
    reload_key: list[float]
    treatment: list[int]
    fused: list[int]
    threshold: list[int]
    prefetch: list[int]
    limit: list[int]
    reserve: list[int]
    reserve_all: bool = True
    patience: float = 0.0
    share_idle: bool = False
    reload_lead: float = field(default=float("inf"))
    reload_late: bool = False
    reload_first: bool = True
    newest_first: bool = True
    alternation: float = 0.0
    evict: bool = False
    share: list[float] | None = None

    def but(self, **changes: object) -> Rule:
        """A copy with some parts exchanged (the others are shared, so exchange a list, do not change it)."""
        return replace(self, **changes)  # type: ignore[arg-type]


def ramp(tab: Tables, offsets: Sequence[float], period: float) -> list[float]:
    """Keys ``offsets[s] + period * j``, of length S m."""
    steps = [period * j for j in range(tab.m)]
    return [offset + step for offset in offsets for step in steps]


def backward_first(tab: Tables, path: Paths, period: float) -> Rule:
    """The plainest rule: the oldest ready backward, else the oldest ready forward, else a W.

    Forwards and backwards of several stages of a device are merged by their ideal times: the earliest possible one
    of microbatch 0, and a period (the work of the busiest device) more for each microbatch.
    """
    never = 1e6 * (period * tab.m + path.turn[0] + 1.0)
    backward = [h + t - never for h, t in zip(path.head, path.turn, strict=True)]
    n = tab.S * tab.m
    return Rule(
        forward_key=ramp(tab, path.head, period),
        backward_key=ramp(tab, backward, period),
        weight_key=ramp(tab, [never] * tab.S, period),
        reload_key=ramp(tab, backward, period),
        treatment=[KEEP] * n,
        fused=[0] * n,
        threshold=[UNBOUNDED] * tab.S,
        prefetch=[1] * tab.S,
        limit=[UNBOUNDED] * tab.S,
        reserve=[0] * tab.S,
    )
