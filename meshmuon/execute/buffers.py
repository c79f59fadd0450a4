"""Where pieces are in the buffers of exchanges, and buffers on the way in host memory.

Pieces move between the flat buffer of an exchange and a batch of matrices in as few strided copies as they allow: those
of ``strided_views``. A (4096, D) matrix over 2,048 ranks is 2,048 blocks of 2 rows. They lie at equal distances in the
buffer and in the matrix, so that one strided copy moves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, sub
from typing import TypeAlias

import torch
from torch import Tensor

from ..device import HOST, Transfers, transfers_for
from ..layout import Piece
from ..ortho import Workspace
from ..plan import PieceTransfer

PlacedTransfers: TypeAlias = "list[tuple[PieceTransfer, int]]"
"""Transfers with the offsets of their pieces in a buffer."""


def offsets_of(
    transfers: Sequence[PieceTransfer], start: int = 0, size: Callable[[Piece], int] = attrgetter("size")
) -> PlacedTransfers:
    """Each transfer with the offset of its piece in a flat buffer, where pieces lie one after the other from
    ``start`` on.
    """
    placed = []
    for transfer in transfers:
        placed.append((transfer, start))
        start += size(transfer.piece)
    return placed


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece at ``offset`` of a flat buffer; its matrix is number ``position`` of a batch."""

    piece: Piece
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle of elements, by its offsets in several tensors; blocks of one kind can move in one copy."""

    kind: tuple[int, ...]  # its height, its width and its row stride in each of the tensors
    offsets: tuple[int, ...]


def strided_views(placed: Iterable[PlacedPiece], stacked: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Equal-shaped views of a batch, (size, rows, cols), and of a flat buffer; copying one list to the other moves
    all pieces.
    """
    of_stacked, of_buffer = [], []
    for run, step in _fewest_runs(list(_blocks(placed, stacked))):
        height, width, *strides = run[0].kind
        of_stacked.append(_view(stacked, run, step, 0, (height, width), strides[0]))
        of_buffer.append(_view(buffer, run, step, 1, (height, width), strides[1]))
    return of_stacked, of_buffer


def _view(
    tensor: Tensor, run: Sequence[_Block], step: Sequence[int], which: int, size: tuple[int, int], stride: int
) -> Tensor:
    offset = tensor.storage_offset() + run[0].offsets[which]
    return tensor.as_strided((len(run), *size), (step[which], stride, 1), offset)


def _blocks(placed: Iterable[PlacedPiece], stacked: Tensor) -> Iterator[_Block]:
    pitch, cols = stacked.stride(0), stacked.size(2)
    for placed_piece in placed:
        width = placed_piece.piece.shape[1]
        offset = placed_piece.offset
        for row, row_stop in placed_piece.piece.rows:
            left = 0
            for col, col_stop in placed_piece.piece.cols:
                kind = row_stop - row, col_stop - col, cols, width
                yield _Block(kind, (placed_piece.position * pitch + row * cols + col, offset + left))
                left += col_stop - col
            offset += (row_stop - row) * width


_Runs: TypeAlias = "list[tuple[list[_Block], tuple[int, ...]]]"
"""Blocks of one kind at equal distances in all tensors, with these distances."""


def _fewest_runs(blocks: Sequence[_Block]) -> _Runs:
    orders = (_runs(sorted(blocks, key=lambda block: block.offsets[which])) for which in range(2))
    return min(orders, key=len)


def _runs(blocks: Sequence[_Block]) -> _Runs:
    """Consecutive blocks in runs."""
    runs: _Runs = []
    for block in blocks:
        if runs:
            run, step = runs[-1]
            gap = tuple(map(sub, block.offsets, run[-1].offsets))
            if block.kind == run[-1].kind and min(gap) > 0 and (len(run) == 1 or gap == step):
                run.append(block)
                runs[-1] = run, gap
                continue
        runs.append(([block], (0,) * len(block.offsets)))
    return runs


@dataclass(frozen=True, slots=True)
class Stage:
    """Flat memory of the device, and as much host memory that is copied there and back."""

    device: Tensor
    host: Tensor
    transfers: Transfers

    def to_device(self) -> None:
        """Later work of the device sees what the host has written."""
        self.transfers.load(self.device, self.host)

    def to_host(self) -> None:
        """Waits until the host may read all results of the device so far, and may write for the next copy."""
        self.transfers.store(self.host, self.device)
        self.transfers.settle()


class Staging:
    """The stages of one device. Those of one name share host memory, as the buffers of a ``Workspace`` do."""

    def __init__(self, device: torch.device) -> None:
        self._transfers = transfers = transfers_for(device)
        self._host = Workspace(lambda size, dtype, _: transfers.host_buffer(size, dtype))

    def flat(self, name: str, device: Tensor) -> Stage:
        """A stage for a flat tensor of the device."""
        return Stage(device, self._host.take(name, device.shape, device.dtype, HOST), self._transfers)

    def matrices(self, name: str, shape: tuple[int, int, int], device: Tensor) -> tuple[Stage, Tensor]:
        """A stage for the flat memory of matrices on the device, and the same matrices in host memory."""
        return self.flat(name, device), self._host.take_matrices(name, shape, device.dtype, HOST)

    def bytes(self) -> int:
        """Host memory held."""
        return self._host.bytes()
