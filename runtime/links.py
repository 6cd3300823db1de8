"""Measures what is not compute: host links alone and side by side, and messages between neighbours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.config import Config, OffloadConfig
from optpipe.problem import Direction
from optpipe.profile import ChannelProfile, TransferProfile
from runtime import gather
from runtime.channel import CpuLane, CudaLane, copy_lane
from runtime.events import Clock, Failure, clock
from runtime.host_memory import HostPool
from runtime.place import Place
from runtime.worker import Rank

#: Bytes of one measured copy, and of a large message.
COPY_BYTES, MESSAGE_BYTES = 16 << 20, 4 << 20
#: Two devices share a link where copying together takes this many times longer than alone.
SHARED_ABOVE = 1.5

Lane = CpuLane | CudaLane


@dataclass(frozen=True)
class HostLink:
    """Bytes per second of one device's copies to the host and back."""

    d2h: float
    h2d: float


class _Copy:
    """One copy of a fixed buffer, as a lane carries it."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source

    def start(self) -> list[tuple[Tensor, Tensor]]:
        """The pair to copy; the memory is there already."""
        return [(self._target, self._source)]

    def finish(self) -> None:
        """Nothing to free."""


class HostLinks:
    """The two copy lanes of this rank, to be measured.

    Parameters
    ----------
    device
        The rank's device.
    bandwidth
        The pace of a CPU device's lanes there and back, bytes per s; None: full speed.
    nbytes
        Of one copy.
    """

    def __init__(
        self, device: torch.device, bandwidth: tuple[float | None, float | None], nbytes: int = COPY_BYTES
    ) -> None:
        failure = Failure()
        lanes = zip(("d2h", "h2d"), bandwidth, strict=True)
        self._lanes = [copy_lane(name, device, failure, bytes_per_s) for name, bytes_per_s in lanes]
        here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._pool = HostPool(pinned=device.type == "cuda")  # kept: its memory is page-locked as long as it is there
        self._host = self._pool.take(nbytes)
        self._jobs = [_Copy(self._host, here), _Copy(here, self._host)]
        self._device, self._nbytes = device, nbytes

    def measure(self, taking_part: bool, repeats: int) -> HostLink | None:
        """The speed of this rank's copies while all ranks that take part copy too; every rank must call it."""
        rates = []
        for lane, job in zip(self._lanes, self._jobs, strict=True):
            gather.barrier()
            if taking_part:
                rates.append(self._rate(lane, job, repeats))
            gather.barrier()
        return HostLink(*rates) if taking_part else None

    def measure_both_ways(self, taking_part: bool, repeats: int) -> HostLink | None:
        """The speed of this rank's copies while it copies both ways; every rank must call it."""
        gather.barrier()
        times: list[float] = []
        if taking_part:
            instants = clock(self._device)
            for _ in range(repeats + 1):
                for lane, job in zip(self._lanes, self._jobs, strict=True):
                    lane.submit(job)
            for lane in self._lanes:
                lane.settle()
                times.append(_median_s(lane, instants))
        gather.barrier()
        return HostLink(*(self._nbytes / time for time in times)) if taking_part else None

    def close(self) -> None:
        """End the lanes, and give the memory back."""
        for lane in self._lanes:
            lane.close()
        self._pool.give(self._host)
        self._pool.free()

    def _rate(self, lane: Lane, job: _Copy, repeats: int) -> float:
        instants = clock(self._device)
        for _ in range(repeats + 1):
            lane.submit(job)
        lane.settle()
        return self._nbytes / _median_s(lane, instants)


def _median_s(lane: Lane, instants: Clock) -> float:
    """How long the last copies of a lane took, s."""
    # The first copy touches the pages and wakes the lane.
    times = [entry.end - entry.start for entry in lane.take_log(instants)[1:]]
    return max(statistics.median(times), 1e-9)


@dataclass(frozen=True)
class HostLinkTrial:
    """Speeds of host links, by device.

    Attributes
    ----------
    alone
        While no one else copies.
    pairs
        Of devices (a, b) side by side, while both copy.
    crowded
        Of a device while it and both its neighbours copy; only of those that have two.
    both_ways
        While a device copies in both directions.
    """

    alone: tuple[HostLink, ...] = ()
    pairs: Mapping[tuple[int, int], Sequence[HostLink]] = field(default_factory=dict)
    crowded: Mapping[int, HostLink] = field(default_factory=dict)
    both_ways: tuple[HostLink, ...] = ()


