"""The simple way for verification: torch's own all-gather of whole tensors, and torch's own cut of the result."""

from __future__ import annotations

from torch import Tensor

from ..torch_compat import as_dtensor
from .failures import named_phase

__all__ = ["has_part", "own_shard", "whole"]


def has_part(tensor: Tensor) -> bool:
    """Whether this rank is on the mesh of ``tensor``."""
    sharded = as_dtensor(tensor)
    return sharded is None or sharded.device_mesh.get_coordinate() is not None


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh."""
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    with named_phase("gather"):
        return sharded.full_tensor()


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``full``, cut as ``like`` is, in memory of its own; nothing is sent."""
    sharded = as_dtensor(like)
    if sharded is None:
        return full
    from torch.distributed.tensor import distribute_tensor  # importing it costs a second, and single-device users never need it

    # Cloned, since torch 2.9 gives a view of ``full``.
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local().clone()
