"""Ranks have their places as the mesh of all ranks has them."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from optpipe.config import Config
from runtime.place import DIMENSIONS, Place

COUNTS = st.integers(1, 3)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_places_are_those_of_the_mesh(replicas: int, shards: int, devices: int, tensor: int) -> None:
    assert DIMENSIONS == ("data", "shard", "pipeline", "tensor")
    shape = replicas, shards, devices, tensor
    mesh = torch.arange(replicas * shards * devices * tensor).reshape(shape)
    for data, shard, device, part in product(*map(range, shape)):
        rank = int(mesh[data, shard, device, part])
        place = Place(devices, replicas * shards, shards, tensor, rank)
        assert place.device == device == place.device_of(rank)
        assert place.pipeline == data * shards + shard
        assert place.ranks == mesh[data, shard, :, part].tolist()
        assert place.of_first(range(mesh.numel())) == mesh[0, 0, :, 0].tolist()
        assert place.copies == mesh.numel() // devices


def test_a_single_pipeline_needs_no_mesh() -> None:
    place = Place.of(1, Config.from_json({"pipeline": {"devices": 3}}, "some.yaml"), torch.device("cpu"))
    assert place.mesh is None and place.group("pipeline") is None
    assert (place.device, place.ranks, place.copies, place.is_sharded) == (1, [0, 1, 2], 1, False)
