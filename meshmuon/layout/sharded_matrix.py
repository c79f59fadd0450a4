"""How the matrices inside a parameter are spread over ranks: pieces, and who holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

from ..errors import PlanError
from ..matrices import Window
from .cuts import Ranges, clip, length, merged, tiles
from .layout import Layout, coordinates, flat_index

__all__ = ["Piece", "ShardedMatrix", "shard_matrices"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a matrix: the product of row ranges and column ranges, in local order.

    Attributes:
        rows: row ranges.
        cols: column ranges.
        holders: the rank that holds it in each replica.
    """

    rows: Ranges
    cols: Ranges
    holders: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the local block."""
        return length(self.rows), length(self.cols)

    @property
    def size(self) -> int:
        """Number of elements."""
        return length(self.rows) * length(self.cols)


@dataclass(frozen=True, eq=False)
class ShardedMatrix:
    """A matrix over ranks: pieces that tile it, each held once in every replica.

    Attributes:
        rows: rows of the matrix.
        cols: columns of the matrix.
        pieces: non-empty pieces.
        replicas: how many ranks hold each piece.
        place: rank → (index of its piece, its replica). Ranks that hold nothing are not in it.
    """

    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    replicas: int
    piece_and_replica: dict[int, tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        piece_and_replica = {
            rank: (k, replica) for k, piece in enumerate(self.pieces) for replica, rank in enumerate(piece.holders)
        }
        object.__setattr__(self, "piece_and_replica", piece_and_replica)
        self._prove()

    @property
    def whole(self) -> bool:
        """Whether every holder has the whole matrix."""
        return len(self.pieces) <= 1

    @property
    def size(self) -> int:
        """Number of elements of the matrix."""
        return self.rows * self.cols

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each piece."""
        return tuple(piece.size for piece in self.pieces)

    def piece_of(self, rank: int) -> Piece | None:
        """The piece that ``rank`` holds."""
        found = self.piece_and_replica.get(rank)
        return None if found is None else self.pieces[found[0]]

    def senders(self, owner: int) -> list[tuple[Piece, int]]:
        """Who sends each piece to ``owner``: its holder in the owner's own replica."""
        replica = self.piece_and_replica[owner][1]
        return [(piece, piece.holders[replica]) for piece in self.pieces]

    def sends_to(self, rank: int, owner: int) -> bool:
        """Whether ``rank`` is the one that sends its piece to ``owner``."""
        found = self.piece_and_replica.get(rank)
        return found is not None and found[1] == self.piece_and_replica[owner][1]

    @cached_property
    def separate_replicas(self) -> tuple[ShardedMatrix, ...]:
        """Each replica as a spread of its own."""
        if self.replicas == 1:
            return (self,)
        return tuple(
            ShardedMatrix(self.rows, self.cols, tuple(Piece(p.rows, p.cols, (p.holders[k],)) for p in self.pieces), 1)
            for k in range(self.replicas)
        )

    def _prove(self) -> None:
        """Every element is in exactly one piece, and every rank holds at most one piece in one replica.

        By the second, ``piece_and_replica`` and ``holders`` are inverse to each other: ``sends_to`` tells a rank that it sends
        its piece exactly when ``senders`` tells the owner to expect it.
        """
        rows, cols = {piece.rows for piece in self.pieces}, {piece.cols for piece in self.pieces}
        grid = {(piece.rows, piece.cols) for piece in self.pieces}
        if self.pieces and not (tiles(self.rows, rows) and tiles(self.cols, cols)):
            raise PlanError(f"the pieces of a {self.rows}×{self.cols} matrix leave a gap or overlap: {self.pieces}")
        if not len(grid) == len(self.pieces) == len(rows) * len(cols) or bool(self.size) != bool(self.pieces):
            raise PlanError(f"a piece of a {self.rows}×{self.cols} matrix is missing or there twice: {self.pieces}")
        if any(len(piece.holders) != self.replicas for piece in self.pieces):
            raise PlanError(f"a replica of a {self.rows}×{self.cols} matrix lacks a piece: {self.pieces}")
        if len(self.piece_and_replica) != len(self.pieces) * self.replicas:
            raise PlanError(f"a rank holds two pieces of one {self.rows}×{self.cols} matrix: {self.pieces}")


@lru_cache(maxsize=1024)
def shard_matrices(layout: Layout, stack_dims: int, window: Window | None = None) -> tuple[ShardedMatrix, ...]:
    """The spread of every matrix of a parameter; matrices that are held alike share one object.

    Args:
        layout: the parameter's layout.
        lead: how many leading dims count matrices (0: the parameter is one matrix; 1: a stack of experts). The next dim is the
            rows, the remaining ones are the columns.
        window: which rows and columns of the parameter the matrices are; None for all of them.
    """
    columns = range(stack_dims + 1, len(layout.shape))
    grid = layout.mesh.shape
    lead_axes, row_axes = layout.axes(0) if stack_dims else (), layout.axes(stack_dims)
    column_axes = [layout.axes(dim) for dim in columns]
    lead_cuts, row_cuts = layout.cuts(0) if stack_dims else (((0, 1),),), layout.cuts(stack_dims)
    column_cuts = _column_cuts(layout, columns)
    shape = layout.shape[stack_dims], math.prod(layout.shape[stack_dims + 1 :])
    if window is not None:
        (top, bottom), (left, right) = window
        row_cuts = tuple(clip(ranges, top, bottom) for ranges in row_cuts)
        column_cuts = {parts: clip(ranges, left, right) for parts, ranges in column_cuts.items()}
        shape = bottom - top, right - left
    held: list[dict[tuple[int, tuple[int, ...]], list[int]]] = [{} for _ in lead_cuts]
    for rank, where in coordinates(layout.mesh).items():  # for each part, the order of the mesh is the order of replicas
        part = flat_index(grid, where, row_axes), tuple(flat_index(grid, where, axes) for axes in column_axes)
        held[flat_index(grid, where, lead_axes)].setdefault(part, []).append(rank)
    sharded_matrices: list[ShardedMatrix | None] = [None] * (layout.shape[0] if stack_dims else 1)
    for ranges, group in zip(lead_cuts, held, strict=True):
        if not ranges:
            continue
        pieces = [Piece(row_cuts[row], column_cuts[col], tuple(ranks)) for (row, col), ranks in sorted(group.items())]
        sharded = ShardedMatrix(*shape, tuple(p for p in pieces if p.rows and p.cols), len(pieces[0].holders))
        for start, stop in ranges:
            sharded_matrices[start:stop] = [sharded] * (stop - start)
    return tuple(sharded for sharded in sharded_matrices if sharded is not None)


def _column_cuts(layout: Layout, dims: range) -> dict[tuple[int, ...], Ranges]:
    """Ranges of the flattened column index for every combination of the parts of the column dims."""
    cuts = [layout.cuts(dim) for dim in dims]
    if len(cuts) == 1:
        return {(k,): ranges for k, ranges in enumerate(cuts[0])}
    sizes = [layout.shape[dim] for dim in dims]
    combinations = product(*(range(len(parts)) for parts in cuts))
    return {parts: _flatten([cut[k] for cut, k in zip(cuts, parts, strict=True)], sizes) for parts in combinations}


def _flatten(ranges: list[Ranges], sizes: list[int]) -> Ranges:
    """The product of ranges over several dims as ranges of one flat index."""
    flat: Ranges = ((0, 1),)
    for mine, size in zip(ranges, sizes, strict=True):
        outer = [index for start, stop in flat for index in range(start, stop)]
        flat = merged((index * size + start, index * size + stop) for index in outer for start, stop in mine)
    return flat
