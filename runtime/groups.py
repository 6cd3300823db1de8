"""Process groups of some of the ranks.

All ranks of the world make them together, those that are in none too. torch could leave it to the members
(``use_local_synchronization``), but names such a group after the number of groups that a process has already: ranks
that have different groups do not name the next one alike, and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from runtime import gather


class Wanted(NamedTuple):
    """A group by what it is for and its global ranks, ascending."""

    purpose: str
    ranks: tuple[int, ...]


# Communicators cost memory and time: who wants the same group again gets it. The same keys on every rank, with None
# where this one is no member. Of one world: of another one none of them is left.
_made: dict[dist.ProcessGroup, dict[Wanted, dist.ProcessGroup | None]] = {}


def make(wanted: Iterable[Wanted], backend: str | None = None) -> dict[Wanted, dist.ProcessGroup]:
    """The groups that this rank wants; all ranks of the world call it together, each with those that it is in.

    Parameters
    ----------
    wanted
        All members want a group, with the same words.
    backend
        Of all of them; default the world's.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _made:
        _made.clear()
    made = _made.setdefault(world, {})
    mine = sorted(set(wanted))
    # Replicas want other groups than this rank's pipeline: one order of all of them, on all ranks.
    anywhere = {Wanted(purpose, tuple(ranks)) for rank in gather.objects(mine) for purpose, ranks in rank}
    for key in sorted(anywhere - made.keys()):
        group = dist.new_group(list(key.ranks), backend=backend, group_desc=key.purpose)
        made[key] = group if dist.get_rank() in key.ranks else None
    return {key: group for key in mine if (group := made[key]) is not None}


def on_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself, or one of the same ranks on gloo where it does not carry what is on the host; all ranks of the
    world call it together, each with a group that it is in."""
    if gather.carries_host_tensors(group):
        return group
    wanted = Wanted("small things", tuple(sorted(dist.get_process_group_ranks(group))))
    return make([wanted], "gloo")[wanted]
