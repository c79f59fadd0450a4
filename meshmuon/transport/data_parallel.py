"""Collectives of data parallel training without a wrapper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["averaged", "broadcast"]


def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The mean of each tensor over the ranks of ``group``; all reductions are started before the first is waited for."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    pending = [dist.all_reduce(copy, group=group, async_op=True) for copy in copies]
    for work in pending:
        if work is not None:
            work.wait()
    return [copy.div_(dist.get_world_size(group)) for copy in copies]


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Gives every rank of ``group`` what rank ``source`` has in ``tensor``."""
    flat = tensor.contiguous()
    dist.broadcast(flat, source, group=group)
    if flat is not tensor:
        tensor.copy_(flat)
