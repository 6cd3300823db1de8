"""A hardware description: what the arithmetic of an estimate needs to know of a cluster.

One device is what one rank computes on; figures are of one device, and of one direction of a link. ``configs/hardware``
has some descriptions, whose comments say which figure is from a data sheet and which is an assumption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from optpipe import files
from optpipe.problem import Bytes, Milliseconds
from optpipe.sections import Count, Listed, Positive, Section, groups_are_apart, wrong

#: A part of what a data sheet promises.
Share = Annotated[float, Field(gt=0, le=1)]


class Peak(Section):
    """Floating point operations a second of matrix products, by dtype, as a data sheet has them (without sparsity).

    The runtime trains in float32; the others are for who reads the file.
    """

    float32: Positive
    tfloat32: Positive | None = None
    float16: Positive | None = None
    bfloat16: Positive | None = None


class Network(Section):
    """A link between two devices, one way."""

    bytes_per_s: Positive
    latency_ms: Milliseconds


class HostLink(Section):
    """A device's link to host memory, as copies achieve it. ``half_duplex``: it carries one direction at a time.

    ``shared``: groups of devices of a node (from 0) behind one switch, which carries one transfer at a time a direction
    (one in all when half duplex).
    """

    d2h_bytes_per_s: Positive
    h2d_bytes_per_s: Positive
    half_duplex: bool = False
    shared: Listed[Listed[Annotated[int, Field(ge=0)]]] = ()


class Hardware(Section):
    """A cluster of equal devices, on nodes of equal size.

    Attributes
    ----------
    device
        What torch calls it.
    devices_per_node
        Ranks that share a machine: those with neighbouring numbers.
    peak_flops_per_s, matmul_efficiency
        Of matrix products, and the share of it that large ones achieve.
    memory_bytes_per_s, memory_efficiency
        Of the device's memory, and the share of it that simple kernels achieve.
    memory_bytes, reserve_bytes
        The device's memory, and what of it is for the workspace of kernels, for what the driver takes and the allocator
        cannot use.
    op_overhead_ms
        What each kernel takes besides, however small it is.
    within_node, between_nodes
        From device to device; None: there is one node only.
    host
        Each device's link to host memory.
    """

    name: str
    device: Literal["cpu", "cuda"]
    devices_per_node: Count
    peak_flops_per_s: Peak
    matmul_efficiency: Share
    memory_bytes_per_s: Positive
    memory_efficiency: Share
    memory_bytes: Bytes
    reserve_bytes: Bytes = 0
    op_overhead_ms: Milliseconds
    within_node: Network
    between_nodes: Network | None = None
    host: HostLink

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """The description in a YAML file.

        Raises
        ------
        InputError
            The file is missing, is not YAML, or anything in it is wrong.
        """
        return cls.from_json(files.read_yaml(path), path)

    @classmethod
    def from_json(cls, value: Any, file: str | Path, prefix: str = "") -> Hardware:
        """A description from what a file held (under the key ``prefix``).

        Raises
        ------
        InputError
            Anything in it is wrong.
        """
        return files.validated(cls, value, file, prefix)

    def to_json(self) -> dict[str, Any]:
        """The description as JSON, defaults written out."""
        return self.model_dump(mode="json")

    def node_of(self, rank: int) -> int:
        """The machine of a rank."""
        return rank // self.devices_per_node

    def switch_of(self, rank: int) -> tuple[int, int]:
        """What a rank's copies to the host go through, as (machine, number): the same for ranks behind one switch."""
        node, place = divmod(rank, self.devices_per_node)
        group = next((group for group in self.host.shared if place in group), (place,))
        return node, min(group)

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.reserve_bytes >= self.memory_bytes:
            raise wrong("reserve_bytes", f"{self.reserve_bytes} leaves nothing of memory_bytes, {self.memory_bytes}")
        groups_are_apart(self.host.shared, "host.shared")
        for index, group in enumerate(self.host.shared):
            if max(group) >= self.devices_per_node:
                most = self.devices_per_node - 1
                raise wrong(f"host.shared[{index}]", f"device {max(group)} does not exist, expected 0 to {most}")
        return self
