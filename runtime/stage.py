"""One stage's ops on its microbatches: F, B, W, BW, C, and what O and R move."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.errors import RunFailed
from runtime import batch_norm
from runtime.accounting import Ledger
from runtime.buffers import Buffers, Was, as_they_were, unmoved
from runtime.host_memory import HostPool
from runtime.saved import InputGradient, Offload, Reload, Saved, enter, storage_of, storages
from runtime.split_backward import WeightStore, convert, deferring, together
from runtime.transport import Parcel

LossFn = Callable[[Tensor, Tensor], Tensor]


def dropout_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The seed of the random numbers that F(stage, microbatch) draws in a step, whatever the schedule."""
    value = seed
    for part in (step, stage, microbatch):
        value = (value * 1_000_003 + part + 1) % (1 << 63)
    return value


def draw_from(seed: int, device: torch.device) -> None:
    """Random numbers come from ``seed`` now."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on outside as if nothing had been."""
    cuda = device.type == "cuda"
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` inside; the generators go on outside as if nothing had been."""
    with own_random_numbers(device):
        draw_from(seed, device)
        yield


def constants(module: nn.Module) -> Iterator[Tensor]:
    """What belongs to the module and to no microbatch: parameters, buffers, and tensors that are neither but are kept
    as attributes, such as masks."""
    for part in module.modules():
        for registered in (part._parameters, part._buffers):
            yield from (tensor for tensor in registered.values() if tensor is not None)
        yield from (value for value in vars(part).values() if isinstance(value, Tensor) and not value.requires_grad)


def parameters_of(module: nn.Module, loss_fn: LossFn) -> Iterator[nn.Parameter]:
    """Those of a stage and of its loss, where that is a module."""
    yield from module.parameters()
    if isinstance(loss_fn, nn.Module):
        yield from loss_fn.parameters()


@dataclass
class _Microbatch:
    """What a stage keeps of a microbatch from F to W."""

    saved: Saved | None  # None: autograd keeps what it saves by itself, not counted
    gradient: InputGradient
    seed: int
    split: bool
    shape: torch.Size
    dtype: torch.dtype
    target: Tensor | None = None
    input: Parcel | Tensor | None = None  # kept only where the forward is run again
    buffers: list[Was] = field(default_factory=list)  # that the forward moved, where it is run again
    edge: GradientEdge | None = None
    store: WeightStore | None = None


@torch.no_grad()
def _own_memory(parameters: Iterable[nn.Parameter], given: Tensor, state: _Microbatch) -> None:
    """First gradients of parameters, to which later ones are added in place, get memory that nothing else uses.

    Autograd makes what comes to a parameter its ``.grad`` without a copy where no one else holds the same tensor. But
    it may be a view of one that is used on: that came for the output, goes to the stage before, is kept for W, or is
    another parameter's ``.grad``.
    """
    others = [given, *(state.store.tensors() if state.store is not None else ())]
    if state.gradient.value is not None:
        others.append(state.gradient.value)
    used = {storage_of(tensor) for tensor in others if tensor.layout is torch.strided}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            continue
        storage = storage_of(gradient)
        if storage in used:
            parameter.grad = gradient.clone()
        used.add(storage)


@dataclass
class Stage:
    """A stage and its microbatches under way.

    Parameters
    ----------
    module
        Takes one tensor and gives one. Linear and Embedding layers in it are converted in place to defer their weight
        gradients, BatchNorm layers to move their averages by mini-batches.
    index, num_stages
        Which stage of how many.
    loss_fn
        Of the last stage: (output, target) to the loss of a microbatch.
    num_microbatches
        What the sum of their losses is divided by, unless ``begin`` says otherwise.
    device
        Where the module lives.
    ledger, pool
        Count what is held on the device, and give host memory.
    """

    module: nn.Module
    index: int
    num_stages: int
    loss_fn: LossFn
    num_microbatches: int
    device: torch.device
    ledger: Ledger
    pool: HostPool
    _skip: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _handled: Container[int] | None = None
    _changes_input: bool = True  # until a forward has shown that it does not
    _buffers: Buffers = field(init=False)
    _denominator: float = 1.0
    _trained: list[nn.Parameter] = field(default_factory=list)
    _under_way: dict[int, _Microbatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        convert(self.module)
        batch_norm.convert(self.module)
        self._buffers = Buffers(self._parts)

    @property
    def _parts(self) -> list[nn.Module]:
        """The modules that run here."""
        return [self.module, *([self.loss_fn] if self.is_last and isinstance(self.loss_fn, nn.Module) else [])]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def begin(
        self, batch: list[Tensor], denominator: float | None = None, handled: Container[int] | None = None
    ) -> None:
        """Before a step.

        Parameters
        ----------
        batch
            Its tensors, which are no activations.
        denominator
            What its losses are divided by.
        handled
            Microbatches whose saved activations can move and are counted; None: all. It costs some microseconds a
            tensor; those of the others are left to autograd.
        """
        self._handled = handled
        self._denominator = float(self.num_microbatches) if denominator is None else denominator
        # Anew every step: an optimiser, or FSDP, may have moved parameters.
        parts = self._parts
        self._skip = storages([*(tensor for part in parts for tensor in constants(part)), *batch])
        self._trained = [p for part in parts for p in part.parameters() if p.requires_grad]
        self._under_way.clear()

    def finish(self, *, is_last: bool = True) -> None:
        """After a run of the plan; ``is_last``: the last one of the optimiser's step."""
        if is_last:
            batch_norm.move_averages(self.module)
        self._skip = {}

    def forward(
        self, microbatch: int, x: Parcel | Tensor, target: Tensor | None, seed: int, *, split: bool, recomputed: bool
    ) -> Parcel | Tensor:
        """F. The output with the hold on it; of the last stage the microbatch's share of the loss.

        Parameters
        ----------
        microbatch
            Which.
        x
            The input: of the first stage a tensor of the batch, else what came from the stage before.
        target
            Of the last stage.
        seed
            Of the random numbers.
        split
            The backward will be split into B and W.
        recomputed
            The forward will run again (C): only the input is kept.
        """
        tensor = x.tensor if isinstance(x, Parcel) else x
        saved = None
        if self._handled is None or microbatch in self._handled:
            saved = Saved(self.ledger, self.device, self._skip, self.pool.space((self.index, microbatch)))
        state = _Microbatch(
            saved,
            InputGradient(self.ledger),
            seed,
            split,
            tensor.shape,
            tensor.dtype,
            target,
        )
        self._under_way[microbatch] = state
        if recomputed:
            state.input = x
            output = self._run_once(state, tensor)
        else:
            output = self._run(state, tensor)
            state.edge = get_gradient_edge(output) if output.requires_grad else None
        output = output.detach()
        if self.is_last:
            result: Parcel | Tensor = output
        else:
            output = output.contiguous()
            if output.untyped_storage()._cdata in self._skip:
                output = output.clone()  # a parameter, or the batch, handed on: its memory is not the run's to use
            result = Parcel(output, self.ledger.hold(output))
        if isinstance(x, Parcel) and not recomputed:
            x.hold.release()
        return result

    def recompute(self, microbatch: int) -> None:
        """C: the forward again, with the same random numbers, this time for the backward."""
        state = self._under_way[microbatch]
        x, state.input = state.input, None
        assert x is not None, "only a forward that kept its input can run again"
        before, state.buffers = state.buffers, []
        with batch_norm.run_again(), as_they_were(before):
            output = self._run(state, x.tensor if isinstance(x, Parcel) else x)
        state.edge = get_gradient_edge(output) if output.requires_grad else None
        if isinstance(x, Parcel):
            x.hold.release()

    @torch.no_grad()
    def _run_once(self, state: _Microbatch, x: Tensor) -> Tensor:
        """The forward before C, which needs the input and the buffers as they were."""
        given = x.clone() if self._changes_input else x
        version, before = given._version, self._buffers.before()
        output = self._run(state, given)
        state.buffers = self._buffers.moved(before)
        changed = given._version != version
        if changed and not self._changes_input:
            raise RunFailed("the stage changes its input in place, but did not before: its forward cannot be run again")
        self._changes_input = changed
        return output

    def _run(self, state: _Microbatch, x: Tensor) -> Tensor:
        draw_from(state.seed, self.device)
        hooks = state.saved.hooks() if state.saved is not None and torch.is_grad_enabled() else nullcontext()
        with hooks, nullcontext() if state.split else together():
            if not self.is_first and torch.is_grad_enabled():
                x = enter(x, state.gradient)
            output: Tensor = self.module(x)
            del x
            if not isinstance(output, Tensor):
                raise RunFailed(f"stage {self.index} gave a {type(output).__name__}, expected one tensor")
            if self.is_last:
                assert state.target is not None
                output = self.loss_fn(output, state.target) / self._denominator
                if output.numel() != 1:
                    raise RunFailed(f"the loss has shape {tuple(output.shape)}, expected one number")
                output = output.reshape(())
        return output

    def backward(self, microbatch: int, gradient: Parcel | None) -> Parcel | None:
        """B or BW, as the forward was told.

        Gives the gradient for the input with the hold on it (zeros where nothing depends on it); None of the first
        stage.

        Parameters
        ----------
        microbatch
            Which.
        gradient
            For the output; None of the last stage.
        """
        state = self._under_way[microbatch]
        edge, state.edge = state.edge, None
        if state.split:
            state.store = WeightStore(state.saved)
        else:
            del self._under_way[microbatch]
        if edge is not None:
            value = gradient.tensor if gradient is not None else torch.ones((), device=self.device)
            first = [parameter for parameter in self._trained if parameter.grad is None]
            # Checkpoints inside the stage run their forwards again: as the first time.
            with deferring(state.store) if state.split else together(), batch_norm.run_again():
                torch.autograd.backward([edge], [value])
            if new := [parameter for parameter in first if parameter.grad is not None]:
                _own_memory(new, value, state)
            del edge, value
        if gradient is not None:
            gradient.hold.release()
        return None if self.is_first else self._input_gradient(state)

    def _input_gradient(self, state: _Microbatch) -> Parcel:
        value, hold = state.gradient.value, state.gradient.hold
        state.gradient.value = state.gradient.hold = None
        if value is None or hold is None:  # nothing in the stage depends on its input
            value = torch.zeros(state.shape, dtype=state.dtype, device=self.device)
            hold = self.ledger.hold(value)
        elif not value.is_contiguous():
            value = value.contiguous()
            hold.release()
            hold = self.ledger.hold(value)
        return Parcel(value, hold)

    def weight(self, microbatch: int) -> None:
        """W: the weight gradients that B put off."""
        store = self._under_way.pop(microbatch).store
        if store is None:
            raise RunFailed(f"W({self.index},{microbatch}) has nothing to do: its backward was not split")
        store.run()

    def offload(self, microbatch: int, nbytes: int | None) -> Offload:
        """What O moves: at least ``nbytes``; None: everything."""
        return self._saved(microbatch).offload(nbytes)

    def reload(self, microbatch: int) -> Reload:
        """What R brings back."""
        return self._saved(microbatch).reload()

    def saved_bytes(self, microbatch: int) -> int:
        """Bytes saved for the backward that are on the device now; the output's place is not among them."""
        return self._saved(microbatch).nbytes

    def _saved(self, microbatch: int) -> Saved:
        saved = self._under_way[microbatch].saved
        assert saved is not None, "its saved activations were left to autograd"
        return saved


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds per microbatch, counted as a run counts it; the names are the problem's.

    ``output_bytes``: what it hands to the next stage; 0 of the last one.
    """

    activation_bytes: int
    weight_context_bytes: int
    offloadable_bytes: int
    checkpoint_bytes: int
    output_bytes: int


def measure_bytes(
    module: nn.Module, index: int, num_stages: int, x: Tensor, target: Tensor | None, loss_fn: LossFn
) -> StageBytes:
    """Run one microbatch through a stage and count what it holds. Gradients are left as they were.

    Parameters
    ----------
    module, index, num_stages, loss_fn
        As for ``Stage``.
    x
        An input: any values will do.
    target
        Of the last stage.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(module, loss_fn)]
    parts = [module, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    try:
        # What is measured is no training.
        with batch_norm.run_again(), unmoved(parts), own_random_numbers(x.device):
            split = _measured(module, index, num_stages, x, target, loss_fn, kind="split")
            fused = _measured(module, index, num_stages, x, target, loss_fn, kind="fused")
            again = _measured(module, index, num_stages, x, target, loss_fn, kind="recomputed")
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return StageBytes(
        max(split["peak"], fused["peak"], again["peak"]),
        split["context"],
        split["saved"],
        again["kept"],
        split["output"],
    )


def _measured(
    module: nn.Module, index: int, num_stages: int, x: Tensor, target: Tensor | None, loss_fn: LossFn, kind: str
) -> dict[str, int]:
    """Levels of one microbatch from F to W; the output stays, as the place of its gradient."""
    ledger = Ledger()
    stage = Stage(module, index, num_stages, loss_fn, 1, x.device, ledger, HostPool())
    stage.begin([tensor for tensor in (x if index == 0 else None, target) if tensor is not None])
    source = x if index == 0 else Parcel(x, ledger.hold(x))
    output = stage.forward(0, source, target, 0, split=kind == "split", recomputed=kind == "recomputed")
    found = {"kept": ledger.activation_bytes}
    if kind == "recomputed":
        stage.recompute(0)
    gradient = None
    found["output"] = 0
    if isinstance(output, Parcel):
        found["output"] = output.hold.nbytes
        # Memory of its own, as the run may have to take it: where the output itself is saved.
        value = torch.ones_like(output.tensor)
        gradient = Parcel(value, ledger.hold(value))
        output.hold.release()
    found["saved"] = stage.saved_bytes(0)
    for parameter in parameters_of(module, loss_fn):
        parameter.grad = None
    given = stage.backward(0, gradient)
    found["peak"] = ledger.activation_peak
    if given is not None:
        given.hold.release()
    found["context"] = ledger.activation_bytes
    if kind == "split":
        stage.weight(0)
    return found
