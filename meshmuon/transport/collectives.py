"""Small collectives over a process group: means, maxima, broadcasts, and one object from every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .channels import channel_of, seconds_of
from .failures import named_phase

_T = TypeVar("_T")


def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The mean of each tensor over the ranks of ``group``; all reductions start before the first is waited for."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with named_phase("averaging of AdamW's gradients", group):
        pending = [dist.all_reduce(copy, group=group, async_op=True) for copy in copies]
        for work in pending:
            if work is not None:
                work.wait()
    return [copy.div_(dist.get_world_size(group)) for copy in copies]


def all_gather_objects(value: _T, group: dist.ProcessGroup, *, phase: str = "agreement") -> dict[int, _T]:
    """Rank → its ``value``; through host memory, whatever the backend. ``phase`` names it in errors."""
    with named_phase(phase, group):
        channel = channel_of(group)
        if channel is not None:
            return channel.all_gather(value, seconds_of(group))
        ranks = dist.get_process_group_ranks(group)
        values: list[Any] = [None] * len(ranks)
        dist.all_gather_object(values, value, group=group)
    return dict(zip(ranks, values, strict=True))


def reduce_largest(packed: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces each number of ``packed`` by its maximum over the ranks; the host does not wait for a device.

    ``packed`` must not contain NaN: what its maximum is depends on the backend.
    """
    with named_phase("reduction of the largest attention logits", group):
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrites ``tensor`` on every rank of ``group`` with what rank ``source`` has in it."""
    flat = tensor.contiguous()
    with named_phase("moving of momentum", group):
        dist.broadcast(flat, source, group=group)
    if flat is not tensor:
        tensor.copy_(flat)
