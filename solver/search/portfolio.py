"""Rounds of all searches: several lines of them, each round of a line longer than the one before."""

from __future__ import annotations

import random

from optpipe.ops import Ops
from optpipe.problem import LONGEST_MS, Problem
from optpipe.timing import earliest
from solver.ada_offload import ada_offload
from solver.annealing import anneal
from solver.annealing.sequences import anneal_sequences, proposals
from solver.bounds import lower_bound
from solver.incumbent import Incumbent
from solver.policy import Policy
from solver.search.around import search_around
from solver.search.parts import as_parts, as_whole
from solver.search.rules import best_of, search_rules
from solver.search.shares import with_best_shares
from solver.search.siblings import sibling, stretched
from solver.search.stages import Genome, search_stages
from solver.search.windows import search_windows

#: Ops that the list schedules of the first round may place, list schedules that it makes at most in each search, and
#: how many times as many the next round makes.
_PLACED, _RUNS, _MORE_RUNS = 100_000, 250, 3
#: Largest schedule that the first round anneals, in ops.
_ANNEALED = 5_000
#: Annealing of schedules with transfers: its part of the time that is left then, the effort of the first round, and
#: temperatures at which it begins, in mean durations of a compute op, of twins and others.
_ANNEALING, _EFFORT, _HOT = 0.7, 3.0, ((0.03, 0.05), (0.1, 0.3))
#: It makes several tries until so many moves have been tried. Chance that microbatches may change places in one.
_TRIED, _EXCHANGED = 150_000, 0.4
#: Compute ops of a problem that is small; how often it is annealed in a round (microbatches change places every other
#: time), the moves of each in the first round, and the windows of that. Windows took nearly all of the time otherwise.
_SMALL, _TRIES, _TRY, _WINDOWS_SMALL = 200, 3, 200_000, 10
#: Largest schedule with transfers that is annealed, in ops.
_SEQUENCED = 20_000
#: Windows that HiGHS solves in the first round, its part of the time that is left then, and the compute ops of the
#: largest problem in which a window is formulated fast enough.
_WINDOWS, _WINDOWS_PART, _WINDOWED = 20, 0.6, 2_500
#: Windows in which shares are free, of a schedule that was found without; of one that comes home from a twin or sibling
#: if it is this close (of the best).
_WINDOWS_APART, _NEAR = 10, 0.02
#: Largest schedule, in ops, whose shares are optimised.
_SHARED = 10_000
#: Of a twin's times: how far they are off at most.
_OFF = 0.03
#: Policies whose stages begin to be evolved in a round, beside the best of each kind; genomes that go on in the next.
_PARENTS = 2
_GENOMES = 2


