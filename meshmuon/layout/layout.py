"""A tensor's layout over a mesh: which parts of it each rank holds.

Plans are made of the pieces that ``shard_matrices`` finds from ``Layout.cuts``. Boxes serve only to compare replicas' gradients.

A mesh has axes, a tensor has dims. Everything is computed from shapes and placements, without tensors and process groups: a mesh
of thousands of ranks takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from ..errors import ConfigError
from .cuts import Range, Ranges, cut, index_at, length

Box: TypeAlias = tuple[Range, ...]
"""One half-open range per tensor dim."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank along the mesh axis holds the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The mesh axis cuts tensor dim ``dim``; a ``split_factor`` above 1 is torch's ``_StridedShard``."""

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.split_factor == 1 else f"S({self.dim}, stride {self.split_factor})"


Placement: TypeAlias = Replicated | Sharded


@dataclass(frozen=True, slots=True)
class Mesh:
    """Global ranks in the order of the mesh, the last axis running fastest: ranks 0 to 5 as (2, 3) are [[0, 1, 2], [3, 4, 5]]."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(f"a mesh of shape {self.shape} needs {math.prod(self.shape)} different ranks, got {self.ranks}")
        # Both are needed once per parameter, and look at every rank.
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))
        run = len(self.ranks) > 2 and self.ranks == tuple(range(self.ranks[0], self.ranks[-1] + 1))
        named = f"{self.ranks[0]}-{self.ranks[-1]}" if run else ",".join(map(str, self.ranks))
        object.__setattr__(self, "_text", f"{'×'.join(map(str, self.shape))} (ranks {named})")

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor of ``shape`` lies on ``mesh``: one placement per mesh axis, applied from the first axis to the last.

    (8, 6) on a 2×2 mesh of ranks 0 to 3 with placements (Replicated, Sharded(0)): ranks 0 and 2 hold rows 0–3, ranks 1 and 3 hold
    rows 4–7.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise ConfigError(f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes")
        for placement in self.placements:
            if isinstance(placement, Sharded) and not (0 <= placement.dim < len(self.shape) and placement.split_factor >= 1):
                raise ConfigError(f"{placement} does not fit a tensor of shape {self.shape}")

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}] on {self.mesh}"

    def held_ranges(self, rank: int) -> tuple[Ranges, ...]:
        """What ``rank`` holds of each dim; its local tensor is their product. A rank outside the mesh holds nothing."""
        coordinate = coordinates(self.mesh).get(rank)
        if coordinate is None:
            return tuple(() for _ in self.shape)
        return tuple(self.cuts(dim)[self.part(dim, coordinate)] for dim in range(len(self.shape)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        return tuple(length(ranges) for ranges in self.held_ranges(rank))

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, in the order of its local tensor."""
        return tuple(product(*self.held_ranges(rank))) if rank in coordinates(self.mesh) else ()

    def global_index(self, rank: int, local: int) -> int:
        """Flat index, in the whole tensor, of the element at flat index ``local`` of the local tensor of ``rank``."""
        index, stride = 0, 1
        for size, ranges in zip(reversed(self.shape), reversed(self.held_ranges(rank)), strict=True):
            local, position = divmod(local, length(ranges))
            index, stride = index + stride * index_at(ranges, position), stride * size
        return index

    def holders(self) -> dict[Box, tuple[int, ...]]:
        """The ranks that hold each box, in the order of the mesh."""
        holders: dict[Box, list[int]] = {}
        for rank in self.mesh.ranks:
            for box in self.boxes(rank):
                holders.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in holders.items()}

    def axes(self, dim: int) -> tuple[int, ...]:
        """Mesh axes that shard ``dim``."""
        return tuple(axis for axis, _ in self._sharded(dim))

    def cuts(self, dim: int) -> tuple[Ranges, ...]:
        """The ranges of each part into which the mesh cuts ``dim``; ``part`` says which one a rank holds."""
        chain = tuple((self.mesh.shape[axis], split_factor) for axis, split_factor in self._sharded(dim))
        return cut(self.shape[dim], chain)

    def part(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which part of ``dim`` the rank at ``coordinate`` of the mesh holds."""
        return flat_index(self.mesh.shape, coordinate, self.axes(dim))

    def _sharded(self, dim: int) -> list[tuple[int, int]]:
        """(mesh axis, split factor) of the placements that shard ``dim``."""
        placements = enumerate(self.placements)
        return [(axis, place.split_factor) for axis, place in placements if isinstance(place, Sharded) and place.dim == dim]


@lru_cache(maxsize=64)
def coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Rank → its coordinates on the mesh."""
    return dict(zip(mesh.ranks, product(*(range(size) for size in mesh.shape)), strict=True))


def flat_index(shape: Sequence[int], coordinate: Sequence[int], axes: Sequence[int]) -> int:
    """Position of ``coordinate`` on the grid of ``axes`` alone, the last axis running fastest.

    Coordinate (1, 2) of a (2, 3) mesh is number 5 on both axes and number 2 on axis 1.
    """
    index = 0
    for axis in axes:
        index = index * shape[axis] + coordinate[axis]
    return index
