"""Maxima over ranks: one packed all-reduce."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .data_parallel import everyone
from .failures import named_phase
from .groups import host_group

__all__ = ["everyone_on_host", "reduce_largest"]


def reduce_largest(packed: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces each number of ``packed`` by its maximum over the ranks; the host does not wait for a device.

    ``packed`` must not contain NaN: what its maximum is depends on the backend.
    """
    with named_phase("reduction of the largest attention logits", group):
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)


def everyone_on_host(fact: object, group: dist.ProcessGroup) -> dict[int, object]:
    """Rank → its ``fact``, through host memory."""
    with named_phase("agreement on attention layers"):
        return everyone(fact, host_group(group))
