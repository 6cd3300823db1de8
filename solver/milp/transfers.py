"""Rows of offloads: chains of O and R, and transfers that share a channel.

Within a stage, O's and R's keep the order of the microbatches. A pair that does not take place has no duration, so a
chain over all microbatches needs no big M: it passes through the idle ones.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from optpipe.ops import Bools, Ints, Kind
from optpipe.problem import Direction
from solver.milp.model import Meaning, Model, joined
from solver.milp.sparse import INF

_DIRECTION: dict[Kind, Direction] = {Kind.O: "d2h", Kind.R: "h2d"}


def add_transfer_chains(model: Model) -> None:
    """F before O before R before B, and one transfer of a stage after the other, for all pairs that may take place."""
    table = model.table
    for s in table.offloaded:
        active = model.may_move(table.ops(Kind.O, s))
        forward, offload, reload_, backward = (table.ops(kind, s)[active] for kind in (Kind.F, Kind.O, Kind.R, Kind.B))
        model.after("out_{}_{}", forward, offload)
        model.after("back_{}_{}", offload, reload_)
        model.after("ready_{}_{}", reload_, backward)
        model.after("chain_{}_{}", offload[:-1], offload[1:])
        model.after("chain_{}_{}", reload_[:-1], reload_[1:])


def add_channels(model: Model) -> None:
    """One transfer at a time on a channel, for transfers of different sequences that share one.

    Two bits a pair, each of which puts one first; one of them is 1 where both take place. Of the same stage,
    O(s, k) precedes R(s, l) for k <= l anyhow.
    """
    table = model.table
    sequences = np.flatnonzero(table.kind >= Kind.O).tolist()
    lanes = {
        q: set(model.problem.channels_of[int(table.device[q]), _DIRECTION[Kind(int(table.kind[q]))]]) for q in sequences
    }
    m = table.microbatches
    for p, q in combinations(sequences, 2):
        if not lanes[p] & lanes[q]:
            continue
        i, k = (part.ravel() for part in np.meshgrid(np.arange(m), np.arange(m), indexing="ij"))
        if table.stage[p] == table.stage[q]:
            i, k = i[i > k], k[i > k]
        a, b = p * m + i, q * m + k
        both = model.may_move(a) & model.may_move(b)
        _exclude(model, a[both], b[both])


def _exclude(model: Model, a: Ints, b: Ints) -> None:
    """a and b do not overlap where both take place."""
    a_first, b_first = _may_precede(model, a, b), _may_precede(model, b, a)
    # Where only one order is possible and the windows bring it about, there is nothing to say.
    apart = _always_apart(model, a, b) | _always_apart(model, b, a)
    a, b = a[~apart], b[~apart]
    a_first, b_first = a_first[~apart], b_first[~apart]
    first = _ahead(model, a, b, a_first)
    second = _ahead(model, b, a, b_first)
    terms = [(first, 1.0), (second, 1.0)]
    if not model.parts:
        terms += [(model.decision[a], -1.0), (model.decision[b], -1.0)]
    model.builder.rows("channel_{}_{}", (a, b), 1.0 if model.parts else -1.0, INF, terms)


def _ahead(model: Model, a: Ints, b: Ints, possible: Bools) -> Ints:
    """Columns of the bits 'a ends before b starts', -1 where that cannot be; with their rows."""
    columns = np.full(len(a), -1, np.int64)
    known = model.decided(Meaning.AHEAD, a, b)
    columns[possible] = model.add_bits(
        "{}_ahead_{}",
        Meaning.AHEAD,
        a[possible],
        b[possible],
        lower=(known[possible] == 1).astype(float),
        upper=(known[possible] != 0).astype(float),
    )
    model.after("lane_{}_{}", a[possible], b[possible], bit=columns[possible], when=1, whole=True)
    return columns


def _may_precede(model: Model, a: Ints, b: Ints) -> Bools:
    """Whether moved transfer a can end before moved transfer b starts."""
    return model.soonest_end(a) <= model.latest_moved(b) + model.slack


def _always_apart(model: Model, a: Ints, b: Ints) -> Bools:
    """Whether moved transfer a ends before moved transfer b starts in every schedule within the windows."""
    if model.objective == "span":
        return np.zeros(len(a), np.bool_)
    took = model.table.longest
    return np.asarray(model.latest_moved(a) + took[a] <= model.windows.earliest[b])


def shared_pairs(model: Model) -> Ints:
    """The O's of all stages that may be offloaded."""
    return joined([model.table.ops(Kind.O, s) for s in model.table.offloaded])
