"""Copies between the flat buffer of an exchange and a batch of matrices: as few strided ones as the pieces allow.

A (4096, D) matrix over 2,048 ranks is 2,048 blocks of 2 rows. They lie at equal distances in the buffer and in the matrix, so
that one strided copy moves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..layout import Piece


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece at ``offset`` of a flat buffer; its matrix is number ``position`` of a batch."""

    piece: Piece
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of ``height`` × ``width`` elements: its flat offset and row stride, in the batch and in the buffer."""

    height: int
    width: int
    batch_offset: int
    batch_stride: int
    buffer_offset: int
    buffer_stride: int

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """What must be equal for blocks to move in one copy."""
        return self.height, self.width, self.batch_stride, self.buffer_stride


def blocks_of(placed: Iterable[PlacedPiece], cols: int, pitch: int) -> list[Block]:
    """The rectangles of pieces of matrices with ``cols`` columns that begin every ``pitch`` elements of a batch."""
    blocks = []
    for placed_piece in placed:
        width = placed_piece.piece.shape[1]
        base = placed_piece.position * pitch
        top = 0
        for row, row_stop in placed_piece.piece.rows:
            left = 0
            for col, col_stop in placed_piece.piece.cols:
                source = placed_piece.offset + top * width + left
                blocks.append(Block(row_stop - row, col_stop - col, base + row * cols + col, cols, source, width))
                left += col_stop - col
            top += row_stop - row
    return blocks


def strided_views(blocks: Sequence[Block], stacked: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Equal-shaped views of ``stacked`` and of the flat ``buffer``; copying one list to the other moves all blocks."""
    in_batch_order = _runs(sorted(blocks, key=lambda block: block.batch_offset))
    in_buffer_order = _runs(sorted(blocks, key=lambda block: block.buffer_offset))
    runs = min(in_batch_order, in_buffer_order, key=len)
    of_stacked = [_view(stacked, run, run[0].batch_offset, step[0], run[0].batch_stride) for run, step in runs]
    of_buffer = [_view(buffer, run, run[0].buffer_offset, step[1], run[0].buffer_stride) for run, step in runs]
    return of_stacked, of_buffer


def _view(tensor: Tensor, run: Sequence[Block], offset: int, step: int, row_stride: int) -> Tensor:
    shape = len(run), run[0].height, run[0].width
    return tensor.as_strided(shape, (step, row_stride, 1), tensor.storage_offset() + offset)


def _runs(blocks: Sequence[Block]) -> list[tuple[list[Block], tuple[int, int]]]:
    """Consecutive blocks of one kind at equal distances in the batch and in the buffer, with these two distances."""
    runs: list[tuple[list[Block], tuple[int, int]]] = []
    for block in blocks:
        if runs:
            run, step = runs[-1]
            last = run[-1]
            gap = block.batch_offset - last.batch_offset, block.buffer_offset - last.buffer_offset
            if block.kind == last.kind and min(gap) > 0 and (len(run) == 1 or gap == step):
                run.append(block)
                runs[-1] = run, gap
                continue
        runs.append(([block], (0, 0)))
    return runs
