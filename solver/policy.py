"""Families of rules for the list scheduler, by a few numbers that mean the same at any size of the problem."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from solver.list_scheduler import KEEP, OFFLOAD, ON_DEMAND, RECOMPUTE, UNBOUNDED, Rule, ramp
from solver.tables import Paths, Tables, least_work, with_parts

_LAST = 1e6  # periods: a key that loses against (negative: wins over) all others


@dataclass(frozen=True)
class Policy:
    """A rule in numbers without a unit: periods (the work of the busiest device for one microbatch), fractions, counts.

    Attributes
    ----------
    lean
        Keys of a stage are shifted by this much of its place in the fill of the pipeline.
    forward_shift
        Periods by which a forward's key is later than its ideal time.
    backward_ideal
        Backwards are keyed by their ideal time; otherwise they always go first.
    weight_shift
        Periods by which a W's key is later than its backward's ideal time; None: W's go last.
    patience, share_idle, newest_first, reload_late, reload_first
        As in :class:`Rule`.
    alternation
        As in :class:`Rule`, in periods.
    flight, flight_extra
        In flight at most ``ceil(flight * (turn + b) / period + flight_extra)``: what keeps the busiest device busy,
        times ``flight``, and so many more. ``flight`` infinite: no limit.
    kept
        Offload what is in flight beyond the microbatches that fit less ``kept``; None: by ``share``.
    share
        Offload this part of the microbatches, evenly spread, relative to what memory and the link call for.
    prefetch, reserve
        As in :class:`Rule`, for every stage.
    part
        Offloads move this part of the offloadable bytes. (It belongs to the tables: see ``tables_for``.)
    evict
        As in :class:`Rule`; on in any case where memory cannot hold one microbatch of all stages of a device.
    recompute
        This part of the microbatches, evenly spread, is recomputed wherever that is possible (on top of the stages
        that must be, where nothing else makes one microbatch fit).
    fuse
        One BW in place of B and W wherever that is shorter.
    """

    lean: float = 1.0
    forward_shift: float = 0.0
    backward_ideal: bool = False
    weight_shift: float | None = None
    patience: float = 0.0
    share_idle: bool = False
    alternation: float = 0.0
    flight: float = math.inf
    flight_extra: int = 0
    kept: int | None = 1
    share: float = 0.0
    prefetch: int = 1
    reserve: int = 1
    newest_first: bool = True
    reload_late: bool = False
    reload_first: bool = True
    part: float = 1.0
    evict: bool = False
    recompute: float = 0.0
    fuse: bool = True

    def tables_for(self, tab: Tables) -> Tables:
        """The tables on which this policy's rule is run: those of the problem, with the part that offloads move."""
        return tab if self.part == 1.0 else with_parts(tab, [self.part] * tab.S)

    def rule(self, tab: Tables, path: Paths) -> Rule:
        """The rule for one problem."""
        period = max(least_work(tab)) or 1.0
        lean = [self.lean * h for h in path.head]
        ideal = [shift + turn for shift, turn in zip(lean, path.turn, strict=True)]
        first = [-_LAST * period] * tab.S
        backward = ramp(tab, ideal if self.backward_ideal else first, period)
        if self.weight_shift is None:
            weight = ramp(tab, [_LAST * period] * tab.S, period)
        else:
            weight = ramp(tab, [i + self.weight_shift * period for i in ideal], period)
        flights = [(t + b) / period for t, b in zip(path.turn, tab.backward, strict=True)]
        return Rule(
            forward_key=ramp(tab, [shift + self.forward_shift * period for shift in lean], period),
            backward_key=backward,
            weight_key=weight,
            reload_key=backward,
            treatment=self._treatment(tab, flights, period),
            fused=self._fused(tab),
            threshold=[max(1, _slots(tab, s) - (self.kept or 0)) for s in range(tab.S)],
            prefetch=[self.prefetch] * tab.S,
            limit=[self._limit(flight) for flight in flights],
            reserve=[self.reserve] * tab.S,
            patience=self.patience,
            share_idle=self.share_idle,
            alternation=self.alternation * period,
            evict=self.evict or any(whole > budget for whole, budget in zip(tab.whole, tab.budget, strict=True)),
            newest_first=self.newest_first,
            reload_late=self.reload_late,
            reload_first=self.reload_first,
        )

    def _limit(self, flight: float) -> int:
        if math.isinf(self.flight):
            return UNBOUNDED
        return max(1, math.ceil(self.flight * flight - 1e-9) + self.flight_extra)

    def _fused(self, tab: Tables) -> list[int]:
        cheaper = [f < b + w for f, b, w in zip(tab.fused, tab.backward, tab.weight, strict=True)]
        return [int(self.fuse and cheaper[s]) for s in range(tab.S) for _ in range(tab.m)]

    def _treatment(self, tab: Tables, flights: list[float], period: float) -> list[int]:
        must = _must_be_recomputed(tab)
        treatment: list[int] = []
        for s in range(tab.S):
            if s in must:
                treatment += [RECOMPUTE] * tab.m
                continue
            row = self._offloads(tab, s, flights[s] * period, period)
            d = tab.device[s]
            tight = tab.whole[d] > tab.budget[d] and tab.dropped[s] < tab.movable[s]  # an offload frees more
            if self.recompute > 0 and tab.dropped[s] and not tight:
                again = spread(tab.m, self.recompute)
                row = [RECOMPUTE if a == OFFLOAD else given for a, given in zip(again, row, strict=True)]
            treatment += row
        return treatment

    def _offloads(self, tab: Tables, s: int, wait: float, period: float) -> list[int]:
        if not tab.movable[s]:
            return [KEEP] * tab.m
        if self.kept is not None:
            return [ON_DEMAND] * tab.m
        # With n of m offloaded, slots are held for (m - n) wait + n (the time that an offloaded one is there).
        there = tab.forward[s] + tab.offload[s] + tab.reload[s] + tab.backward[s]
        if wait <= there:
            return [KEEP] * tab.m
        part = (wait - _slots(tab, s) * period) / (wait - there)
        return spread(tab.m, min(1.0, self.share * max(0.0, part)))


