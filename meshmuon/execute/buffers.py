"""Where pieces are in the buffers of exchanges, and buffers on the way: in host memory, and between the hops of relays.

Pieces move between the flat buffer of an exchange and a batch of matrices in as few strided copies as they allow: those of
``strided_views``. A (4096, D) matrix over 2,048 ranks is 2,048 blocks of 2 rows. They lie at equal distances in the buffer and
in the matrix, so that one strided copy moves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import HOST, Transfers, transfers_for
from ..layout import Piece
from ..ortho import Workspace
from ..plan import Hops


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece at ``offset`` of a flat buffer; its matrix is number ``position`` of a batch."""

    piece: Piece
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle of elements: ``kind`` is its height, its width, and its row strides in the batch and in the buffer."""

    kind: tuple[int, int, int, int]  # blocks of one kind can move in one copy
    batch_offset: int
    buffer_offset: int


def strided_views(placed: Iterable[PlacedPiece], stacked: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Equal-shaped views of a batch, (size, rows, cols), and of a flat buffer; copying one list to the other moves all pieces."""
    blocks = list(_blocks(placed, stacked))
    in_batch_order = _runs(sorted(blocks, key=lambda block: block.batch_offset))
    in_buffer_order = _runs(sorted(blocks, key=lambda block: block.buffer_offset))
    of_stacked, of_buffer = [], []
    for run, step in min(in_batch_order, in_buffer_order, key=len):
        height, width, batch_stride, buffer_stride = run[0].kind
        shape, batch_offset, buffer_offset = (len(run), height, width), run[0].batch_offset, run[0].buffer_offset
        of_stacked.append(stacked.as_strided(shape, (step[0], batch_stride, 1), stacked.storage_offset() + batch_offset))
        of_buffer.append(buffer.as_strided(shape, (step[1], buffer_stride, 1), buffer.storage_offset() + buffer_offset))
    return of_stacked, of_buffer


def _blocks(placed: Iterable[PlacedPiece], stacked: Tensor) -> Iterator[_Block]:
    pitch, cols = stacked.stride(0), stacked.size(2)
    for placed_piece in placed:
        width = placed_piece.piece.shape[1]
        offset = placed_piece.offset
        for row, row_stop in placed_piece.piece.rows:
            left = 0
            for col, col_stop in placed_piece.piece.cols:
                kind = row_stop - row, col_stop - col, cols, width
                yield _Block(kind, placed_piece.position * pitch + row * cols + col, offset + left)
                left += col_stop - col
            offset += (row_stop - row) * width


def _runs(blocks: Sequence[_Block]) -> list[tuple[list[_Block], tuple[int, int]]]:
    """Consecutive blocks of one kind at equal distances in the batch and in the buffer, with these two distances."""
    runs: list[tuple[list[_Block], tuple[int, int]]] = []
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


@dataclass(frozen=True, slots=True)
class RelayMemory:
    """Buffers between the hops of one exchange.

    Exchanges of the same ``place`` are never in flight at the same time, and share the buffers of the first hop. The others run
    while the exchange is waited for, which all exchanges of one ``direction`` do one after the other on one stream.
    """

    workspace: Workspace
    place: str
    direction: str

    def take(self, hop: int, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of one hop. Before the first is used, the largest of its kind has been taken (``reserve``)."""
        where = self.direction if hop else self.place
        return self.workspace.take(f"relay {hop} {name} {where}", (size,), dtype, device)

    def reserve(self, hops: Hops, position: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates the buffers of an exchange for the rank at ``position`` in the plan; later ones may be smaller."""
        for number, hop in enumerate(hops):
            for name, sizes in (("sent", hop.sent), ("received", hop.received)):
                self.take(number, name, sizes[position] // dtype.itemsize, dtype, device)
