"""The logits that a user passes to a step: checked, in the same order on all ranks, and gathered if they are
DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import known_to_host
from ..errors import ConfigError
from ..layout import Layout
from ..params.dtensors import ReplicaGroup, as_dtensor, check_cuts, groups_of, layouts_of, siblings
from ..torch_compat import local_part
from ..transport import shared_group
from ..transport.collectives import reduce_largest
from .projections import LayerKey

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def check_logits(qk_logits: Any) -> None:
    """Raises unless ``qk_logits`` maps layers to tensors of one number per head."""
    if not isinstance(qk_logits, Mapping):
        raise ConfigError(f"qk_logits must map layers to tensors, as in {{0: logits}}, got {type(qk_logits).__name__}.")
    for layer, logits in qk_logits.items():
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise ConfigError(f"qk_logits: the layer {layer!r} must be a number or the name of a module.")
        if not isinstance(logits, Tensor) or logits.dim() != 1 or logits.is_complex():
            what = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"qk_logits: layer {layer!r} needs a tensor of one dim, the largest logit per head, got {what}."
            )
        if (sharded := as_dtensor(logits)) is not None:
            _layout(layer, sharded)


def ordered(qk_logits: Mapping[LayerKey, Tensor]) -> dict[LayerKey, Tensor]:
    """The logits in an order that is the same on all ranks, whatever the order of the mapping."""
    return dict(sorted(qk_logits.items(), key=lambda item: repr(item[0])))


def logits_text(qk_logits: Any) -> str:
    """What must be equal on all ranks, as text: layers, numbers of logits, and the placements of DTensors."""
    if qk_logits is None:
        return "no qk_logits"
    if not isinstance(qk_logits, Mapping):
        return f"qk_logits={type(qk_logits).__name__}"
    return "qk_logits of " + ", ".join(
        f"{layer!r}: {_shape_text(logits)}" for layer, logits in ordered(qk_logits).items()
    )


def whole_logits(qk_logits: Mapping[LayerKey, Tensor]) -> list[Tensor]:
    """The logits of every layer as plain tensors of all heads.

    One all-reduce (maximum) per mesh assembles DTensors from the shards of all ranks, and also reduces
    ``Partial("max")``. ``full_tensor`` would need one gather per layer and axis, and fails on logits that axes divide
    unevenly.
    """
    plain = {layer: logits.detach() for layer, logits in qk_logits.items() if as_dtensor(logits) is None}
    by_mesh: dict[DeviceMesh, dict[LayerKey, DTensor]] = {}
    for layer, logits in qk_logits.items():
        if (sharded := as_dtensor(logits)) is not None:
            by_mesh.setdefault(sharded.device_mesh, {})[layer] = sharded
    for mesh, members in by_mesh.items():
        packed = torch.cat([_padded_shard(layer, logits) for layer, logits in members.items()])
        if mesh.size() > 1:
            reduce_largest(packed, process_group_of(mesh))
        plain.update(zip(members, torch.split(packed, [logits.numel() for logits in members.values()]), strict=True))
    return [plain[layer] for layer in qk_logits]


def nan_as_infinity(logits: Tensor) -> Tensor:
    """``logits`` with +∞ instead of NaN, which a maximum over ranks may lose."""
    return torch.where(logits.isnan(), math.inf, logits)


def ranks_of(group: ReplicaGroup) -> tuple[int, ...]:
    """The ranks of a process group in its order, or those of a mesh in ascending order."""
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    return tuple(sorted(group.mesh.flatten().tolist()))


def process_group_of(group: ReplicaGroup) -> dist.ProcessGroup:
    """One process group for all ranks of a process group or mesh."""
    return group if isinstance(group, dist.ProcessGroup) else shared_group(ranks_of(group), groups_of(group))


def _padded_shard(layer: LayerKey, logits: DTensor) -> Tensor:
    """This rank's shard at its position in a vector of all heads, −∞ elsewhere."""
    local = local_part(logits.detach())
    local = local.to(torch.float64 if local.dtype == torch.float64 else torch.float32)
    whole = torch.full((logits.numel(),), -math.inf, dtype=local.dtype, device=local.device)
    offset = 0
    for start, stop in _layout(layer, logits).held_ranges(dist.get_rank())[0]:
        whole[start:stop] = nan_as_infinity(local[offset : offset + stop - start])
        offset += stop - start
    return whole


def _layout(layer: LayerKey, logits: DTensor) -> Layout:
    """The layout of the logits. ``Partial("max")`` counts as replicated, since the all-reduce takes the maximum
    anyway.
    """
    from torch.distributed.tensor import Partial, Replicate

    placements = []
    for placement in logits.placements:
        if isinstance(placement, Partial) and placement.reduce_op != "max":
            raise ConfigError(
                f"qk_logits: layer {layer!r} has the placements {logits.placements}, but the largest logits are not "
                "sums or "
                'means. Use Partial("max") for maxima that are not reduced yet.'
            )
        placements.append(Replicate() if isinstance(placement, Partial) else placement)
    this_rank, name = frozenset({dist.get_rank()}), f"qk_logits of layer {layer!r}"
    check_cuts(name, logits)
    layouts = layouts_of(name, tuple(logits.shape), placements, siblings(logits.device_mesh), this_rank)
    if not layouts:
        raise ConfigError(
            f"qk_logits: this rank is not on the mesh of the logits of layer {layer!r}: pass it plain logits."
        )
    return layouts[0]


def _shape_text(logits: Any) -> str:
    sharded = as_dtensor(logits) if isinstance(logits, Tensor) else None
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if sharded is not None:
        return f"{shape} on {sharded.placements}"
    # Different values would scale replicas differently. Values on a device are not compared: the host would have to
    # wait.
    return str(logits.tolist()) if isinstance(logits, Tensor) and known_to_host(logits) else f"{shape}"
