"""The last backward of a device and what follows it.

The last B (or BW) of a device is of its first stage: after any other one, that microbatch's B of the first stage
follows. When it starts, its activations are whole; of other microbatches only contexts that wait for their W are there,
``sum(context y) <= budget - a``. So all forwards, all B's, and all W's but those y come before its end, the idle time
of the fill too, and after it the way to the end of the step:

    T >= head + fill + work - max(sum(y (whole - b))) - (whole - b of this one) + tail,        b = min(B, BW).
"""

from __future__ import annotations

import math

from solver.bounds.fill import fill
from solver.bounds.knapsack import Item, most_value
from solver.bounds.view import View


def backward_chain(view: View) -> float:
    """The bound of the last backward; exact in y for one stage."""
    later = [b - i for b, i in zip(view.whole, view.input, strict=True)]
    if view.budget is None:
        pending = sum(view.m * x for x in later) - later[0]
    elif len(view.stages) == 1:
        count = view.m - 1
        if view.context[0]:
            count = min(count, max(0, view.budget - view.activation[0]) // view.context[0])
        pending = count * later[0]
    else:
        items = [Item(x, c, float(view.m)) for x, c in zip(later, view.context, strict=True)]
        pending = most_value(items, view.budget - view.activation[0])
    pending = min(pending, sum(view.m * x for x in later) - later[0])
    end = max(view.tail[0], later[0]) if view.own_end else view.tail[0]
    return view.head + fill(view).idle + view.work - pending - later[0] + end if math.isfinite(pending) else 0.0
