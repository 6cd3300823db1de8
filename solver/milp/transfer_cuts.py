"""Valid rows of transfers, without which the relaxation hides every transfer behind a fraction of a bit.

All pairs that are away when x starts were offloaded one after the other, those from microbatch i on after F(s, i), and
come back one after the other, those up to j before B(s, j):

    start(x) - end(F(s, i)) >= sum over k >= i of tO * away(k, x),
    start(B(s, j)) - start(x) >= sum over k <= j of tR * away(k, x)     where B(s, j) is not before x.
"""

from __future__ import annotations

import numpy as np

from optpipe.ops import Ints
from solver.milp.memory import Away, DeviceMemory
from solver.milp.model import DeviceOrder, Model
from solver.milp.sparse import INF


def add_transfer_loads(model: Model, device: DeviceOrder, memory: DeviceMemory, away: Away) -> None:
    """The rows above, at the starts of F's."""
    m = model.table.microbatches
    for s in np.unique(memory.pairs // m).tolist():
        mine = np.flatnonzero(memory.pairs // m == s)
        told = np.flatnonzero((away.column[:, mine] >= 0).any(axis=1))
        if len(told):
            _outwards(model, device, memory, away, mine, told)
            _homewards(model, device, memory, away, mine, told)


def _outwards(model: Model, device: DeviceOrder, memory: DeviceMemory, away: Away, mine: Ints, told: Ints) -> None:
    """Rows for events ``told`` and first microbatches that may be away at them."""
    took = model.table.longest[memory.pairs[mine[0]]]
    x, i = np.nonzero(away.column[np.ix_(told, mine)] >= 0)
    event, first = told[x], memory.forward[mine[i]]
    # A forward that may come after the event has a bit; where it is 0 nothing from it on is away.
    later = np.maximum(0.0, model.windows.latest[device.ops[first]] + model.base[device.ops[first]])
    big = np.maximum(0.0, later - model.windows.earliest[device.ops[event]])
    terms = [
        (model.start[device.ops[event]], 1.0),
        (model.start[device.ops[first]], -1.0),
        (device.column[first, event], -big * device.sign[first, event]),
    ]
    side = model.base[device.ops[first]] - big * (1.0 - device.const[first, event])
    rows = model.builder.rows("outwards_{}_{}", (device.ops[first], device.ops[event]), side, INF, terms)
    row, k = np.nonzero(np.arange(len(mine)) >= i[:, None])
    model.builder.entries(rows[row], away.amount[event[row], mine[k]], -took)


def _homewards(model: Model, device: DeviceOrder, memory: DeviceMemory, away: Away, mine: Ints, told: Ints) -> None:
    """Rows for events ``told`` and last microbatches whose backwards wait for what is away at them."""
    took = model.table.longest[memory.reloads[mine[0]]]
    columns = away.column[np.ix_(told, mine)] >= 0
    columns[:, -1] = True
    x, j = np.nonzero(columns)
    event, last = told[x], memory.backward[mine[j]]
    big = np.maximum(0.0, model.windows.latest[device.ops[event]] - model.windows.earliest[device.ops[last]])
    terms = [
        (model.start[device.ops[last]], 1.0),
        (model.start[device.ops[event]], -1.0),
        (device.column[last, event], big * device.sign[last, event]),
    ]
    side = -big * device.const[last, event]
    rows = model.builder.rows("homewards_{}_{}", (device.ops[event], device.ops[last]), side, INF, terms)
    row, k = np.nonzero(np.arange(len(mine)) <= j[:, None])
    model.builder.entries(rows[row], away.amount[event[row], mine[k]], -took)
