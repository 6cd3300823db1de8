"""Whether a plan could be shorter if the memory of one device alone were limited, microbatches in any order.

A program for CP-SAT that asks less than the problem does, so that where it has no solution there is no plan:

- Only one device has a budget. Devices below it (towards the end of the model) take their time, but never make a
  microbatch wait; device 0, if it has no budget, does all its forwards first, which loses nothing: of work that is
  there at time 0 and work that arrives later, doing the first first ends no later (one machine, release dates).
- Microbatches have no names. On each device the k-th forward, the l-th backward and the l-th W are known by their
  turns; between devices only the counts matter (the k-th forward comes after the k-th of the device before). Only on
  the device with the budget forwards are matched to backwards, and so are what goes and what comes back.

What is left has 3 n ops on each of a few devices, instead of as many with names on all of them, and every order in it
is a literal: CP-SAT then reasons about orders alone, and how fine a tick is does not matter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from optpipe.problem import Problem

#: A literal, or a constant.
Literal = Any
_KINDS = "FBW"


def without_others_memory(problem: Problem, device: int, below: float, parts: int, ticks: int) -> cp_model.CpModel:
    """The program.

    Parameters
    ----------
    problem
        One stage a device, in order, a link of its own each way, nothing recomputed, fused backwards no shorter.
    device
        The one whose memory counts.
    below
        ms: the makespan is to be at most one tick shorter.
    parts
        Equal parts of an activation, of which a transfer moves some.
    ticks
        A millisecond. All times, also that of a part, are whole ticks.
    """
    return _Program(problem, device, below, parts, ticks).model


class _Program:
    """The program while it is being made. All times are in ticks."""

    def __init__(self, problem: Problem, device: int, below: float, parts: int, ticks: int) -> None:
        stages = problem.stages
        assert [stage.device for stage in stages] == list(range(problem.num_devices)), "one stage a device, in order"
        assert all(stage.checkpoint_bytes is None for stage in stages), "nothing is recomputed"
        assert all(stage.bw_ms >= stage.backward_ms + stage.weight_ms for stage in stages), "BW is no shorter"
        self.model = cp_model.CpModel()
        self.problem, self.device, self.parts = problem, device, parts
        self.n = problem.num_microbatches

        def whole(ms: float) -> int:
            assert abs(ms * ticks - round(ms * ticks)) < 1e-6, "all times are whole ticks"
            return round(ms * ticks)

        self.length = {
            (kind, s): whole(getattr(stage, name))
            for s, stage in enumerate(stages)
            for kind, name in zip(_KINDS, ("forward_ms", "backward_ms", "weight_ms"), strict=True)
        }
        self.lag = [whole(ms) for ms in problem.comm_ms]
        self.out, self.back = (
            [whole(p * ms / parts) for p in range(parts + 1)]
            for ms in (stages[device].offload_ms, stages[device].reload_ms)
        )
        self.end = math.ceil(below * ticks - 1e-6) - 1
        self.first = 0 if device == 0 else 1
        self.start: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.before: dict[tuple[str, str, int, int, int], Literal] = {}
        if self.n * sum(self.length[kind, 0] for kind in _KINDS) > self.end:
            self.model.add_bool_or([])  # device 0 does all its work
        for s in range(self.first, device + 1):
            self._add_ops(s)
        for s in range(self.first, device + 1):
            self._add_orders(s)
        for above, s in pairwise(range(self.first, device + 1)):
            for k in range(self.n):
                self._after(self.start["F", above, k], self.length["F", above] + self.lag[above], self.start["F", s, k])
                self._after(self.start["B", s, k], self.length["B", s] + self.lag[above], self.start["B", above, k])
        self._add_transfers()
        self._add_levels()

    def _turn(self, s: int) -> int:
        """From the end of a forward of stage s to the start of its backward, at least."""
        below = range(s + 1, self.problem.num_stages)
        return sum(self.length["F", x] + self.length["B", x] + 2 * self.lag[x - 1] for x in below)

    def _way_up(self, s: int, left: int) -> int:
        """From the end of a backward of stage s to the end of all, at least, if it is one of the last ``left``."""
        way = sum(self.length["B", x] + self.lag[x] for x in range(1, s)) + (self.lag[0] if s else 0)
        return way + left * (self.length["B", 0] + self.length["W", 0]) if s else self.length["W", 0]

    def _after(self, first: Any, ticks: int, second: Any, literal: Literal = 1) -> None:
        """The second starts so long after the first, if the literal is true."""
        if isinstance(literal, int):
            if literal:
                self.model.add(second >= first + ticks)
        else:
            self.model.add(second >= first + ticks).only_enforce_if(literal)

    def _clause(self, *literals: Literal) -> None:
        """One of them is true."""
        if not any(isinstance(x, int) and x for x in literals):
            self.model.add_bool_or([x for x in literals if not isinstance(x, int)])

    def _window(self, kind: str, s: int, k: int) -> tuple[int, int]:
        """The earliest and the latest start of the k-th forward, backward or W of a device."""
        length, n = self.length, self.n
        head = sum(length["F", x] + self.lag[x] for x in range(s))
        slowest = max(length["F", x] for x in range(s + 1))
        latest = self.end - length["B", s] - max(self._way_up(s, n - k), (n - 1 - k) * length["B", s])
        if kind == "F":
            return head + k * slowest, latest - self._turn(s) - length["F", s]
        first = head + length["F", s] + self._turn(s)
        if kind == "B":
            return first + k * length["B", s], latest
        return first + length["B", s] + k * length["W", s], self.end - (n - k) * length["W", s]

    def _add_ops(self, s: int) -> None:
        for kind in _KINDS:
            for k in range(self.n):
                first, last = self._window(kind, s, k)
                if first > last:
                    self.model.add_bool_or([])  # no time for it
                self.start[kind, s, k] = self.model.new_int_var(first, max(first, last), f"{kind}{s}.{k}")
                if k:
                    self._after(self.start[kind, s, k - 1], self.length[kind, s], self.start[kind, s, k])
        for k in range(self.n):
            self._after(self.start["F", s, k], self.length["F", s] + self._turn(s), self.start["B", s, k])
            self._after(self.start["B", s, k], self.length["B", s], self.start["W", s, k])

    def _add_orders(self, s: int) -> None:
        """One op at a time: which of two comes first, and what follows from that."""
        n, turns = self.n, range(self.n)
        for kind, other in ("FB", "FW", "BW"):
            for i in turns:
                for j in turns:
                    value = self._order_of(kind, other, s, i, j)
                    self.before[kind, other, s, i, j] = value
                    if i > j:
                        self._after(self.start[kind, s, i], self.length[kind, s], self.start[other, s, j], value)
                        self._after(self.start[other, s, j], self.length[other, s], self.start[kind, s, i], _no(value))
            for i in turns:
                for j in turns:
                    if i + 1 < n:
                        self._clause(_no(self.before[kind, other, s, i + 1, j]), self.before[kind, other, s, i, j])
                    if j + 1 < n:
                        self._clause(_no(self.before[kind, other, s, i, j]), self.before[kind, other, s, i, j + 1])
        for i in turns:
            for j in turns:
                for k in turns:
                    fb, fw = self.before["F", "B", s, i, j], self.before["F", "W", s, i, k]
                    bw = self.before["B", "W", s, j, k]
                    self._clause(_no(fb), _no(bw), fw)
                    self._clause(fb, bw, _no(fw))
        ops = [(self.start[kind, s, k], self.length[kind, s]) for kind in _KINDS for k in turns]
        self.model.add_no_overlap([self.model.new_fixed_size_interval_var(*op, "") for op in ops])

    def _order_of(self, kind: str, other: str, s: int, i: int, j: int) -> Literal:
        """Whether the i-th op of a kind comes before the j-th of another one of the device."""
        (first, last), (other_first, other_last) = self._window(kind, s, i), self._window(other, s, j)
        if i <= j or other_first + self.length[other, s] > last:
            return 1
        if first + self.length[kind, s] > other_last:
            return 0
        return self.model.new_bool_var("")

    def _add_transfers(self) -> None:
        """What goes of the k-th forward (``goes``) and comes back for the l-th backward (``comes``), by parts."""
        model, s, turns = self.model, self.device, range(self.n)
        head = self._window("F", s, 0)[0]
        last = max(head, self._window("B", s, self.n - 1)[1])
        self.offload = [model.new_int_var(head, last, f"O{k}") for k in turns]
        self.reload = [model.new_int_var(head, last, f"R{k}") for k in turns]
        self.goes, self.comes = (
            [[model.new_bool_var("") for _ in range(self.parts + 1)] for _ in turns] for _ in range(2)
        )
        self.match = [[model.new_bool_var("") for _ in turns] for _ in turns]
        for k in turns:
            for row in (self.goes[k], self.comes[k], self.match[k], [self.match[i][k] for i in turns]):
                model.add_exactly_one(row)
            self._after(self.start["F", s, k], self.length["F", s], self.offload[k])
            for p in range(1, self.parts + 1):
                self._after(self.reload[k], self.back[p], self.start["B", s, k], self.comes[k][p])
            for j in turns:
                matched = self.match[k][j]
                self._after(self.start["F", s, k], self.length["F", s] + self._turn(s), self.start["B", s, j], matched)
                for p in range(self.parts + 1):
                    self._clause(_no(matched), _no(self.goes[k][p]), self.comes[j][p])
                    if p:
                        model.add(self.reload[j] >= self.offload[k] + self.out[p]).only_enforce_if(
                            [matched, self.goes[k][p]]
                        )
        self._one_at_a_time(self.offload, self.goes, self.out)
        self.sooner = self._one_at_a_time(self.reload, self.comes, self.back)

    def _one_at_a_time(
        self, start: list[Any], moved: list[list[Any]], took: list[int]
    ) -> dict[tuple[int, int], Literal]:
        """Of two transfers of one link that both take place one comes first; which, for every pair."""
        found: dict[tuple[int, int], Literal] = {}
        for i in range(self.n):
            for j in range(i + 1, self.n):
                found[i, j] = first = self.model.new_bool_var("")
                found[j, i] = first.negated()
                for a, b in ((i, j), (j, i)):
                    for p in range(1, self.parts + 1):
                        if_so = [found[a, b], moved[a][p], moved[b][0].negated()]
                        self.model.add(start[b] >= start[a] + took[p]).only_enforce_if(if_so)
        return found

    def _gone(self, k: int, taker: Any) -> Literal:
        """A literal that may be true only where all that goes of the k-th forward has gone before ``taker`` starts."""
        gone = self.model.new_bool_var("")
        for p in range(1, self.parts + 1):
            self.model.add(taker >= self.offload[k] + self.out[p]).only_enforce_if([gone, self.goes[k][p]])
        return gone

    def _ended(self, kind: str, k: int, taker: Any) -> Literal:
        """A literal that may be true only where the k-th backward or W has ended before ``taker`` starts."""
        ended = self.model.new_bool_var("")
        self._after(self.start[kind, self.device, k], self.length[kind, self.device], taker, ended)
        return ended

    def _both(self, first: Any, second: Any) -> Any:
        """A literal that may be true only where both are."""
        both = self.model.new_bool_var("")
        self.model.add_implication(both, first)
        self.model.add_implication(both, second)
        return both

    def _either(self, *needed: Literal) -> Any:
        """A literal that is true where all are."""
        found = self.model.new_bool_var("")
        self._clause(found, *(_no(x) for x in needed))
        return found

    def _add_levels(self) -> None:
        """Where memory is taken, by a forward or a reload, there is enough."""
        s, turns, stage = self.device, range(self.n), self.problem.stages[self.device]
        budget = self.problem.devices[s].memory_bytes
        assert budget is not None, "the device has a budget"
        # In bytes times parts all are whole numbers.
        whole, kept = stage.activation_bytes * self.parts, stage.weight_context_bytes * self.parts
        share = stage.offloadable_bytes
        started = [[self.model.new_bool_var("") for _ in turns] for _ in turns]  # reload j at or before forward k
        for k in turns:
            taker = self.start["F", s, k]
            level: list[Any] = [whole * (k + 1)]
            for j in turns:
                if j < k:
                    gone = self._gone(j, taker)
                    level += [-share * p * self._both(gone, self.goes[j][p]) for p in range(1, self.parts + 1)]
                there = started[j][k]
                self._after(taker, 0, self.reload[j], _no(there))
                self._after(self.reload[j], 0, taker, there)
                self._clause(there, self.before["F", "B", s, k, j], self.comes[j][0])
                level += [share * p * self._either(there, self.comes[j][p]) for p in range(1, self.parts + 1)]
                level.append((kept - whole) * _no(self.before["F", "B", s, k, j]))
                level.append(-kept * _no(self.before["F", "W", s, k, j]))
            self.model.add(sum(level) <= budget * self.parts)
        for j in turns:
            taker = self.reload[j]
            level = [share * p * self.comes[j][p] for p in range(1, self.parts + 1)]
            for i in turns:
                level.append(whole * _no(started[j][i]))  # a forward that starts at the instant counts, as it may
                gone = self._gone(i, taker)
                level += [-share * p * self._both(gone, self.goes[i][p]) for p in range(1, self.parts + 1)]
                if i != j:
                    level += [
                        share * p * self._either(self.sooner[i, j], self.comes[i][p]) for p in range(1, self.parts + 1)
                    ]
                level.append((kept - whole) * self._ended("B", i, taker))
                level.append(-kept * self._ended("W", i, taker))
            self.model.add(sum(level) <= budget * self.parts).only_enforce_if(self.comes[j][0].negated())


def _no(literal: Literal) -> Literal:
    return 1 - literal if isinstance(literal, int) else literal.negated()
