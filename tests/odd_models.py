"""Models that are odd but legal, cut into stages, and the check that a plan gives what one process gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from optpipe import memory
from optpipe.plan import Plan
from runtime.executor import Executor
from runtime.stage import dropout_seed, measure_bytes, seeded
from runtime.transport import TensorSpec
from tests.pipelines import gradients, problem_with, random_plan

ROWS, LENGTH, WIDTH, TOKENS = 2, 8, 16, 32
STEPS = 2


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target) ** 2).mean()


@dataclass(frozen=True)
class Odd:
    """A model and how it is fed.

    Attributes
    ----------
    stages
        Makes them, the same every time.
    tokens
        The input is int64 (ROWS, LENGTH); else float32 (ROWS, LENGTH, WIDTH).
    boundaries
        What goes from stage to stage, where it is not what the default says.
    tolerance
        Largest difference of a gradient to that of one process, where a plan adds up in another order.
    exact
        Whether gradients are the same bit for bit where the order is that of one process. Not where autograd itself
        adds several uses of a weight within a microbatch, and a pipeline adds them one by one.
    changes_batch
        A stage changes its input in place, where that is the batch on one rank.
    """

    stages: Callable[[], list[nn.Module]]
    tokens: bool = False
    boundaries: Sequence[TensorSpec] | None = None
    tolerance: float = 1e-6
    exact: bool = True
    changes_batch: bool = False

    def specs(self) -> list[TensorSpec]:
        return list(self.boundaries or [TensorSpec((ROWS, LENGTH, WIDTH))] * (len(self.make()) - 1))

    def make(self) -> list[nn.Module]:
        torch.manual_seed(7)
        return self.stages()

    def batch(self, microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of one batch, as a data loader gives them."""
        generator = torch.Generator().manual_seed(1)
        shape = (microbatches * ROWS, LENGTH)
        inputs = torch.randint(0, TOKENS, shape, generator=generator)
        if not self.tokens:
            inputs = torch.randn(*shape, WIDTH, generator=generator)
        targets = torch.randn(*shape, 1, generator=generator)
        return list(inputs.chunk(microbatches)), list(targets.chunk(microbatches))


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Calls(nn.Module):
    """A module from a function of itself and its input; the parts are its submodules."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def tied() -> list[nn.Module]:
    """Embedding and projection share a weight within the stage; the last stage uses a layer twice in a chain."""
    tokens, out = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
    out.weight = tokens.weight
    first = Calls(lambda m, x: torch.softmax(m.out(m.tokens(x)), -1) @ m.tokens.weight, tokens=tokens, out=out)
    twice = Calls(lambda m, x: m.layer(torch.tanh(m.layer(x))) + m.layer(x) * m.layer.weight.sum(), layer=line())
    return [first, line(), twice]


def tied_across() -> list[nn.Module]:
    """The first and the last of four stages share a weight: they must be on one device."""
    first, last = line(), line()
    last.weight = first.weight
    return [first, line(), nn.Sequential(line(), nn.GELU()), last]


def checkpointed() -> list[nn.Module]:
    def again(reentrant: bool) -> nn.Module:
        inner = nn.Sequential(line(), nn.Dropout(0.3), nn.GELU(), line())
        return Calls(lambda m, x: checkpoint(m.inner, x, use_reentrant=reentrant) + x, inner=inner)

    return [again(False), nn.Sequential(again(False), again(True)), nn.Sequential(line(), again(True))]


def autocast() -> list[nn.Module]:
    def low(m: Calls, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.inner(x)

    inner = nn.Sequential(line(), nn.GELU(), nn.Conv1d(LENGTH, LENGTH, 3, padding=1), line())
    return [line(), Calls(low, inner=inner), Calls(low, inner=line())]


class Codes(torch.autograd.Function):
    """Saves integers, booleans, a parameter, an empty tensor and its own output."""

    @staticmethod
    def forward(ctx, x, weight):
        index, sign = x.argmax(-1, keepdim=True), x > 0
        out = torch.where(sign, x.gather(-1, index) * weight, x)
        ctx.save_for_backward(index, sign, weight, x, torch.empty(0, dtype=torch.int32), out)
        return out

    @staticmethod
    def backward(ctx, g):
        index, sign, weight, x, empty, out = ctx.saved_tensors
        assert empty.numel() == 0 and out.shape == x.shape
        chosen = torch.where(sign, g, 0.0)
        gx = torch.where(sign, 0.0, g).scatter_add(-1, index, (chosen * weight).sum(-1, keepdim=True))
        return gx, (chosen * x.gather(-1, index)).sum(dim=(0, 1))


def codes() -> nn.Module:
    return Calls(lambda m, x: Codes.apply(x, m.weight), weight=nn.Parameter(torch.linspace(1, 2, WIDTH)))


def in_place() -> list[nn.Module]:
    """Stages that change their input, as a convolution's activation does where a cut goes between the two."""
    return [
        nn.Sequential(line(), nn.BatchNorm1d(LENGTH)),
        nn.Sequential(nn.ReLU(inplace=True), line()),
        nn.Sequential(nn.Hardswish(inplace=True), line(), nn.ReLU(inplace=True), nn.Conv1d(LENGTH, LENGTH, 1)),
        Calls(lambda m, x: m.layer(x.mul_(2).add_(1)), layer=line()),
    ]


