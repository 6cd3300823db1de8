"""Measures the model of a config in place: on its ranks, inside real schedules.

    partition   costs of single layers, where the config wants it balanced
    bytes       what each stage holds of a microbatch
    trials      1F1B with a split backward, with a fused one, and with offloads: times of every op, message lags, load
    links       copies to the host alone and beside each neighbour, messages of several sizes

Each trial runs as training does, through the executor, on as many ranks, so times contain what the ranks do to each
other. Pipelines side by side run each on its own; what they do to sum their gradients is not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from optpipe import partition
from optpipe.config import Config
from optpipe.ops import Kind
from optpipe.profile import (
    DeviceProfile,
    LinkProfile,
    Profile,
    StageProfile,
    Timing,
    TrialProfile,
)
from runtime import conditions, costs, data, gather, launch, links, optimizer, parallel, samples, stages
from runtime.data import VOCABULARY, batch_shape
from runtime.executor import Executor
from runtime.model import loss_fn
from runtime.place import Place
from runtime.samples import Sample, Trace
from runtime.stage import StageBytes, measure_bytes
from runtime.trial import Trial
from runtime.worker import Rank

#: Of the free memory of a GPU, what trials may fill with activations.
TRIAL_SHARE = 0.8
#: The schedules that are run. That with recomputation tells only how long C takes: its F keeps nothing.
TRIALS: dict[str, dict[str, Any]] = {
    "split backward": {"split": True},
    "fused backward": {"split": False},
    "recomputation": {"split": False, "recompute": True},
    "offloads": {"split": True, "offload": True},
}


def profile(config: Config, on_progress: Callable[[str], None] | None = None) -> Profile:
    """Measure the model of a config on the local ranks that its training would have, or on those of torchrun.

    Parameters
    ----------
    config
        Needs ``model``. A balanced partition is settled first, from measured costs of the layers.
    on_progress
        Called with a short text at each phase, in the launching process (under torchrun: on rank 0).

    Returns
    -------
    Profile
        The same on every rank under torchrun; only ``launch.is_chief()`` should write it.

    Raises
    ------
    InputError
        The config has no model, or asks for devices that are not there, or its text cannot be read: what is measured
        does not depend on the text, but what it is measured for does.
    RunFailed
        A rank failed: the first cause.
    """
    stages.gpt_config(config)  # a config without a model is refused before anything starts
    ranks = config.num_ranks
    device = launch.resolve_device(config.device, ranks, config.file)
    data.check(config)

    def hear(message: dict[str, Any]) -> None:
        if on_progress is not None:
            on_progress(message["progress"])

    arguments = {"config": config.to_json(), "file": config.file}
    return Profile.from_json(launch.launch(measure_rank, arguments, ranks, device, hear), config.file)


def measure_rank(rank: Rank, config: dict[str, Any], file: str) -> dict[str, Any]:
    """What one rank does to measure; the profile as JSON, the same on every rank."""
    settings = Config.from_json({**config, "device": rank.device.type}, file)
    place = Place.of(rank.rank, settings, rank.device)
    if settings.pipeline.partition == "balanced":
        _say(rank, "layers, to balance the stages")
        of_ranks = gather.numbers(costs.layers(settings, rank.device, place))
        mean = [statistics.fmean(layer) for layer in zip(*of_ranks, strict=True)]
        settings = settings.with_partition(partition.balanced(mean, settings.pipeline.stage_devices))
    return _Measurement(rank, settings, place).run().to_json()


def _say(rank: Rank, text: str) -> None:
    if rank.rank == 0:
        rank.send({"progress": text})


class _Measurement:
    """One rank's part of a profile whose partition is settled."""

    def __init__(self, rank: Rank, config: Config, place: Place) -> None:
        self.rank, self.config, self.place = rank, config, place
        self.placement = config.pipeline.stage_devices
        self.stages = stages.build_stages(config, place.device, rank.device)
        parallel.parallelize(self.stages.values(), place, sharded=False)
        self.boundaries = stages.boundaries(config)
        self.message_bytes = 0

    def run(self) -> Profile:
        """Measure everything; every rank gets the whole profile."""
        _say(self.rank, "bytes that each stage holds")
        sizes = self._sizes()
        in_flight = self._in_flight(sizes)
        trials: dict[str, tuple[Trial, list[Trace]]] = {}
        common: dict[str, Any] = {"in_flight": in_flight, "half_duplex": self.config.offload.half_duplex}
        for name, kind in TRIALS.items():
            if kind.get("offload") and not self.config.offload.enabled:
                continue
            _say(self.rank, f"1F1B, {name}")
            trial = Trial(self.placement, self._microbatches(), **kind, **common)
            trials[name] = trial, self._run_trial(trial)
        _say(self.rank, "links")
        host = links.measure_host_links(self.rank, self.config, self.place)
        return self._profile(sizes, trials, self._links(), host)

    def _microbatches(self) -> int:
        """Enough for a steady state, whatever the batch."""
        return min(self.config.batch.microbatches, max(8, 2 * len(self.placement)))

    def _batch(self) -> tuple[list[Tensor], list[Tensor]]:
        """Random tokens: what they are changes no time."""
        _, size, context = batch_shape(self.config)
        shape = (self._microbatches(), size, context)
        generator = torch.Generator().manual_seed(self.config.train.seed)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(self.rank.device)
        return list(tokens), list(tokens.flip(-1))

    def _sizes(self) -> list[StageBytes]:
        """Of every stage, by number."""
        tokens, targets = self._batch()
        found: dict[str, Any] = {}
        for number, module in self.stages.items():
            x = tokens[0]
            if number > 0:
                spec = self.boundaries[number - 1]
                x = torch.randn(spec.shape, dtype=spec.dtype, device=self.rank.device)
            measured = measure_bytes(module, number, len(self.placement), x, targets[0], loss_fn)
            found[str(number)] = vars(measured)
        whole = {int(number): sizes for row in gather.objects(found) for number, sizes in row.items()}
        return [StageBytes(**whole[number]) for number in range(len(self.placement))]

    def _in_flight(self, sizes: list[StageBytes]) -> int | None:
        """Microbatches a stage that the trials may hold: on a GPU as many as fit, on a CPU device no limit."""
        most = 1e9
        if self.rank.device.type == "cuda":
            _, gradients, _ = optimizer.state_bytes(self.stages.values(), self.config.train.shards)
            free = TRIAL_SHARE * (torch.cuda.mem_get_info(self.rank.device)[0] - gradients)
            most = max(1.0, free // max(1, sum(sizes[number].activation_bytes for number in self.stages)))
        least = min(row[0] for row in gather.numbers([most]))
        return None if least >= len(self.placement) else int(least)

    def _run_trial(self, trial: Trial) -> list[Trace]:
        """Steps of a trial over all ranks, those after the warm-up."""
        pace = self.config.offload.bandwidth_bytes_per_s
        executor = Executor(
            trial.plan(),
            self.stages,
            self.boundaries,
            loss_fn,
            device=self.rank.device,
            ranks=self.place.ranks,
            bandwidth=(pace, pace),
        )
        self.message_bytes = max(self.message_bytes, executor.message_bytes)
        inputs, targets = self._batch()
        steps = []
        with executor:
            for number in range(self.config.measure.warmup + self.config.measure.iterations):
                gather.numbers([0.0])  # all begin together, as behind the clipping of a training step
                result = executor.step(inputs, targets, number=number)
                for module in self.stages.values():
                    module.zero_grad(set_to_none=True)
                origin = result.origin * 1e3
                if number >= self.config.measure.warmup:
                    steps.append(([Sample.of(op, origin) for op in result.ops], result.step_ms))
        ranks = self.place.of_first(gather.objects(steps))
        return [
            Trace(tuple(Sample(Kind(kind), *rest) for ops, _ in step for kind, *rest in ops), max(ms for _, ms in step))
            for step in zip(*ranks, strict=True)
        ]

    def _links(self) -> list[dict[str, list[float]]]:
        """Per boundary between stages: ms of an empty message, of one of its size and of a large one."""
        found = []
        for number, spec in enumerate(self.boundaries):
            ends = self.place.ranks[self.placement[number]], self.place.ranks[self.placement[number + 1]]
            sizes = {"empty": 1, "own": spec.nbytes, "large": links.MESSAGE_BYTES}
            here = {}
            for name, nbytes in sizes.items() if ends[0] != ends[1] else ():
                here[name] = links.message_ms(*ends, nbytes, self.rank.device, self.config.measure.iterations)
            found.append({name: ms for name, ms in here.items() if ms is not None})
        rows = self.place.of_first(gather.objects(found))
        return [rows[self.placement[number]][number] for number in range(len(found))]

    def _profile(
        self,
        sizes: list[StageBytes],
        trials: dict[str, tuple[Trial, list[Trace]]],
        messages: list[dict[str, list[float]]],
        host: links.HostLinkTrial,
    ) -> Profile:
        times = self._times(trials)
        plain = [trace for name in ("split backward", "fused backward") for trace in trials[name][1]]
        lags = samples.message_lags(plain, self.placement)
        boundary_links = tuple(
            _link(self.boundaries[number].nbytes, lags.get(number, []), messages[number])
            for number in range(len(self.boundaries))
        )
        load = samples.loads(plain, self.placement)
        if self.place.tensor_parallel > 1:
            load = [None] * len(load)  # ranks wait for each other within ops, whatever else the machine does
        held = *optimizer.state_bytes(self.stages.values(), self.config.train.shards), self.message_bytes
        static = self.place.of_first(gather.numbers([float(part) for part in held]))
        comm = [link.message_ms.median for link in boundary_links]
        checks = tuple(self._check(name, *trial, times, comm) for name, trial in trials.items())
        late = samples.late_share(trials["offloads"][1]) if "offloads" in trials else 0.0
        return Profile.make(
            name=self.config.name,
            machine=conditions.facts(self.rank),
            stages=tuple(self._stage(number, sizes[number], times) for number in range(len(self.placement))),
            devices=tuple(
                DeviceProfile(
                    weight_bytes=int(weights),
                    gradient_bytes=int(gradients),
                    optimizer_bytes=int(state),
                    message_bytes=int(messages_under_way),
                    load=load[device],
                )
                for device, (weights, gradients, state, messages_under_way) in enumerate(static)
            ),
            links=boundary_links,
            channels=links.channels(self.config.offload, host.alone, host.pairs, host.crowded),
            trials=checks,
            settings=self.config,
            warnings=(
                *conditions.warnings(load, late, checks, conditions.crowding(self.rank), self.config.train.pipelines),
                *links.doubts(self.config.offload, host),
            ),
        )

    def _times(self, trials: dict[str, tuple[Trial, list[Trace]]]) -> dict[tuple[int, Kind], list[float]]:
        """Samples of all trials, by stage and kind; of the one with recomputation those of C."""
        times: dict[tuple[int, Kind], list[float]] = {}
        for trial, traces in trials.values():
            on_cpu = self.rank.device.type == "cpu"
            for key, found in samples.durations(traces, self.placement, with_host=on_cpu).items():
                if not trial.recompute or key[1] == Kind.C:
                    times.setdefault(key, []).extend(found)
        return times

    def _check(
        self,
        name: str,
        trial: Trial,
        traces: list[Trace],
        times: dict[tuple[int, Kind], list[float]],
        comm: list[float],
    ) -> TrialProfile:
        """A trial as it ran beside what the figures say of it."""
        transfers, neighbours = samples.waits(traces, self.config.pipeline.devices, self.placement)
        return TrialProfile(
            name=f"1F1B, {name}",
            predicted_ms=samples.predicted_ms(trial.plan(), times, comm),
            measured_ms=statistics.median(trace.step_ms for trace in traces),
            transfer_wait_ms=tuple(transfers),
            message_wait_ms=tuple(neighbours),
        )

    def _stage(self, number: int, sizes: StageBytes, times: dict[tuple[int, Kind], list[float]]) -> StageProfile:
        counts = cast("tuple[int, ...]", self.config.pipeline.partition)

        def timing(kind: Kind) -> Timing:
            return Timing.of(times[number, kind])

        offload = self.config.offload.enabled
        return StageProfile(
            device=self.placement[number],
            layers=counts[number],
            forward_ms=timing(Kind.F),
            backward_ms=timing(Kind.B),
            weight_ms=timing(Kind.W),
            fused_backward_ms=timing(Kind.BW),
            recompute_ms=timing(Kind.C),
            activation_bytes=sizes.activation_bytes,
            weight_context_bytes=sizes.weight_context_bytes,
            offloadable_bytes=sizes.offloadable_bytes,
            checkpoint_bytes=sizes.checkpoint_bytes,
            offload_ms=timing(Kind.O) if offload else None,
            reload_ms=timing(Kind.R) if offload else None,
        )


def _link(nbytes: int, lags: list[float], messages: dict[str, list[float]]) -> LinkProfile:
    """Lags inside a schedule where there are any, else messages alone; within a device messages take no time."""
    if not messages:
        return LinkProfile(message_bytes=nbytes, message_ms=Timing(median=0.0))
    empty, large = statistics.median(messages["empty"]), statistics.median(messages["large"])
    return LinkProfile(
        message_bytes=nbytes,
        message_ms=Timing.of(lags or messages["own"]),
        latency_ms=empty,
        bytes_per_s=links.MESSAGE_BYTES / max(large - empty, 1e-6) * 1e3,
    )
