"""Between the flat buffer of an exchange and the stage: as few strided copies as the pieces allow.

An even shard of thousands of ranks makes thousands of small blocks; they lie at equal distances on both sides, so that one
strided copy moves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..layout import Piece

__all__ = ["Block", "PlacedPiece", "blocks_of", "strided_views"]


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece at ``offset`` of a flat buffer; its matrix is number ``position`` of a stage."""

    piece: Piece
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of ``height`` × ``width`` elements, by its flat offset and row stride on both sides."""

    height: int
    width: int
    stage: int
    stage_stride: int
    buffer: int
    buffer_stride: int

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """What must be equal for blocks to move in one copy."""
        return self.height, self.width, self.stage_stride, self.buffer_stride


def blocks_of(placed: Iterable[PlacedPiece], cols: int, pitch: int) -> list[Block]:
    """The rectangles of pieces of matrices of ``cols`` columns that begin every ``pitch`` elements of a stage."""
    blocks = []
    for one in placed:
        width = one.piece.shape[1]
        base = one.position * pitch
        top = 0
        for row, row_stop in one.piece.rows:
            left = 0
            for col, col_stop in one.piece.cols:
                source = one.offset + top * width + left
                blocks.append(Block(row_stop - row, col_stop - col, base + row * cols + col, cols, source, width))
                left += col_stop - col
            top += row_stop - row
    return blocks


def strided_views(blocks: Sequence[Block], stage: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Equal-shaped views of ``stage`` and of the flat ``buffer``; copying one list to the other moves all blocks."""
    by_stage = _runs(sorted(blocks, key=lambda block: block.stage))
    by_buffer = _runs(sorted(blocks, key=lambda block: block.buffer))
    runs = min(by_stage, by_buffer, key=len)
    into = [_view(stage, run, run[0].stage, step[0], run[0].stage_stride) for run, step in runs]
    back = [_view(buffer, run, run[0].buffer, step[1], run[0].buffer_stride) for run, step in runs]
    return into, back


def _view(memory: Tensor, run: Sequence[Block], offset: int, step: int, row_stride: int) -> Tensor:
    shape = len(run), run[0].height, run[0].width
    return memory.as_strided(shape, (step, row_stride, 1), memory.storage_offset() + offset)


def _runs(blocks: Sequence[Block]) -> list[tuple[list[Block], tuple[int, int]]]:
    """Neighbours of one kind at equal distances on both sides, with these distances."""
    runs: list[tuple[list[Block], tuple[int, int]]] = []
    for block in blocks:
        if runs:
            run, step = runs[-1]
            last = run[-1]
            gap = block.stage - last.stage, block.buffer - last.buffer
            if block.kind == last.kind and min(gap) > 0 and (len(run) == 1 or gap == step):
                run.append(block)
                runs[-1] = run, gap
                continue
        runs.append(([block], (0, 0)))
    return runs