def handed_on() -> list[nn.Module]:
    """Outputs that are not the stage's own: the batch, a parameter, a buffer, a constant; a part of a large one; one
    that is not contiguous; and one that is saved too."""
    turned = Calls(lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2), layer=nn.Linear(LENGTH, LENGTH))
    saved = nn.Sequential(line(), nn.ReLU())
    given = Calls(lambda m, x: m.value, value=nn.Parameter(torch.randn(ROWS, LENGTH, WIDTH)))
    plus = Calls(lambda m, x: x + 1.0 if m.ask else m.constant)
    plus.ask, plus.constant = False, torch.randn(ROWS, LENGTH, WIDTH)
    part = Calls(lambda m, x: m.layer(x).repeat(3, 1, 1)[ROWS : 2 * ROWS], layer=line())
    wide = Calls(lambda m, x: m.layer(x).mean(1, keepdim=True).expand(-1, LENGTH, -1), layer=line())
    return [nn.Identity(), part, wide, turned, saved, given, nn.Identity(), line(), plus, line()]


def weight_norm() -> list[nn.Module]:
    """A Linear whose weight is computed: the old way, by a hook, and the new way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(line())
    return [old, nn.utils.parametrizations.weight_norm(line()), line()]


def forces() -> list[nn.Module]:
    """The forward differentiates, and its result is differentiated again."""

    def force(m: Calls, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = m.layer(torch.tanh(m.layer(x))).square().sum()
            return torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())[0]

    return [line(), Calls(force, layer=line()), nn.Sequential(Calls(force, layer=line()), line())]


def vmapped() -> list[nn.Module]:
    each = Calls(lambda m, x: torch.func.vmap(m.layer)(x), layer=line())
    return [each, nn.Sequential(each_row(), line())]


def each_row() -> nn.Module:
    return Calls(lambda m, x: torch.func.vmap(m.layer, in_dims=1, out_dims=1)(x), layer=line())


def recurrent() -> list[nn.Module]:
    lstm = Calls(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    attention = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1, batch_first=True)
    convolution = nn.Sequential(nn.Unflatten(-1, (4, 4)), nn.Conv2d(LENGTH, LENGTH, 3), nn.PReLU(), nn.Flatten(2))
    return [lstm, attention, nn.Sequential(convolution, frozen(nn.Linear(4, 5)))]


def masks() -> list[nn.Module]:
    """A mask that is no buffer, a cache that is made on first use, an input that is half of the output."""
    masked = Calls(lambda m, x: m.layer(x) * m.mask)
    masked.layer, masked.mask = line(), torch.rand(LENGTH, WIDTH)

    def rope(m: Calls, x: Tensor) -> Tensor:
        if m.table is None:
            m.table = torch.linspace(0, 1, LENGTH * WIDTH).view(LENGTH, WIDTH)
        return F.dropout(m.layer(x) * m.table, 0.2)

    cached = Calls(rope, layer=line()).eval()  # which F.dropout does not ask
    cached.table = None
    return [masked, cached, Calls(lambda m, x: torch.cat((x[..., :8], m.layer(x)[..., 8:]), -1), layer=line())]


def positions() -> list[nn.Module]:
    """Parameters whose gradients are views of what the backward goes on with: they come in as views, and no sum over
    sequences is made. Never two of the same: then plain autograd adds up wrongly."""

    def add(m: Calls, x: Tensor) -> Tensor:
        x = m.layer(x) if m.before else x
        x = (x.reshape(1, -1, WIDTH) + m.value.unsqueeze(0)).view(x.shape)
        return x if m.before else m.layer(x)

    def added(before: bool) -> nn.Module:
        made = Calls(add, layer=line(), value=nn.Parameter(torch.randn(ROWS * LENGTH, WIDTH)))
        made.before = before
        return made

    return [nn.Sequential(added(True), nn.Tanh()), added(False), nn.Sequential(added(True), nn.Tanh(), added(False))]


float64 = [TensorSpec((ROWS, LENGTH, WIDTH), torch.float64)] * 2
ODD: dict[str, Odd] = {
    "no parameters": Odd(lambda: [nn.Tanh(), nn.Identity(), nn.Sigmoid()]),
    "frozen": Odd(lambda: [frozen(nn.Embedding(TOKENS, WIDTH)), frozen(line()), line(), frozen(line())], tokens=True),
    "all frozen": Odd(lambda: [frozen(line()), nn.Sequential(frozen(line()), nn.ReLU())]),
    "tied": Odd(tied, tokens=True, tolerance=2e-6, exact=False),
    "tied across": Odd(tied_across, exact=False),
    "checkpoint": Odd(checkpointed),
    "autocast": Odd(
        autocast,
        boundaries=[TensorSpec((ROWS, LENGTH, WIDTH), t) for t in (torch.float32, torch.bfloat16)],
        tolerance=0.02,
    ),
    "bfloat16": Odd(
        lambda: [Calls(lambda m, x: m.layer(x.bfloat16()), layer=line().bfloat16()), line().bfloat16()],
        boundaries=[TensorSpec((ROWS, LENGTH, WIDTH), torch.bfloat16)],
        tolerance=0.02,
    ),
    "float64": Odd(
        lambda: [Calls(lambda m, x: m.layer(x.double()), layer=line().double()), line().double(), line().double()],
        boundaries=float64,
    ),
    "integers between stages": Odd(
        lambda: [nn.Identity(), nn.Embedding(TOKENS, WIDTH), line()],
        tokens=True,
        boundaries=[TensorSpec((ROWS, LENGTH), torch.int64), TensorSpec((ROWS, LENGTH, WIDTH))],
    ),
    "dropout": Odd(
        lambda: [nn.Sequential(line(), nn.Dropout(0.2)), nn.Dropout(0.5), nn.Sequential(line(), nn.Dropout(0.2))]
    ),
    "custom function": Odd(lambda: [codes(), nn.Sequential(line(), codes()), codes()]),
    "in place": Odd(in_place, changes_batch=True),
    "in place behind an embedding": Odd(
        lambda: [nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.ReLU(inplace=True)), line()], tokens=True
    ),
    "handed on": Odd(handed_on),
    "positions": Odd(positions),
    "weight norm": Odd(weight_norm),
    "forces": Odd(forces, tolerance=1e-5, exact=False),
    "vmap": Odd(vmapped, exact=False),
    "recurrent": Odd(recurrent),
    "masks": Odd(masks),
    "outputs that are saved": Odd(
        lambda: [nn.Sequential(line(), function) for function in (nn.Tanh(), nn.Sigmoid(), nn.ReLU())]
    ),
}


def lengthened(odd: Odd, count: int) -> Odd:
    """The same with more stages behind, for at least so many ranks."""
    stages = odd.make()
    more = count - len(stages)
    if more <= 0:
        return odd
    x = odd.batch(1)[0][0]
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    out, width = TensorSpec(tuple(x.shape), x.dtype), x.shape[-1]

    def behind() -> nn.Module:
        layers = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        return Calls(lambda m, x: m.layers(x.float()), layers=layers)

    specs = [*odd.specs(), out, *[TensorSpec(out.shape)] * (more - 1)]
    return replace(odd, stages=lambda: [*odd.make(), *(behind() for _ in range(more))], boundaries=specs)


def plain(odd: Odd, m: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """One process, microbatch after microbatch: losses, gradients of all steps together, buffers."""
    stages = odd.make()
    losses = []
    seen = {layer: [] for stage in stages for layer in stage.modules() if isinstance(layer, _BatchNorm)}
    state = {layer: (layer.running_mean.clone(), layer.running_var.clone()) for layer in seen}
    for layer, inputs in seen.items():
        layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].detach().clone()))
    for step in range(STEPS):
        inputs, targets = odd.batch(m)
        total = 0.0
        for j in range(m):
            x = inputs[j]
            for s, stage in enumerate(stages):
                with seeded(dropout_seed(0, step, s, j), torch.device("cpu")):
                    x = stage(x)
            loss = loss_fn(x, targets[j]) / m
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        for layer, inputs in seen.items():
            whole = torch.cat(inputs).transpose(0, 1).flatten(1)
            state[layer][0].lerp_(whole.mean(1), layer.momentum)
            state[layer][1].lerp_(whole.var(1), layer.momentum)
            inputs.clear()
    for layer, (mean, variance) in state.items():
        # Not of each microbatch: of the mini-batch, once a step.
        layer.running_mean, layer.running_var = mean, variance
        layer.num_batches_tracked.fill_(STEPS)
    return losses, gradients(dict(enumerate(stages))), buffers(dict(enumerate(stages)))


def buffers(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {f"{s}.{name}": value.clone() for s, module in stages.items() for name, value in module.named_buffers()}


def plan_of(odd: Odd, places: Sequence[int], m: int, seed: int, *, limited: bool = True) -> Plan:
    """A random plan whose bytes are measured; ``limited``: its devices have budgets."""
    modules, specs = odd.make(), odd.specs()
    inputs, targets = odd.batch(1)
    sizes = []
    for s, module in enumerate(modules):
        spec = specs[s - 1] if s else None
        x = inputs[0] if spec is None else torch.ones(spec.shape, dtype=spec.dtype)
        sizes.append(measure_bytes(module, s, len(modules), x, targets[0] if s == len(modules) - 1 else None, loss_fn))
    plan = random_plan(problem_with(sizes, places, m), seed, offload=0.5)
    return plan if limited else without_budgets(plan)


def without_budgets(plan: Plan) -> Plan:
    """The same: after the first step what does not move is left to autograd."""
    devices = [{"memory_bytes": None}] * plan.problem.num_devices
    return Plan(plan.problem.changed(devices=devices), plan.ops)


def check(name: str, places: Sequence[int], rank: int, m: int, seed: int) -> None:
    odd = ODD[name]
    plan = plan_of(odd, places, m, seed, limited=seed % 2 == 0)
    losses, grads, state = plain(odd, m)
    modules = odd.make()
    stages = {s: modules[s] for s in plan.problem.stages_of[rank]}
    peak = memory.peaks(plan.problem, plan.ops)[rank]
    with Executor(plan, stages, odd.specs(), loss_fn) as executor:
        for step in range(STEPS):
            inputs, targets = odd.batch(m)
            result = executor.step(inputs, targets, number=step)
            if len(modules) - 1 in stages:
                assert math.isclose(result.loss, losses[step], rel_tol=1e-6), name
            assert result.peak_bytes <= peak, name
            assert result.message_peak_bytes <= executor.message_bytes, name
            if not odd.changes_batch:
                for now, before in zip([*inputs, *targets], [t for part in odd.batch(m) for t in part], strict=True):
                    assert torch.equal(now, before), f"{name}: the batch was changed"
    found = gradients(stages)
    own = {key: value for key, value in grads.items() if int(key.split(".")[0]) in stages}
    assert all(not found[key].any() for key in found.keys() - own.keys()), "where one process has no gradient it is 0"
    for key, value in own.items():
        torch.testing.assert_close(
            found[key], value, rtol=odd.tolerance, atol=odd.tolerance, msg=lambda m, k=key: f"{name}: {k}: {m}"
        )
    for key, value in buffers(stages).items():
        torch.testing.assert_close(value, state[key], rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{name}: {k}: {m}")
    assert executor.ledger.activation_bytes == executor.ledger.message_bytes == executor.pool.in_use == 0, name


def places_on(name: str, odd: Odd, count: int) -> list[int]:
    """Stages dealt out to ranks; two stages that share a weight as one object go to one rank."""
    stages = len(odd.make())
    return [(min(s, stages - 1 - s) if name == "tied across" else s) % count for s in range(stages)]
