"""The ragged exchange: every rank may send a different number of elements to every other rank, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_compat import first_told
from .collectives import all_gather_objects, maximum, reduce_largest, reduce_sum
from .failures import hang_up, named_phase, wait_for

_T = TypeVar("_T")
WARM_UP = "warm-up exchange"


@dataclass(frozen=True, slots=True)
class Pending:
    """An exchange that has started, and what errors call it: ``"gather"`` or ``"scatter"``."""

    work: dist.Work
    received: Tensor
    phase: str
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Work that is issued after this call sees the received elements. On a GPU the host does not block."""
        with named_phase(self.phase, self.group):
            wait_for(self.work, self.received, self.group)


class Exchange:
    """Asynchronous all-to-all between the ranks of one process group, which holds all ranks of a plan.

    Who calls it, and when:

    1. ``splits``: a ``StepExecutor`` while it prepares a plan, on any rank, any number of times. It does not
       communicate.
    2. ``reduce_largest``: the optimizer, at most once per step, before any ``start`` of it, on all ranks of the group
       or none.
    3. ``add_up``: the optimizer, at most once per step, after the last ``wait`` of it, on all ranks of the group or
       none.
    4. ``start``: a ``StepExecutor`` while it runs, at every step. All ranks of the group start the same exchanges in
       the same order, also those in which a rank sends and receives nothing: the n-th exchange of one rank meets the
       n-th of every other. What a rank sends to another must be as long as what the other expects from it; the plan
       guarantees that.
    5. ``Pending.wait``: once for each ``start`` on each rank, in any order. Until then the two buffers must not be
       touched.
    6. ``tell``: a ``StepExecutor`` while it runs, between the ``start`` of a scatter and its use, on all ranks or none.
    7. ``warm_up``: a ``StepExecutor``, at most once per plan, before its first ``start``, on all ranks of the group or
       none.
    8. ``abandon``: the optimizer, on a rank that fails between its first ``start`` and its last ``wait`` of a step. The
       group cannot be used after that.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)  # in the order of the group

    def splits(self, counts: Mapping[int, int]) -> list[int]:
        """Elements per rank of the group, in its order: {0: 6, 2: 12} over four ranks is [6, 0, 12, 0]."""
        return [counts.get(rank, 0) for rank in self.ranks]

    def start(
        self, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int], *, phase: str
    ) -> Pending:
        """Starts an exchange between flat buffers; ``phase`` names it in errors."""
        with named_phase(phase, self._group):
            work: dist.Work | None = dist.all_to_all_single(
                received, sent, received_splits, sent_splits, group=self._group, async_op=True
            )
        assert work is not None
        return Pending(work, received, phase, self._group)

    def reduce_largest(self, value: Tensor) -> None:
        """Replaces ``value`` by its maximum over the ranks, on its device; the host does not wait."""
        reduce_largest(value, self._group, phase="agreement")

    def add_up(self, values: Tensor) -> None:
        """Replaces ``values`` by their sums over the ranks, on their device; the host does not wait."""
        reduce_sum(values, self._group, phase="reduction of metrics")

    def tell(self, entries: list[_T]) -> dict[int, list[_T]]:
        """Rank → its ``entries``; empty if no rank has any, which takes one small vote in host memory."""
        with named_phase("scatter", self._group):
            (most,) = maximum((len(entries),), self._group)
        return all_gather_objects(entries, self._group) if most else {}

    def warm_up(self, received_splits: list[int], sent_splits: list[int], device: torch.device, attempt: int) -> None:
        """Exchanges one number with each rank whose split is not 0, and reduces one over all: what connects lazily does
        so here.

        The host waits until all has arrived. If a rank fails, all raise the same error, that of the first one to fail:
        it leaves its reason in the store of the process group, under the number of this ``attempt``, before its
        connections are closed.
        """
        own, group = dist.get_rank(), self._group
        arriving, leaving = ([min(1, count) for count in counts] for counts in (received_splits, sent_splits))
        with named_phase(WARM_UP, group):
            try:
                largest = torch.full((1,), float(own), device=device)
                sent, received = largest.repeat(sum(leaving)), torch.full((sum(arriving),), -1.0, device=device)
                wait_for(
                    dist.all_to_all_single(received, sent, arriving, leaving, group=group, async_op=True),
                    received,
                    group,
                )
                arrived, expected = received.tolist(), [rank for rank, n in zip(self.ranks, arriving, strict=True) if n]
                wait_for(dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True), largest, group)
                if arrived != expected or largest.item() != max(self.ranks):
                    raise RuntimeError(f"{arrived} has arrived from ranks {expected}")
                all_gather_objects(None, group, phase=WARM_UP)  # no rank returns before all have received theirs
            except Exception as error:
                reason = f"rank {own} of {self.ranks}: {type(error).__name__}: {error}"
                raise RuntimeError(first_told(f"meshmuon {WARM_UP} {attempt}", reason)) from error

    def abandon(self) -> None:
        """Called by a rank that leaves a step after the ranks have agreed on it: those that wait for it get an error at
        once.

        Where the backend cannot tell them, they wait for their timeout.
        """
        hang_up(self._group)