class Portfolio:
    """All searches, as lines that each go their own way.

    Where a search ends depends much on how it begins. So of two lines that have made as many rounds only the better one
    makes the next, longer one (siblings apart from the others): half of the time goes to the longest rounds but one
    and so on, down to lines that begin anew. A large problem has one line only: there is no time for more.

    Of four lines one searches a sibling, with fewer microbatches (see ``siblings``), and two (of a small problem one),
    where there are offloads, twins, whose times are a little off. Where times are round many things happen at one
    instant, and none of a schedule's neighbours is shorter though schedules further off are; the twin's schedule is
    re-timed.

    A round does a fixed amount of work, so with the same seed and no time pressure it finds the same schedule.
    """

    def __init__(self, incumbent: Incumbent, rng: random.Random, lines: int = 0) -> None:
        self.incumbent, self.rng = incumbent, rng
        self.first: Ops | None = None
        self.waiting: dict[tuple[bool, int], Line] = {}  # by kind, and by the number of rounds that they have made
        self.lines = lines  # which kind of line comes next: lanes begin with different ones

    def round(self, seconds: float) -> None:
        """The first round of a new line, then those rounds for which there are two lines to choose from; at most so
        many seconds."""
        incumbent, problem = self.incumbent, self.incumbent.problem
        end = incumbent.seconds + seconds
        if 3 * problem.num_stages * problem.num_microbatches > _WINDOWED:
            line = self.waiting.setdefault((False, 0), Line(incumbent, self.rng, self.rng.random() < 0.5))
            line.round(seconds)
            return
        self.first = self.first or incumbent.ops
        line = self._line()
        line.round(seconds)
        while line.key in self.waiting and not incumbent.at_bound and incumbent.seconds < end:
            other = self.waiting.pop(line.key)
            line = min(other, line, key=lambda each: each.loss)
            line.round(end - incumbent.seconds)
        self.waiting[line.key] = line

    def _line(self) -> Line:
        """A new line."""
        incumbent, rng = self.incumbent, random.Random(self.rng.getrandbits(64))
        self.lines += 1
        problem = self._other_problem(rng) if incumbent.options.objective == "makespan" else None
        fluent = self.lines <= 2 or rng.random() < 0.5
        if problem is None:
            return Line(incumbent.line(self.first), rng, fluent)
        bound = lower_bound(problem, incumbent.options.objective)
        other = Incumbent(problem, incumbent.options, bound, begin=incumbent.begin, facts={})
        other.offer(ada_offload(problem), "ada-offload")
        return Line(other, rng, fluent, home=incumbent)

    def _other_problem(self, rng: random.Random) -> Problem | None:
        """What a new line searches on: a sibling of the problem, a twin, or (None) the problem itself."""
        problem = self.incumbent.problem
        offloads = any(problem.can_offload(s) for s in range(problem.num_stages))
        few = sibling(problem, rng) if self.lines % 4 == 3 else None
        twins = (2,) if _is_small(problem) else (1, 2)
        if offloads and (self.lines % 4 in twins or (few is not None and rng.random() < 0.5)):
            return twin(few or problem, rng)
        return few


def twin(problem: Problem, rng: random.Random) -> Problem:
    """The problem with times of each kind off by up to some percent, the same for all stages: of compute they are
    longer, of transfers shorter, and messages take a little longer.

    Of two orders that are equally good it prefers the one that leaves messages and transfers some slack. (The other
    way round it has been seen to lead nowhere.)
    """
    value = problem.to_json()
    factor = {
        kind: 1.0 + rng.uniform(0.0, _OFF) for kind in ("forward_ms", "backward_ms", "weight_ms", "fused_backward_ms")
    }
    factor["offload_ms"] = factor["reload_ms"] = 1.0 - rng.uniform(0.0, _OFF)
    for stage in value["stages"]:
        stage |= {kind: min(LONGEST_MS, stage[kind] * by) for kind, by in factor.items() if stage.get(kind) is not None}
    late = _OFF * min(stage["forward_ms"] for stage in value["stages"]) * rng.random()
    value["comm_ms"] = [min(LONGEST_MS, time + late) for time in value["comm_ms"]]
    return Problem.model_validate(value)


def _is_small(problem: Problem) -> bool:
    return 3 * problem.num_stages * problem.num_microbatches <= _SMALL