def measure_host_links(rank: Rank, config: Config, place: Place) -> HostLinkTrial:
    """Copies to the host and back: of each device alone and both ways at once, beside each neighbour, and beside both.
    The same on every rank; every rank must call it. Nothing where offloading is off.

    All ranks of a device (of tensor parallel groups, of pipelines side by side) copy when it does, as in training; the
    speeds are those of the first pipeline."""
    if not config.offload.enabled:
        return HostLinkTrial()
    devices, repeats = config.pipeline.devices, max(3, config.measure.iterations // 2)
    pace = config.offload.bandwidth_bytes_per_s
    host = HostLinks(rank.device, (pace, pace))

    def speeds(mine: HostLink | None) -> list[HostLink]:
        rows = gather.numbers([mine.d2h, mine.h2d] if mine else [0.0, 0.0])
        return [HostLink(*row) for row in place.of_first(rows)]

    def together(members: Sequence[int]) -> list[HostLink]:
        return speeds(host.measure(place.device in members, repeats))

    alone = tuple(together([device])[device] for device in range(devices))
    both_ways = tuple(speeds(host.measure_both_ways(place.device == d, repeats))[d] for d in range(devices))
    pairs = {}
    # Neighbours by number: switches join devices that sit side by side.
    for pair in pairwise(range(devices)):
        found = together(pair)
        pairs[pair] = [found[device] for device in pair]
    crowded = {device: together(range(device - 1, device + 2))[device] for device in range(1, devices - 1)}
    host.close()
    return HostLinkTrial(alone, pairs, crowded, both_ways)


def doubts(offload: OffloadConfig, trial: HostLinkTrial) -> list[str]:
    """What the channels of a profile leave out, in words."""
    if offload.bandwidth_bytes_per_s is not None:
        return []  # a pace is the config's word on the links
    found = []
    for device, (now, before) in enumerate(zip(trial.both_ways, trial.alone, strict=True)):
        if not offload.half_duplex and _share(now, before) * SHARED_ABOVE < 1.0:
            found.append(
                f"device {device} copies both ways at once at {_share(now, before):.0%} of its speed one way: "
                "expected offload.half_duplex: true"
            )
    for device, now in trial.crowded.items():
        beside = [speeds[pair.index(device)] for pair, speeds in trial.pairs.items() if device in pair]
        least = min(_share(one, trial.alone[device]) for one in beside)
        share = _share(now, trial.alone[device])
        if share * SHARED_ABOVE < least:
            found.append(
                f"device {device} copies at {share:.0%} of its speed beside both neighbours, "
                f"but at {least:.0%} beside one: what all three share is no channel here"
            )
    return found


def _share(now: HostLink, alone: HostLink) -> float:
    """The speed of the slower direction as a share of its speed alone."""
    return min(now.d2h / alone.d2h, now.h2d / alone.h2d)


def shared_groups(devices: int, pairs: Mapping[tuple[int, int], float]) -> list[tuple[int, ...]]:
    """Groups of devices behind one switch, from copy speeds.

    Parameters
    ----------
    devices
        How many there are.
    pairs
        For devices (a, b) that copy at the same time: the slower one's speed as a share of its speed alone.

    Returns
    -------
    list of tuple of int
        Groups of at least two devices, ascending.
    """
    group = list(range(devices))

    def root(device: int) -> int:
        while group[device] != device:
            device = group[device]
        return device

    for (a, b), share in pairs.items():
        if share * SHARED_ABOVE < 1.0:
            group[max(root(a), root(b))] = min(root(a), root(b))
    found: dict[int, list[int]] = {}
    for device in range(devices):
        found.setdefault(root(device), []).append(device)
    return [tuple(members) for members in found.values() if len(members) > 1]


def message_ms(sender: int, receiver: int, nbytes: int, device: torch.device, repeats: int) -> list[float] | None:
    """How long a message takes from one rank to another, ms: half of there and back. None on other ranks.

    Every rank must call it.
    """
    rank = dist.get_rank()
    gather.barrier()
    samples = None
    if rank in (sender, receiver):
        payload = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device)
        other = receiver if rank == sender else sender
        turns: list[Callable[[], Any]] = [lambda: dist.send(payload, other), lambda: dist.recv(payload, other)]
        samples = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for turn in turns if rank == sender else turns[::-1]:
                turn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append((time.perf_counter() - start) * 500.0)
        samples = samples[1:]  # the first connects
    gather.barrier()
    return samples


def channels(
    offload: OffloadConfig,
    alone: Sequence[HostLink],
    together: Mapping[tuple[int, int], Sequence[HostLink]],
    crowded: Mapping[int, HostLink] | None = None,
) -> tuple[ChannelProfile, ...]:
    """The channels of all devices: private links, and a switch for each group that the config names or was found.

    Parameters
    ----------
    offload
        The config's section. Where it names no groups they are found from the speeds, unless a pace hides them.
    alone
        Speeds of each device that copies alone.
    together
        For devices (a, b) that copied at the same time, their speeds.
    crowded
        Speeds of devices that copied while both their neighbours did.
    """
    if not alone:
        return ()
    groups = [tuple(group) for group in offload.shared]
    if not groups and offload.bandwidth_bytes_per_s is None:
        shares = {
            pair: min(_share(now, alone[device]) for device, now in zip(pair, speeds, strict=True))
            for pair, speeds in together.items()
        }
        groups = shared_groups(len(alone), shares)
    private = [(device,) for device in range(len(alone)) if not any(device in group for group in groups)]

    def transfer(device: int, direction: Direction) -> TransferProfile:
        beside = [getattr(speeds[pair.index(device)], direction) for pair, speeds in together.items() if device in pair]
        beside += [getattr(now, direction) for one, now in (crowded or {}).items() if one == device]
        return TransferProfile(
            device=device,
            direction=direction,
            alone_bytes_per_s=getattr(alone[device], direction),
            together_bytes_per_s=min(beside) if beside else None,
        )

    both: tuple[Direction, ...] = ("d2h", "h2d")
    lanes: list[tuple[str, tuple[Direction, ...]]] = (
        [("host", both)] if offload.half_duplex else [(direction, (direction,)) for direction in both]
    )
    return tuple(
        ChannelProfile(
            name=f"{name}:{'-'.join(map(str, group))}",
            transfers=tuple(transfer(device, direction) for device in group for direction in directions),
        )
        for group in sorted([*groups, *private])
        for name, directions in lanes
    )
