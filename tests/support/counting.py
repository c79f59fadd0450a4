"""What goes through the process group: every ragged exchange is counted, rank by rank; and what a plan says of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from meshmuon import Muon
from meshmuon.plan.plan_data import PlanData
from meshmuon.transport import Exchange


class Wire:
    """Counts of what was sent and of what the plans said would be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: dict[int, int] = {}
        self.elements: dict[int, int] = {}
        self.nbytes: dict[int, int] = {}
        self.to_self: dict[int, int] = {}
        self.planned: dict[int, int] = {}

    def record(self, sent: Tensor, splits: list[int], group: Any) -> None:
        rank = dist.get_rank()
        own = splits[dist.get_group_rank(group, rank)]
        others = sum(splits) - own
        assert sent.numel() == sum(splits), "the buffer is not what the splits say"
        with self._lock:
            for table, amount in (
                (self.calls, 1),
                (self.elements, others),
                (self.nbytes, others * sent.element_size()),
                (self.to_self, own),
            ):
                table[rank] = table.get(rank, 0) + amount

    def watch(self, optimizer: Muon) -> set[int]:
        """After each step: what its plan says that this rank sent, in all waves with a parameter that was stepped."""
        rank, plan, idle = dist.get_rank(), optimizer.plan(), optimizer._planner._decision.idle
        waves = {task.wave for task in plan.tasks if task.param not in idle}
        tasks = tuple(task for task in plan.tasks if task.wave in waves)
        stepped = PlanData(plan.ranks, plan.params, tasks, plan.wave_lanes, plan.options)
        with self._lock:
            self.planned[rank] = self.planned.get(rank, 0) + stepped.bytes_sent.get(rank, 0)
        return waves

    def check(self, rank: int) -> None:
        assert self.nbytes.get(rank, 0) == self.planned.get(rank, 0), (
            f"rank {rank}: bytes sent and bytes planned differ"
        )
        assert self.to_self.get(rank, 0) == 0, f"rank {rank} sends to itself"


@contextmanager
def counted() -> Iterator[Wire]:
    """Counts the ragged exchanges of all ranks of this process, without those of ``prepare()``."""
    wire, this_rank = Wire(), threading.local()
    original, warm_up = dist.all_to_all_single, Exchange.warm_up

    def uncounted(*args: Any) -> None:
        this_rank.warms_up = True
        warm_up(*args)
        this_rank.warms_up = False

    def counting(
        output: Tensor, sent: Tensor, output_splits: list[int], splits: list[int], *, group: Any, async_op: bool
    ) -> Any:
        if not getattr(this_rank, "warms_up", False):
            wire.record(sent, splits, group)
        return original(output, sent, output_splits, splits, group=group, async_op=async_op)

    with patch.object(dist, "all_to_all_single", counting), patch.object(Exchange, "warm_up", uncounted):
        yield wire


def bytes_sent(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes that it sends in a step of ``Muon``, or of ``DistMuon``, which ``averages`` gradients at the
    owners.
    """
    if not averages:
        return plan.bytes_sent
    total = dict.fromkeys(plan.ranks, 0)
    for wave in plan.traffic:  # gradients take the way of the weights, backwards
        for rank, sent, received in zip(plan.ranks, wave.scatter.sent, wave.scatter.received, strict=True):
            total[rank] += sent + received
    return total


def buffer_bytes(plan: PlanData, *, averages: bool) -> dict[int, int]:
    """Rank → bytes of its exchange buffers. ``DistMuon`` has buffers for all waves at once, and for the averages of
    one.
    """
    if not averages:
        return {rank: plan.buffer_bytes(rank) for rank in plan.ranks}
    averaged = [dict.fromkeys(plan.ranks, 0) for _ in plan.wave_lanes]
    for task in plan.tasks:
        averaged[task.wave][task.owner] += task.sharded.size * plan.params[task.param].itemsize
    sent = bytes_sent(plan, averages=True)
    return {rank: sent[rank] + max((wave[rank] for wave in averaged), default=0) for rank in plan.ranks}
