"""A profile from arithmetic: the model's FLOPs and bytes against a hardware description.

A kernel takes its overhead and the longer of two times: its FLOPs at the speed of matrix products, its bytes at the
speed of memory (the roofline: Williams et al., doi:10.1145/1498765.1498785). An op takes its kernels one after another.
Bytes are counted as a run counts them; times are only as good as the description.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from pydantic import ValidationError

from optpipe import gpt, partition
from optpipe.config import Config
from optpipe.errors import InputError
from optpipe.gpt import Layer, Work
from optpipe.hardware import Hardware, Network
from optpipe.messages import under_way_bytes
from optpipe.problem import Direction
from optpipe.profile import (
    ChannelProfile,
    DeviceProfile,
    LinkProfile,
    Profile,
    StageProfile,
    Timing,
    TransferProfile,
)
from optpipe.sections import MemoryConfig

#: The dtype that the runtime trains in.
DTYPE = "float32"
#: Bytes of AdamW's step count, one a parameter tensor.
_STEP_BYTES = 4
#: Overhead above this share of a step's compute makes a warning: it is the least certain figure.
OVERHEAD_ABOVE = 0.25


def estimate(config: Config, hardware: Hardware | None = None) -> Profile:
    """The profile that a config's model would have on hardware that is not at hand.

    Parameters
    ----------
    config
        Needs ``model``. A balanced partition is settled first, from the estimated times of the layers. Where
        ``memory`` says nothing, devices have the memory of the hardware.
    hardware
        In place of the config's own.

    Raises
    ------
    InputError
        The config has no model or no hardware, wants another kind of device, or more ranks than there are links for.
    """
    hardware = config.described_hardware if hardware is None else hardware
    if config.device not in ("auto", hardware.device):
        message = f"is {config.device}, but {hardware.name} is {hardware.device}, expected {hardware.device} or auto"
        raise InputError(config.file, "device", message)
    changes = {"device": hardware.device, "memory": _memory(config.memory, hardware)}
    nothing = dict.fromkeys(("problem", "profile", "hardware"))
    config = config.model_copy(update={**nothing, **changes})
    if hardware.between_nodes is None and hardware.node_of(config.num_ranks - 1):
        most = f"expected at most {hardware.devices_per_node}, or between_nodes of {hardware.name}"
        raise InputError(config.file, "pipeline.devices", f"makes {config.num_ranks} ranks, {most}")
    return _Estimate(config, hardware).run()


def _memory(memory: MemoryConfig, hardware: Hardware) -> MemoryConfig:
    """What the config says, if only that there is no limit; else all of the device but its reserve."""
    if memory.model_fields_set:
        return memory
    return MemoryConfig(device_bytes=hardware.memory_bytes, reserve_bytes=hardware.reserve_bytes)


class _Estimate:
    """An estimate on its way; the partition is settled when it begins."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.hardware, self.layers = hardware, gpt.layers(config)
        self.message = gpt.message_bytes(config)
        self.ranks = _ranks(config)
        self.placement = config.pipeline.stage_devices
        self.sum_ms = _sum_ms(self.message, config.train.tensor_parallel, self._network(self.ranks))
        if config.pipeline.partition == "balanced":
            costs = [sum(self._times([layer])) for layer in self.layers]
            config = config.with_partition(partition.balanced(costs, self.placement))
        self.config = config
        counts = config.pipeline.partition
        assert counts != "balanced"
        ends = list(accumulate(counts))
        self.stages = [self.layers[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def run(self) -> Profile:
        """The whole profile."""
        last, devices = len(self.stages) - 1, self._devices()
        try:
            return self._profile(last, devices)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))} would be {first['input']!r:.40}"
            message = f"and its hardware make an estimate beyond all bounds: {what}"
            raise InputError(self.config.file, "model", message) from None

    def _profile(self, last: int, devices: tuple[DeviceProfile, ...]) -> Profile:
        return Profile.make(
            name=self.config.name,
            machine={"device": self.hardware.device, "name": self.hardware.name},
            hardware=self.hardware,
            stages=tuple(self._stage(number) for number in range(last + 1)),
            devices=devices,
            links=tuple(self._link(number) for number in range(last)),
            channels=self._channels() if self.config.offload.enabled else (),
            settings=self.config,
            warnings=tuple(self._warnings(devices)),
        )

    def _ms(self, works: Iterable[Work]) -> float:
        """How long kernels take, one after another."""
        hardware = self.hardware
        flops_per_s = getattr(hardware.peak_flops_per_s, DTYPE) * hardware.matmul_efficiency
        bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_efficiency
        return sum(
            hardware.op_overhead_ms + 1e3 * max(work.flops * work.done / flops_per_s, work.nbytes / bytes_per_s)
            for work in works
        )

    def _times(self, layers: Sequence[Layer]) -> tuple[float, float, float]:
        """F, B and W of some layers, ms."""
        sums = self.sum_ms * sum(layer.sums for layer in layers)
        return (
            sum(self._ms(layer.forward) for layer in layers) + sums,
            sum(self._ms(layer.backward) for layer in layers) + sums,
            sum(self._ms(layer.weight) for layer in layers),
        )

    def _stage(self, number: int) -> StageProfile:
        layers, device = self.stages[number], self.placement[number]
        forward, backward, weight = self._times(layers)
        is_last = number == len(self.stages) - 1
        kept = gpt.kept_bytes(layers, self.message, is_first=number == 0, is_last=is_last)
        away = kept["offloadable_bytes"]
        offload = self.config.offload.enabled
        return StageProfile(
            device=device,
            layers=len(layers),
            forward_ms=_timing(forward),
            backward_ms=_timing(backward),
            weight_ms=_timing(weight),
            fused_backward_ms=_timing(backward + weight),
            recompute_ms=_timing(forward),
            offload_ms=_timing(away / self._host_rate(device, "d2h") * 1e3) if offload else None,
            reload_ms=_timing(away / self._host_rate(device, "h2d") * 1e3) if offload else None,
            **kept,
        )

    def _devices(self) -> tuple[DeviceProfile, ...]:
        count = self.config.pipeline.devices
        numbers: list[list[int]] = [[] for _ in range(count)]
        for layers, device in zip(self.stages, self.placement, strict=True):
            numbers[device] += [size for layer in layers for size in layer.parameters]
        under_way = under_way_bytes(self.config, self.message)
        return tuple(
            DeviceProfile(**state_bytes(numbers[device], self.config.train.shards), message_bytes=under_way[device])
            for device in range(count)
        )

    def _link(self, number: int) -> LinkProfile:
        ends = self.placement[number : number + 2]
        if ends[0] == ends[1]:
            return LinkProfile(message_bytes=self.message, message_ms=Timing(median=0.0))
        # The ranks of each pipeline, and of each part of a device, send to those that stand where they do.
        network = self._network(zip(self.ranks[ends[0]], self.ranks[ends[1]], strict=True))
        return LinkProfile(
            message_bytes=self.message,
            message_ms=_timing(network.latency_ms + self.message / network.bytes_per_s * 1e3),
            latency_ms=network.latency_ms,
            bytes_per_s=network.bytes_per_s,
        )

    def _network(self, groups: Iterable[Iterable[int]]) -> Network:
        """What groups of ranks talk over: between nodes where one of them has ranks on several."""
        between = self.hardware.between_nodes
        apart = any(len({self.hardware.node_of(rank) for rank in group}) > 1 for group in groups)
        return between if apart and between is not None else self.hardware.within_node

    def _host_rate(self, device: int, direction: Direction) -> float:
        """Bytes per second of each rank's copies while all ranks of its device copy, as they do in training."""
        rate: float = getattr(self.hardware.host, f"{direction}_bytes_per_s")
        rate /= max(Counter(map(self.hardware.switch_of, self.ranks[device])).values())
        pace = self.config.offload.bandwidth_bytes_per_s
        return min(rate, pace) if pace is not None and self.hardware.device == "cpu" else rate

    def _channels(self) -> tuple[ChannelProfile, ...]:
        """As ``runtime.links.channels`` makes them: the groups that the config names, else those of the hardware."""
        groups = [tuple(group) for group in self.config.offload.shared] or self._groups()
        alone = set(range(len(self.ranks))) - {device for group in groups for device in group}
        both: tuple[Direction, ...] = ("d2h", "h2d")
        half_duplex = self.config.offload.half_duplex or self.hardware.host.half_duplex
        lanes: list[tuple[str, tuple[Direction, ...]]] = (
            [("host", both)] if half_duplex else [(direction, (direction,)) for direction in both]
        )
        return tuple(
            ChannelProfile(
                name=f"{name}:{'-'.join(map(str, group))}",
                transfers=tuple(
                    TransferProfile(
                        device=device, direction=direction, alone_bytes_per_s=self._host_rate(device, direction)
                    )
                    for device in group
                    for direction in directions
                ),
            )
            for group in sorted([*groups, *((device,) for device in alone)])
            for name, directions in lanes
        )

    def _groups(self) -> list[tuple[int, ...]]:
        """Devices that have ranks behind one switch."""
        if self.config.offload.bandwidth_bytes_per_s is not None:
            return []  # a pace is the config's word on the links
        groups: list[tuple[set[tuple[int, int]], list[int]]] = []
        for device, ranks in enumerate(self.ranks):
            switches, members = {self.hardware.switch_of(rank) for rank in ranks}, [device]
            for group in [group for group in groups if group[0] & switches]:
                groups.remove(group)
                switches, members = switches | group[0], group[1] + members
            groups.append((switches, members))
        return [tuple(sorted(members)) for _, members in groups if len(members) > 1]

    def _warnings(self, devices: Sequence[DeviceProfile]) -> list[str]:
        train, name = self.config.train, self.hardware.name
        found = [
            f"estimated for {name}, not measured: times are the arithmetic of {DTYPE} kernels one after another; what "
            "the host does between them, and what ranks do to each other, is left out"
        ]
        if self.hardware.device == "cuda":
            found.append(
                "what attention and dropout keep on a GPU is reckoned from torch's kernels, not compared with a run"
            )
        if train.pipelines > 1:
            found.append(
                f"{train.pipelines} pipelines side by side (train.replicas, train.shards): what they exchange, weights "
                "and gradients, is not estimated, and comes on top of a plan's step"
            )
        works = [w for layer in self.layers for part in (layer.forward, layer.backward, layer.weight) for w in part]
        share = self.hardware.op_overhead_ms * len(works) / sum(sum(self._times([layer])) for layer in self.layers)
        if share > OVERHEAD_ABOVE:
            found.append(f"{share:.0%} of compute is the overhead of small kernels (op_overhead_ms), an assumption")
        try:
            self.config.budgets([device.static_bytes for device in devices])
        except InputError as error:
            found.append(f"{error.key}: {error.message}")
        return found


