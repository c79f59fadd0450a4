"""The logits of a step as plain tensors: checked, in one order on all ranks, and put together where they are DTensors."""

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
from ..params.dtensors import as_dtensor, check_cuts, groups_of, layouts_of, siblings
from ..torch_compat import local_part
from ..transport import shared_group
from ..transport.maxima import reduce_largest
from .names import LayerKey

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["check_logits", "logits_text", "ordered", "whole_logits"]


def check_logits(qk_logits: Any) -> None:
    """Refuses what is no mapping of layers to one number per head."""
    if not isinstance(qk_logits, Mapping):
        raise ConfigError(f"qk_logits must map layers to tensors, as in {{0: logits}}, got {type(qk_logits).__name__}.")
    for layer, logits in qk_logits.items():
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise ConfigError(f"qk_logits: the layer {layer!r} must be a number or the name of a module.")
        if not isinstance(logits, Tensor) or logits.dim() != 1 or logits.is_complex():
            what = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(f"qk_logits: layer {layer!r} needs a tensor of one dim, the largest logit per head, got {what}.")
        if (sharded := as_dtensor(logits)) is not None:
            _layout(layer, sharded)


def ordered(qk_logits: Mapping[LayerKey, Tensor]) -> dict[LayerKey, Tensor]:
    """In an order that all ranks share."""
    return dict(sorted(qk_logits.items(), key=lambda item: repr(item[0])))


def logits_text(qk_logits: Any) -> str:
    """What ranks must have in common, as text: layers, numbers of logits, and how those of DTensors are divided."""
    if qk_logits is None:
        return "no qk_logits"
    if not isinstance(qk_logits, Mapping):
        return f"qk_logits={type(qk_logits).__name__}"
    return "qk_logits of " + ", ".join(f"{layer!r}: {_shape_text(one)}" for layer, one in ordered(qk_logits).items())


def whole_logits(qk_logits: Mapping[LayerKey, Tensor]) -> list[Tensor]:
    """All logits of every layer as plain tensors.

    Those of DTensors on one mesh are put together by one all-reduce of what each rank holds, which also takes maxima that are
    not taken yet. (``full_tensor`` would be one gather per layer and axis, and fails on logits that axes divide unevenly.)
    """
    plain = {layer: one.detach() for layer, one in qk_logits.items() if as_dtensor(one) is None}
    divided: dict[DeviceMesh, dict[LayerKey, DTensor]] = {}
    for layer, one in qk_logits.items():
        if (sharded := as_dtensor(one)) is not None:
            divided.setdefault(sharded.device_mesh, {})[layer] = sharded
    for mesh, members in divided.items():
        packed = torch.cat([_own_part(layer, one) for layer, one in members.items()])
        if mesh.size() > 1:
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
            reduce_largest(packed, shared_group(ranks, groups_of(mesh)))
        plain.update(zip(members, torch.split(packed, [one.numel() for one in members.values()]), strict=True))
    return [plain[layer] for layer in qk_logits]


def _own_part(layer: LayerKey, logits: DTensor) -> Tensor:
    """What this rank holds, at its place among −∞; NaN, which a maximum may lose, as +∞."""
    local = local_part(logits.detach())
    local = local.to(torch.float64 if local.dtype == torch.float64 else torch.float32)
    whole = torch.full((logits.numel(),), -math.inf, dtype=local.dtype, device=local.device)
    at = 0
    for start, stop in _layout(layer, logits).local(dist.get_rank())[0]:
        mine = local[at : at + stop - start]
        whole[start:stop] = torch.where(mine.isnan(), math.inf, mine)
        at += stop - start
    return whole


def _layout(layer: LayerKey, logits: DTensor) -> Layout:
    """How the logits are divided; partial maxima count as replicated."""
    from torch.distributed.tensor import Partial, Replicate

    placements = []
    for one in logits.placements:
        if isinstance(one, Partial) and one.reduce_op != "max":
            raise ConfigError(
                f"qk_logits: layer {layer!r} has the placements {logits.placements}: the largest logits are no sums or means. "
                'Use Partial("max") for maxima that are still to be taken.'
            )
        placements.append(Replicate() if isinstance(one, Partial) else one)
    mine, name = frozenset({dist.get_rank()}), f"qk_logits of layer {layer!r}"
    check_cuts(name, logits)
    layouts = layouts_of(name, tuple(logits.shape), placements, siblings(logits.device_mesh), mine)
    if not layouts:
        raise ConfigError(f"qk_logits: this rank is not on the mesh of the logits of layer {layer!r}: give it logits of its own.")
    return layouts[0]


def _shape_text(logits: Any) -> str:
    sharded = as_dtensor(logits) if isinstance(logits, Tensor) else None
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if sharded is not None:
        return f"{shape} on {sharded.placements}"
    # Ranks that give other maxima would scale replicas differently; on a device the host would have to wait to see it.
    return str(logits.tolist()) if isinstance(logits, Tensor) and known_to_host(logits) else f"{shape}"
