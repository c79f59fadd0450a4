"""The simple way for verification: torch's own all-gather of whole tensors, and torch's own cut of the result."""

from __future__ import annotations

from torch import Tensor

from .failures import named_phase

__all__ = ["has_part", "own_shard", "whole"]


def has_part(tensor: Tensor) -> bool:
    """Whether this rank is on the mesh of ``tensor``."""
    from torch.distributed.tensor import DTensor  # importing it costs a second, and single-device users never need it

    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    with named_phase("gather"):
        return tensor.full_tensor()


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``full``, cut as ``like`` is, in memory of its own; nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return full
    # Cloned, since torch 2.9 gives a view of ``full``.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local().clone()