def _must_be_recomputed(tab: Tables) -> set[int]:
    """Stages without whose recomputation one microbatch does not fit, though all that can be offloaded is."""
    must: set[int] = set()
    for d in range(tab.D):
        held = tab.stage_list[tab.stage_ptr[d] : tab.stage_ptr[d + 1]]
        if tab.whole[d] <= tab.budget[d]:
            continue
        while not _one_fits(tab, held, must, tab.budget[d]):
            better = [s for s in held if s not in must and tab.dropped[s] > tab.movable[s]]
            if not better:
                break
            must.add(max(better, key=lambda s: tab.dropped[s] - tab.movable[s]))
    return must


def _one_fits(tab: Tables, held: list[int], recomputed: set[int], budget: int) -> bool:
    below = 0
    for s in held:
        if below + tab.activation[s] > budget:
            return False
        below += tab.activation[s] - (tab.dropped[s] if s in recomputed else tab.movable[s])
    return True


def spread(m: int, part: float, phase: float = 0.0) -> list[int]:
    """OFFLOAD for this part of m microbatches, evenly spread; KEEP for the others."""
    return [OFFLOAD if math.floor((j + 1) * part + phase) > math.floor(j * part + phase) else KEEP for j in range(m)]


def _slots(tab: Tables, s: int) -> int:
    """How many microbatches' activations of all stages of the device fit at once."""
    d = tab.device[s]
    return min(UNBOUNDED, tab.budget[d] // max(1, tab.whole[d]))


def draw(tab: Tables, rng: random.Random) -> Policy:
    """A random policy."""
    policy = Policy(
        lean=rng.choice([0.0, 1.0, -1.0, 0.5]),
        forward_shift=rng.choice([-1.0, 0.0, 0.0, 1.0, 2.0, 4.0]),
        backward_ideal=rng.random() < 0.5,
        weight_shift=rng.choice([None, None, None, 0.5, 1.0, 2.0, 4.0, 8.0]),
        patience=rng.choice([0.0, 0.0, 0.5, 1.0, 1.0]),
        share_idle=rng.random() < 0.3,
        alternation=rng.choice([0.0, 0.0, 0.0, 0.5, 1.0, 2.0]),
        flight=rng.choice([1.0, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, math.inf]),
        flight_extra=rng.choice([0, 0, 1, 2, 3, 4]),
        fuse=rng.random() < 0.5,
    )
    if any(tab.dropped):
        policy = replace(policy, recompute=rng.choice([0.0, 0.0, 0.25, 0.5, 1.0]))
    if not any(tab.movable):
        return policy
    policy = replace(
        policy,
        kept=rng.choice([0, 1, 2, 3, None]),
        share=rng.choice([0.6, 0.8, 1.0, 1.2, 1.5]),
        prefetch=rng.choice([0, 0, 1, 1, 2, 3]),
        reserve=rng.choice([0, 0, 1, 1, 2]),
        newest_first=rng.random() < 0.5,
        reload_first=rng.random() < 0.75,
        part=rng.choice([1.0, 1.0, 1.0, 0.75, 0.5, 0.34]),
        evict=rng.random() < 0.3,
    )
    return replace(policy, reload_late=rng.random() < 0.5) if crowded(tab) else policy


def crowded(tab: Tables) -> bool:
    """Whether a device has memory for one or two microbatches only, and activations that can leave it."""
    return any(tab.movable[s] > 0 and _slots(tab, s) <= 2 for s in range(tab.S))
