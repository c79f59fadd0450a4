"""For the reference path: torch's own gather of whole tensors, and torch's own sharding of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..torch_compat import as_dtensor
from .failures import named_phase


def has_part(tensor: Tensor) -> bool:
    """Whether this rank is on the mesh of ``tensor``."""
    sharded = as_dtensor(tensor)
    return sharded is None or sharded.device_mesh.get_coordinate() is not None


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh."""
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    with named_phase("gather", *sharded.device_mesh.get_all_groups()):
        return sharded.full_tensor()


def check_round_trip(name: str, like: Tensor) -> None:
    """Refuses a layout whose shards torch cannot gather into the tensor that it sharded; every rank of the mesh must
    call.

    It happens with ``_StridedShard`` and sizes that do not divide (torch 2.13: 5 × 1 over two axes, both strided).
    """
    sharded = as_dtensor(like)
    if sharded is None:
        return
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = sharded.device_mesh, sharded.placements
    numbers = torch.arange(like.numel(), device=sharded.to_local().device).view(like.shape)
    try:
        gathered, trouble = (
            distribute_tensor(numbers, mesh, placements, src_data_rank=None).full_tensor(),
            "in another order",
        )
    except RuntimeError as error:
        gathered, trouble = None, str(error)
    if gathered is None or not torch.equal(gathered, numbers):
        raise UnsupportedError(
            f"{name}, {tuple(like.shape)} with placements {placements} on a mesh of {tuple(mesh.shape)}: torch itself "
            f"cannot gather it, which the reference path needs ({trouble}). Step this layout without "
            "use_distributed_muon=True: the normal path does not use torch's gather. Or choose sizes that divide."
        )


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of ``full``, laid out as ``like`` is, in separate memory; nothing is sent."""
    sharded = as_dtensor(like)
    if sharded is None:
        return full
    # importing it costs a second, and single-device users never need it
    from torch.distributed.tensor import distribute_tensor

    # Cloned, since a replicated one is a view of ``full``.
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local().clone()
