"""The elementwise work of a step on a GPU, as Triton kernels over lists of tensors. ``list_kernels`` launches them.

Each kernel reads a table in device memory with a row per tensor: its sizes, where its tiles begin, and address and
strides of every operand.

A tensor is cut into tiles of rows × columns. A program finds its tensor by bisection of the tiles' beginnings, divides
the index of each of its rows into that of the outer dims, and walks along the innermost dim without a division.

All arithmetic is in float32. Numbers of bfloat16 are read and rounded by their bits, so that the interpreter gives what
a GPU gives. Not yet run on a GPU: the tests run the kernels in Triton's interpreter and compile them for sm_80 to
sm_120.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

DIMS = 4
"""Most dims of a tensor after neighbouring ones are joined, the innermost included."""

# A row of the table: its first tile, tiles side by side; sizes of ``DIMS`` dims; then address and strides of each
# operand.
_HEAD = tl.constexpr(2 + DIMS)
_OPERAND = tl.constexpr(1 + DIMS)

# Constants of ``rounding``.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
"""Dtypes that the kernels read and write, as they are told to the compiler."""


def _jit(function: Callable[..., Any]) -> Any:
    # triton.jit carries no types; this one place says so to the type checker. Lists grow and shrink with the parameters
    # that have gradients: a length of 1 or a multiple of 16 would recompile them in the middle of a step.
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
    elif kind == 4:
        at = address.to(tl.pointer_type(tl.uint64)) + offsets
    else:
        at = address.to(tl.pointer_type(tl.int8)) + offsets  # booleans
    if dense:
        at = tl.multiple_of(at, (16, 16))
    return at


@_jit
def _read(
    entry: tl.tensor,
    operand: tl.constexpr,
    i0: tl.tensor,
    i1: tl.tensor,
    i2: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    kind: tl.constexpr,
    dense: tl.constexpr,
) -> tl.tensor:
    address, offsets = _offsets(entry, operand, i0, i1, i2, cols, dense)
    numbers = tl.load(_pointers(address, offsets, kind, dense), mask=inside, other=0)
    if kind == 1:
        numbers = (numbers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif kind == 2:
        numbers = numbers.to(tl.float32)
    return numbers


@_jit
def _write(
    entry: tl.tensor,
    operand: tl.constexpr,
    i0: tl.tensor,
    i1: tl.tensor,
    i2: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    numbers: tl.tensor,
    noise: tl.tensor,  # 16 random bits for each number, or None to round to nearest
    kind: tl.constexpr,
    dense: tl.constexpr,
) -> None:
    address, offsets = _offsets(entry, operand, i0, i1, i2, cols, dense)
    at = _pointers(address, offsets, kind, dense)
    if kind == 1:
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1) if noise is None else bits + noise  # of two nearest, the even one
        # adding to a NaN's bits may give any number
        upper = tl.where(numbers != numbers, 0x7FC0, (rounded >> 16) & 0xFFFF)
        tl.store(at, upper.to(tl.int16), mask=inside)
    else:
        tl.store(at, numbers.to(at.dtype.element_ty), mask=inside)


@_jit
def _scalar(value: tl.tensor, in_memory: tl.constexpr) -> tl.tensor:
    if in_memory:
        value = tl.load(value).to(tl.float32)
    return value


@_jit
def momentum_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    retain: tl.tensor,
    momentum: tl.tensor,
    retain_in_memory: tl.constexpr,
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
    grad = _read(entry, 0, i0, i1, i2, cols, inside, kind_0, dense)
    old = _read(entry, 1, i0, i1, i2, cols, inside, kind_1, dense)
    buffer = old * _scalar(retain, retain_in_memory) + grad
    _write(entry, 1, i0, i1, i2, cols, inside, buffer, None, kind_1, dense)
    if fills:
        ahead = _rounded(buffer, kind_1)  # what is looked ahead from is what was stored
        if looks_ahead:
            ahead = ahead * momentum + grad
        _write(entry, 2, i0, i1, i2, cols, inside, ahead, None, kind_2, dense)


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
def update_kernel(
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
    # Operands: weight, update; if guarded, momentum and what it was; for stochastic rounding, the hashed rows and
    # columns of the elements and the counter.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    factor, step = _scalar(decay, decay_in_memory), _scalar(rate, rate_in_memory)
    update = _read(entry, 1, i0, i1, i2, cols, inside, kind_1, dense)
    lost = update - update != 0  # not finite
    if guarded and tl.max(tl.max(lost.to(tl.int32), axis=1), axis=0) > 0:
        before = _read(entry, 3, i0, i1, i2, cols, inside, kind_2, dense)
        momentum = _read(entry, 2, i0, i1, i2, cols, inside, kind_2, dense)
        _write(entry, 2, i0, i1, i2, cols, inside, tl.where(lost, before, momentum), None, kind_2, dense)
    weight = _read(entry, 0, i0, i1, i2, cols, inside, kind_0, dense)
    decayed = tl.where(weight * update * step >= 0, weight * factor, weight) if cautious else weight * factor
    stepped = decayed - (update * step + 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
    weight = tl.where(lost, weight, stepped) if guarded else stepped
    noise = None
    if stochastic:
        first: tl.constexpr = 4 if guarded else 2
        counter = tl.load(entry + (_HEAD + (first + 2) * _OPERAND)).to(tl.pointer_type(tl.uint64))
        seed = _mixed(_mixed(tl.load(counter)) + tl.load(counter + 1) * _GAMMA)
        words = _word(_read(entry, first, i0, i1, i2, cols, inside, 4, False) ^ seed)
        words = words ^ _word(_read(entry, first + 1, i0, i1, i2, cols, inside, 4, False) ^ _mixed(seed + _GAMMA))
        words = words * 0x7FEB352D
        words = (words ^ (words >> 15)) * 0x846CA68B
        noise = (words >> 16).to(tl.int32)
    _write(entry, 0, i0, i1, i2, cols, inside, weight, noise, kind_0, dense)


@_jit
def copy_kernel(
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
    numbers = _read(entry, 1, i0, i1, i2, cols, inside, kind_1, dense)
    _write(entry, 0, i0, i1, i2, cols, inside, numbers, None, kind_0, dense)


@_jit
def nonfinite_kernel(
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
    numbers = _read(entry, 0, i0, i1, i2, cols, inside, kind_0, dense)
    found = tl.max(tl.max((numbers - numbers != 0).to(tl.int32), axis=1), axis=0)  # inf − inf is NaN, as NaN − NaN is
    if found > 0:
        tl.store(flag, 1.0)


@_jit
def fill_kernel(
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
    # Operands: what is filled, with the float32 of these ``bits`` (a constant −0 may become 0), and the rows where it
    # is: not 0.
    entry, i0, i1, i2, cols, inside = _locate(table, tensors, width, tile_rows, tile_cols, dense)
    of_row = tl.max(inside.to(tl.int32), axis=1)[:, None] > 0
    filled = _read(entry, 1, i0, i1, i2, tl.arange(0, 1), of_row, kind_1, False) != 0
    if tl.max(tl.max(filled.to(tl.int32), axis=1), axis=0) > 0:
        value = (tl.full((tile_rows, tile_cols), 0, tl.int32) + bits).to(tl.float32, bitcast=True)
        numbers = tl.where(filled, value, _read(entry, 0, i0, i1, i2, cols, inside, kind_0, dense))
        _write(entry, 0, i0, i1, i2, cols, inside, numbers, None, kind_0, dense)
