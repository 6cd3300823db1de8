"""Layers into stages: the partition found is the best there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe import partition


def best_by_trying_all(costs: list[float], stage_devices: list[int]) -> float:
    stages, layers = len(stage_devices), len(costs)
    edges = ([0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1))
    return min(partition.load(costs, [b - a for a, b in pairwise(e)], stage_devices) for e in edges)


def placements(stages: int) -> list[list[int]]:
    linear = list(range(stages))
    v = [min(stage, stages - 1 - stage) for stage in linear]
    interleaved = [stage % ((stages + 1) // 2) for stage in linear]
    return [linear, v, interleaved, [stage // 2 for stage in linear]]


cost = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 2.0]), st.floats(0, 10))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(cost, min_size=1, max_size=9))
def test_no_partition_has_a_smaller_largest_load(data: st.DataObject, costs: list[float]) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    devices = data.draw(st.sampled_from(placements(stages)))
    counts = partition.balanced(costs, devices)
    assert len(counts) == stages
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert partition.load(costs, counts, devices) == pytest.approx(best_by_trying_all(costs, devices))


def test_equal_layers_are_split_evenly() -> None:
    assert partition.balanced([1.0] * 12, [0, 1, 2, 3]) == [3, 3, 3, 3]
    assert partition.balanced([1.0] * 12, [0, 1, 1, 0]) == [3, 3, 3, 3]


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert partition.balanced([1, 1, 1, 1, 1, 3], [0, 1]) == [4, 2]


@settings(max_examples=3, deadline=None)
@given(st.lists(st.floats(0.9, 1.1), min_size=98, max_size=98))
def test_a_large_model_gets_a_near_perfect_v_though_the_search_is_cut_short(costs: list[float]) -> None:
    devices = [min(stage, 15 - stage) for stage in range(16)]
    load = partition.load(costs, partition.balanced(costs, devices), devices)
    assert load <= sum(costs) / 8 + max(costs)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        partition.balanced([1, 1], [0, 1, 2])
