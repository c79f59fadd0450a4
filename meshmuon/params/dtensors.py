"""DTensors as the pure rooms see them: meshes and placements as plain data, and refusals of layouts that cannot be
stepped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, GradientError, TransportError, UnsupportedError
from ..layout import Layout, Mesh, Placement, Ranges, Replicated, Sharded, coordinates, flat_index
from ..torch_compat import as_dtensor as as_dtensor  # other rooms import it from here
from ..torch_compat import cut_in_mesh_order, dtensor_like, local_part, mesh_slices, same_layout, spec_of, split_factor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

ReplicaGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh"
"""The ranks over which plain tensors are replicated."""


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor with the mesh and placements of ``like`` and with ``local`` as this rank's part.

    If ``like`` is a plain tensor, it is ``local`` itself. ``DTensor.from_local`` would copy a part that is in host
    memory to the devices of the mesh.
    """
    sharded = as_dtensor(like)
    return local if sharded is None else dtensor_like(sharded, local)


def zeros_laid_out_like(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, placements: Sequence[Any] | None = None
) -> Tensor:
    """Zeros of another shape, on the mesh of ``param``, with its placements or others."""
    sharded = as_dtensor(param)
    if sharded is None:
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    placements = sharded.placements if placements is None else tuple(placements)
    local_shape = _own_layout(sharded, shape, placements).local_shape(dist.get_rank())
    local = torch.zeros(local_shape, dtype=dtype, device=param.device)
    no_memory = torch.empty(local.shape, dtype=dtype, device="meta")
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    # The local part is put in afterwards: ``from_local`` would copy one that is in host memory to the mesh's devices.
    empty = DTensor.from_local(
        no_memory, sharded.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return dtensor_like(empty, local)


def check_placement(name: str, param: Tensor) -> None:
    """Refuses a parameter whose layout an optimizer cannot step."""
    if (sharded := as_dtensor(param)) is not None:
        known_placements(name, sharded.placements, param.dim())  # refuses unknown ones
        _check_order(name, siblings(sharded.device_mesh)[0])
        check_cuts(name, sharded)


def check_cuts(name: str, param: Tensor) -> None:
    """Refuses a DTensor whose dims are cut in another order than that of the mesh axes. All ranks come to the same
    result.
    """
    sharded = as_dtensor(param)
    if sharded is not None and not cut_in_mesh_order(sharded):
        raise UnsupportedError(
            f"{name} has placements {sharded.placements} that are applied in another order than that of the mesh's "
            f"axes ({spec_of(sharded)}). Lay it out in the usual order: distribute_tensor(p.full_tensor(), "
            "p.device_mesh, p.placements)."
        )


def check_memory(name: str, param: Tensor) -> None:
    """Refuses a parameter that trains and of which this rank holds several elements at one address: they cannot be
    stepped.
    """
    local = local_part(param)
    if param.requires_grad and shares_addresses(local):
        raise ConfigError(
            f"{name} has shape {tuple(local.shape)} and strides {local.stride()}: several of its elements share one "
            "address, as after expand(), and a step would write all of them there. Make it a parameter with separate "
            "memory: nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))."
        )


def shares_addresses(local: Tensor) -> bool:
    """Whether several elements of a plain tensor are at one address, as after ``expand``."""
    reach = 0
    # In a tensor without overlaps, each dim strides over all that the dims with smaller strides reach.
    for stride, size in sorted(
        (stride, size) for size, stride in zip(local.shape, local.stride(), strict=True) if size > 1
    ):
        if stride <= reach:
            return local.numel() > 0
        reach += stride * (size - 1)
    return False


def same_placement(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape are cut in the same way: both plain, or both on one mesh with the same
    placements.
    """
    first_sharded, second_sharded = as_dtensor(first), as_dtensor(second)
    if first_sharded is None or second_sharded is None:
        return first_sharded is second_sharded
    return same_layout(first_sharded, second_sharded)


def shard_place(tensor: Tensor) -> dict[int, int]:
    """Which shard a tensor is: its coordinate on each axis of the mesh that cuts it; empty for a plain or replicated
    tensor.

    A DTensor that was read from a file of another rank has that rank's coordinates.
    """
    sharded = as_dtensor(tensor)
    coordinate = None if sharded is None else sharded.device_mesh.get_coordinate()
    if sharded is None or coordinate is None:
        return {}
    return {axis: coordinate[axis] for axis, placement in enumerate(sharded.placements) if not placement.is_replicate()}


def check_gradient_placement(name: str, param: Tensor, grad: Tensor) -> None:
    """Refuses a gradient that is not laid out like its parameter. The error shows the call that fixes it."""
    sharded, gradient = as_dtensor(param), as_dtensor(grad)
    if same_placement(param, grad):
        shard, grad_shard = local_part(param), local_part(grad)
        # wrappers give empty shards other shapes
        if shard.shape != grad_shard.shape and shard.numel() + grad_shard.numel():
            raise GradientError(
                f"{name}: this rank holds {tuple(shard.shape)}, of the gradient {tuple(grad_shard.shape)}, although "
                "both have the same placements: cut the gradient like the parameter."
            )
        return
    if sharded is None or gradient is None:
        kinds = ("DTensor", "plain tensor") if gradient is None else ("plain tensor", "DTensor")
        raise GradientError(
            f"{name} is a {kinds[0]}, its gradient is a {kinds[1]}: make the gradient like the parameter."
        )
    unreduced = any(placement.is_partial() for placement in gradient.placements)
    what = "is not reduced yet" if unreduced else "is laid out differently"
    raise GradientError(
        f"{name} has placements {sharded.placements}, its gradient {gradient.placements}: the gradient {what}. Before "
        "step(), call p.grad = p.grad.redistribute(p.device_mesh, p.placements)."
    )


def layouts_of(
    name: str, shape: tuple[int, ...], placements: Sequence[Any], meshes: Sequence[Mesh], planning_ranks: frozenset[int]
) -> tuple[Layout, ...]:
    """The layouts of a parameter on those of its ``meshes`` that contain one of ``planning_ranks``.

    ``planning_ranks`` are the ranks that plan together with this one (``Topology.ranks``).

    A parameter on one axis of a larger mesh exists once per coordinate on the other axes: on axis "tp" of a 2 × 4 mesh
    ("dp", "tp"), ranks 0–3 hold one copy and ranks 4–7 another. Each copy has its own layout and owners in the plan.
    """
    our_placements = known_placements(name, placements, len(shape))
    _check_order(name, meshes[0])
    return tuple(Layout(shape, mesh, our_placements) for mesh in meshes if not planning_ranks.isdisjoint(mesh.ranks))


def layout_text(name: str, param: Tensor) -> str:
    """Where a parameter is, as errors and tables show it."""
    sharded = as_dtensor(param)
    if sharded is None:
        return str(param.device)
    placements = ", ".join(map(str, known_placements(name, sharded.placements, param.dim())))
    return f"{param.device} [{placements}] on {'×'.join(map(str, sharded.device_mesh.shape))}"


def replicated_layout(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """The layout of a tensor that each of ``ranks`` holds whole."""
    return Layout(tuple(shape), Mesh((len(ranks),), tuple(ranks)), (Replicated(),))


def siblings(mesh: DeviceMesh) -> tuple[Mesh, ...]:
    """The mesh and, if it is a slice of a larger one, all slices like it, in the same order on every rank."""
    shape = tuple(mesh.shape)
    return tuple(Mesh(shape, ranks) for ranks in mesh_slices(mesh))


def connected_ranks(rank: int, sets: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """All ranks that share one of ``sets`` with ``rank``, directly or through other ranks, in ascending order."""
    reached, remaining = {rank}, [frozenset(ranks) for ranks in sets]
    while touching := [ranks for ranks in remaining if not ranks.isdisjoint(reached)]:
        reached = reached.union(*touching)
        remaining = [ranks for ranks in remaining if not ranks <= reached]
    return tuple(sorted(reached))


def _check_order(name: str, mesh: Mesh) -> None:
    """Refuses a mesh whose ranks do not ascend: torch's process groups sort ranks, which would contradict the
    placements.
    """
    axis = _axis_out_of_order(mesh)
    if axis is not None:
        raise UnsupportedError(
            f"{name} is on the mesh {mesh}, whose ranks do not ascend along axis {axis}; torch's process groups order "
            "ranks, so that shards would not be where the placements say. Build the mesh with ascending ranks."
        )


@lru_cache(maxsize=64)  # thousands of parameters are on a few meshes, and it looks at every rank
def _axis_out_of_order(mesh: Mesh) -> int | None:
    """The first axis along which some ranks do not ascend."""
    for rank, coordinate in coordinates(mesh).items():
        for axis, size in enumerate(mesh.shape):
            following = (*coordinate[:axis], coordinate[axis] + 1, *coordinate[axis + 1 :])
            if following[axis] < size and mesh.ranks[flat_index(mesh.shape, following, range(len(following)))] < rank:
                return axis
    return None


def groups_of(mesh_or_group: DeviceMesh | Mesh | dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """The process groups that a mesh already has, or the process group itself; a mesh that is simulated has none."""
    if isinstance(mesh_or_group, Mesh):
        return []
    if mesh_or_group is None or isinstance(mesh_or_group, dist.ProcessGroup):
        return [] if mesh_or_group is None else [mesh_or_group]
    try:
        return list(mesh_or_group.get_all_groups()) if mesh_or_group.get_coordinate() is not None else []
    except RuntimeError as error:
        raise TransportError(
            f"the process groups of the mesh {mesh_or_group} are gone: {error}. After destroy_process_group(), rebuild "
            "meshes and model."
        ) from error


def replica_ranks(mesh_or_group: DeviceMesh | dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The sets of ranks over which plain tensors are replicated: those of the process group, or of a mesh and its
    siblings.
    """
    if mesh_or_group is None or isinstance(mesh_or_group, dist.ProcessGroup):
        return [] if mesh_or_group is None else [tuple(dist.get_process_group_ranks(mesh_or_group))]
    return [mesh.ranks for mesh in siblings(mesh_or_group)]


def memory_order(tensor: Tensor) -> list[int]:
    """The dims of a tensor in the order of memory, outermost first. For a DTensor it is the order of the whole
    tensor.
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def held_ranges(param: Tensor) -> tuple[Ranges, ...]:
    """What this rank holds of each dim of a parameter, in the order of its local tensor; all of a plain tensor."""
    sharded, shape = as_dtensor(param), tuple(param.shape)
    if sharded is None:
        return tuple(((0, size),) if size else () for size in shape)
    return _own_layout(sharded, shape, sharded.placements).held_ranges(dist.get_rank())


def own_layout(param: Tensor) -> tuple[Layout | None, int]:
    """The layout of a parameter, None for a plain tensor, and the rank of which ``held_ranges`` of it are asked."""
    sharded = as_dtensor(param)
    return (
        (None, 0)
        if sharded is None
        else (_own_layout(sharded, tuple(param.shape), sharded.placements), dist.get_rank())
    )


def _own_layout(param: DTensor, shape: tuple[int, ...], placements: Sequence[Any]) -> Layout:
    """The layout of a tensor of ``shape`` with these placements, on that slice of the mesh of ``param`` which this
    rank is in.
    """
    rank, meshes = dist.get_rank(), siblings(param.device_mesh)
    mesh = next((mesh for mesh in meshes if rank in mesh.ranks), meshes[0])
    return Layout(shape, mesh, known_placements("", placements, len(shape)))


def trailing_elements(param: DTensor, count: int) -> int:
    """How many of the last ``count`` elements of the whole tensor, in the order of memory, this rank holds.

    They are the last elements of its local tensor.
    """
    held, innermost_first = held_ranges(param), memory_order(param)[::-1]

    def is_held(index: int) -> bool:
        for dim in innermost_first:
            index, position = divmod(index, param.size(dim))
            if not any(start <= position < stop for start, stop in held[dim]):
                return False
        return True

    return sum(map(is_held, range(param.numel() - count, param.numel())))


def known_placements(name: str, placements: Sequence[Any], dims: int) -> tuple[Placement, ...]:
    """torch's placements as ours. Every type is handled explicitly: an unknown one must never count as replicated."""
    # of a parameter that is simulated
    if all(isinstance(placement, (Replicated, Sharded)) for placement in placements):
        return tuple(placements)
    from torch.distributed.tensor import Partial, Replicate, Shard

    converted: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            converted.append(Replicated())
        elif (factor := split_factor(placement)) is not None:
            converted.append(Sharded(placement.dim % dims, factor))
        elif isinstance(placement, Shard):
            converted.append(Sharded(placement.dim % dims))
        elif isinstance(placement, Partial):
            raise ConfigError(
                f"{name} has placements {tuple(placements)}: a Partial parameter is a sum that was never taken. "
                "Redistribute it to Replicate() or Shard(dim) before building the optimizer."
            )
        else:
            raise UnsupportedError(
                f"{name} has the placement {placement!r}, which meshmuon does not know. Use Shard or Replicate."
            )
    return tuple(converted)
