"""Groups of some of the ranks: whoever is in which of them, all find each other. gloo stands in for NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runtime import gather, groups, optimizer
from runtime.gradients import Copy, TiedWeights
from runtime.groups import Wanted
from runtime.nccl import connect_links
from runtime.program import Link
from tests.pipelines import in_processes


def links_of(places: list[int]) -> list[Link]:
    """Those of a plan whose stage s is on device ``places[s]``."""
    pairs = [(places[s], places[s + 1]) for s in range(len(places) - 1) if places[s] != places[s + 1]]
    return sorted({Link(a, b, False) for a, b in pairs} | {Link(b, a, True) for a, b in pairs})


def carry(rank: int, ranks: list[int], places: list[int]) -> int:
    """Connect a plan's links and send over each of them, all at once; how many groups there are now."""
    number, cpu = ranks.index(rank), torch.device("cpu")
    links = links_of(places)
    found = connect_links(links, ranks, number, cpu, "gloo")
    assert set(found) == {link for link in links if number in (link.sender, link.receiver)}
    assert len({id(group) for group in found.values()}) == len(found), "a group a link"
    works, buffers = [], {}
    for n, link in enumerate(links):
        if link.sender == number:
            works.append(dist.isend(torch.tensor(float(n)), ranks[link.receiver], group=found[link]))
        elif link.receiver == number:
            buffers[n] = torch.zeros(())
            works.append(dist.irecv(buffers[n], ranks[link.sender], group=found[link]))
    for work in works:
        work.wait()
    assert all(float(buffer) == n for n, buffer in buffers.items())
    return len(dist.distributed_c10d._world.pg_map)


def one_pipeline(rank: int, count: int) -> list[int]:
    """A line, then other plans in the same processes: the same links, a V, a ring."""
    ranks, line = list(range(count)), list(range(count))
    return [carry(rank, ranks, places) for places in (line, line, line + line[::-1], line + line)]


@pytest.mark.parametrize("count", [3, 4])
def test_links_of_any_pipeline_connect_and_later_plans_use_them_again(count: int) -> None:
    for rank, (first, again, v, ring) in enumerate(in_processes(count, one_pipeline)):
        ends = 1 if rank in (0, count - 1) else 2
        assert first == again == 1 + 2 * ends, "the world, and what goes each way over each end"
        assert v == 1 + 4 * ends and ring > first


def side_by_side(rank: int, count: int) -> list[int]:
    """Pipelines of two lengths, whose ranks are in turn; then one of all ranks, backwards."""
    ranks = [0, 2, 3] if rank in (0, 2, 3) else [4, 1]
    found = [carry(rank, ranks, list(range(len(ranks)))) for _ in range(2)]
    return [*found, carry(rank, list(range(count))[::-1], list(range(count)))]


def test_pipelines_side_by_side_connect() -> None:
    for first, again, whole in in_processes(5, side_by_side):
        assert first == again < whole


def tie(rank: int, shared: list[list[int]]) -> list[float]:
    """Weights that the given ranks share, each of them twice; their gradients are 2 to the rank."""
    module = nn.ParameterDict({str(n): nn.Parameter(torch.tensor(float(rank))) for n in range(len(shared))})
    tied = TiedWeights(
        [[Copy(owner, str(n)) for owner in owners] for n, owners in enumerate(shared)], {rank: module}, range(8)
    )
    for parameter in module.parameters():
        parameter.grad = torch.tensor(2.0**rank)
    tied.finish()
    for n, owners in enumerate(shared):
        if rank in owners:
            assert float(module[str(n)]) == owners[0], "copies start as the first one is"
            assert tied.counts(module[str(n)]) == (rank == owners[0])
    return [float(parameter.grad) for parameter in module.parameters()]


def tied_among_three(rank: int, _: int) -> list[list[float]]:
    return [tie(rank, shared) for shared in ([[0, 2], [1, 2]], [[0, 2], [1, 2]], [[2, 1], [0, 1, 2], [1, 0]])]


def test_weights_that_three_ranks_share_in_pairs() -> None:
    pairs = {0: [5.0, 1.0], 1: [2.0, 6.0], 2: [5.0, 6.0]}
    then = {0: [1.0, 7.0, 3.0], 1: [6.0, 7.0, 3.0], 2: [6.0, 7.0, 4.0]}
    found = in_processes(3, tied_among_three)
    assert found == [[pairs[rank], pairs[rank], then[rank]] for rank in range(3)]


def tied_in_two_pipelines(rank: int, _: int) -> list[list[float]]:
    """Two pipelines of two ranks, of which only one shares at first; then each does, and then all of them."""
    first = tie(rank, [[0, 1]] if rank < 2 else [])
    second = tie(rank, [[0, 1]] if rank < 2 else [[3, 2]])
    return [first, second, tie(rank, [[0, 3], [1, 2], [3, 1]])]


def test_pipelines_need_not_share_the_same_weights() -> None:
    found = in_processes(4, tied_in_two_pipelines)
    assert [row[0] for row in found] == [[3.0], [3.0], [], []]
    assert [row[1] for row in found] == [[3.0], [3.0], [12.0], [12.0]]
    assert [row[2] for row in found] == [[9.0, 1.0, 1.0], [2.0, 6.0, 10.0], [4.0, 6.0, 4.0], [9.0, 8.0, 10.0]]


def one_world_after_another(rank: int, count: int) -> list[bool]:
    pair, store = Wanted("test", (0, 2)), dist.distributed_c10d._get_default_store()
    found = [groups.make([pair] if rank != 1 else []).get(pair)]
    found.append(groups.make([pair] if rank != 1 else []).get(pair))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=count)
    found.append(groups.make([pair] if rank != 1 else []).get(pair))
    if rank != 1:
        dist.all_reduce(torch.ones(1), group=found[-1])
    return [found[0] is found[1], found[0] is found[2]]


def test_groups_go_with_their_world() -> None:
    assert in_processes(3, one_world_after_another) == [[True, False], [True, True], [True, False]]


def without_host_tensors(rank: int, count: int) -> tuple[object, list[list[float]], float, float]:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    # As a world of plain NCCL: nothing carries tensors on the host.
    dist.init_process_group("cuda:gloo", store=dist.PrefixStore("gpus", store), rank=rank, world_size=count)
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.zeros(1))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), float(rank + 1))
    gather.barrier()
    norm = optimizer.clip([weight], 0.5, halves[rank // 2])
    found = gather.objects([rank]), gather.numbers([0.5 * rank]), norm, gather.exact_sum([float(rank)])
    gather.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=count)
    return found


def test_a_world_for_gpus_alone_will_do() -> None:
    """Another program's own loop may have set up NCCL and nothing else."""
    found = in_processes(4, without_host_tensors)
    for rank, (objects, numbers, norm, total) in enumerate(found):
        assert objects == [[0], [1], [2], [3]]
        assert numbers == [[0.0], [0.5], [1.0], [1.5]]
        assert norm == pytest.approx((2 * (1 + 4) if rank < 2 else 2 * (9 + 16)) ** 0.5)
        assert total == 6.0
