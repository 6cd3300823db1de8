"""Exact optima of tiny problems with whole-number times, by breadth-first search over everything that can be done.

The search shares no code with the solver: each cell (stage, microbatch) goes through phases, time advances by 1, and
at every instant each idle device and each idle channel starts any op that its inputs and memory allow, or stays idle.
Microbatches are alike, so F's and B's of a stage run in ascending order without loss. Whole and half transfers are
tried.
"""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

from optpipe.problem import Problem
from solver.feasibility import smallest_budgets
from tests.random_schedules import PLACEMENTS, placement

NEW, F, HERE, O, AWAY, R, BACK, B, CONTEXT, W, DONE, BW, DROPPED, C = range(14)  # noqa: E741


class Cell(NamedTuple):
    """One microbatch of one stage: phase, ms left of its running op, ms until its F and its B arrive next door."""

    phase: int = NEW
    left: int = 0
    f_lag: int = -1  # -1: not sent yet
    b_lag: int = -1
    parts: int = 0  # halves of the movable bytes that are moved
    drop: bool = False


class TooLarge(Exception):
    """The search would take too long."""


def optimum(problem: Problem, upper: float, *, most_states: int = 20_000) -> int | None:
    """The least makespan below ``upper``; None if there is none.

    Times must be whole, transfer times even, and of compute ops at least 1. Raises TooLarge where more than
    ``most_states`` states differ at one instant.
    """
    search = _Search(problem)
    start = tuple(Cell() for _ in range(search.S * search.m))
    layer, time = {start}, 0
    while layer and time < upper:
        if any(all(cell.phase == DONE for cell in state) for state in layer):
            return time
        following: set[tuple[Cell, ...]] = set()
        for state in layer:
            for begun in search.starts(state):
                after = search.advance(begun)
                if time + 1 + search.least_rest(after) < upper:
                    following.add(after)
            if len(following) > most_states:
                raise TooLarge
        layer, time = following, time + 1
    return None


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.p, self.S, self.m = problem, problem.num_stages, problem.num_microbatches
        self.comm = [int(c) for c in problem.comm_ms] + [0]
        stages = problem.stages
        self.forward, self.weight = [t.forward_ms for t in stages], [t.weight_ms for t in stages]
        self.backward = [min(t.backward_ms + t.weight_ms, t.bw_ms) for t in stages]
        # From the end of F, and from the start of B, to the end of the microbatch.
        self.after_b = list(self.backward)
        for s in range(1, self.S):
            quickest = min(stages[s].backward_ms, stages[s].bw_ms)
            self.after_b[s] = max(self.after_b[s], quickest + self.comm[s - 1] + self.after_b[s - 1])
        self.after_f = list(self.after_b)
        for s in range(self.S - 2, -1, -1):
            self.after_f[s] = max(self.after_b[s], self.comm[s] + self.forward[s + 1] + self.after_f[s + 1])
        self.lanes = [("compute", d) for d in range(problem.num_devices)]
        self.lanes += [("channel", c) for c in range(len(problem.channels))]

    def running_on(self, s: int, cell: Cell) -> list[tuple[str, int]]:
        d = self.p.stages[s].device
        if cell.phase in (O, R):
            return [("channel", c) for c in self.p.channels_of[d, "d2h" if cell.phase == O else "h2d"]]
        return [("compute", d)] if cell.phase in (F, B, W, BW, C) else []

    def bytes_of(self, s: int, cell: Cell) -> int:
        stage = self.p.stages[s]
        if cell.phase in (NEW, DONE):
            return 0
        if cell.phase in (CONTEXT, W):
            return stage.weight_context_bytes
        if cell.phase == AWAY:
            return stage.activation_bytes - stage.offloadable_bytes * cell.parts // 2
        if cell.phase == DROPPED:
            assert stage.checkpoint_bytes is not None
            return stage.checkpoint_bytes
        return stage.activation_bytes

    def level(self, state: tuple[Cell, ...], d: int) -> int:
        return sum(self.bytes_of(k // self.m, c) for k, c in enumerate(state) if self.p.stages[k // self.m].device == d)

    def options(self, state: tuple[Cell, ...], lane: tuple[str, int]) -> list[tuple[int, Cell]]:
        """(cell index, cell once the op runs) of every op that could start on an idle lane."""
        found = []
        for k, cell in enumerate(state):
            s, j = divmod(k, self.m)
            stage = self.p.stages[s]
            first = j == 0
            if lane[0] == "compute":
                if stage.device != lane[1]:
                    continue
                earlier = None if first else state[k - 1].phase
                above_ready = s + 1 == self.S or state[k + self.m].b_lag == 0
                if cell.phase == NEW and (first or earlier != NEW) and (s == 0 or state[k - self.m].f_lag == 0):
                    f = Cell(F, int(stage.forward_ms))
                    found.append((k, f))
                    if stage.checkpoint_bytes is not None:
                        found.append((k, f._replace(drop=True)))
                elif cell.phase in (HERE, BACK) and above_ready and (first or earlier in (B, CONTEXT, W, DONE, BW)):
                    found.append((k, cell._replace(phase=B, left=int(stage.backward_ms))))
                    found.append((k, cell._replace(phase=BW, left=int(stage.bw_ms))))
                elif cell.phase == CONTEXT:
                    found.append((k, cell._replace(phase=W, left=int(stage.weight_ms))))
                elif cell.phase == DROPPED:
                    found.append((k, cell._replace(phase=C, left=int(stage.forward_ms))))
            elif self.p.can_offload(s):
                if cell.phase == HERE and not cell.parts:
                    for parts in (1, 2):
                        out = cell._replace(phase=O, left=int(stage.offload_ms) * parts // 2, parts=parts)
                        if lane in self.running_on(s, out):
                            found.append((k, out))
                elif cell.phase == AWAY:
                    back = cell._replace(phase=R, left=int(stage.reload_ms) * cell.parts // 2)
                    if lane in self.running_on(s, back):
                        found.append((k, back))
        return found

    def starts(self, state: tuple[Cell, ...]) -> set[tuple[Cell, ...]]:
        """Every state that follows at this instant, with ops started on idle lanes."""
        busy = {lane for k, cell in enumerate(state) for lane in self.running_on(k // self.m, cell)}
        choices = []
        for lane in self.lanes:
            choices.append([None, *([] if lane in busy else self.options(state, lane))])
        found = set()
        for pick in product(*choices):
            after = list(state)
            used = set(busy)
            for option in pick:
                if option is None:
                    continue
                k, cell = option
                lanes = set(self.running_on(k // self.m, cell))
                if after[k] != state[k] or used & lanes:
                    break
                used |= lanes
                after[k] = cell
            else:
                result = tuple(after)
                takes = any(a != b and b.phase in (F, R, C) for a, b in zip(state, result, strict=True))
                if not takes or self.fits(result):
                    found.add(result)
        return found

    def fits(self, state: tuple[Cell, ...]) -> bool:
        for d, device in enumerate(self.p.devices):
            if device.memory_bytes is not None and self.level(state, d) > device.memory_bytes:
                return False
        return True

    def advance(self, state: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """One ms later."""
        after = []
        for k, cell in enumerate(state):
            s = k // self.m
            f_lag = cell.f_lag - 1 if cell.f_lag > 0 else cell.f_lag
            b_lag = cell.b_lag - 1 if cell.b_lag > 0 else cell.b_lag
            phase, left = cell.phase, max(0, cell.left - 1)
            if cell.left == 1:
                if phase == F:
                    phase, f_lag = (DROPPED if cell.drop else HERE), self.comm[s]
                elif phase == O:
                    phase = AWAY
                elif phase in (R, C):
                    phase = BACK
                elif phase == B:
                    phase, b_lag = CONTEXT, self.comm[s - 1] if s else 0
                elif phase == BW:
                    phase, b_lag = DONE, self.comm[s - 1] if s else 0
                else:
                    phase = DONE
            after.append(Cell(phase, left, f_lag, b_lag, cell.parts, cell.drop))
        return tuple(after)

    def least_rest(self, state: tuple[Cell, ...]) -> float:
        """Time that some device or some microbatch has still to go, at least."""
        rest = [0.0] * self.p.num_devices
        longest = 0.0
        for k, cell in enumerate(state):
            s = k // self.m
            phase, left = cell.phase, cell.left
            if phase == DONE:
                continue
            backward = self.backward[s]
            if phase in (NEW, F):
                own = left if phase == F else self.forward[s]
                work, way = own + backward, own + self.after_f[s]
            elif phase in (B, BW):
                work = way = left + (self.weight[s] if phase == B else 0.0)
                if s:
                    way = max(way, left + self.comm[s - 1] + self.after_b[s - 1])
            elif phase in (CONTEXT, W):
                work = way = left if phase == W else self.weight[s]
            else:
                work, way = backward, self.after_b[s]
            rest[self.p.stages[s].device] += work
            longest = max(longest, way)
        return max(longest, *rest)


def tiny_problem(rng: random.Random) -> Problem:
    """A problem that is small enough: up to 8 cells, whole times, every kind of placement, channel and budget."""
    devices = rng.randint(1, 3)
    per_device = 1 if devices > 2 else rng.randint(1, 2)
    places = placement(rng.choice(PLACEMENTS), devices, per_device)
    most = {1: 5, 2: 4, 3: 3, 4: 2}[len(places)]
    transfers, recomputes = rng.random() < 0.4, rng.random() < 0.25
    stages = []
    for device in places:
        activation = 2 * rng.randint(2, 6)
        b, w = rng.randint(1, 3), rng.randint(1, 3)
        stage = {
            "device": device,
            "forward_ms": float(rng.randint(1, 3)),
            "backward_ms": float(b),
            "weight_ms": float(w),
            "activation_bytes": activation,
            "weight_context_bytes": rng.choice([0, activation // 2, activation]),
        }
        if rng.random() < 0.3:
            stage["fused_backward_ms"] = float(max(1, b + w - rng.randint(0, 2)))
        if transfers:
            stage["offloadable_bytes"] = rng.choice([0, activation, activation])
            stage["offload_ms"], stage["reload_ms"] = float(rng.choice([2, 2, 4])), float(rng.choice([2, 2, 4]))
        if recomputes:
            stage["checkpoint_bytes"] = rng.choice([None, 0, 2])
        stages.append(stage)
    both = ("d2h", "h2d")
    groups = rng.choice(
        [
            [[(d, x)] for d in range(devices) for x in both],
            [[(d, x) for x in both] for d in range(devices)],
            [[(d, x) for d in range(devices)] for x in both],
            [[(d, x) for d in range(devices) for x in both]],
        ]
    )
    channels = [
        {"name": f"c{n}", "transfers": [{"device": d, "direction": x} for d, x in group]}
        for n, group in enumerate(groups)
    ]
    problem = Problem.model_validate(
        {
            "num_microbatches": rng.randint(2, most),
            "devices": [{"memory_bytes": None}] * devices,
            "stages": stages,
            "comm_ms": [float(rng.choice([0, 0, 1])) for _ in places[1:]],
            "channels": channels if transfers else [],
        }
    )
    whole = [sum(problem.stages[s].activation_bytes for s in held) for held in problem.stages_of]
    least = smallest_budgets(problem)
    return problem.with_budgets(
        [rng.choice([x, w, int(w * rng.uniform(1, 2.5)), None]) for x, w in zip(least, whole, strict=True)]
    )