def state_bytes(numbers: Sequence[int], shards: int) -> dict[str, int]:
    """Weights, gradients and AdamW's state of a rank, as ``runtime.optimizer.state_bytes`` counts them.

    Parameters
    ----------
    numbers
        Numbers in each parameter tensor.
    shards
        Ranks that each keep a part of everything, and the whole weights and gradients besides while a step runs.
    """
    size = gpt.FLOAT * sum(numbers)
    kept = -(-size // shards)
    besides = kept if shards > 1 else 0
    return {
        "weight_bytes": size + besides,
        "gradient_bytes": size + besides,
        "optimizer_bytes": 2 * kept + _STEP_BYTES * len(numbers),
    }


def _ranks(config: Config) -> list[list[int]]:
    """The global ranks of each device, over all pipelines side by side, as ``runtime.place`` numbers them."""
    devices, parts = config.pipeline.devices, config.train.tensor_parallel
    first = range(0, config.num_ranks, devices * parts)  # of each pipeline
    return [[rank + device * parts + part for rank in first for part in range(parts)] for device in range(devices)]


def _sum_ms(nbytes: int, ranks: int, network: Network) -> float:
    """A sum over ranks in a ring, round which each part goes twice (Patarasuk and Yuan,
    doi:10.1016/j.jpdc.2008.09.002)."""
    steps = 2 * (ranks - 1)
    return steps * (network.latency_ms + nbytes / ranks / network.bytes_per_s * 1e3)


def _timing(ms: float) -> Timing:
    return Timing(median=round(ms, 6))
