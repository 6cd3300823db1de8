"""DualPipeV (DeepSeek-AI, after DualPipe, arXiv:2412.19437): a V placement that pairs a forward of one microbatch with
the backward of another, so that an implementation can hide the communication of one behind the other.

A plan knows no op that is two at once: of a pair the F comes first, then the BW. Device at position i of D runs

    2 (D - 1 - i)       F of the earlier chunk
    i + 1               F of the earlier, F of the later chunk
    D - 1 - i           B and W and then F of the later chunk
    m - 2 D + i + 1     pairs: F of the earlier with BW of the later, F of the later with BW of the earlier chunk
    D - 1 - i           BW of the later chunk, F of the later with BW of the earlier chunk
    i + 1               backwards of the later and the earlier chunk: the first half BW, then B
    D - 1 - i           a pending W, a backward of the earlier chunk
                        and the W's that are left.
"""

from __future__ import annotations

from collections import deque

from optpipe.ops import Kind, Ops
from optpipe.problem import Problem
from solver.schedules.errors import DoesNotApply
from solver.schedules.orders import Step, in_order
from solver.schedules.placement import v_positions


def dual_pipe_v(problem: Problem) -> Ops:
    """DualPipeV on two stages a device.

    Raises
    ------
    DoesNotApply
        No V placement, or fewer microbatches than stages.
    """
    D = v_positions(problem)
    if problem.num_microbatches < 2 * D:
        raise DoesNotApply(f"needs at least as many microbatches as stages, {2 * D}")
    orders: list[list[Step]] = [[] for _ in range(D)]
    for i in range(D):
        orders[problem.stages[i].device] = _order(D, i, problem.num_microbatches)
    return in_order(problem, orders)


def _order(D: int, i: int, m: int) -> list[Step]:
    earlier, later = i, 2 * D - 1 - i
    steps: list[Step] = []
    pending: deque[Step] = deque()
    forwards, backwards = {earlier: 0, later: 0}, {earlier: 0, later: 0}

    def forward(s: int) -> None:
        steps.append(Step(Kind.F, s, forwards[s]))
        forwards[s] += 1

    def backward(s: int, *, split: bool = False) -> None:
        steps.append(Step(Kind.B if split else Kind.BW, s, backwards[s]))
        if split:
            pending.append(Step(Kind.W, s, backwards[s]))
        backwards[s] += 1

    def weight() -> None:
        if pending:
            steps.append(pending.popleft())

    for _ in range(2 * (D - 1 - i)):
        forward(earlier)
    for _ in range(i + 1):
        forward(earlier)
        forward(later)
    for _ in range(D - 1 - i):
        backward(later, split=True)
        weight()
        forward(later)
    for _ in range(m - 2 * D + i + 1):
        forward(earlier)
        backward(later)
        forward(later)
        backward(earlier)
    for _ in range(D - 1 - i):
        backward(later)
        forward(later)
        backward(earlier)
    # Odd positions begin to split one backward earlier.
    whole = 2 * ((i + 1) // 2) + (0 if i % 2 else 1)
    for k in range(i + 1):
        backward(later, split=2 * k >= whole)
        backward(earlier, split=2 * k + 1 >= whole)
    for _ in range(D - 1 - i):
        weight()
        backward(earlier, split=True)
    while pending:
        weight()
    return steps
