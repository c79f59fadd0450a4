"""The copies of a wave: between shards and exchange buffers, and between these and the matrices of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..plan import PieceTransfer
from .buffers import PlacedPiece, PlacedTransfers, offsets_of, strided_views
from .ortho_batch import OrthoBatch
from .program_builder import MatrixBatch, ProgramBuilder
from .rounding import RoundingScratch
from .shards import ShardView, UpdateViews
from .wave import CopyPairs, OwnedBatch

Places: TypeAlias = "Sequence[tuple[PlacedTransfers, Tensor]]"
"""Where pieces are in buffers."""
PlacedPieces: TypeAlias = "Sequence[tuple[Sequence[PlacedPiece], Tensor]]"
"""The same for the pieces of a batch."""
PieceViews: TypeAlias = "Sequence[tuple[PieceTransfer, list[ShardView]]]"
"""Pieces as the weights see them."""


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
        at_end = [(transfer, offset // dtype.itemsize) for transfer, offset in staying]
        return cls(dtype, offsets_of(own), at_end, offsets_of(owned))

    def of_dtype(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first.view(self.dtype), second.view(self.dtype)

    def places(self, matrices: Tensor, shards: Tensor) -> Places:
        """All pieces of matrices that this rank owns."""
        return list(zip((self.owned, self.staying), self.of_dtype(matrices, shards), strict=True))


def views_of(builder: ProgramBuilder, way: Way, buffer: Tensor) -> PieceViews:
    """Where this rank's pieces of a wave are for its weights: in the exchange buffer itself."""
    buffer = buffer.view(way.dtype)
    return [(transfer, builder.piece_views(transfer, offset, buffer)) for transfer, offset in (*way.own, *way.staying)]


def owned_batch(
    builder: ProgramBuilder, batch: MatrixBatch, ortho_batch: OrthoBatch, unpack_from: Places, pack_into: Places
) -> OwnedBatch:
    """A batch with its copies.

    ``unpack_from`` says where the pieces lie in the buffers when the gather is done, ``pack_into`` where the pieces of
    the result must go.
    """
    position = {matrix.task: k for k, matrix in enumerate(batch)}
    arrived, leaving = (
        [
            ([PlacedPiece(t.piece, offset, position[t.task]) for t, offset in transfers if t.task in position], buffer)
            for transfers, buffer in places
        ]
        for places in (unpack_from, pack_into)
    )
    (in_batch, in_buffers), (out_of_batch, into_buffers) = (
        _views(places, ortho_batch.stacked) for places in (arrived, leaving)
    )
    unpack, pack = CopyPairs(in_batch, in_buffers), CopyPairs(into_buffers, out_of_batch)
    return OwnedBatch(ortho_batch, unpack, pack)


def _views(places: PlacedPieces, stacked: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    of_batch, of_buffers = list[Tensor](), list[Tensor]()
    for pieces, buffer in places:
        views = strided_views(pieces, stacked, buffer)
        of_batch += views[0]
        of_buffers += views[1]
    return of_batch, of_buffers


def update_views(builder: ProgramBuilder, wave: int, views: PieceViews) -> UpdateViews:
    """The views of a wave's updates."""
    shards = [shard for _, of_piece in views for shard in of_piece]
    scratch = RoundingScratch(builder.workspace, "rounding beside")
    return UpdateViews(
        shards, builder.step_params, scratch, builder.momentum_slot(wave % builder.plan.options.in_flight)
    )
