"""DTensors as the pure rooms see them: meshes and placements as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, GradientError, TransportError, UnsupportedError
from ..layout import Layout, Mesh, Placement, Ranges, Replicated, Sharded, coordinates, cut, flat_index, length, merged
from ..torch_compat import (
    as_dtensor,
    cut_in_mesh_order,
    dtensor_like,
    mesh_slices,
    same_layout,
    spec_of,
    split_factor,
    strided_shards_nest,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

ReplicaGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh"
"""Over which ranks plain tensors are replicated."""

__all__ = [
    "as_dtensor",
    "check_cuts",
    "check_gradient_placement",
    "check_placement",
    "connected_ranks",
    "groups_of",
    "known_placements",
    "layout_text",
    "layouts_of",
    "replicated_layout",
    "siblings",
    "with_local",
    "zeros_laid_out_like",
]


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor that lies on its mesh as ``like`` does and has ``local`` as this rank's part; ``local`` itself for a plain one.

    ``DTensor.from_local`` would copy a part that is in host memory to the mesh's devices.
    """
    sharded = as_dtensor(like)
    return local if sharded is None else dtensor_like(sharded, local)


def zeros_laid_out_like(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of another shape that lie on the mesh of ``param`` in the same way."""
    sharded = as_dtensor(param)
    if sharded is None:
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    rank, meshes = dist.get_rank(), siblings(sharded.device_mesh)
    mesh = next((one for one in meshes if rank in one.ranks), meshes[0])
    layout = Layout(shape, mesh, known_placements("", sharded.placements, len(shape)))
    local = torch.zeros(layout.local_shape(rank), dtype=dtype, device=param.device)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_placement(name: str, param: Tensor) -> None:
    """Refuses a parameter that lies on its mesh in a way that has no meaning for an optimizer."""
    if (sharded := as_dtensor(param)) is not None:
        placements, mesh = known_placements(name, sharded.placements, param.dim()), siblings(sharded.device_mesh)[0]
        _check_order(name, mesh)
        check_cuts(name, sharded)
        _check_strided(name, tuple(param.shape), mesh, placements)


def check_cuts(name: str, param: Tensor) -> None:
    """Refuses a DTensor whose mesh axes cut a dim in another order than placements alone say; it is the same on every rank."""
    sharded = as_dtensor(param)
    if sharded is not None and not cut_in_mesh_order(sharded):
        raise UnsupportedError(
            f"{name} has placements {sharded.placements} that are applied in another order than that of the mesh's axes "
            f"({spec_of(sharded)}). Lay it out in the usual order: distribute_tensor(p.full_tensor(), p.device_mesh, "
            "p.placements)."
        )


def same_placement(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are cut alike: both plain, or both on one mesh in the same way."""
    mine, theirs = as_dtensor(one), as_dtensor(other)
    if mine is None or theirs is None:
        return mine is theirs
    return same_layout(mine, theirs)


def check_gradient_placement(name: str, param: Tensor, grad: Tensor) -> None:
    """Refuses a gradient that is not laid out like its parameter, with the call that mends it."""
    sharded, gradient = as_dtensor(param), as_dtensor(grad)
    if same_placement(param, grad):
        if sharded is not None and gradient is not None:
            mine, its = sharded.to_local(), gradient.to_local()
            if mine.shape != its.shape and mine.numel() + its.numel():  # wrappers give empty shards other shapes
                raise GradientError(
                    f"{name}: this rank holds {tuple(mine.shape)}, of the gradient {tuple(its.shape)}, although both have the "
                    "same placements: cut the gradient like the parameter."
                )
        return
    if sharded is None or gradient is None:
        kinds = ("DTensor", "plain tensor") if gradient is None else ("plain tensor", "DTensor")
        raise GradientError(f"{name} is a {kinds[0]}, its gradient is a {kinds[1]}: make the gradient like the parameter.")
    what = "is not reduced yet" if any(one.is_partial() for one in gradient.placements) else "is laid out differently"
    raise GradientError(
        f"{name} has placements {sharded.placements}, its gradient {gradient.placements}: the gradient {what}. Before step(), "
        "call p.grad = p.grad.redistribute(p.device_mesh, p.placements)."
    )


def layouts_of(
    name: str, shape: tuple[int, ...], placements: Sequence[Any], meshes: Sequence[Mesh], reached: frozenset[int]
) -> tuple[Layout, ...]:
    """The layouts of a parameter on those of its ``meshes`` that ``reached`` ranks touch.

    A parameter on one axis of a larger mesh exists once per coordinate on the other axes, on meshes of its own. They never
    share work, but a plan that covers their ranks must know of all of them.
    """
    found = known_placements(name, placements, len(shape))
    _check_order(name, meshes[0])
    _check_strided(name, shape, meshes[0], found)
    return tuple(Layout(shape, mesh, found) for mesh in meshes if not reached.isdisjoint(mesh.ranks))


def layout_text(name: str, param: Tensor) -> str:
    """Where a parameter lives, for people."""
    sharded = as_dtensor(param)
    if sharded is None:
        return str(param.device)
    placements = ", ".join(map(str, known_placements(name, sharded.placements, param.dim())))
    return f"{param.device} [{placements}] on {'×'.join(map(str, sharded.device_mesh.shape))}"


def replicated_layout(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """A tensor that each of ``ranks`` has whole."""
    return Layout(tuple(shape), Mesh((len(ranks),), tuple(ranks)), (Replicated(),))


def siblings(mesh: DeviceMesh) -> tuple[Mesh, ...]:
    """The mesh and, where it is a slice of a larger one, all slices like it, in an order that is the same on every rank."""
    shape = tuple(mesh.shape)
    return tuple(Mesh(shape, ranks) for ranks in mesh_slices(mesh))


def connected_ranks(rank: int, sets: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """All ranks that are in one of ``sets`` with ``rank``, directly or through others, in ascending order."""
    reached, apart = {rank}, [frozenset(ranks) for ranks in sets]
    while touching := [ranks for ranks in apart if not ranks.isdisjoint(reached)]:
        reached = reached.union(*touching)
        apart = [ranks for ranks in apart if not ranks <= reached]
    return tuple(sorted(reached))


def _check_order(name: str, mesh: Mesh) -> None:
    """Process groups order their ranks; where a mesh has another order, torch's collectives contradict its placements."""
    where = coordinates(mesh)
    for rank, place in where.items():
        for axis, size in enumerate(mesh.shape):
            after = (*place[:axis], place[axis] + 1, *place[axis + 1 :])
            if after[axis] < size and mesh.ranks[flat_index(mesh.shape, after, range(len(after)))] < rank:
                raise UnsupportedError(
                    f"{name} is on the mesh {mesh}, whose ranks do not ascend along axis {axis}; torch's process groups order "
                    "ranks, so that shards would not be where the placements say. Build the mesh with ascending ranks."
                )


def _check_strided(name: str, shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement]) -> None:
    """Where torch cuts uneven strided shards in two ways under the same placements, nothing tells which it was."""
    if strided_shards_nest():
        return
    lengths = [{size} for size in shape]  # that ranks hold so far
    for parts, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Sharded):
            dim, factor = placement.dim, placement.split_factor
            if factor > 1 and any(cut(size, ((parts, factor),)) != _cut_at_once(size, parts, factor) for size in lengths[dim]):
                raise UnsupportedError(
                    f"{name} has {shape[dim]} elements along dim {dim} in a strided sharding "
                    f"({', '.join(map(str, placements))} on {mesh}) that does not divide them. torch {torch.__version__} cuts "
                    "these in one way in FSDP2 and in another in distribute_tensor: use a newer torch, or sizes that divide."
                )
            lengths[dim] = {length(held) for size in lengths[dim] for held in cut(size, ((parts, factor),))}


def _cut_at_once(size: int, parts: int, factor: int) -> tuple[Ranges, ...]:
    """What ``distribute_tensor`` of torch 2.9 makes of a strided sharding: equal chunks, dealt out to the parts in turn."""
    chunks = cut(size, ((parts * factor, 1),))
    return tuple(merged(one for chunk in chunks[part::parts] for one in chunk) for part in range(parts))


def groups_of(place: DeviceMesh | dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """The process groups that a mesh has already, or the group itself."""
    if place is None or isinstance(place, dist.ProcessGroup):
        return [] if place is None else [place]
    try:
        return list(place.get_all_groups()) if place.get_coordinate() is not None else []
    except RuntimeError as error:
        raise TransportError(
            f"the process groups of the mesh {place} are gone: {error}. After destroy_process_group() build meshes and model "
            "anew."
        ) from error


def replica_ranks(place: DeviceMesh | dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The sets of ranks over which plain tensors are replicated: the group's, or those of a mesh and of its siblings."""
    if place is None or isinstance(place, dist.ProcessGroup):
        return [] if place is None else [tuple(dist.get_process_group_ranks(place))]
    return [mesh.ranks for mesh in siblings(place)]


def memory_order(tensor: Tensor) -> list[int]:
    """The dims of a tensor, outermost first, in the order in which they lie in memory; of a DTensor, in that of the whole."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def trailing_elements(param: DTensor, count: int) -> int:
    """How many of the last ``count`` elements, in the order of memory, of the whole tensor this rank holds.

    They are the last ones of its local tensor.
    """
    rank, order = dist.get_rank(), memory_order(param)
    shape = tuple(param.shape[dim] for dim in order)
    mesh = next(one for one in siblings(param.device_mesh) if rank in one.ranks)
    placed = known_placements("", param.placements, len(shape))
    turned = tuple(replace(one, dim=order.index(one.dim)) if isinstance(one, Sharded) else one for one in placed)
    layout = Layout(shape, mesh, turned)
    held, total = math.prod(layout.local_shape(rank)), math.prod(shape)
    found = 0
    while found < min(count, held) and layout.global_index(rank, held - 1 - found) >= total - count:
        found += 1
    return found


def known_placements(name: str, placements: Sequence[Any], dims: int) -> tuple[Placement, ...]:
    """torch's placements as ours. Every type is named: an unknown one must never pass as replicated."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            found.append(Replicated())
        elif (factor := split_factor(placement)) is not None:
            found.append(Sharded(placement.dim % dims, factor))
        elif isinstance(placement, Shard):
            found.append(Sharded(placement.dim % dims))
        elif isinstance(placement, Partial):
            raise ConfigError(
                f"{name} has placements {tuple(placements)}: a Partial parameter is a sum that was never taken. "
                "Redistribute it to Replicate() or Shard(dim) before building the optimizer."
            )
        else:
            raise UnsupportedError(
                f"{name} has the placement {placement!r}, which meshmuon does not know. Use Shard or Replicate."
            )
    return tuple(found)