class Line:
    """The searches on one incumbent, and what they learn from one round to the next.

    ``home`` is the incumbent of the problem itself where the line's own one is of a twin or sibling. A ``fluent`` line
    goes on from schedules with the shares that the linear program gives; in others the transfers of a stage move alike,
    and what other shares are worth is tried apart: each finds what the other one misses.
    """

    def __init__(self, incumbent: Incumbent, rng: random.Random, fluent: bool, home: Incumbent | None = None) -> None:
        self.incumbent, self.rng, self.fluent, self.home = incumbent, rng, fluent, home
        self.small = _is_small((home or incumbent).problem)
        self.start = incumbent.ops
        self.value = float("inf")  # of the best schedule, also of those that move other shares
        self.pool: list[tuple[float, int, Policy]] = []
        self.genomes: list[tuple[float, Genome]] = []
        self.rounds = 0

    @property
    def is_sibling(self) -> bool:
        """Whether the line has fewer microbatches than the problem itself."""
        own = self.incumbent.problem.num_microbatches
        return self.home is not None and own < self.home.problem.num_microbatches

    @property
    def key(self) -> tuple[bool, int]:
        """Lines are compared with others of the same kind that have made as many rounds."""
        return self.is_sibling, self.rounds

    @property
    def loss(self) -> float:
        """By how much (ms) the best schedule misses the bound: what a sibling's schedule loses at its ends stays."""
        return self.incumbent.value - self.incumbent.bound if self.is_sibling else self.value

    def round(self, seconds: float) -> None:
        """One round, of at most so many seconds: policies, single stages, annealing, windows, around the best."""
        incumbent, rng = self.incumbent, self.rng
        problem = incumbent.problem
        ops = 3 * problem.num_stages * min(problem.num_microbatches, 4 * problem.num_devices)
        runs = max(4, min(_RUNS, _PLACED // ops)) * _MORE_RUNS**self.rounds
        end = incumbent.seconds + seconds
        found = search_rules(incumbent, rng, runs=runs, seconds=0.3 * seconds)
        self.pool = best_of([*self.pool, *((value, self.rounds, policy) for value, _, policy in found)])
        if self.pool:
            starts: list[Policy | Genome] = [*(genome for _, genome in self.genomes), *self._parents()]
            evolved = search_stages(incumbent, rng, starts, runs=2 * runs, seconds=0.5 * (end - incumbent.seconds))
            self.genomes = evolved[:_GENOMES]
        if (orders := self._orders_alone()) is not None:
            better = anneal(
                problem,
                orders,
                seconds=0.5 * (end - incumbent.seconds),
                goal=incumbent.bound,
                seed=rng.getrandbits(32),
                rounds=3 + self.rounds,
                on_improvement=incumbent.taker("annealing"),
            )
            incumbent.offer(better, "annealing")
        self._anneal_sequences(_ANNEALING * (end - incumbent.seconds))
        if self.fluent:
            self._reshare(incumbent, end)
        windows = _WINDOWS_SMALL if self.small else _WINDOWS
        self._windows(incumbent, windows * 2**self.rounds, end, parts=self.fluent)
        placed = _PLACED * _MORE_RUNS**self.rounds
        around = 2 * min(runs, placed // (3 * problem.num_stages * problem.num_microbatches))
        search_around(incumbent, rng, runs=around, seconds=end - incumbent.seconds)
        self.value = min(self.value, self._at_home(end))
        self.rounds += 1

    def _at_home(self, end: float) -> float:
        """What the best schedule, with other shares, is worth for the problem itself; the best objective."""
        incumbent, home = self.incumbent, self.home
        if incumbent.ops is None or incumbent.options.objective != "makespan":
            return incumbent.value if home is None else float("inf")
        own = self._own()
        self._reshare(own, end)
        if not self.fluent:
            self._windows(own, _WINDOWS_APART * 2**self.rounds, end, parts=True)
            self._reshare(own, end)
        if home is None or own.ops is None:
            return own.value
        if home.at_bound:
            return float("inf")
        apart = home.line(None)
        if own.problem.num_microbatches == apart.problem.num_microbatches:
            apart.offer(earliest(apart.problem, own.ops), "twin")
        else:
            self._stretch(own.ops, apart, end)
        self._reshare(apart, end)
        if apart.value <= home.value * (1 + _NEAR):
            self._windows(apart, _WINDOWS_APART * 2**self.rounds, end, parts=True)
            self._reshare(apart, end)
        return apart.value

    def _own(self) -> Incumbent:
        """What may take other shares: this line's incumbent, or another one that begins with its schedule."""
        incumbent = self.incumbent
        if self.fluent:
            return incumbent
        if incumbent.parent is not None:
            return incumbent.parent.line(incumbent.ops)
        found = Incumbent(incumbent.problem, incumbent.options, incumbent.bound, begin=incumbent.begin, facts={})
        found.offer(incumbent.ops, incumbent.source)
        return found

    def _stretch(self, ops: Ops, apart: Incumbent, end: float) -> None:
        """Offer what a schedule of a sibling, or of its twin, is worth with all microbatches."""
        few = self.incumbent.problem.num_microbatches
        problem = apart.problem.model_copy(update={"num_microbatches": few})
        small = Incumbent(problem, self.incumbent.options, 0.0, begin=self.incumbent.begin, facts={})
        small.offer(earliest(problem, ops), "sibling")
        self._reshare(small, end)
        left = end - self.incumbent.seconds
        if small.ops is not None and left > 0:
            for found in stretched(apart.problem, problem, small.ops, below=self.value, seconds=left):
                apart.offer(found, "sibling")

    def _reshare(self, best: Incumbent, end: float) -> None:
        """What each transfer should move."""
        left = end - best.seconds
        if best.ops is None or best.at_bound or left <= 0 or len(best.ops) > _SHARED or best.ops.is_compute.all():
            return
        if best.options.objective == "makespan":
            best.offer(with_best_shares(best.problem, best.ops, seconds=left), "shares")

    def _windows(self, best: Incumbent, windows: int, end: float, *, parts: bool) -> None:
        """Windows, where they are formulated fast enough and there are transfers for ``parts``."""
        problem, left = best.problem, end - best.seconds
        if left <= 0 or 3 * problem.num_stages * problem.num_microbatches > _WINDOWED:
            return
        parts &= best.ops is not None and not best.ops.is_compute.all()
        search_windows(best, self.rng, windows=windows, seconds=_WINDOWS_PART * left, parts=parts)

    def _anneal_sequences(self, seconds: float) -> None:
        """Anneal the best schedule with its transfers, where something can be offloaded."""
        best = self.incumbent
        # What policies and stages find is shorter, but further from what annealing can make of the start.
        problem, ops = best.problem, best.ops if self.rounds else self.start
        if ops is None or best.options.objective != "makespan" or best.at_bound or seconds <= 0:
            return
        if len(ops) > _SEQUENCED or not any(problem.can_offload(s) for s in range(problem.num_stages)):
            return
        whole = (problem, ops) if self.fluent else as_whole(problem, ops)
        if whole is None:
            return
        end = best.seconds + seconds
        moves = proposals(whole[1])
        effort, tries = _EFFORT, max(1, round(_TRIED / (_EFFORT * moves)))
        if self.small:
            effort, tries = _TRY / moves, _TRIES
        for left in range(tries, 0, -1):
            seconds = (end - best.seconds) / left
            if seconds <= 0 or best.at_bound:
                return
            found = anneal_sequences(
                *whole,
                seconds=seconds,
                goal=best.bound,
                seed=self.rng.getrandbits(32),
                effort=effort * _MORE_RUNS**self.rounds,
                hot=self.rng.choice(_HOT[self.home is None]),
                parts=self.fluent,
                exchange=left % 2 == 1 if self.small else self.rng.random() < _EXCHANGED,
                on_improvement=best.taker("annealing") if self.fluent else None,
            )
            best.offer(found if self.fluent else as_parts(problem, whole[0], found), "annealing")

    def _parents(self) -> list[Policy]:
        """Policies whose stages are to be evolved: the best one, the best of the other kind, and some others."""
        best = self.pool[0][2]
        other = [policy for _, _, policy in self.pool if (policy.kept is None) != (best.kept is None)][:1]
        some = self.rng.sample(self.pool, min(_PARENTS, len(self.pool)))
        return [best, *other, *(entry[2] for entry in some)]

    def _orders_alone(self) -> Ops | None:
        """The best schedule, if annealing of orders can improve it and does so in a round's time."""
        ops = self.incumbent.ops
        if ops is None or self.incumbent.options.objective != "makespan" or self.incumbent.at_bound:
            return None
        return ops if len(ops) <= _ANNEALED * 2**self.rounds and ops.is_compute.all() else None
