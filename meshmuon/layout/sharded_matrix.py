"""From a layout to the pieces of each matrix inside a parameter, and who holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

from ..errors import PlanError
from ..matrices import Window
from .layout import Layout, Ranges, coordinates, flat_index, length, merged, positions, tiles


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a matrix: all combinations of row ranges and column ranges, in the order of its local
    tensor.

    Rows 4–7 of an (8, 6) matrix that ranks 1 and 3 hold: ``Piece(((4, 8),), ((0, 6),), (1, 3))``.
    """

    rows: Ranges
    cols: Ranges
    holders: tuple[int, ...]  # the rank that holds it in each replica

    @property
    def shape(self) -> tuple[int, int]:
        return length(self.rows), length(self.cols)

    @property
    def size(self) -> int:
        return length(self.rows) * length(self.cols)


@dataclass(frozen=True, eq=False)
class ShardedMatrix:
    """A matrix over ranks: pieces that tile it, each held once in every replica."""

    rows: int
    cols: int
    pieces: tuple[Piece, ...]  # non-empty ones
    replicas: int  # number of ranks that hold each piece
    # Rank → (index of the piece that it holds, index of the replica that it belongs to); its keys are all holders.
    holdings: dict[int, tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        holdings = {
            rank: (k, replica) for k, piece in enumerate(self.pieces) for replica, rank in enumerate(piece.holders)
        }
        object.__setattr__(self, "holdings", holdings)
        self._check_pieces()

    @property
    def whole(self) -> bool:
        """Whether every holder has the whole matrix."""
        return len(self.pieces) <= 1

    @cached_property
    def size(self) -> int:
        return self.rows * self.cols

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(piece.size for piece in self.pieces)

    def piece_of(self, rank: int) -> Piece | None:
        """The piece that ``rank`` holds; None if it holds nothing of the matrix."""
        holding = self.holdings.get(rank)
        return None if holding is None else self.pieces[holding[0]]

    def senders(self, owner: int) -> list[tuple[Piece, int]]:
        """Who sends each piece to ``owner``: its holder in the owner's own replica."""
        _, replica = self.holdings[owner]
        return [(piece, piece.holders[replica]) for piece in self.pieces]

    def sends_to(self, rank: int, owner: int) -> bool:
        """Whether ``rank`` is the one that sends its piece to ``owner``."""
        holding = self.holdings.get(rank)
        return holding is not None and holding[1] == self.holdings[owner][1]

    @cached_property
    def separate_replicas(self) -> tuple[ShardedMatrix, ...]:
        if self.replicas == 1:
            return (self,)
        return tuple(
            ShardedMatrix(self.rows, self.cols, tuple(Piece(p.rows, p.cols, (p.holders[k],)) for p in self.pieces), 1)
            for k in range(self.replicas)
        )

    def _check_pieces(self) -> None:
        """Raises unless every element is in exactly one piece, and every rank holds at most one piece in one replica.

        The second makes ``holdings`` the inverse of ``Piece.holders``: ``sends_to`` tells a rank to send its piece
        exactly when ``senders`` tells the owner to expect it.
        """
        rows, cols = {piece.rows for piece in self.pieces}, {piece.cols for piece in self.pieces}
        grid = {(piece.rows, piece.cols) for piece in self.pieces}
        tiled = not self.pieces or (tiles(self.rows, rows) and tiles(self.cols, cols))
        listed_once = len(grid) == len(self.pieces) == len(rows) * len(cols) and bool(self.size) == bool(self.pieces)
        copied = all(len(piece.holders) == self.replicas for piece in self.pieces)
        if not (tiled and listed_once and copied and len(self.holdings) == len(self.pieces) * self.replicas):
            text = "leave a gap or overlap, or are not held by one rank each in every replica"
            raise PlanError(f"the pieces of a {self.rows}×{self.cols} matrix {text}: {self.pieces}")


@lru_cache(maxsize=1024)
def shard_matrices(layout: Layout, stack_dims: int, window: Window | None = None) -> tuple[ShardedMatrix, ...]:
    """The pieces and holders of every matrix of a parameter; matrices with the same holders share one object.

    Experts (8, 64, 48) with dim 0 sharded over a 2-rank axis and dim 1 over a 4-rank axis: two objects, for experts 0–3
    and 4–7, each with four pieces of 16 rows.

    Args:
        layout: the parameter's layout.
        stack_dims: number of leading dims that index the matrices (0: the parameter is one matrix; 1: a stack of
            experts). The next dim is the rows, the remaining ones are the columns.
        window: which rows and columns of the parameter the matrices are; None for all of them.
    """
    columns = range(stack_dims + 1, len(layout.shape))
    mesh_shape = layout.mesh.shape
    stack_axes, row_axes = layout.axes(0) if stack_dims else (), layout.axes(stack_dims)
    column_axes = [layout.axes(dim) for dim in columns]
    stack_cuts, row_cuts = layout.cuts(0) if stack_dims else (((0, 1),),), layout.cuts(stack_dims)
    column_cuts = _column_cuts(layout, columns)
    shape = layout.shape[stack_dims], math.prod(layout.shape[stack_dims + 1 :])
    if window is not None:
        rows, cols = window
        row_cuts = tuple(positions(ranges, rows) for ranges in row_cuts)
        column_cuts = {shards: positions(ranges, cols) for shards, ranges in column_cuts.items()}
        shape = rows.length, cols.length
    # For each shard of the stack, (shard of the rows, shards of the column dims) → its holders; number k is in replica
    # k.
    held: list[dict[tuple[int, tuple[int, ...]], list[int]]] = [{} for _ in stack_cuts]
    for rank, coordinate in coordinates(layout.mesh).items():
        column_shards = tuple(flat_index(mesh_shape, coordinate, axes) for axes in column_axes)
        shard = flat_index(mesh_shape, coordinate, row_axes), column_shards
        held[flat_index(mesh_shape, coordinate, stack_axes)].setdefault(shard, []).append(rank)
    sharded_matrices: list[ShardedMatrix | None] = [None] * (layout.shape[0] if stack_dims else 1)
    for ranges, holders in zip(stack_cuts, held, strict=True):
        if not ranges:
            continue
        pieces = [Piece(row_cuts[row], column_cuts[col], tuple(ranks)) for (row, col), ranks in sorted(holders.items())]
        sharded = ShardedMatrix(*shape, tuple(p for p in pieces if p.rows and p.cols), len(pieces[0].holders))
        for start, stop in ranges:
            sharded_matrices[start:stop] = [sharded] * (stop - start)
    return tuple(sharded for sharded in sharded_matrices if sharded is not None)


def _column_cuts(layout: Layout, dims: range) -> dict[tuple[int, ...], Ranges]:
    """Ranges of the flattened column index for every combination of shards of the column dims."""
    cuts = [layout.cuts(dim) for dim in dims]
    if len(cuts) == 1:
        return {(k,): ranges for k, ranges in enumerate(cuts[0])}
    sizes = [layout.shape[dim] for dim in dims]
    combinations = product(*(range(len(cut)) for cut in cuts))
    return {shards: _flatten([cut[k] for cut, k in zip(cuts, shards, strict=True)], sizes) for shards in combinations}


def _flatten(ranges: list[Ranges], sizes: list[int]) -> Ranges:
    """The product of ranges over several dims as ranges of one flat index.

    Indices 1–2 of a dim of 3 and index 0 of a dim of 4 are ((4, 5), (8, 9)) of the 12 flat indices.
    """
    flat: Ranges = ((0, 1),)
    for dim_ranges, size in zip(ranges, sizes, strict=True):
        outer = [index for start, stop in flat for index in range(start, stop)]
        flat = merged((index * size + start, index * size + stop) for index in outer for start, stop in dim_ranges)
    return flat
