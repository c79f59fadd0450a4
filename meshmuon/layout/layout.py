"""A tensor's layout over a mesh: which of its elements each rank holds.

A mesh has axes, a tensor has dims. Everything is computed from shapes and placements, without tensors and process
groups: a mesh of thousands of ranks takes milliseconds. Plans are made of the pieces that ``shard_matrices`` finds from
``Layout.cuts``.

What a rank holds of a dim is a list of half-open index ranges, in the order of its local tensor: one range for plain
sharding, several for strided sharding. 18 rows over 8 ranks: ((0, 3),), ((3, 6),), … ((15, 18),) on ranks 0 to 5, and
() on ranks 6 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from ..errors import ConfigError
from ..matrices import StridedRange

Range: TypeAlias = tuple[int, int]
"""Indices [start, stop) of a tensor dim."""

Ranges: TypeAlias = tuple[Range, ...]
"""What one rank holds of a tensor dim, in local order; empty when it holds nothing."""


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
    """Global ranks in the order of the mesh, the last axis running fastest: ranks 0 to 5 as (2, 3) are [[0, 1, 2],
    [3, 4, 5]].
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(
                f"a mesh of shape {self.shape} needs {math.prod(self.shape)} different ranks, got {self.ranks}"
            )
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

    (8, 6) on a 2×2 mesh of ranks 0 to 3 with placements (Replicated, Sharded(0)): ranks 0 and 2 hold rows 0–3, ranks 1
    and 3 hold rows 4–7.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise ConfigError(f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes")
        for placement in self.placements:
            if isinstance(placement, Sharded) and not (
                0 <= placement.dim < len(self.shape) and placement.split_factor >= 1
            ):
                raise ConfigError(f"{placement} does not fit a tensor of shape {self.shape}")

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}] on {self.mesh}"

    def held_ranges(self, rank: int) -> tuple[Ranges, ...]:
        """What ``rank`` holds of each dim; its local tensor is their product. A rank outside the mesh holds nothing."""
        coordinate = coordinates(self.mesh).get(rank)
        if coordinate is None:
            return tuple(() for _ in self.shape)
        return tuple(self.cuts(dim)[self.shard_index(dim, coordinate)] for dim in range(len(self.shape)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(length(ranges) for ranges in self.held_ranges(rank))

    def holders(self) -> dict[tuple[Ranges, ...], list[int]]:
        """What is held of each dim → the ranks that hold it, in the order of the mesh. Ranks that hold nothing are
        left out.
        """
        holders: dict[tuple[Ranges, ...], list[int]] = {}
        for rank in self.mesh.ranks:
            held = self.held_ranges(rank)
            if all(held):
                holders.setdefault(held, []).append(rank)
        return holders

    def axes(self, dim: int) -> tuple[int, ...]:
        placements = enumerate(self.placements)
        return tuple(axis for axis, placement in placements if isinstance(placement, Sharded) and placement.dim == dim)

    def cuts(self, dim: int) -> tuple[Ranges, ...]:
        """The ranges of each shard into which the mesh cuts ``dim``; ``shard_index`` says which one a rank holds."""
        split_factors = [
            1 if isinstance(placement, Replicated) else placement.split_factor for placement in self.placements
        ]
        return cut(self.shape[dim], tuple((self.mesh.shape[axis], split_factors[axis]) for axis in self.axes(dim)))

    def shard_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which shard of ``dim`` the rank at ``coordinate`` of the mesh holds."""
        return flat_index(self.mesh.shape, coordinate, self.axes(dim))


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


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


@lru_cache(maxsize=1024)
def cut(size: int, chain: tuple[tuple[int, int], ...]) -> tuple[Ranges, ...]:
    """Cuts a dim of ``size`` over several mesh axes, one after the other.

    ``cut(8, ((2, 1), (2, 1)))`` gives rows 0–1, 2–3, 4–5 and 6–7 to the four ranks of a 2×2 mesh. ``cut(8, ((2, 2),))``
    gives rows 0–1 and 4–5 to the first of two ranks, rows 2–3 and 6–7 to the second.

    Args:
        size: length of the dim.
        chain: (ranks, split factor) of each mesh axis that shards the dim, in the order of the mesh. A split factor
            above 1 first cuts the dim into that many chunks, then cuts each chunk into one shard per rank and gives
            shard *i* of all of them to rank *i*.

    Returns:
        The ranges of every combination of coordinates on those axes, the last axis running fastest.
    """
    held: list[Ranges] = [((0, size),) if size else ()]
    for count, split_factor in chain:
        held = [shard for ranges in held for shard in _shard(ranges, count, split_factor)]
    return tuple(held)


def positions(ranges: Ranges, strided: StridedRange) -> Ranges:
    """The positions in ``strided`` of those of its indices that are in ``ranges``.

    The indices 2 to 9 are ``StridedRange(2, 8)``, of which ((0, 3), (8, 12)) has the positions ((0, 1), (6, 8)).
    """
    return merged(
        (first, last) for first, last in ((strided.before(a), strided.before(b)) for a, b in ranges) if first < last
    )


def local_indices(ranges: Ranges, strided: StridedRange) -> tuple[StridedRange, ...]:
    """Where the indices of ``strided`` are in the local dim of a rank that holds ``ranges``, in order.

    A rank with the indices 3 to 11 holds one index of the first block of ``StridedRange(0, 4, 3, 5)``, the second
    block, and two indices of the third: ``StridedRange(0, 1)``, ``StridedRange(2, 4)`` and ``StridedRange(7, 2)`` of
    its local dim.
    """
    found: list[StridedRange] = []
    offset = 0
    for start, stop in ranges:
        for inside in strided.between(start, stop):
            local = inside.moved(offset - start)
            joined = found[-1].joined(local) if found else None
            if joined is None:
                found.append(local)
            else:
                found[-1] = joined
        offset += stop - start
    return tuple(found)


def tiles(size: int, covers: Iterable[Ranges]) -> bool:
    """Whether the ranges of all ``covers`` together contain every index of a dim of ``size`` exactly once."""
    position = 0
    for start, stop in sorted(span for ranges in covers for span in ranges):
        if start != position or stop <= start:
            return False
        position = stop
    return position == size


def _shard(ranges: Ranges, count: int, split_factor: int) -> list[Ranges]:
    if split_factor == 1:
        return _chunk(ranges, count)
    chunks = [_chunk(chunk, count) for chunk in _chunk(ranges, split_factor)]
    return [merged(span for shards in chunks for span in shards[k]) for k in range(count)]


def _chunk(ranges: Ranges, count: int) -> list[Ranges]:
    """``torch.chunk`` on the indices in ``ranges``: equal chunks, a smaller one, then empty ones."""
    size = -(-length(ranges) // count)
    return [_between_positions(ranges, k * size, (k + 1) * size) for k in range(count)]


def _between_positions(ranges: Ranges, first: int, last: int) -> Ranges:
    """The indices at positions [first, last) of ``ranges``."""
    if len(ranges) == 1:  # the common case, and the one that must be fast for 2,048 ranks
        (start, stop) = ranges[0]
        begin, end = min(start + first, stop), min(start + last, stop)
        return ((begin, end),) if begin < end else ()
    between = []
    position = 0
    for start, stop in ranges:
        begin, end = max(start, start + first - position), min(stop, start + last - position)
        if begin < end:
            between.append((begin, end))
        position += stop - start
    return tuple(between)


def merged(ranges: Iterable[Range]) -> Ranges:
    """``ranges`` with those joined that continue each other: ((0, 3), (3, 6), (8, 9)) becomes ((0, 6), (8, 9))."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
