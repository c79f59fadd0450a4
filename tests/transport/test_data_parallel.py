"""What data-parallel ranks tell each other outside of waves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshmuon.transport import broadcast
from tests.support.threads import run_threads


def test_a_part_that_is_not_contiguous_is_broadcast_in_place() -> None:
    """Some columns of a weight, as the parts of a fused one: torch broadcasts a copy, which must go back."""

    def main(rank: int) -> torch.Tensor:
        whole = torch.full((3, 6), float(rank))
        part = whole[:, 1:4]
        assert not part.is_contiguous()
        group = dist.group.WORLD
        assert group is not None
        broadcast(part, 1, group)
        return whole

    for rank, found in enumerate(run_threads(3, main)):
        expected = torch.full((3, 6), float(rank))
        expected[:, 1:4] = 1.0
        assert torch.equal(found, expected)
