"""Which ranks hold the same elements of a parameter, and which of them counts these elements in a norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..agree.identity import current_rank
from ..layout import Layout, Mesh, Replicated, coordinates
from ..params.dtensors import as_dtensor, connected_ranks, known_placements, replicated_layout, siblings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class ReplicaRole:
    """This rank's role among the ranks that hold the same elements of a parameter.

    For a parameter on a 2×4 mesh with placements (Replicate, Shard(0)), each quarter has 2 replicas. The rank at (0, 3)
    counts the last quarter, the rank at (1, 3) does not, and both have the cell (3,).
    """

    counts: bool  # whether this rank counts the elements
    replicas: int  # number of ranks that hold the same elements
    cell: tuple[int, ...]  # which elements these are, as coordinates on the mesh axes that cut the parameter


class Replicas:
    """The ranks that the meshes of some parameters connect, and the role of this rank for each parameter.

    Slices of one mesh hold the same parameters: a model that was sharded over ``mesh["shard"]`` has a replica in every
    slice. Plain tensors are replicated over all connected ranks.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.rank = current_rank()
        meshes = dict.fromkeys(sharded.device_mesh for param in params if (sharded := as_dtensor(param)) is not None)
        # The mesh of each sharded parameter, with all slices of its parent mesh that look like it.
        self.slices: dict[DeviceMesh, tuple[Mesh, ...]] = {mesh: siblings(mesh) for mesh in meshes}
        # All ranks that share a mesh with this one, directly or through others, in ascending order.
        self.ranks = connected_ranks(self.rank, (mesh.ranks for slices in self.slices.values() for mesh in slices))
        self._roles: dict[tuple[DeviceMesh | None, tuple[Any, ...]], ReplicaRole] = {}

    def role(self, name: str, param: Tensor) -> ReplicaRole:
        """The role of this rank for ``param``, which ``name`` names in errors."""
        sharded = as_dtensor(param)
        key = (None, ()) if sharded is None else (sharded.device_mesh, sharded.placements)
        if key not in self._roles:
            here = sharded is None or sharded.device_mesh.get_coordinate() is not None
            layouts = self.layouts(name, param) if here else ()
            axes = (
                list(zip(layouts[0].placements, coordinates(layouts[0].mesh)[self.rank], strict=True))
                if layouts
                else []
            )
            sizes = zip(layouts[0].placements, layouts[0].mesh.shape, strict=True) if layouts else ()
            self._roles[key] = ReplicaRole(
                counts=bool(layouts) and not any(position for place, position in axes if isinstance(place, Replicated)),
                replicas=math.prod(size for place, size in sizes if isinstance(place, Replicated)),
                cell=tuple(position for place, position in axes if not isinstance(place, Replicated)),
            )
        return self._roles[key]

    def layouts(self, name: str, param: Tensor) -> tuple[Layout, ...]:
        """The layout of a parameter, with the slices of its mesh as one more axis that replicates it.

        For a parameter on the slices (0, 1) and (2, 3) it is one layout on a 2×2 mesh. Empty if none of the slices is
        connected; those of other pipeline stages are not.
        """
        shape, sharded = tuple(param.shape), as_dtensor(param)
        if sharded is None:
            return (replicated_layout(shape, self.ranks),)
        slices = [mesh_slice for mesh_slice in self.slices[sharded.device_mesh] if mesh_slice.ranks[0] in self.ranks]
        if not slices:
            return ()
        mesh = Mesh((len(slices), *slices[0].shape), tuple(rank for mesh_slice in slices for rank in mesh_slice.ranks))
        return (Layout(shape, mesh, (Replicated(), *known_placements(name, sharded.placements, len(shape)))),)
