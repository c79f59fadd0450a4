"""The elementwise work of a step on a GPU, as Triton kernels over lists of tensors: one launch for a whole list.

torch's own ``_foreach`` operations launch one kernel per tensor unless all tensors have one dtype and equal strides, which pieces
of sharded matrices do not have. Each kernel here reads a table in device memory with a row per tensor: its sizes, where its tiles
begin, and address and strides of every operand. The table is written again only if an address or a stride has changed.

A tensor is cut into tiles of rows × columns. A program finds its tensor by bisection of the tiles' beginnings, divides the index
of each of its rows into that of the outer dims, and walks along the innermost dim without a division.

All arithmetic is in float32. Numbers of bfloat16 are read and rounded by their bits, so that the interpreter gives what a GPU
gives. Not yet run on a GPU: the tests run the kernels in Triton's interpreter and compile them for sm_80 to sm_120.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ..device import copy_to
from .int8 import BLOCK, LEAST_SCALE, MOST_SCALE, PER_AMAX, ROUNDS

TILE = 2048
"""Elements of a tile."""

DIMS = 4
"""Most dims of a tensor after neighbouring ones are joined, the innermost included."""

# A row of the table: its first tile, tiles side by side, sizes of ``DIMS`` dims; then address and strides of each operand.
_HEAD = tl.constexpr(2 + DIMS)
_OPERAND = tl.constexpr(1 + DIMS)

# Constants of ``rounding``.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)

_PER_AMAX, _LEAST_SCALE = tl.constexpr(PER_AMAX), tl.constexpr(LEAST_SCALE)
_MOST_SCALE, _ROUNDS = tl.constexpr(MOST_SCALE), tl.constexpr(ROUNDS)

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3, torch.int8: 3}
"""Dtypes that the kernels read and write, as they are told to the compiler."""


def _jit(function: Callable[..., Any]) -> Any:
    # triton.jit carries no types; this one place says so to the type checker. Lists grow and shrink with the parameters that have
    # gradients: a length of 1 or a multiple of 16 would recompile them in the middle of a step.
    return triton.jit(function, do_not_specialize=("tensors",))


@_jit
def _locate(
    table: tl.tensor,
    tensors: tl.tensor,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> tl.tensor:
    # The row of the table of this program's tensor, and the rows and columns of its tile in that tensor.
    program = tl.program_id(0)
    low = program * 0
    high = tensors - 1
    while low < high:  # the last tensor whose first tile is not behind this one
        middle = (low + high + 1) // 2
        behind = tl.load(table + middle.to(tl.int64) * width) > program
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    entry = table + low.to(tl.int64) * width
    tile = program - tl.load(entry)
    across = tl.load(entry + 1)
    rows = (tile // across) * tile_rows + tl.arange(0, tile_rows)
    cols = (tile % across) * tile_cols + tl.arange(0, tile_cols)
    size_0, size_1, size_2, size_3 = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    if dense:
        size_3 = tl.multiple_of(size_3, 8)
    inside = (rows < size_0 * size_1 * size_2)[:, None] & (cols < size_3)[None, :]
    return entry, rows // (size_1 * size_2), (rows // size_2) % size_1, rows % size_2, cols, inside


@_jit
def _offsets(
    entry: tl.tensor,
    operand: tl.constexpr,
    index_0: tl.tensor,
    index_1: tl.tensor,
    index_2: tl.tensor,
    cols: tl.tensor,
    dense: tl.constexpr,
) -> tl.tensor:
    at = entry + (_HEAD + operand * _OPERAND)
    address, stride_0, stride_1, stride_2 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    if dense:  # elements move in vectors of 16 bytes
        stride_0 = tl.multiple_of(stride_0, 8)
        stride_1 = tl.multiple_of(stride_1, 8)
        stride_2 = tl.multiple_of(stride_2, 8)
    else:
        cols = cols * tl.load(at + 4)
    return address, (index_0 * stride_0 + index_1 * stride_1 + index_2 * stride_2)[:, None] + cols[None, :]


@_jit
def _pointers(address: tl.tensor, offsets: tl.tensor, kind: tl.constexpr, dense: tl.constexpr) -> tl.tensor:
    if kind == 0:
        at = address.to(tl.pointer_type(tl.float32)) + offsets
    elif kind == 1:
        at = address.to(tl.pointer_type(tl.int16)) + offsets  # the bits of bfloat16
    elif kind == 2:
        at = address.to(tl.pointer_type(tl.float16)) + offsets
    elif kind == 3:
        at = address.to(tl.pointer_type(tl.int8)) + offsets  # booleans, too
    else:
        at = address.to(tl.pointer_type(tl.uint64)) + offsets
    if dense:
        at = tl.multiple_of(at, (16, 16))
    return at


@_jit
def _read(address: tl.tensor, offsets: tl.tensor, inside: tl.tensor, kind: tl.constexpr, dense: tl.constexpr) -> tl.tensor:
    numbers = tl.load(_pointers(address, offsets, kind, dense), mask=inside, other=0)
    if kind == 1:
        numbers = (numbers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif kind == 2:
        numbers = numbers.to(tl.float32)
    return numbers


@_jit
def _write(
    address: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    numbers: tl.tensor,
    noise: tl.tensor,  # 16 random bits for each number, or None to round to nearest
    kind: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    at = _pointers(address, offsets, kind, dense)
    if kind == 1:
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1) if noise is None else bits + noise  # of two nearest, the even one
        upper = tl.where(numbers != numbers, 0x7FC0, (rounded >> 16) & 0xFFFF)  # adding to a NaN's bits may give any number
        tl.store(at, upper.to(tl.int16), mask=inside)
    else:
        tl.store(at, numbers.to(at.dtype.element_ty), mask=inside)


@_jit
def _scalar(value: tl.tensor, in_memory: tl.constexpr) -> tl.tensor:
    if in_memory:
        value = tl.load(value).to(tl.float32)
    return value


@_jit
def _momentum_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    retain: tl.tensor,
    momentum: tl.tensor,
    gain: tl.tensor,
    retain_in_memory: tl.constexpr,
    scales: tl.constexpr,
    looks_ahead: tl.constexpr,
    fills: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    kind_2: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: gradient, momentum and, if it fills, where the result goes.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    grad = _read(address, offsets, inside, kind_0, dense)
    if scales:  # else it would change how the sums below are rounded
        grad = grad * gain
    address, offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    buffer = _read(address, offsets, inside, kind_1, dense)
    buffer = buffer * _scalar(retain, retain_in_memory) + grad
    _write(address, offsets, inside, buffer, None, kind_1, dense)
    if fills:
        buffer = _rounded(buffer, kind_1)  # what is looked ahead from is what was stored
        if looks_ahead:
            buffer = buffer * momentum + grad
        address, offsets = _offsets(entry, 2, i0, i1, i2, cols, dense)
        _write(address, offsets, inside, buffer, None, kind_2, dense)


@_jit
def _int8_momentum_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    retain: tl.tensor,
    momentum: tl.tensor,
    gain: tl.tensor,
    retain_in_memory: tl.constexpr,
    scales: tl.constexpr,
    looks_ahead: tl.constexpr,
    fills: tl.constexpr,
    block: tl.constexpr,
    kind_0: tl.constexpr,
    kind_2: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: gradient, quanta; if it fills, where the result goes; the first scale of each row, which the others follow. A
    # tile has whole blocks. The arithmetic is that of ``int8``.
    blocks: tl.constexpr = tile_cols // block
    last: tl.constexpr = 3 if fills else 2
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    scale_cols = tl.min(cols, axis=0) // block + tl.arange(0, blocks)
    has_block = tl.max(tl.reshape(inside.to(tl.int32), (tile_rows, blocks, block)), axis=2) > 0
    scale_address, scale_offsets = _offsets(entry, last, i0, i1, i2, scale_cols, False)
    scale_offsets += scale_cols[None, :]
    old_scale = _read(scale_address, scale_offsets, has_block, 1, False)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    grad = _read(address, offsets, inside, kind_0, dense)
    if scales:
        grad = grad * gain
    quanta_address, quanta_offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    old = _read(quanta_address, quanta_offsets, inside, 3, dense).to(tl.float32) * _of_elements(old_scale, block)
    buffer = old * _scalar(retain, retain_in_memory) + grad
    if fills:
        address, offsets = _offsets(entry, 2, i0, i1, i2, cols, dense)
        _write(address, offsets, inside, buffer * momentum + grad if looks_ahead else buffer, None, kind_2, dense)
    buffer = tl.where(inside, buffer, 0.0)
    largest = tl.max(tl.reshape(tl.abs(buffer), (tile_rows, blocks, block)), axis=2)
    lost = tl.max(tl.reshape((buffer - buffer != 0).to(tl.int32), (tile_rows, blocks, block)), axis=2) > 0
    scale = tl.minimum(tl.maximum(largest * _PER_AMAX, _LEAST_SCALE), _MOST_SCALE)
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    if retain_in_memory:  # a step that may be skipped: a block that has not changed might change in being rounded
        changed = tl.max(tl.reshape((inside & (buffer != old)).to(tl.int32), (tile_rows, blocks, block)), axis=2) > 0
        scale = tl.where(changed, scale, old_scale)
    divisor = tl.where(lost, 1.0, tl.maximum(scale, _LEAST_SCALE))
    ratio = tl.div_rn(buffer, _of_elements(divisor, block))
    ratio = tl.minimum(tl.maximum((ratio + _ROUNDS) - _ROUNDS, -127.0), 127.0)
    ratio = tl.where(_of_elements(lost.to(tl.float32), block) > 0, 0.0, ratio)
    _write(quanta_address, quanta_offsets, inside, ratio, None, 3, dense)
    _write(scale_address, scale_offsets, has_block, tl.where(lost, float("nan"), scale), None, 1, False)


@_jit
def _of_elements(numbers: tl.tensor, block: tl.constexpr) -> tl.tensor:
    # From a number for each block, (rows, blocks), to one for each element.
    rows: tl.constexpr = numbers.shape[0]
    blocks: tl.constexpr = numbers.shape[1]
    return tl.reshape(tl.broadcast_to(numbers[:, :, None], (rows, blocks, block)), (rows, blocks * block))


@_jit
def _restore_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: what becomes what it was where the update is not finite, what it was, and the update.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 2, i0, i1, i2, cols, False)
    update = _read(address, offsets, inside, kind_1, False)
    lost = inside & (update - update != 0)
    if tl.max(tl.max(lost.to(tl.int32), axis=1), axis=0) > 0:
        address, offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
        before = _read(address, offsets, inside, kind_0, dense)
        address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
        _write(address, offsets, lost, before, None, kind_0, dense)


@_jit
def _rounded(numbers: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    if kind == 1:
        bits = numbers.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        numbers = tl.where(numbers != numbers, numbers, kept.to(tl.float32, bitcast=True))
    elif kind == 2:
        numbers = numbers.to(tl.float16).to(tl.float32)
    return numbers


@_jit
def _mixed(words: tl.tensor) -> tl.tensor:
    # As in ``rounding``: SplitMix64's permutation.
    words = (words ^ (words >> 30)) * _MIX_1
    words = (words ^ (words >> 27)) * _MIX_2
    return words ^ (words >> 31)


@_jit
def _word(words: tl.tensor) -> tl.tensor:
    return ((words * _MIX_2) >> 32).to(tl.uint32)


@_jit
def _update_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    decay_in_memory: tl.constexpr,
    rate_in_memory: tl.constexpr,
    cautious: tl.constexpr,
    stochastic: tl.constexpr,
    guarded: tl.constexpr,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    kind_2: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: weight, update; if guarded, momentum and what it was; for stochastic rounding, the hashed rows and columns of the
    # elements and the counter.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    factor, step = _scalar(decay, decay_in_memory), _scalar(rate, rate_in_memory)
    update_address, update_offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    update = _read(update_address, update_offsets, inside, kind_1, dense)
    lost = update - update != 0  # not finite
    if guarded and tl.max(tl.max(lost.to(tl.int32), axis=1), axis=0) > 0:
        address, offsets = _offsets(entry, 3, i0, i1, i2, cols, dense)
        before = _read(address, offsets, inside, kind_2, dense)
        address, offsets = _offsets(entry, 2, i0, i1, i2, cols, dense)
        momentum = _read(address, offsets, inside, kind_2, dense)
        _write(address, offsets, inside, tl.where(lost, before, momentum), None, kind_2, dense)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    weight = _read(address, offsets, inside, kind_0, dense)
    decayed = tl.where(weight * update * step >= 0, weight * factor, weight) if cautious else weight * factor
    stepped = decayed - (update * step + 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
    weight = tl.where(lost, weight, stepped) if guarded else stepped
    noise = None
    if stochastic:
        first: tl.constexpr = 4 if guarded else 2
        row_address, row_offsets = _offsets(entry, first, i0, i1, i2, cols, False)
        col_address, col_offsets = _offsets(entry, first + 1, i0, i1, i2, cols, False)
        counter = tl.load(entry + (_HEAD + (first + 2) * _OPERAND)).to(tl.pointer_type(tl.uint64))
        seed = _mixed(_mixed(tl.load(counter)) + tl.load(counter + 1) * _GAMMA)
        words = _word(_read(row_address, row_offsets, inside, 4, False) ^ seed)
        words = words ^ _word(_read(col_address, col_offsets, inside, 4, False) ^ _mixed(seed + _GAMMA))
        words = words * 0x7FEB352D
        words = (words ^ (words >> 15)) * 0x846CA68B
        noise = (words >> 16).to(tl.int32)
    _write(address, offsets, inside, weight, noise, kind_0, dense)


@_jit
def _copy_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: target, source.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 1, i0, i1, i2, cols, dense)
    numbers = _read(address, offsets, inside, kind_1, dense)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    _write(address, offsets, inside, numbers, None, kind_0, dense)


@_jit
def _nonfinite_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    flag: tl.tensor,
    kind_0: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operand: what is looked at. Sets ``flag`` to 1 if an element is infinite or NaN.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
    numbers = _read(address, offsets, inside, kind_0, dense)
    found = tl.max(tl.max((numbers - numbers != 0).to(tl.int32), axis=1), axis=0)  # inf − inf is NaN, as NaN − NaN is
    if found > 0:
        tl.store(flag, 1.0)


@_jit
def _fill_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    bits: tl.tensor,
    kind_0: tl.constexpr,
    kind_1: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    # Operands: what is filled, with the float32 of these ``bits`` (a constant −0 may become 0), and the rows where it is: not 0.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    mask_address, mask_offsets = _offsets(entry, 1, i0, i1, i2, tl.arange(0, 1), False)
    filled = _read(mask_address, mask_offsets, tl.max(inside.to(tl.int32), axis=1)[:, None] > 0, kind_1, False) != 0
    if tl.max(tl.max(filled.to(tl.int32), axis=1), axis=0) > 0:
        address, offsets = _offsets(entry, 0, i0, i1, i2, cols, dense)
        value = (tl.full((tile_rows, tile_cols), 0, tl.int32) + bits).to(tl.float32, bitcast=True)
        numbers = tl.where(filled, value, _read(address, offsets, inside, kind_0, dense))
        _write(address, offsets, inside, numbers, None, kind_0, dense)


class ListTable:
    """The table of a list of tensors on one device, and how a kernel is launched over it.

    ``operands`` has one list per operand; tensors at the same place have the same shape. The last ``broadcast`` ones are read
    element by element. With ``by_rows``, a row of a tile is the innermost dim of a tensor, which is at most ``TILE`` long. With
    ``block``, a tile has whole blocks of so many elements of the innermost dim.
    """

    def __init__(
        self, operands: Sequence[Sequence[Tensor]], broadcast: int = 0, *, by_rows: bool = False, block: int = 0
    ) -> None:
        rows = [row for tensors in zip(*operands, strict=True) for row in _rows(tensors, by_rows=by_rows or block > 0)]
        inner = max((row[DIMS - 1] for row in rows), default=1)
        self.tile_cols = min(TILE, triton.next_power_of_2(max(inner, block)))
        self.tile_rows = TILE // self.tile_cols
        numbers: list[int] = []
        self.tiles = 0
        for row in rows:
            across, outer = -(-row[DIMS - 1] // self.tile_cols), row[0] * row[1] * row[2]
            numbers += [self.tiles, across, *row]
            self.tiles += across * -(-outer // self.tile_rows)
        self.tensors = len(rows)
        self.width = 2 + DIMS + len(operands) * (1 + DIMS)
        vectors = operands[: len(operands) - broadcast]
        bytes_each = min((tensor.itemsize for tensors in vectors for tensor in tensors), default=2)
        as_bytes = not block and any(tensors[0].dtype == torch.int8 for tensors in operands)  # at any address
        self.dense = not as_bytes and all(_is_dense(row, len(vectors), max(8, 16 // bytes_each)) for row in rows)
        device = operands[0][0].device
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever torch's default device is
        self.numbers = copy_to(host if device.type == "cpu" else host.pin_memory(), device)

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        if not self.tiles:
            return
        # Triton launches on the current device, which need not be that of the tensors. -1 changes nothing.
        with torch.cuda.device(self.numbers.device if self.numbers.is_cuda else -1):
            shape = {"width": self.width, "tile_rows": self.tile_rows, "tile_cols": self.tile_cols, "dense": self.dense}
            # A product and a sum round separately, as in the twin: the kernels wait for memory anyway.
            kernel[(self.tiles,)](self.numbers, self.tensors, *arguments, **constants, **shape, enable_fp_fusion=False)

    def emptied(self) -> ListTable:
        """A table of one tensor without elements: what is launched over it is the same kernel, and writes nothing."""
        empty = copy(self)
        empty.tensors, empty.tiles = min(1, self.tensors), min(1, self.tiles)
        operands = [self.numbers.data_ptr(), *[0] * DIMS] * ((self.width - 2 - DIMS) // (1 + DIMS))  # memory that may be read
        empty.numbers = copy_to(torch.tensor([0, *[1] * DIMS, 0, *operands], device="cpu"), self.numbers.device)
        return empty


def _rows(tensors: Sequence[Tensor], *, by_rows: bool = False) -> list[list[int]]:
    """Rows of the table for one tensor of each operand: sizes, then address and strides per operand.

    Neighbouring dims are joined if the strides of all operands allow it; not the innermost one if ``by_rows``. A tensor of too
    many dims takes several rows.
    """
    shape = tensors[0].shape
    if not tensors[0].numel():
        return []
    sizes: list[int] = []
    strides: list[list[int]] = []
    for dim in reversed(range(len(shape))):
        step = [tensor.stride(dim) for tensor in tensors]
        if shape[dim] == 1 and (sizes or not by_rows):
            continue
        if len(sizes) > by_rows and all(outer == inner * sizes[0] for outer, inner in zip(step, strides[0], strict=True)):
            sizes[0] *= shape[dim]
        else:
            sizes.insert(0, shape[dim])
            strides.insert(0, step)
    if len(sizes) > DIMS:
        split = next(dim for dim in range(len(shape)) if shape[dim] > 1)
        return [
            row
            for parts in zip(*(tensor.unbind(split) for tensor in tensors), strict=True)
            for row in _rows(parts, by_rows=by_rows)
        ]
    missing = DIMS - len(sizes)
    row = [1] * missing + sizes
    for operand, tensor in enumerate(tensors):
        row += [tensor.data_ptr(), *[0] * missing, *(step[operand] for step in strides)]
    return [row]


def _is_dense(row: Sequence[int], operands: int, vector: int) -> bool:
    """Whether the first operands of a row can move in vectors of 16 bytes: elements adjacent, lines at multiples of them.

    ``vector`` is the number of elements of which all have 16 bytes or more.
    """
    places = [row[at : at + 1 + DIMS] for at in range(DIMS, DIMS + operands * (1 + DIMS), 1 + DIMS)]
    return row[DIMS - 1] % vector == 0 and all(
        address % 16 == 0 and inner == 1 and all(stride % vector == 0 for stride in outer) for address, *outer, inner in places
    )


class ListKernels:
    """Launches the kernels. Keeps the tables of the last lists: in steady state tensors are where they were a step ago."""

    MOST_TABLES = 2048

    def __init__(self) -> None:
        self._tables: dict[Hashable, ListTable] = {}
        # If set, kernels are launched over tables without elements, inside of this context.
        self.only_compiles: Callable[[], AbstractContextManager[None]] | None = None

    def _table(self, *operands: Sequence[Tensor], broadcast: int = 0, by_rows: bool = False, block: int = 0) -> ListTable:
        places = ((t.data_ptr(), t.shape, t.stride()) for tensors in operands for t in tensors)
        key = len(operands), broadcast, by_rows, block, *places
        table = self._tables.pop(key, None) or ListTable(operands, broadcast, by_rows=by_rows, block=block)
        self._tables[key] = table  # the last one used is the last one in the dict
        if len(self._tables) > self.MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _launch(self, table: ListTable, kernel: Any, *arguments: Any, **constants: Any) -> None:
        if self.only_compiles is None:
            table.launch(kernel, *arguments, **constants)
            return
        with self.only_compiles():
            table.emptied().launch(kernel, *arguments, **constants)

    def accumulate(self, momenta: Sequence[Tensor], grads: Sequence[Tensor], retain: float | Tensor, gain: float = 1.0) -> None:
        """M ← retain·M + gain·G."""
        self.fill(None, grads, momenta, retain, None, gain)

    def fill(
        self,
        views: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        retain: float | Tensor,
        momentum: float | None,
        gain: float = 1.0,
    ) -> None:
        """M ← retain·M + gain·G; then, if there are views, V ← gain·G + momentum·M, or V ← M if ``momentum`` is None."""
        operands = (grads, momenta) if views is None else (grads, momenta, views)
        self._launch(
            self._table(*operands),
            _momentum_kernel,
            *_as_arguments(retain, 1.0 if momentum is None else momentum, gain),
            retain_in_memory=isinstance(retain, Tensor),
            scales=gain != 1,
            looks_ahead=momentum is not None,
            fills=views is not None,
            kind_0=_KINDS[grads[0].dtype],
            kind_1=_KINDS[momenta[0].dtype],
            kind_2=_KINDS[momenta[0].dtype if views is None else views[0].dtype],
        )

    def fill_int8(
        self,
        views: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        momenta: tuple[Sequence[Tensor], Sequence[Tensor]],
        retain: float | Tensor,
        momentum: float | None,
        gain: float = 1.0,
    ) -> None:
        """As ``fill``, with momenta in int8: quanta (…, columns), and their scales (…, blocks), adjacent in each row."""
        quanta, scales = momenta
        first = [rows[..., :1].expand(tensor.shape) for rows, tensor in zip(scales, quanta, strict=True)]
        operands = (grads, quanta, first) if views is None else (grads, quanta, views, first)
        self._launch(
            self._table(*operands, broadcast=1, block=BLOCK),
            _int8_momentum_kernel,
            *_as_arguments(retain, 1.0 if momentum is None else momentum, gain),
            retain_in_memory=isinstance(retain, Tensor),
            scales=gain != 1,
            looks_ahead=momentum is not None,
            fills=views is not None,
            block=BLOCK,
            kind_0=_KINDS[grads[0].dtype],
            kind_2=_KINDS[torch.float32 if views is None else views[0].dtype],
        )

    def restore(self, targets: Sequence[Tensor], before: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """Makes targets what they were before where updates, which may be broadcast, are not finite."""
        kinds = {"kind_0": _KINDS[targets[0].dtype], "kind_1": _KINDS[updates[0].dtype]}
        self._launch(self._table(targets, before, updates, broadcast=1), _restore_kernel, **kinds)

    def apply(
        self,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool,
        counters: Sequence[tuple[Tensor, Tensor, Tensor]] | None,
        old_momenta: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        """p ← p·decay − rate·update, rounded once.

        Stochastically with ``counters``: of each tensor the hashed rows and columns of its elements, and its counter. With
        ``old_momenta``, momenta and what they were, elements whose update is not finite keep weight and momentum.
        """
        operands: list[Sequence[Tensor]] = [params, updates, *(old_momenta or ())]
        if counters is not None:
            pairs = list(zip(counters, params, strict=True))
            operands += [[numbers[k].expand(param.shape) for numbers, param in pairs] for k in range(2)]
            operands.append([numbers[2][:1].expand(param.shape) for numbers, param in pairs])
        self._launch(
            self._table(*operands, broadcast=0 if counters is None else 3),
            _update_kernel,
            *_as_arguments(decay, rate),
            decay_in_memory=isinstance(decay, Tensor),
            rate_in_memory=isinstance(rate, Tensor),
            cautious=cautious,
            stochastic=counters is not None,
            guarded=old_momenta is not None,
            kind_0=_KINDS[params[0].dtype],
            kind_1=_KINDS[updates[0].dtype],
            kind_2=0 if old_momenta is None else _KINDS[old_momenta[0][0].dtype],
        )

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies each source to its target, rounding to the target's dtype."""
        kinds = {"kind_0": _KINDS[targets[0].dtype], "kind_1": _KINDS[sources[0].dtype]}
        self._launch(self._table(targets, sources), _copy_kernel, **kinds)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        """Fills ``tensors`` with ``value`` where ``mask``, on the device, broadcast and constant along rows, is not 0."""
        (bits,) = struct.unpack("i", struct.pack("f", value))
        kinds = {"kind_0": _KINDS[tensors[0].dtype], "kind_1": _KINDS[mask.dtype]}
        table = self._table(tensors, [mask.expand(tensor.shape) for tensor in tensors], broadcast=1)
        self._launch(table, _fill_kernel, bits, **kinds)

    def mark_nonfinite(self, tensors: Sequence[Tensor], flag: Tensor) -> None:
        """Sets ``flag``, float32 of one element, to 1 if any element of ``tensors`` is infinite or NaN."""
        self._launch(self._table(tensors), _nonfinite_kernel, flag, kind_0=_KINDS[tensors[0].dtype])


def _as_arguments(*scalars: float | Tensor) -> list[float | Tensor]:
    return [scalar if isinstance(scalar, Tensor) else float(scalar) for scalar in scalars]  # an int would recompile the kernel
