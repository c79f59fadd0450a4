"""How many bytes a piece has on the wire: elements of a dtype, or int8 with a scale for each block.

A block is 128 consecutive elements of a row of the whole matrix; ``execute/int8.py`` says what the scales are. A piece
travels as its elements, followed by the scales of the blocks that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..layout import Layout, Piece, Ranges, shard_matrices
from ..matrices import MatrixSet

BLOCK = 128
"""Elements of a row that share a scale."""

SCALE_BYTES = 2
INT8 = 1
"""Bytes per element of int8, the only dtype on the wire with as few."""

BY_OWNER = ", gathered unrounded"
"""In the lane of matrices whose layout cuts blocks, after their dtypes: the owner rounds them to int8."""

_ALIGNMENT = 8  # bytes: where two dtypes share a buffer, pieces that stay begin at a multiple of it


class PieceBytes(NamedTuple):
    """Bytes of one piece."""

    gather: int  # on its way to the owner
    scatter: int  # on its way back
    held: int  # of the memory that has room for both


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes per element on the way to the owner and back; ``INT8`` stands for int8 with scales."""

    gather: int
    scatter: int

    def of(self, piece: Piece) -> PieceBytes:
        gather, scatter = (bytes_of(piece, itemsize) for itemsize in (self.gather, self.scatter))
        held = gather if self.gather == self.scatter else -(-max(gather, scatter) // _ALIGNMENT) * _ALIGNMENT
        return PieceBytes(gather, scatter, held)

    @property
    def itemsize(self) -> float:
        """Bytes per element, the mean of both ways: what a byte costs is the same on both."""
        if self.gather == self.scatter != INT8:
            return self.gather
        ways = (size + SCALE_BYTES / BLOCK if size == INT8 else size for size in (self.gather, self.scatter))
        return sum(ways) / 2


def bytes_of(piece: Piece, itemsize: int) -> int:
    """Bytes of a piece with ``itemsize`` bytes per element, those of its scales included."""
    rows, cols = piece.shape
    scales = SCALE_BYTES * sum(stop - start for start, stop in blocks_touched(piece.cols)) if itemsize == INT8 else 0
    return rows * (cols * itemsize + scales)


def blocks_touched(cols: Ranges) -> Ranges:
    """The blocks that columns lie in, in ascending order: columns ((100, 140), (150, 160)) lie in blocks ((0, 2),)."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(cols):
        first, behind = start // BLOCK, -(-stop // BLOCK)
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(behind, joined[-1][1])
        else:
            joined.append((first, behind))
    return tuple(joined)


def layout_cuts_blocks(layout: Layout, matrix_set: MatrixSet) -> bool:
    """Whether some holder of a matrix of the set cannot find the scales of its blocks alone."""
    matrices = shard_matrices(layout, stack_dims=matrix_set.stack_dims, window=matrix_set.window)
    return any(cuts_blocks(piece, sharded.cols) for sharded in set(matrices) for piece in sharded.pieces)


def cuts_blocks(piece: Piece, width: int) -> bool:
    """Whether a piece of a matrix with ``width`` columns has a part of a block only, or a short block before others."""
    ends = [stop for _, stop in piece.cols]
    whole = all(stop % BLOCK == 0 for stop in ends[:-1]) and (ends[-1] % BLOCK == 0 or ends[-1] == width)
    return not whole or any(start % BLOCK for start, _ in piece.cols)
