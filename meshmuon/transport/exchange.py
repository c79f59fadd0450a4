"""The ragged exchange: every rank may send a different number of elements to every other rank, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .failures import hang_up, named_phase


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange that has started, and what errors call it: ``"gather"`` or ``"scatter"``."""

    work: dist.Work
    phase: str
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Work that is issued after this call sees the received elements. On a GPU the host does not block."""
        with named_phase(self.phase, self.group):
            self.work.wait()


class Exchange:
    """Asynchronous all-to-all between the ranks of one process group, which holds all ranks of a plan.

    Who calls it, and when:

    1. ``splits``: a ``StepExecutor`` while it prepares a plan, on any rank, any number of times. It does not communicate.
    2. ``reduce_largest``: the optimizer, at most once per step, before any ``start`` of it, on all ranks of the group or none.
    3. ``add_up``: the optimizer, at most once per step, after the last ``wait`` of it, on all ranks of the group or none.
    4. ``start``: a ``StepExecutor`` while it runs, at every step. All ranks of the group start the same exchanges in the same
       order, also those in which a rank sends and receives nothing: the n-th exchange of one rank meets the n-th of every other.
       What a rank sends to another must be as long as what the other expects from it; the plan guarantees that.
    5. ``Pending.wait``: once for each ``start`` on each rank, in any order. Until then the two buffers must not be touched.
    6. ``abandon``: the optimizer, on a rank that fails between its first ``start`` and its last ``wait`` of a step. The group
       cannot be used after that.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def splits(self, counts: Mapping[int, int]) -> list[int]:
        """Elements per rank of the group, in its order: {0: 6, 2: 12} over four ranks is [6, 0, 12, 0]."""
        return [counts.get(rank, 0) for rank in self._ranks]

    def start(self, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int], *, phase: str) -> Pending:
        """Starts an exchange between flat buffers; ``phase`` names it in errors."""
        with named_phase(phase, self._group):
            work: dist.Work | None = dist.all_to_all_single(
                received, sent, received_splits, sent_splits, group=self._group, async_op=True
            )
        assert work is not None
        return Pending(work, phase, self._group)

    def reduce_largest(self, value: Tensor) -> None:
        """Replaces ``value`` by its maximum over the ranks, on its device; the host does not wait."""
        with named_phase("agreement", self._group):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, in its order."""
        return self._ranks

    def add_up(self, values: Tensor) -> None:
        """Replaces ``values`` by their sums over the ranks, on their device; the host does not wait."""
        with named_phase("reduction of metrics", self._group):
            dist.all_reduce(values, group=self._group)

    def abandon(self) -> None:
        """Leaves a step half done. Ranks that wait for this one get an error at once, where the backend can tell them."""
        hang_up(self._group)
