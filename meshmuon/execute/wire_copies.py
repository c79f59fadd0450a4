"""The copies of a wave: between shards and exchange buffers, and between these and the matrices of batches.

They are as the pieces are, or into int8 and out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..ortho import Workspace
from ..plan import SCALE_BYTES, PieceTransfer, blocks_touched, cuts_blocks
from .buffers import PlacedPiece, PlacedTransfers, int8_views, offsets_of, strided_views
from .int8 import SCALE_DTYPE, Int8View, scales_shape
from .ortho_batch import OrthoBatch
from .program_builder import MatrixBatch, ProgramBuilder
from .rounding import RoundingScratch
from .shards import ShardView, UpdateViews
from .step_param import RunningStep
from .wave import NO_COPIES, Copies, CopyPairs, OwnedBatch
from .weight_sums import WeightSums, new_table
from .wire import LaneWire, size_on_wire

Places: TypeAlias = "Sequence[tuple[PlacedTransfers, Tensor]]"
"""Where pieces are in buffers."""
PlacedPieces: TypeAlias = "Sequence[tuple[Sequence[PlacedPiece], Tensor]]"
"""The same for the pieces of a batch."""


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


def unrounded_buffer(builder: ProgramBuilder, wave: int, size: int) -> Tensor | None:
    """Where this rank's shards are in full precision, before they are rounded for the wire or after; None if never."""
    template, wire = builder.lane_template(wave), builder.lane_wire(wave)
    if torch.int8 not in (wire.gather, wire.scatter) and rounds_in_passing(builder, wave):
        return None
    return builder.workspace.take("unrounded", (size,), template.update_dtype, template.param.device)


def rounds_in_passing(builder: ProgramBuilder, wave: int) -> bool:
    """Whether momentum is written to the exchange buffer in its dtype at once."""
    template, gather = builder.lane_template(wave), builder.lane_wire(wave).gather
    fuses = builder.settings.fuses(template.param.device) and template.update_dtype == torch.float32
    return gather == template.update_dtype or (fuses and gather != torch.int8)


def beside_wire(
    way: Way, buffer: Tensor, unrounded: Tensor | None, int8_copies: Callable[[list[Int8View]], Copies]
) -> tuple[tuple[PlacedTransfers, Tensor], Copies]:
    """Where this rank's pieces are for its weights, in which buffer, and the copies between there and the exchange buffer.

    They are one after the other in ``unrounded`` or, if that is None, in the exchange buffer itself.
    """
    placed, buffer = [*way.own, *way.staying], buffer.view(way.dtype)
    if unrounded is None:
        return (placed, buffer), NO_COPIES
    numbers = offsets_of([transfer for transfer, _ in placed])
    place = numbers, unrounded
    if way.dtype == torch.int8:
        pieces = [PlacedPiece(t.piece, offset, at) for (t, offset), (_, at) in zip(placed, numbers, strict=True)]
        return place, int8_copies(int8_views(pieces, unrounded, buffer))
    if numbers == placed:  # all of it in one copy
        total = sum(transfer.piece.size for transfer, _ in placed)
        return place, CopyPairs([buffer[:total]], [unrounded[:total]])
    lists = ([flat[at : at + t.piece.size] for t, at in at_of] for flat, at_of in ((buffer, placed), (unrounded, numbers)))
    narrow, wide = lists
    return place, CopyPairs(narrow, wide)


def owned_batch(
    builder: ProgramBuilder, batch: MatrixBatch, ortho_batch: OrthoBatch, unpack_from: Places, pack_into: Places, wire: LaneWire
) -> OwnedBatch:
    """A batch with its copies.

    ``unpack_from`` says where the pieces lie in the buffers when the gather is done, ``pack_into`` where the pieces of the
    result must go.
    """
    position = {matrix.task: k for k, matrix in enumerate(batch)}
    arrived, leaving = (
        [
            ([PlacedPiece(t.piece, offset, position[t.task]) for t, offset in transfers if t.task in position], buffer)
            for transfers, buffer in places
        ]
        for places in (unpack_from, pack_into)
    )
    cut = wire.scatter == torch.int8 and any(cuts_blocks(builder.plan.tasks[matrix.task].sharded) for matrix in batch)
    in_int8 = batch_in_int8(ortho_batch.stacked, builder.workspace) if cut or wire.by_owner else None
    return OwnedBatch(
        ortho_batch,
        unpack=unpacking(arrived, ortho_batch.stacked, in_int8 if wire.by_owner else None),
        pack=packing(leaving, ortho_batch.stacked, in_int8),
    )


def update_views(builder: ProgramBuilder, wave: int, placed: PlacedTransfers, buffer: Tensor) -> UpdateViews:
    """The views of a wave's updates. The table of sums has a row for each of its tasks whose rules ask for them."""
    tasks = (t for t, task in enumerate(builder.plan.tasks) if task.wave == wave and builder.step_params[task.param].scales)
    rows, shards = {task: row for row, task in enumerate(tasks)}, list[ShardView]()
    for transfer, offset in placed:
        of_piece = builder.piece_views([(transfer, offset)], buffer)
        if (row := rows.get(transfer.task)) is not None:
            holdings = builder.plan.tasks[transfer.task].sharded.holdings
            counted = builder.rank == next(rank for rank in transfer.piece.holders if rank in holdings)
            of_piece = [replace(shard, rows=slice(row, row + 1), counted=counted) for shard in of_piece]
        shards += of_piece
    template, slot = builder.lane_template(wave), builder.momentum_slot(wave % builder.plan.options.in_flight)
    sums = WeightSums(new_table(len(rows), template.param.device), template.work_device) if rows else None
    return UpdateViews(shards, builder.step_params, RoundingScratch(builder.workspace, "rounding beside"), slot, sums)
