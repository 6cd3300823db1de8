"""A problem as flat lists of numbers, and the lengths of its longest paths: what the inner loops read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from optpipe.problem import Direction, Problem

#: Budget of a device without a limit.
NO_LIMIT = 1 << 62


class Tables(NamedTuple):
    """A problem in flat lists. Ragged ones are a pair: items ``list[ptr[i]:ptr[i + 1]]`` belong to i.

    Attributes
    ----------
    S, m, D, C
        Stages, microbatches, devices, channels.
    device
        Per stage its device.
    stage_ptr, stage_list
        Per device its stages, ascending.
    forward, backward, weight, fused, offload, reload
        Per stage the time of F (and C), B, W, BW, O, R in ms.
    activation, context
        Bytes that F takes; bytes of these that only W frees.
    movable, offloadable
        Bytes that an O moves away, 0 where no channel carries them both ways; bytes that it could move at most (more
        only after ``with_parts``).
    dropped
        Bytes that F gives back where C follows; 0 where it cannot be recomputed.
    budget
        Per device bytes.
    comm
        Per stage ms to the next one (0 for the last).
    lane_ptr, lane_list
        The channels of d2h transfers of device d at 2 d, of h2d transfers at 2 d + 1.
    peer_ptr, peer_list
        Per device the devices (itself first) that share a channel with it.
    whole
        Per device the bytes of one microbatch's activations of all its stages.
    """

    S: int
    m: int
    D: int
    C: int
    device: list[int]
    stage_ptr: list[int]
    stage_list: list[int]
    forward: list[float]
    backward: list[float]
    weight: list[float]
    fused: list[float]
    offload: list[float]
    reload: list[float]
    activation: list[int]
    context: list[int]
    movable: list[int]
    offloadable: list[int]
    dropped: list[int]
    budget: list[int]
    comm: list[float]
    lane_ptr: list[int]
    lane_list: list[int]
    peer_ptr: list[int]
    peer_list: list[int]
    whole: list[int]


def tables(problem: Problem) -> Tables:
    """The problem in flat lists."""
    stages, stages_of = problem.stages, problem.stages_of
    sharers = [{t.device for t in channel.transfers} for channel in problem.channels]
    lanes, peers = [], []
    directions: tuple[Direction, Direction] = ("d2h", "h2d")
    for d in range(problem.num_devices):
        both = [problem.channels_of[d, direction] for direction in directions]
        lanes += [list(channels) for channels in both]
        near = {p for channels in both for c in channels for p in sharers[c]} - {d}
        peers.append([d, *sorted(near)])
    stage_ptr, stage_list = _ragged([list(held) for held in stages_of])
    lane_ptr, lane_list = _ragged(lanes)
    peer_ptr, peer_list = _ragged(peers)
    movable = [s.offloadable_bytes if problem.can_offload(i) else 0 for i, s in enumerate(stages)]
    return Tables(
        S=problem.num_stages,
        m=problem.num_microbatches,
        D=problem.num_devices,
        C=len(problem.channels),
        device=[s.device for s in stages],
        stage_ptr=stage_ptr,
        stage_list=stage_list,
        forward=[float(s.forward_ms) for s in stages],
        backward=[float(s.backward_ms) for s in stages],
        weight=[float(s.weight_ms) for s in stages],
        fused=[float(s.bw_ms) for s in stages],
        offload=[float(s.offload_ms) for s in stages],
        reload=[float(s.reload_ms) for s in stages],
        activation=[s.activation_bytes for s in stages],
        context=[s.weight_context_bytes for s in stages],
        movable=movable,
        offloadable=movable,
        dropped=[0 if s.checkpoint_bytes is None else s.activation_bytes - s.checkpoint_bytes for s in stages],
        budget=[NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices],
        comm=[float(c) for c in problem.comm_ms] + [0.0],
        lane_ptr=lane_ptr,
        lane_list=lane_list,
        peer_ptr=peer_ptr,
        peer_list=peer_list,
        whole=[sum(stages[s].activation_bytes for s in held) for held in stages_of],
    )


def with_parts(tab: Tables, parts: Sequence[float]) -> Tables:
    """The problem with transfers that move only a part of each stage's offloadable bytes (0 to 1, per stage)."""
    movable = [math.ceil(part * whole) for part, whole in zip(parts, tab.offloadable, strict=True)]
    shares = [moved / whole if whole else 0.0 for moved, whole in zip(movable, tab.offloadable, strict=True)]
    old = [moved / whole if moved else 1.0 for moved, whole in zip(tab.movable, tab.offloadable, strict=True)]

    def scaled(times: list[float]) -> list[float]:
        return [time / before * share for time, before, share in zip(times, old, shares, strict=True)]

    return tab._replace(movable=movable, offload=scaled(tab.offload), reload=scaled(tab.reload))


def _ragged(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    ptr = [0]
    for row in rows:
        ptr.append(ptr[-1] + len(row))
    return ptr, [item for row in rows for item in row]


class Paths(NamedTuple):
    """Longest paths of one microbatch through an empty pipeline, per stage, in ms.

    Attributes
    ----------
    head
        Earliest start of F: ``head[s + 1] = head[s] + F[s] + comm[s]``.
    turn
        Least time from the start of F to the start of B:
        ``turn[s] = F[s] + comm[s] + turn[s + 1] + b[s + 1] + comm[s]``, ``F`` for the last stage.
    rise
        Least time from the end of B to the end of the B of stage 0: ``rise[s + 1] = rise[s] + b[s] + comm[s]``.

    ``b`` is the shorter of B and BW, so that these are lower bounds whichever of them a schedule uses.
    """

    head: list[float]
    turn: list[float]
    rise: list[float]


def paths(tab: Tables) -> Paths:
    """The longest paths through an empty pipeline."""
    S, f, c = tab.S, tab.forward, tab.comm
    b = [min(pair) for pair in zip(tab.backward, tab.fused, strict=True)]
    head, turn, rise = [0.0] * S, [0.0] * S, [0.0] * S
    for s in range(1, S):
        head[s] = head[s - 1] + f[s - 1] + c[s - 1]
        rise[s] = rise[s - 1] + b[s - 1] + c[s - 1]
    turn[S - 1] = f[S - 1]
    for s in range(S - 2, -1, -1):
        turn[s] = f[s] + c[s] + turn[s + 1] + b[s + 1] + c[s]
    return Paths(head, turn, rise)


def least_work(tab: Tables) -> list[float]:
    """Per device the least compute time of one microbatch: F and the cheaper of B + W and BW, over its stages."""
    work = [0.0] * tab.D
    for s in range(tab.S):
        work[tab.device[s]] += tab.forward[s] + min(tab.backward[s] + tab.weight[s], tab.fused[s])
    return work
