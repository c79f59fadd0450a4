"""Groups that meshmuon makes itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshmuon.transport import groups


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
