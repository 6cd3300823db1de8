"""The loss on held-out data, by forwards only, under a schedule of their own (``forward_only``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from optpipe.problem import Problem
from runtime import checks, forward_only
from runtime.accounting import Ledger
from runtime.boundary import Boundary, most_bytes
from runtime.connect import connect
from runtime.events import Failure
from runtime.program import Compute
from runtime.saved import storages
from runtime.stage import LossFn, constants
from runtime.transport import Parcel


class Evaluator:
    """Evaluates a model that lies on ranks in stages: the numbers are those of a single process.

    All ranks construct it together, and use it together.

    Parameters
    ----------
    problem
        The stages, their devices and forward times; ``num_microbatches`` may be another than in training.
    stages
        This rank's stages by number. They run in evaluation mode and are put back.
    boundaries, loss_fn, device, ranks, timeout_s
        As for ``executor.Executor``.

    Raises
    ------
    InputError
        What is given does not fit the problem.
    """

    def __init__(
        self,
        problem: Problem,
        stages: Mapping[int, nn.Module],
        boundaries: Sequence[Boundary],
        loss_fn: LossFn,
        *,
        device: torch.device | str = "cpu",
        ranks: Sequence[int] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        ranks = list(range(problem.num_devices)) if ranks is None else list(ranks)
        number = checks.own_device(ranks)
        checks.check_parts(problem, number, ranks, stages, boundaries)
        self._problem, self._stages, self._loss_fn = problem, dict(stages), loss_fn
        self._boundaries, self.device = list(boundaries), checks.with_index(torch.device(device))
        self.program = forward_only.build(problem, number, [most_bytes(boundary) for boundary in boundaries])
        self.ledger, self._failure = Ledger(), Failure()
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._transport = connect(
            problem, self.program, boundaries, self.device, self.ledger, self._failure, ranks, timeout_s
        )

    @torch.no_grad()
    def loss(
        self,
        inputs: Sequence[Tensor] | None = None,
        targets: Sequence[Tensor] | None = None,
        *,
        denominator: float | None = None,
    ) -> float | None:
        """The sum of the microbatches' losses over their number, or over ``denominator``; as in ``Executor.step``.

        Returns
        -------
        float or None
            On the rank that holds the last stage; None elsewhere.

        Raises
        ------
        InputError
            The batch does not fit the problem.
        RunFailed
            Something failed here, or another rank is gone; the first cause. The evaluator is of no use afterwards.
        """
        count, is_last = self._problem.num_microbatches, self._problem.num_stages - 1 in self._stages
        for name, needed, tensors in (("inputs", 0 in self._stages, inputs), ("targets", is_last, targets)):
            if needed:
                checks.check_batch(name, tensors, count, self._boundaries)
        parts = [tensor for stage in self._stages.values() for tensor in constants(stage)]
        self._kept = storages([*parts, *(inputs or ())])
        losses: dict[int, Tensor] = {}
        doing = ""
        try:
            with _in_evaluation_mode(self._stages.values()):
                for item in self.program.items:
                    assert isinstance(item, Compute)
                    doing = f"F({item.stage},{item.microbatch}) of an evaluation"
                    loss = self._forward(item, inputs or (), targets or ())
                    if loss is not None:
                        losses[item.microbatch] = loss
            self._reshard()
            self._transport.drain()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            self._failure.report(error, doing)
            self._transport.abort()
            first = self._failure.first
            assert first is not None
            raise first from first.__cause__
        if not is_last:
            return None
        total = torch.zeros((), device=self.device)
        for microbatch in range(count):
            total = total + losses[microbatch] / (denominator or count)
        return float(total)

    def _forward(self, item: Compute, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor | None:
        """One forward, and its output handed on; of the last stage the loss."""
        self._failure.check()
        if item.gives is not None:
            self._transport.before_giving(item.gives)
        self._transport.post(item.post)
        parcel = None if item.takes is None else self._transport.take(item.takes)
        if parcel is not None:
            parcel.hold.as_activation()
        self._transport.post(item.post_ahead)
        output = self._stages[item.stage](inputs[item.microbatch] if parcel is None else parcel.tensor)
        if item.gives is None:
            loss = self._loss_fn(output, targets[item.microbatch])
            if parcel is not None:
                parcel.hold.release()
            return loss
        output = output.detach().contiguous()
        if output.untyped_storage()._cdata in self._kept:
            output = output.clone()  # a parameter, or the batch, handed on: its memory is not to be written to
        checks.check_output(item.stage, item.microbatch, output, self._boundaries[item.stage])
        # Held before the input is let go: a stage may hand on what it was given.
        hold = self.ledger.hold(output)
        if parcel is not None:
            parcel.hold.release()
        self._transport.give(item.gives, Parcel(output, hold))
        return None

    def _reshard(self) -> None:
        """Let go of parameters that FSDP has gathered: an optimiser may step before they are used again."""
        for stage in self._stages.values():
            for part in stage.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def close(self) -> None:
        """End the threads. Twice does no harm."""
        self._transport.close()


@contextmanager
def _in_evaluation_mode(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Every module goes back to the mode that it was in: a part may have been in evaluation mode all along."""
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
