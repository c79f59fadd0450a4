"""Ranks agree on what they are about to do: one small reduction in host memory per step, no wait for a device."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from .data_parallel import everyone

__all__ = ["Agreement"]

_T = TypeVar("_T")


class Agreement:
    """Compares a number over the ranks of a group, and collects what differs when it does."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        with torch.inference_mode(False):  # made inside inference_mode it could never be written outside
            self._word = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.ranks = dist.get_process_group_ranks(group)

    def start(self, token: int) -> dist.Work:
        """Starts comparing ``token``, a number below 2**62; every rank of the group must."""
        self._word[0], self._word[1] = token, -token
        work: dist.Work | None = dist.all_reduce(self._word, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return work

    def unanimous(self, work: dist.Work) -> bool:
        """Whether all ranks started with the same token."""
        work.wait()
        return bool(self._word[0] == -self._word[1])

    def everyone(self, fact: _T) -> dict[int, _T]:
        """Every rank's ``fact``; slow, for when ranks disagree."""
        return everyone(fact, self._group)
