"""The ragged exchange: every rank sends a different number of elements to every other, none of them padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["Exchange", "Pending"]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Makes what is issued next see the received elements; on a GPU without stopping the host."""
        ...


class Exchange:
    """Asynchronous all-to-all over one group. Exchanges must be started in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def splits(self, counts: Mapping[int, int]) -> list[int]:
        """Elements per rank of the group, in its order, from a table that leaves out zeros."""
        return [counts.get(rank, 0) for rank in self._ranks]

    def start(self, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int]) -> Pending:
        """Starts an exchange between flat buffers, which must stay untouched until it has been waited for."""
        work: Pending | None = dist.all_to_all_single(
            received, sent, received_splits, sent_splits, group=self._group, async_op=True
        )
        assert work is not None
        return work
