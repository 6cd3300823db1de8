"""Data parallel around the pipeline, on torch's own parts: several pipelines, each with a part of the batch.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "pipeline"))

             pipeline -->
    data     rank 0   rank 1   rank 2   rank 3        one pipeline, devices 0 to 3 of its plan
      |      rank 4   rank 5   rank 6   rank 7        another one, with another part of the batch
      v

The ranks of a column hold the same stages, and share gradients once a stage has those of all its microbatches, while
other stages still compute. ``Replicas`` keeps whole parameters everywhere, as DDP does. ``Shards`` is for stages under
FSDP2: each rank keeps a part, and gathers the rest for the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from runtime import batch_norm

#: Gradients travel in pieces of about so many bytes, as in DDP.
BUCKET_BYTES = 25 << 20
#: A forward method that FSDP stages are given.
_LAST = "forward_of_nothing"


def ranks_of(mesh: DeviceMesh, name: str) -> list[int]:
    """The global ranks along a dimension of a mesh, of this rank's row: an executor's ``ranks``, say."""
    return [int(rank) for rank in mesh[name].mesh.flatten()]


class Replicas:
    """Mean gradients over replicas that keep whole parameters. BatchNorm's averages move by the batch of all replicas;
    other buffers are each replica's own.

    All ranks of the group construct it together; parameters and buffers become those of its first rank.

    Parameters
    ----------
    stages
        This rank's stages by number.
    group
        The ranks that hold the same stages: ``mesh.get_group("data")``.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: dist.ProcessGroup) -> None:
        self._stages, self._group = dict(stages), group
        self._size, first = dist.get_world_size(group), dist.get_process_group_ranks(group)[0]
        # The last stage goes first. One order for all replicas, in which they send the same, though their stages may
        # be ready in different ones: each may have to make room for itself.
        self._order = sorted(self._stages, reverse=True)
        self._parameters = _by_last_stage(self._stages, self._order)
        self._left: list[int] = []
        self._ready: set[int] = set()
        self._under_way: list[tuple[Any, Tensor, list[Tensor]]] = []
        with torch.no_grad():
            for tensor in _once(stages.values()):
                dist.broadcast(_local(tensor), first, group=group)

    def begin(self) -> None:
        self._left, self._ready = list(self._order), set()

    @torch.no_grad()
    def ready(self, stage: int) -> None:
        self._ready.add(stage)
        while self._left and self._left[0] in self._ready:
            for gradients in _buckets(_gradients(self._parameters[self._left.pop(0)])):
                flat = _flatten_dense_tensors(gradients)  # of one gradient: that itself, which is whole by now
                work = dist.all_reduce(flat, group=self._group, async_op=True)
                self._under_way.append((work, flat, gradients))

    @torch.no_grad()
    def finish(self) -> None:
        while self._under_way:
            work, flat, gradients = self._under_way.pop(0)
            work.wait()
            flat.div_(self._size)
            for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(mean)
        batch_norm.share(self._stages.values(), self._group)


class Shards:
    """Stages under FSDP2 (``fully_shard`` on each stage's module, and on parts of it as one likes).

    Parameters are gathered at the start of a run and stay for all its microbatches; after the last backward of a stage
    its gradients are reduced and scattered, and its parameters go. So activations are all that an offload has to move.

    Parameters
    ----------
    stages
        This rank's stages by number, each an ``FSDPModule``.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._stages: dict[int, FSDPModule] = {}
        for number, module in stages.items():
            if not isinstance(module, FSDPModule):
                raise TypeError(f"stage {number} is a {type(module).__name__}, expected one after fully_shard")
            self._stages[number] = module
            # Through it goes a backward that belongs to no microbatch. Another executor may have made it.
            if not hasattr(module, _LAST):
                setattr(module, _LAST, _identity)
                register_fsdp_forward_method(module, _LAST)

    def begin(self) -> None:
        for module in self._stages.values():
            self._is_last(module, False)
            module.set_reshard_after_forward(False)
            for part in _parts(module):
                part.unshard()

    @torch.enable_grad()
    def ready(self, stage: int) -> None:
        # FSDP reduces within a backward, but a stage's gradients are whole only after its last W. So it gets one more
        # backward, of nothing: as it ends FSDP reduces the gradients of all of the stage's parts.
        module = self._stages[stage]
        self._is_last(module, True)
        nothing = torch.zeros((), device=_device(module), requires_grad=True)
        getattr(module, _LAST)(nothing).backward()

    @staticmethod
    def _is_last(module: FSDPModule, last: bool) -> None:
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)

    def finish(self) -> None:
        pass


def _identity(x: Tensor) -> Tensor:
    return x


def _device(module: FSDPModule) -> torch.device:
    assert isinstance(module, nn.Module)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _parts(module: FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(module, nn.Module)
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _once(stages: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once, though stages may share them."""
    found = (tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
    return list(dict.fromkeys(found))


def _by_last_stage(stages: Mapping[int, nn.Module], order: Iterable[int]) -> dict[int, list[nn.Parameter]]:
    """Each parameter once, though stages may share it: under the last one in ``order`` that holds it."""
    stage_of = {parameter: number for number in order for parameter in stages[number].parameters()}
    found: dict[int, list[nn.Parameter]] = {number: [] for number in stages}
    for parameter, number in stage_of.items():
        found[number].append(parameter)
    return found


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Of all that are trained, so that replicas send the same; zeros where there is none."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield _local(parameter.grad)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, and of about ``BUCKET_BYTES``."""
    open_: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = open_.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(part.nbytes for part in bucket) >= BUCKET_BYTES:
            yield open_.pop(gradient.dtype)
    yield from open_.values()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
