"""The quantiser of ``int8`` on a GPU: a list of pieces into int8, or out of it, in one launch of a Triton kernel.

The kernels are over lists of tensors as those of ``list_kernels``. A row of a tile is one block, so that the largest magnitude of
a block is a reduction inside of a program. Scales are written and read as bytes: pieces begin at any address. Not yet run on a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from .int8 import LEAST_SCALE, MOST_SCALE, PER_AMAX, ROUNDS, Int8View
from .list_kernels import _KINDS, ListKernels, _jit, _locate, _offsets, _pointers, _read, _write

_LEAST, _MOST = tl.constexpr(LEAST_SCALE), tl.constexpr(MOST_SCALE)
_PER_AMAX, _ROUNDS = tl.constexpr(PER_AMAX), tl.constexpr(ROUNDS)
_BYTES = tl.constexpr(_KINDS[torch.bool])


@_jit
def to_int8_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    kind_0: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: numbers, quanta, and the first byte of the block's scale.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    numbers = _read(address, offsets, inside, kind_0, dense)
    # Magnitudes as integers: their order is that of the numbers, with infinity and NaN behind all others.
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]
    lost = largest >= 0x7F800000
    scale = tl.minimum(tl.maximum(largest.to(tl.float32, bitcast=True) * _PER_AMAX, _LEAST), _MOST)
    upper = tl.where(lost, 0x7FC0, (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16)  # up to the next number of bfloat16
    scale = tl.where(lost, 1.0, (upper << 16).to(tl.float32, bitcast=True))
    ratios = tl.div_rn(numbers, tl.broadcast_to(scale, (tile_rows, tile_cols)))
    rounded = tl.minimum(tl.maximum((ratios + _ROUNDS) - _ROUNDS, -127.0), 127.0)
    quanta = tl.where(lost, 0.0, rounded).to(tl.int8)
    address, offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    tl.store(_pointers(address, offsets, _BYTES, dense), quanta, mask=inside)
    address, offsets = _offsets(entry, 2, i0, i1, i2, tl.arange(0, 1), dense)
    of_row = tl.max(inside.to(tl.int32), axis=1)[:, None] > 0
    tl.store(_pointers(address, offsets, _BYTES, dense), upper.to(tl.int8), mask=of_row)
    tl.store(_pointers(address + 1, offsets, _BYTES, dense), (upper >> 8).to(tl.int8), mask=of_row)


@_jit
def from_int8_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    kind_0: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands as above.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    quanta = tl.load(_pointers(address, offsets, _BYTES, dense), mask=inside, other=0).to(tl.float32)
    address, offsets = _offsets(entry, 2, i0, i1, i2, tl.arange(0, 1), dense)
    of_row = tl.max(inside.to(tl.int32), axis=1)[:, None] > 0
    low = tl.load(_pointers(address, offsets, _BYTES, dense), mask=of_row, other=0).to(tl.int32) & 0xFF
    high = tl.load(_pointers(address + 1, offsets, _BYTES, dense), mask=of_row, other=0).to(tl.int32) & 0xFF
    scale = ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    _write(address, offsets, inside, quanta * scale, None, kind_0, dense)


class Int8ListKernels(ListKernels):
    """With the quantiser."""

    def quantise(self, views: Sequence[Int8View]) -> None:
        """Writes the numbers of each view, which have one dtype, as int8."""
        self._launch_on_blocks(to_int8_kernel, views)

    def dequantise(self, views: Sequence[Int8View]) -> None:
        """Writes the int8 of each view as numbers, which have one dtype."""
        self._launch_on_blocks(from_int8_kernel, views)

    def _launch_on_blocks(self, kernel: Any, views: Sequence[Int8View]) -> None:
        operands = list(zip(*(part for view in views for part in view.parts), strict=True))
        self._launch(self._table(*operands, by_rows=True), kernel, kind_0=_KINDS[views[0].numbers.dtype])
