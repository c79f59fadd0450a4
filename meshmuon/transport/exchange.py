"""The ragged exchange: every rank sends a different number of elements to every other, none of them padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .failures import hang_up, named_phase

__all__ = ["Exchange", "Pending"]


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange under way, and the phase of the step that it belongs to."""

    work: dist.Work
    phase: str
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Makes what is issued next see the received elements; on a GPU without stopping the host."""
        with named_phase(self.phase, self.group):
            self.work.wait()


class Exchange:
    """Asynchronous all-to-all over one group. Exchanges must be started in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def splits(self, counts: Mapping[int, int]) -> list[int]:
        """Elements per rank of the group, in its order, from a table that leaves out zeros."""
        return [counts.get(rank, 0) for rank in self._ranks]

    def start(self, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int], *, phase: str) -> Pending:
        """Starts an exchange between flat buffers, which must stay untouched until it has been waited for."""
        with named_phase(phase, self._group):
            work: dist.Work | None = dist.all_to_all_single(
                received, sent, received_splits, sent_splits, group=self._group, async_op=True
            )
        assert work is not None
        return Pending(work, phase, self._group)

    def largest(self, value: Tensor) -> None:
        """Replaces ``value`` on its device by its largest over the ranks; the host does not wait for a device."""
        with named_phase("agreement", self._group):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)

    def abandon(self) -> None:
        """This rank leaves a step in the middle: the ranks that wait for it hear at once, where the group can tell them."""
        hang_up(self._group)
