"""Groups that meshmuon makes itself."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_name

from meshmuon.transport import exchange_group, groups
from tests.support.threads import run_threads


def test_a_group_of_some_ranks_leaves_the_names_of_later_groups_alone() -> None:
    """torch counts the groups that a process knows: members of a new group and other ranks must go on with the same
    count.
    """

    def main(rank: int) -> list[str]:
        if rank < 2:
            exchange_group((0, 1), [])
        return [_process_group_name([0, 2], use_hashed_name=hashed) for hashed in (True, False)]

    names = run_threads(3, main)
    assert names[0] == names[1] == names[2]


def test_groups_are_shut_down_with_the_default_group() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group, ended = groups._new_group([0]), list[str]()
    weakref.finalize(group, ended.append, "freed")
    del group
    gc.collect()
    assert ended == []
    dist.destroy_process_group()
    gc.collect()
    assert ended == ["freed"]


def test_two_groups_of_the_same_ranks_do_not_meet_under_one_name() -> None:
    """A second optimizer, or one that is made anew, may need one more group of the same ranks and backend."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        made = [groups._new_group([0]) for _ in range(3)]
        assert len({group.group_name for group in made}) == 3
        for group in made:
            dist.all_reduce(torch.ones(1), group=group)
    finally:
        dist.destroy_process_group()
