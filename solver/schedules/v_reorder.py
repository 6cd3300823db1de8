"""Orders of a building block, reordered for times that are not those of the block (the third step of arXiv:2405.15362).

Repeated, a block leaves gaps before and after its steady phase, which ops that are free to run earlier can fill. Two
ways to do so, both as if every op took one unit and every message none:

- squeezed: each op as early as it can, ops that have arrived overtaking others that have not, within the memory;
- ends: before its first B of the earlier chunk, device i of the V runs as many F's of the earlier chunk as memory
  allows beside at most i // 2 + 2 of the later one, the last ones of both in turn, then in turn B's of the later chunk
  and F's; and what is left of the B's after the last F of the later chunk leaves device 0 goes up and down the V
  without a gap.

    device 0  F F F F F . . . f B W f B W f B W . b       capitals: F and W of the earlier chunk,
    device 1  . F F F F . . f f B W f B W F B W b ..      B of the later one
"""

from __future__ import annotations

from optpipe.problem import Problem
from solver.schedules.placement import v_positions
from solver.schedules.weights import Filling, Numbers, Policy

#: Ways to reorder: none, squeezed, ends.
HOWS = 3


class Reorder:
    """Reorders orders of F's and B's on one problem; orders are numbers of ops per device (see ``weights``).

    Parameters
    ----------
    problem
        Stages on a V.
    limits
        Per device the bytes that it may hold.
    """

    def __init__(self, problem: Problem, limits: list[int]) -> None:
        self.D, self.S, self.m = v_positions(problem), problem.num_stages, problem.num_microbatches
        self.limits = limits
        unit = {"forward_ms": 1.0, "backward_ms": 1.0, "weight_ms": 1.0}
        stages = [stage.model_copy(update=unit) for stage in problem.stages]
        self.unit = Numbers(problem.changed(stages=stages, comm_ms=[0.0] * (self.S - 1)))
        sizes = [sum(problem.stages[s].activation_bytes for s in held) for held in problem.stages_of]
        #: Chunks that every device may hold.
        self.chunks = min(
            2 * self.D, *(2 * limit // size if size else 2 * self.D for limit, size in zip(limits, sizes, strict=True))
        )
        self.device = [problem.stages[i].device for i in range(self.D)]

    def by(self, how: int, orders: list[list[int]]) -> list[list[int]] | None:
        """The orders, reordered in one of the ways (``HOWS``); None: they need more memory."""
        if how == 0:
            return orders
        if how == 1:
            filling = self._filled(orders, Policy(True, overtake=0.0))
            return (
                None if filling is None else [[op for op in done if op < 2 * self.S * self.m] for done in filling.done]
            )
        return self._drained(self._warmed_up(orders))

    def _filled(self, orders: list[list[int]], policy: Policy) -> Filling | None:
        filling = Filling(self.unit, orders, self.limits, policy)
        return filling if filling.run() and filling.complete else None

    def _rows(self, i: int) -> tuple[int, int, int, int]:
        """Kind and stage, as in ``Numbers.row``, of position i's F's, and B's, of the earlier and the later chunk."""
        return i, self.S - 1 - i, self.S + i, 2 * self.S - 1 - i

    def _warmed_up(self, orders: list[list[int]]) -> list[list[int]]:
        """With other orders before the first B of the earlier chunk."""
        m, changed = self.m, list(orders)
        for i, d in enumerate(self.device):
            f0, f1, b0, b1 = self._rows(i)
            first = next(k for k, op in enumerate(orders[d]) if op // m == b0)
            before = [op // m for op in orders[d][:first]]
            most = {row: before.count(row) for row in (f0, f1, b1)}
            level = min(i // 2 + 2, self.chunks // 2, m)
            ahead = [f0] * (2 * (self.D - 1 - i)) + [f0, f1] * (i + 1)
            steps: list[int] = []
            count = dict.fromkeys(most, 0)
            for row in ahead:
                if count[row] < min(most[row], level if row == f1 else min(self.chunks - level, m)):
                    steps.append(row * m + count[row])
                    count[row] += 1
            while count != most:
                for row in (b1, f1 if count[f1] < most[f1] else f0):
                    if count[row] < most[row]:
                        steps.append(row * m + count[row])
                        count[row] += 1
            changed[d] = steps + orders[d][first:]
        return changed

    def _drained(self, orders: list[list[int]]) -> list[list[int]] | None:
        """With the last B's of both chunks where they follow each other without a gap."""
        filling = self._filled(orders, Policy(True))
        if filling is None:
            return None
        m, D = self.m, self.D
        at = {op: t for d in range(D) for op, t in zip(filling.done[d], filling.starts[d], strict=True)}
        last_forward = at[self.S * m - 1]
        earlier = min((self.chunks + 1) // 2, m)
        later = min(self.chunks - earlier, m)
        changed = list(orders)
        for i, d in enumerate(self.device):
            _, _, b0, b1 = self._rows(i)
            for k in range(earlier):
                at[b0 * m + m - 1 - k] = last_forward - i + 2 * (D - k)
            for k in range(min(i + 1, later)):
                at[b1 * m + m - 1 - k] = last_forward + 1 + i - 2 * k
            changed[d] = sorted(orders[d], key=lambda op: (at[op], op))
        return changed
