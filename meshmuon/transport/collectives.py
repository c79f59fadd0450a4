"""Small collectives over a process group: means, maxima, broadcasts, and one object from every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .channels import channel_of, gathered_bytes, reduce, seconds_of, spread
from .failures import named_phase, wait_for
from .plain_data import from_bytes, to_bytes

_T = TypeVar("_T")


def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The mean of each tensor over the ranks of ``group``; all reductions start before the first is waited for."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with named_phase("averaging of AdamW's gradients", group):
        channel_of(group)
        pending = [dist.all_reduce(copy, group=group, async_op=True) for copy in copies]
        for work, copy in zip(pending, copies, strict=True):
            if work is not None:
                wait_for(work, copy, group)
    return [copy.div_(dist.get_world_size(group)) for copy in copies]


def all_gather_objects(value: _T, group: dist.ProcessGroup, *, phase: str = "agreement") -> dict[int, _T]:
    """Rank → its ``value``, which must be plain data (``plain_data.py``); ``phase`` names it in errors."""
    with named_phase(phase, group):
        channel = channel_of(group)
        if channel is not None:
            return channel.all_gather(value, seconds_of(group))
        ranks = dist.get_process_group_ranks(group)
        values: list[Any] = [from_bytes(message)[0] for message in gathered_bytes(to_bytes([value]), group)]
    return dict(zip(ranks, values, strict=True))


def reduce_largest(packed: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces each number of ``packed`` by its maximum over the ranks; the host does not wait for a device.

    ``packed`` must not contain NaN: what its maximum is depends on the backend.
    """
    with named_phase("reduction of the largest attention logits", group):
        reduce(packed, group, dist.ReduceOp.MAX)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrites ``tensor`` on every rank of ``group`` with what rank ``source`` has in it."""
    flat = tensor.contiguous()
    with named_phase("moving of momentum", group):
        spread(flat, source, group)
    if flat is not tensor:
        tensor.copy_(flat)
