"""Random layouts, and what torch itself puts on each rank for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon.layout import Layout, Mesh, Placement, Ranges, Replicated, Sharded

WORLD = 18
"""Ranks there are; a mesh has at most 16, so that some are outside every mesh."""


@dataclass(frozen=True)
class Case:
    """A tensor shape, a mesh and torch's placements."""

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[TorchPlacement, ...]

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.mesh, tuple(ours(placement) for placement in self.placements))

    @property
    def tensor(self) -> torch.Tensor:
        return torch.arange(math.prod(self.shape)).reshape(self.shape)


def ours(placement: TorchPlacement) -> Placement:
    if isinstance(placement, _StridedShard):
        return Sharded(placement.dim, int(placement.split_factor))
    return Sharded(placement.dim) if isinstance(placement, Shard) else Replicated()


def random_shape(rng: random.Random, dims: int) -> tuple[int, ...]:
    """Mostly small sizes, so that shards are often uneven and sometimes empty."""
    return tuple(
        rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13] if rng.random() < 0.6 else [1, 2, 3, 4, 5])
        for _ in range(dims)
    )


def mesh_shapes(axes: int, most: int) -> list[tuple[int, ...]]:
    return [shape for shape in product(range(1, most + 1), repeat=axes) if math.prod(shape) <= most]


MESH_SHAPES = {axes: mesh_shapes(axes, 16) for axes in (1, 2, 3)}


def random_mesh(rng: random.Random) -> Mesh:
    """One to three axes, seldom of one rank; ranks in order, or shuffled, or some of the world."""
    shapes = MESH_SHAPES[rng.choice([1, 2, 2, 3, 3])]
    shape = rng.choice([shape for shape in shapes if 1 not in shape] if rng.random() < 0.8 else shapes)
    size = math.prod(shape)
    return Mesh(shape, tuple(range(size)) if rng.random() < 0.5 else tuple(rng.sample(range(WORLD), size)))


def random_placement(rng: random.Random, dims: int) -> TorchPlacement:
    kind = rng.random()
    if kind < 0.25:
        return Replicate()
    dim = rng.randrange(dims) if rng.random() < 0.5 else 0
    return Shard(dim) if kind < 0.65 else _StridedShard(dim, split_factor=rng.choice([1, 2, 2, 3, 4, 5]))


def random_case(rng: random.Random, mesh: Mesh | None = None) -> Case:
    dims = rng.randint(1, 4)
    mesh = mesh or random_mesh(rng)
    shape, placements = random_shape(rng, dims), tuple(random_placement(rng, dims) for _ in mesh.shape)
    return Case(shape, mesh, placements)


def split(case: Case, tensor: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
    """Local part of ``tensor`` on every rank of the mesh: torch's own splitting, applied axis after axis."""
    held = [case.tensor if tensor is None else tensor]
    for placement, parts in zip(case.placements, case.mesh.shape, strict=True):
        if isinstance(placement, Replicate):
            held = [tensor for tensor in held for _ in range(parts)]
        else:
            assert isinstance(placement, (Shard, _StridedShard))
            held = [shard for tensor in held for shard in placement._split_tensor(tensor, parts, with_padding=False)[0]]
    return dict(zip(case.mesh.ranks, held, strict=True))


def distribute(cases: Sequence[Case]) -> list[dict[int, torch.Tensor]]:
    """For each case the local tensor of every rank of the world, from ``distribute_tensor`` on that rank.

    The fake process group lets one process be each rank in turn; without a source rank torch only splits.
    """
    held: list[dict[int, torch.Tensor]] = [{} for _ in cases]
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            for case, shards in zip(cases, held, strict=True):
                mesh = DeviceMesh("cpu", torch.tensor(case.mesh.ranks).reshape(case.mesh.shape), _init_backend=False)
                shards[rank] = distribute_tensor(case.tensor, mesh, case.placements, src_data_rank=None).to_local()
        finally:
            dist.destroy_process_group()
    return held


def indices(ranges: Ranges) -> torch.Tensor:
    return torch.tensor([index for start, stop in ranges for index in range(start, stop)], dtype=torch.long)


def select(tensor: torch.Tensor, local: Sequence[Ranges]) -> torch.Tensor:
    """The part of ``tensor`` that ``local`` names, in local order."""
    for dim, ranges in enumerate(local):
        tensor = tensor.index_select(dim, indices(ranges))
    return tensor
