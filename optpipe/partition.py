"""Layers into stages: contiguous runs whose largest device load is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

#: Steps of the search for several stages a device, after which the best partition found is taken.
MAX_STEPS = 200_000


def balanced(costs: Sequence[float], stage_devices: Sequence[int]) -> list[int]:
    """How many layers each stage holds so that the largest device load is least.

    Exact where every device has one stage, by dynamic programming in O(stages * layers^2). Where a device has several
    (interleaved, V), by branch and bound, exact unless it takes more than ``MAX_STEPS`` steps; then the best found.

    Parameters
    ----------
    costs
        Cost of each layer along the model, at least 0, in any unit.
    stage_devices
        The device of each stage along the model.

    Returns
    -------
    list of int
        Layers of each stage, each at least 1; they add up to ``len(costs)``.

    Raises
    ------
    ValueError
        There are more stages than layers.
    """
    if len(stage_devices) > len(costs):
        raise ValueError(f"{len(costs)} layers do not make {len(stage_devices)} stages")
    if len(set(stage_devices)) == len(stage_devices):
        return _one_stage_a_device(costs, len(stage_devices))
    return _Search(costs, stage_devices).best


def load(costs: Sequence[float], counts: Sequence[int], stage_devices: Sequence[int]) -> float:
    """The largest device load of a partition."""
    loads = [0.0] * (max(stage_devices) + 1)
    first = 0
    for count, device in zip(counts, stage_devices, strict=True):
        loads[device] += sum(costs[first : first + count])
        first += count
    return max(loads)


def _one_stage_a_device(costs: Sequence[float], stages: int) -> list[int]:
    """The linear partition problem: best[k][n] is the least largest load of the first n layers on k stages."""
    layers = len(costs)
    total = [0.0, *accumulate(costs)]
    best = [0.0] + [float("inf")] * layers
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        row = [float("inf")] * (layers + 1)
        cut = [0] * (layers + 1)
        # Enough layers must stay for the stages behind.
        for n in range(stage, layers - (stages - stage) + 1):
            for before in range(n - 1, stage - 2, -1):
                last = total[n] - total[before]
                if (value := max(best[before], last)) < row[n]:
                    row[n], cut[n] = value, before
                if last > row[n]:
                    break  # the last stage only grows from here
        best = row
        cuts.append(cut)
    counts = []
    n = layers
    for cut in reversed(cuts):
        counts.append(n - cut[n])
        n = cut[n]
    return counts[::-1]


class _Search:
    """Branch and bound over the stages along the model; ``best`` is the best partition known."""

    def __init__(self, costs: Sequence[float], stage_devices: Sequence[int]) -> None:
        self.costs, self.devices = costs, list(stage_devices)
        self.total = [0.0, *accumulate(costs)]
        self.best = _proportional(len(costs), len(stage_devices))
        self.limit = load(costs, self.best, stage_devices)
        self.bound = max(max(costs), self.total[-1] / len(set(stage_devices)))
        self.steps = 0
        self.seen: set[tuple[int, int, tuple[float, ...]]] = set()
        self._extend([], 0, [0.0] * (max(stage_devices) + 1))

    def _extend(self, counts: list[int], first: int, loads: list[float]) -> None:
        """Every better partition that begins with ``counts``; the layers from ``first`` on are left."""
        stage, stages, layers = len(counts), len(self.devices), len(self.costs)
        self.steps += 1
        # Sums of the same costs in another order differ in their last bits.
        if self.steps > MAX_STEPS or self.limit <= self.bound * (1 + 1e-12):
            return
        if stage == stages:
            self.best, self.limit = list(counts), max(loads)
            return
        state = (stage, first, tuple(loads))
        if state in self.seen:
            return
        self.seen.add(state)
        open_devices = set(self.devices[stage:])
        if sum(self.limit - loads[d] for d in open_devices) < self.total[-1] - self.total[first]:
            return  # what is left does not fit below the best known
        device = self.devices[stage]
        most = layers - first - (stages - stage - 1)
        least = most if stage == stages - 1 else 1
        goal = self._goal(stage, first, loads)
        cost = [end - self.total[first] for end in self.total[first:]]
        for count in sorted(range(least, most + 1), key=lambda n: abs(cost[n] - goal)):
            here = loads[device] + cost[count]
            if here < self.limit:
                loads[device], kept = here, loads[device]
                counts.append(count)
                self._extend(counts, first + count, loads)
                counts.pop()
                loads[device] = kept

    def _goal(self, stage: int, first: int, loads: list[float]) -> float:
        """A fair cost for this stage: what its device may still take over its stages that are left."""
        device = self.devices[stage]
        left = sum(d == device for d in self.devices[stage:])
        fair = (self.total[-1] - self.total[first] + sum(loads[d] for d in set(self.devices[stage:]))) / len(
            set(self.devices[stage:])
        )
        return max(fair - loads[device], 0.0) / left


def _proportional(layers: int, stages: int) -> list[int]:
    """Equal counts, as far as they go."""
    return [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]
