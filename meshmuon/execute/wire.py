"""What travels: dtypes to the owners and back, and the copies into int8 and out of it.

Every element of a matrix that is exchanged is rounded, also what its owner holds itself: bits do not depend on who owns what.
Pieces in int8 that stay on their rank are therefore stored as if they had travelled. Where a holder has only a part of a block,
it does not know the block's scale: then pieces are gathered as they are, and the owner rounds the matrix (``by_owner``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..layout import Piece
from ..ortho import Workspace
from ..plan import SCALE_BYTES, PieceTransfer, PlannedParam, Wire, blocks_touched, bytes_of
from .buffers import PlacedPiece, PlacedTransfers, int8_views, offsets_of, strided_views
from .int8 import SCALE_DTYPE, Int8View, scales_shape
from .step_param import RunningStep, StepParam
from .wave import Copies, CopyPairs

Places: TypeAlias = "Sequence[tuple[PlacedTransfers, Tensor]]"
"""Where pieces are in buffers."""
PlacedPieces: TypeAlias = "Sequence[tuple[Sequence[PlacedPiece], Tensor]]"
"""The same for the pieces of a batch."""


@dataclass(frozen=True, slots=True)
class LaneWire:
    """How the matrices of a lane travel."""

    gather: torch.dtype
    scatter: torch.dtype
    by_owner: bool  # gathers are not rounded on the way, but by the owner, to int8
    nbytes: Wire

    @classmethod
    def of(cls, planned: PlannedParam, step_param: StepParam) -> LaneWire:
        gather, scatter = step_param.comm_dtype
        by_owner = gather == torch.int8 and planned.itemsize != gather.itemsize
        return cls(step_param.update_dtype if by_owner else gather, scatter, by_owner, planned.wire)

    @property
    def base(self) -> torch.dtype:
        """Dtype of the buffers that both directions share: bytes if they differ."""
        return self.gather if self.gather == self.scatter else torch.int8


class Way(NamedTuple):
    """One direction of a wave on one rank: the dtype, and where pieces are in the buffers, in elements of it."""

    dtype: torch.dtype
    own: PlacedTransfers  # this rank's pieces that travel, in ``shards``
    staying: PlacedTransfers  # those that stay, in ``shards``
    owned: PlacedTransfers  # pieces of the matrices that it owns, in ``gathered`` or ``results``

    @classmethod
    def of(
        cls, dtype: torch.dtype, own: Sequence[PieceTransfer], owned: Sequence[PieceTransfer], staying: PlacedTransfers
    ) -> Way:
        """``staying`` has offsets in bytes: those of a piece are the same in both directions."""
        size = partial(size_on_wire, dtype=dtype)
        at_end = [(transfer, offset // dtype.itemsize) for transfer, offset in staying]
        return cls(dtype, offsets_of(own, size=size), at_end, offsets_of(owned, size=size))

    def of_dtype(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first.view(self.dtype), second.view(self.dtype)

    def places(self, matrices: Tensor, shards: Tensor) -> Places:
        """All pieces of matrices that this rank owns."""
        return list(zip((self.owned, self.staying), self.of_dtype(matrices, shards), strict=True))


def size_on_wire(piece: Piece, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` that a piece takes on the wire, its scales included."""
    return bytes_of(piece, dtype.itemsize) // dtype.itemsize


@dataclass(frozen=True, slots=True)
class ToInt8:
    """Writes numbers as int8."""

    views: Sequence[Int8View]

    def run(self, step: RunningStep) -> None:
        if self.views:
            step.elementwise.quantise(self.views)


@dataclass(frozen=True, slots=True)
class FromInt8:
    """Writes int8 as numbers."""

    views: Sequence[Int8View]

    def run(self, step: RunningStep) -> None:
        if self.views:
            step.elementwise.dequantise(self.views)


def unpacking(arrived: PlacedPieces, stacked: Tensor, rounded: Int8View | None) -> list[Copies]:
    """From pieces to the matrices of a batch. With ``rounded``, where the batch has room in int8, they are rounded there."""
    if arrived[0][1].dtype == torch.int8:
        return [FromInt8([view for pieces, buffer in arrived for view in int8_views(pieces, stacked, buffer)])]
    in_batch, in_buffers = _copied(arrived, stacked)
    copies = CopyPairs(in_batch, in_buffers)
    return [copies] if rounded is None else [copies, ToInt8([rounded]), FromInt8([rounded])]


def packing(leaving: PlacedPieces, stacked: Tensor, rounded: Int8View | None) -> list[Copies]:
    """From the matrices of a batch to pieces. Pieces in int8 that cut blocks are cut out of ``rounded``, the whole batch."""
    if leaving[0][1].dtype != torch.int8:
        in_batch, in_buffers = _copied(leaving, stacked)
        return [CopyPairs(in_buffers, in_batch)]
    if rounded is None:
        return [ToInt8([view for pieces, buffer in leaving for view in int8_views(pieces, stacked, buffer)])]
    in_batch, in_buffers = _copied(leaving, rounded.quanta)
    scales = [([_scales_of(placed) for placed in pieces], buffer) for pieces, buffer in leaving]
    scales_in_batch, scales_in_buffers = _copied(scales, rounded.scales)
    return [ToInt8([rounded]), CopyPairs(in_buffers + scales_in_buffers, in_batch + scales_in_batch)]


def _copied(places: PlacedPieces, stacked: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [strided_views(pieces, stacked, buffer) for pieces, buffer in places]
    return [view for views, _ in pairs for view in views], [view for _, views in pairs for view in views]


def _scales_of(placed: PlacedPiece) -> PlacedPiece:
    """The bytes of a piece's scales, as a piece of the bytes of the scales of the whole matrix."""
    cols = tuple((SCALE_BYTES * start, SCALE_BYTES * stop) for start, stop in blocks_touched(placed.piece.cols))
    return PlacedPiece(replace(placed.piece, cols=cols), placed.offset + placed.piece.size, placed.position)


def batch_in_int8(stacked: Tensor, workspace: Workspace) -> Int8View:
    """Memory for a batch, (size, rows, cols), in int8."""
    quanta = workspace.take("quanta", stacked.shape, torch.int8, stacked.device)
    scales = workspace.take("scales", scales_shape(stacked.shape), SCALE_DTYPE, stacked.device)
    return Int8View(stacked, quanta, scales.view(torch.int8), 0)
