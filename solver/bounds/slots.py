"""How many microbatches can be whole at once, and what it costs not to be.

At most ``K = floor(budget / a)`` microbatches hold all of their activations a at once (one stage, no recomputation).
One of which q bytes are moved, of g movable ones, is whole while F runs, until its transfer has ended, from the start
of its way back on, and while B runs:

    w(q) = F + q (O + R) / g + B,      w(0) = turn + B where nothing moves;

and it holds, with the context until W has run,

    h(q) = a w(q) + (a - q) (turn + B - w(q)) + context W      bytes x ms at least.

All w's fit into K times the time from the first F to the last B's end, all h's into the budget times all of the time.
So for every weight l from 0 to 1

    T >= head + l (the least time after the last B's end) + m min over q of (l w(q) / K + (1 - l) h(q) / budget).

A last backward that is fused ends later and counts as longer instead: by at least (BW - B) / K in all. With memory for
one or two microbatches this is far above what bytes alone say, since a transfer frees nothing before its end.

With K = 1 and r = budget - a bytes beside the one that is whole, more is true. What begins to hold more than r is whole
then (its F or its way back starts), and nothing else holds more than r. So the times in which a microbatch holds more
than r are no one else's: it is away only if it moves a - r at least, and where its context is more than r they last
until W has run. (All of the other ones end before the B that is last, so their W's count, whoever's end is measured.)
"""

from __future__ import annotations

from solver.bounds.view import View

#: Weights l that are tried, in so many steps from 0 to 1.
_STEPS = 24


def slots(view: View) -> float:
    """The bound above, ms; 0 where it says nothing."""
    if len(view.stages) > 1 or view.dropped[0] or not view.budget or not view.activation[0]:
        return 0.0
    at_once = view.budget // view.activation[0]
    if not at_once or at_once >= view.m:
        return 0.0
    tail, b = view.tail[0], view.input[0]
    split = max(view.weight[0], tail) if view.own_end else tail
    after = min(split, tail + (view.fused[0] - b) / at_once)
    beside = view.budget - view.activation[0] if at_once == 1 else view.activation[0]
    return view.head + max(_weighted(view, k / _STEPS, at_once, after, beside) for k in range(_STEPS + 1))


def _weighted(view: View, weight: float, at_once: int, after: float, beside: int) -> float:
    """``l after + m min over q`` for ``l = weight``, if one that has moved its q bytes leaves ``beside`` at most."""
    budget = view.budget or 0
    a, b, movable = view.activation[0], view.input[0], view.movable[0]
    # The least that a backward and its context hold, split or fused; a context may outlive an end that is not its own.
    last = a * b
    if view.own_end:
        last = min(a * view.split[0] + view.context[0] * view.weight[0], a * view.fused[0])
    stay = view.turn[0] + b

    def value(q: float, w: float, alone: float) -> float:
        held = a * (w - b) + (a - q) * (stay - w) + last
        return weight * alone / at_once + (1.0 - weight) * held / budget

    least = value(0.0, stay, stay)
    fewest = float(a - beside)
    f, c = view.forward[0] + b, (view.out_ms[0] + view.back_ms[0]) / max(movable, 1)
    if movable and fewest > 0:
        # One that moves less than that is alone all the time, but holds less. (2 c q = stay - f where it holds least.)
        q = min(max((stay - f) / (2.0 * c), 0.0) if c > 0 else fewest, fewest, float(movable))
        least = min(least, value(q, min(stay, f + c * q), stay))
    if movable >= max(fewest, 1.0):
        # Both w and h are convex in q: the least is where the slope vanishes, or at an end.
        # d/dq: weight c / K + (1 - weight) / budget (a c - c (a - q) - (stay - f - c q)) = 0
        bend = 2.0 * c * (1.0 - weight) / budget
        slope = weight * c / at_once + (1.0 - weight) / budget * (f - stay)
        best = min(max(-slope / bend, fewest), float(movable)) if bend > 0 else float(movable if slope < 0 else fewest)
        for q in (best, fewest, float(movable)):
            w = min(stay, f + c * q)
            least = min(least, value(q, w, w))
    # What follows a B is no one else's time either where its context leaves no room for another one.
    rest = min(view.split[0] - b + view.weight[0], view.fused[0] - b) if view.context[0] > beside else 0.0
    return weight * (after + (view.m - 1) * rest) + view.m * least
