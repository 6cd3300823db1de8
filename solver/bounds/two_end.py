"""Fill and drain together: the idle time that both ends of a step force on a device.

Let f be the start of the device's last F (of its last stage, K: after any other F one of stage K follows). At f the
device runs nothing else, so every microbatch of a stage is in one state: its B has yet to run (x of them, this one
too), or only its W (y), or it is done; memory says  sum(a x + context y) <= budget.

Drain: what ran before f is at least the whole work less ``left``,
``left = F_K + sum(x whole + y (whole - B))``, and after f it takes at least ``turn + after`` of stage K. So

    T >= head + fill + max(work, work - left + turn + after)          with the largest ``left`` that memory allows.

Fill and drain are disjoint where the last F starts after the window of the fill.

In between (one stage, nothing leaves memory): let f_j be the start of the j-th F, k = floor(budget / a). At f_(j+k) at
most k are whole, so of F's 0 .. j + k some B of one with a number >= j has ended: f_(j+k) >= f_j + turn + B. So the
windows [f_j, f_j + turn], j = 0, k, 2 k, ... are disjoint; in each run at most k F's, the backwards of the x - 1 others
that were whole at f_j and the W's of the y: each idles at least ``turn - (k F + (x - 1) whole + y W)``.

Offloads: besides the budget, ``left`` may use what the channel can bring back in time. Recomputation: z dropped ones
add z whole to ``left`` but z F to the work, so that of the gap G = turn + after - left at least G F / (F + whole)
stays.
"""

from __future__ import annotations

import math

from solver.bounds.fill import fill, rate
from solver.bounds.knapsack import Item, most_value
from solver.bounds.view import View


def two_end(view: View) -> float:
    """Work, fill, drain and the windows in between."""
    ends = fill(view)
    before, middle = _drain(view)
    both = view.head + middle + before
    if view.own_end:
        both = max(both, view.head + view.work)
        fill_alone = view.head + view.work + ends.idle
    else:
        fill_alone = 0.0
    if ends.last_forward_is_later:
        return max(both + ends.idle, fill_alone)
    return max(both, fill_alone)


def _drain(view: View) -> tuple[float, float]:
    """Time without fill and middle windows (from the first F to the end); idle time of the middle windows."""
    tail = view.turn[-1] + view.after[-1]
    if len(view.stages) == 1 and not view.movable[0] and not view.dropped[0]:
        left, middle = _exact(view)
    else:
        left, middle = _relaxed(view, tail), 0.0
    gap = tail - left
    if gap > 0 and any(view.dropped):
        kept = [f / (f + w) if f + w > 0 else 0.0 for f, w in zip(view.forward, view.whole, strict=True)]
        gap *= min(kept)
    if view.own_end:
        return view.work + max(0.0, gap), middle
    return view.work + gap, middle


def _exact(view: View) -> tuple[float, float]:
    """Largest ``left`` and the idle time of the middle windows, over whole numbers x and y."""
    m, f, b, w = view.m, view.forward[0], view.whole[0], view.weight[0]
    half = max(0.0, b - view.split[0])
    k = m if view.budget is None or not view.activation[0] else min(m, view.budget // view.activation[0])
    left, busiest = -math.inf, 0.0
    for x in range(1, k + 1):
        y = _halves(view, x)
        left = max(left, f + x * b + y * half)
        busiest = max(busiest, k * f + (x - 1) * b + y * w)
    windows = max(0, (m - 1) // k - 1) if k < m else 0
    return left, windows * max(0.0, view.turn[0] - busiest)


def _halves(view: View, x: int) -> int:
    """Most microbatches whose W alone is pending beside x whole ones."""
    rest = view.m - x
    if view.budget is None or not view.context[0]:
        return rest
    return min(rest, (view.budget - view.activation[0] * x) // view.context[0])


def _relaxed(view: View, tail: float) -> float:
    """Largest ``left`` by a fractional knapsack, with what the channel brings back within ``tail``."""
    m = float(view.m)
    last = len(view.stages) - 1
    items = [Item(b, a, m - (k == last)) for k, (b, a) in enumerate(zip(view.whole, view.activation, strict=True))]
    items += [Item(b - s, c, m) for b, s, c in zip(view.whole, view.split, view.context, strict=True) if b > s]
    own = view.forward[-1] + view.whole[-1]
    if view.budget is None:
        return own + most_value(items, math.inf)
    room = float(view.budget - view.activation[-1])
    speed = rate(view.movable, view.back_ms)
    if speed > 0:
        dearest = max((i.value / i.size if i.size else math.inf for i in items), default=0.0)
        if speed * dearest > 1:
            return math.inf  # more time after f would allow more work than time
        time = tail - min(view.after)
        room += min(speed * max(0.0, time), float(sum(view.m * g for g in view.movable)))
    return own + most_value(items, room)
