"""Where a list schedule stands and what it goes by, one record for each stage and microbatch, stage, and device.

The scheduler reads and writes ``cells[k].phase`` or ``devices[d].busy``. Compiled, these are numpy arrays of records,
which cost nothing to pass around (a tuple of a column for each field would cost more than the scheduling itself); in
plain Python they are lists of small objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from solver.compiled import COMPILED, records
from solver.list_scheduler.rule import Rule
from solver.tables import Tables

INFINITY = float("inf")

#: Phases of one microbatch's activations of one stage.
UNBORN, FORWARD, RESIDENT, LEAVING, AWAY, RETURNING, BACKWARD = range(7)


@dataclass(slots=True, eq=False)
class Cell:
    """One microbatch at one stage; in a list at ``k = stage * m + microbatch``.

    Attributes
    ----------
    forward_key, backward_key, weight_key, reload_key, treatment, fused
        As in :class:`~solver.list_scheduler.rule.Rule`.
    movable, offload, reload
        Bytes that an offload of it moves, and ms that moving them takes.
    f_start, b_start, w_start, o_start, r_start, c_start
        Start times in ms; -1 where the op has not started. A BW starts in ``b_start``.
    f_ready, b_ready
        When the input of F or the gradient for B arrives, ms; infinite as long as nobody knows.
    phase
        Where the activations are.
    """

    forward_key: float
    backward_key: float
    weight_key: float
    reload_key: float
    treatment: int
    fused: int
    movable: int
    offload: float
    reload: float
    f_start: float
    b_start: float
    w_start: float
    o_start: float
    r_start: float
    c_start: float
    f_ready: float
    b_ready: float
    phase: int


@dataclass(slots=True, eq=False)
class StageRow:
    """One stage: its device, times (ms) and bytes as in the problem, its limits as in the rule, and how far it is.

    Attributes
    ----------
    comm
        To the next stage, ms; 0 for the last.
    movable
        Bytes that an offload moves at most.
    dropped
        Bytes that a recomputation does without; 0 where there is none.
    f_count, b_count, b_done, w_next
        F's and B's started, B's ended, the next W.
    """

    device: int
    forward: float
    backward: float
    weight: float
    fused: float
    comm: float
    activation: int
    context: int
    movable: int
    dropped: int
    threshold: int
    prefetch: int
    limit: int
    reserve: int
    f_count: int
    b_count: int
    b_done: int
    w_next: int


@dataclass(slots=True, eq=False)
class DeviceRow:
    """One device.

    Attributes
    ----------
    stages, stages_end, outward, outward_end, homeward, homeward_end, peers, peers_end
        Where in ``lists`` its stages are, the channels of its offloads and of its reloads, and the devices that share
        a channel with it (itself first).
    moves
        1 where something can be offloaded.
    whole, budget
        Bytes of one microbatch's activations of all its stages; bytes that there are.
    level, floor
        Bytes in use; bytes in use once every pending W has run and all is at rest (see ``memory_rule``).
    busy
        Free from this time on, ms.
    idle
        Idle time since its first op, ms.
    begun
        1 once it has run something.
    backward_last
        0 where the last F or B was an F, else 1.
    awake
        1 while it is in the list of those to be asked.
    """

    stages: int
    stages_end: int
    outward: int
    outward_end: int
    homeward: int
    homeward_end: int
    peers: int
    peers_end: int
    moves: int
    whole: int
    budget: int
    level: int
    floor: int
    busy: float
    idle: float
    begun: int
    backward_last: int
    awake: int


@dataclass(slots=True, eq=False)
class Frame:
    """What is there once: sizes, the switches of the rule, and the largest idle time of any device.

    ``eps`` ms: instants closer than this are one.
    """

    S: int
    m: int
    n: int
    reserve_all: int
    patience: float
    share_idle: int
    reload_lead: float
    reload_late: int
    reload_first: int
    newest_first: int
    alternation: float
    evict: int
    eps: float
    idle: float


class Run(NamedTuple):
    """The records of one run; ``lists`` holds what devices refer to, ``channels`` until when each one is busy (ms)."""

    frames: Sequence[Frame]
    cells: Sequence[Cell]
    stages: Sequence[StageRow]
    devices: Sequence[DeviceRow]
    lists: Any
    channels: Any


class State(NamedTuple):
    """What a run came to, as columns (lists or arrays).

    Attributes
    ----------
    f_start, b_start, w_start, o_start, r_start, c_start
        (S m): start times in ms; -1 where there is no such op. A BW starts in ``b_start``.
    busy
        (D): end of the last op, ms.
    """

    f_start: Any
    b_start: Any
    w_start: Any
    o_start: Any
    r_start: Any
    c_start: Any
    busy: Any


def fresh(tab: Tables, rule: Rule, eps: float) -> Run:
    """Nothing has started; the inputs of stage 0 are there."""
    n = tab.S * tab.m
    never = [-1.0] * n
    cells = records(
        Cell,
        n,
        {
            **{name: getattr(rule, name) for name in ("forward_key", "backward_key", "weight_key", "reload_key")},
            "treatment": rule.treatment,
            "fused": rule.fused,
            **moved_by(tab, rule),
            **dict.fromkeys(State._fields[:-1], never),
            "f_ready": [0.0] * tab.m + [INFINITY] * (n - tab.m),
            "b_ready": [INFINITY] * n,
        },
    )
    stage_fields = {f.name for f in fields(StageRow)}
    stages = records(
        StageRow,
        tab.S,
        {name: getattr(tab, name) for name in Tables._fields if name in stage_fields}
        | {name: getattr(rule, name) for name in ("threshold", "prefetch", "limit", "reserve")},
    )
    lists, devices = _devices(tab)
    frame = {name: [getattr(rule, name)] for name in ("reserve_all", "patience", "share_idle", "reload_lead")}
    frame |= {name: [getattr(rule, name)] for name in ("reload_late", "reload_first", "newest_first")}
    frame |= {name: [getattr(rule, name)] for name in ("alternation", "evict")}
    frames = records(Frame, 1, frame | {"S": [tab.S], "m": [tab.m], "n": [n], "eps": [eps]})
    if COMPILED:
        return Run(frames, cells, stages, devices, np.array(lists, np.int64), np.zeros(tab.C))
    return Run(frames, cells, stages, devices, lists, [0.0] * tab.C)


def moved_by(tab: Tables, rule: Rule) -> dict[str, Any]:
    """(S m): the bytes that a transfer of each stage and microbatch moves, and the ms that it takes out and back."""
    movable, offload, reload_ = (np.repeat(column, tab.m) for column in (tab.movable, tab.offload, tab.reload))
    if rule.share is None:
        return {"movable": movable, "offload": offload, "reload": reload_}
    moved = np.minimum(movable, np.ceil(np.asarray(rule.share) * movable)).astype(np.int64)
    part = moved / np.maximum(movable, 1)
    return {"movable": moved, "offload": offload * part, "reload": reload_ * part}


def outcome(run: Run) -> State:
    """The starts of a run, and when its devices end."""
    names = State._fields[:-1]
    if COMPILED:
        cells: Any = run.cells
        devices: Any = run.devices
        return State(**{name: cells[name] for name in names}, busy=devices["busy"])
    columns = zip(*((c.f_start, c.b_start, c.w_start, c.o_start, c.r_start, c.c_start) for c in run.cells), strict=True)
    starts = dict(zip(names, map(list, columns), strict=True))
    return State(**starts, busy=[device.busy for device in run.devices])


def _devices(tab: Tables) -> tuple[list[int], Sequence[DeviceRow]]:
    """The lists that devices refer to, and the devices."""
    lanes, peers = len(tab.stage_list), len(tab.stage_list) + len(tab.lane_list)
    moves = [0] * tab.D
    for s in range(tab.S):
        moves[tab.device[s]] |= int(tab.movable[s] > 0)
    columns: dict[str, Sequence[float]] = {
        "stages": tab.stage_ptr[:-1],
        "stages_end": tab.stage_ptr[1:],
        "outward": [lanes + p for p in tab.lane_ptr[0:-1:2]],
        "outward_end": [lanes + p for p in tab.lane_ptr[1::2]],
        "homeward": [lanes + p for p in tab.lane_ptr[1::2]],
        "homeward_end": [lanes + p for p in tab.lane_ptr[2::2]],
        "peers": [peers + p for p in tab.peer_ptr[:-1]],
        "peers_end": [peers + p for p in tab.peer_ptr[1:]],
        "moves": moves,
        "whole": tab.whole,
        "budget": tab.budget,
        "backward_last": [1] * tab.D,
    }
    return [*tab.stage_list, *tab.lane_list, *tab.peer_list], records(DeviceRow, tab.D, columns)
