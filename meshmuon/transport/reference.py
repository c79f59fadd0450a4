"""The simple way for verification: torch's own all-gather of whole tensors, and torch's own cut of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .failures import named_phase

__all__ = ["check_round_trip", "has_part", "own_shard", "whole"]


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


def check_round_trip(name: str, like: Tensor) -> None:
    """Refuses a layout of which torch's gather does not give back what torch's cut took apart; every rank of the mesh must call.

    It happens with ``_StridedShard`` and sizes that do not divide (torch 2.13: 5 × 1 over two axes, both strided).
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return
    mesh, placements = like.device_mesh, like.placements
    numbers = torch.arange(like.numel(), device=like.to_local().device).view(like.shape)
    where = f"{name}, {tuple(like.shape)} with placements {placements} on a mesh of {tuple(mesh.shape)}"
    advice = "Step this layout without use_distributed_muon, which does not use torch's gather, or choose sizes that divide."
    try:
        back = distribute_tensor(numbers, mesh, placements, src_data_rank=None).full_tensor()
    except RuntimeError as error:
        raise UnsupportedError(
            f"{where}: torch itself cannot gather it, which the reference path needs ({error}). {advice}"
        ) from error
    if not torch.equal(back, numbers):
        raise UnsupportedError(
            f"{where}: torch's own gather puts elements in other places than torch's cut took them from. {advice}"
        )


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``full``, cut as ``like`` is; nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()
