"""What a plan must know about a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..execute import UpdateRule
from ..matrices import MatrixSet
from ..ortho import Orthogonalizer, Scheme

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PlanInput"]


class PlanInput(NamedTuple):
    """What a plan must know about a parameter. Steps with equal plan inputs have equal plans.

    Attributes:
        name: its name.
        group_index: index of its param group.
        shape: its global shape.
        local_shape: shape of this rank's shard.
        mesh: its mesh, None for a plain tensor.
        placements: torch's placements on the mesh.
        device: the device it is on.
        matrix_sets: its matrices, one set per part of a fused weight; None if AdamW steps it.
        scheme: how they are orthogonalised.
        rule: the update rule that is applied besides; None for plain Muon.
        compute_dtype: dtype of the products.
        comm_dtype: dtype on the wire.
        update_dtype: dtype in which the update is formed.
        has_grad: whether it has a gradient on this rank.
    """

    name: str
    group_index: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]
    device: torch.device
    matrix_sets: tuple[MatrixSet, ...] | None
    scheme: Scheme | Orthogonalizer | None
    rule: UpdateRule | None
    compute_dtype: torch.dtype
    comm_dtype: torch.dtype
    update_dtype: torch.dtype
    has_grad: bool
