"""How a model is laid out over ranks in the sharded benchmark, and the least that must travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from models import gpt_matrices
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["DATA_PARALLEL", "ModelLayout", "layouts_for"]

DATA_PARALLEL = "DistMuon"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A layout of all parameters.

    Attributes:
        name: in tables.
        mesh: shape of the mesh.
        placements: placements of the parameters; parameter k has number k modulo their count.
        pieces: how many ranks share a matrix within a replica.
        replicas: copies of each matrix.
        experts: the model is stacks of experts.
    """

    name: str
    mesh: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]
    pieces: int
    replicas: int = 1
    experts: bool = False

    @property
    def data_parallel(self) -> bool:
        """Whether every rank has whole weights and gradients of its own."""
        return self.name == DATA_PARALLEL

    def shapes(self, layers: int, width: int) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        if self.experts:
            return [(16, width, width // 2)] * max(1, layers // 2)
        return [*gpt_matrices(layers, width)]

    def place(self, value: Tensor, index: int) -> Tensor:
        """The parameter ``index`` as this rank holds it."""
        if self.data_parallel:
            return value
        placements = self.placements[index % len(self.placements)]
        return distribute_tensor(value, _mesh(self.mesh), placements, src_data_rank=None)

    def bound(self, elements: int) -> float:
        """Bytes that a rank sends at least, on average, when each matrix is orthogonalised once.

        The owner lacks all but its own piece of the matrix, and every holder but the owner lacks the result.
        """
        world = dist.get_world_size()
        if self.data_parallel:  # every rank's gradient to the owner, the weights to every rank
            return 4 * elements * 2 * (world - 1) / world
        return 4 * elements * (1 + self.replicas - 2 / self.pieces) / world


@lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def layouts_for(world: int) -> list[ModelLayout]:
    """The layouts that make sense on that many ranks."""
    layouts = [ModelLayout("FSDP2", (world,), ((Shard(0),),), world)]
    if world > 1:
        layouts.append(ModelLayout(DATA_PARALLEL, (world,), (), 1, world))
    if world >= 4 and world % 2 == 0:
        half = world // 2
        column_wise, row_wise = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))
        layouts += [
            ModelLayout("HSDP", (2, half), ((Replicate(), Shard(0)),), half, 2),
            ModelLayout("TP×FSDP", (half, 2), (column_wise, row_wise), world),
            ModelLayout("EP×FSDP, cut", (half, 2), ((Shard(1), Shard(0)),), half, experts=True),
            ModelLayout("EP×FSDP, whole", (half, 2), ((_StridedShard(0, split_factor=2), Shard(0)),), 1, experts=True),
        ]
    return layouts


def values_of(layout: ModelLayout, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, the same on all ranks, and gradients: the same, or each rank's own where the optimizer averages."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    own = torch.Generator().manual_seed(1 + dist.get_rank() * layout.data_parallel)
    return weights, [torch.randn(shape, generator=own) for shape in shapes]
