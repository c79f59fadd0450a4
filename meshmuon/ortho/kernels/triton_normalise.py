"""Divides each matrix of a batch by its Frobenius norm in two launches, as Triton kernels.

The first kernel cuts a matrix into segments and finds, for each, the largest magnitude and the sum of squares relative
to it: no square overflows or underflows. Every program of the second kernel combines the segments of its matrix and
divides its tile.

Not yet run on a GPU: the tests run the kernels in Triton's interpreter and compile them for sm_80 to sm_120.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from .products import NORM_PARTS
from .triton_symmetric import jit

PARTS = NORM_PARTS

TILE = 2048
"""Elements that a program handles at a time."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Lower bound of the divisor: 0 stays 0, and smaller entries are relative to it."""


@jit
def _sums_kernel(
    batch: tl.tensor, pitch: tl.tensor, size: tl.tensor, sums: tl.tensor, parts: tl.constexpr, tile: tl.constexpr
) -> None:
    program = tl.program_id(0)  # the other axes of a launch have at most 65,535 programs
    matrix, part = (program // parts).to(tl.int64), program % parts
    batch += matrix * pitch
    places = part.to(tl.int64) * tile + tl.arange(0, tile)
    largest = tl.full((tile,), _TINY, tl.float32)
    squares = tl.full((tile,), 0.0, tl.float32)
    for start in range(0, size, parts * tile):
        numbers = tl.abs(tl.load(batch + start + places, mask=start + places < size, other=0.0).to(tl.float32))
        larger = tl.maximum(largest, numbers, propagate_nan=tl.PropagateNan.ALL)
        before, added = largest / larger, numbers / larger
        squares = squares * before * before + added * added
        largest = larger
    most = tl.max(largest, axis=0)
    share = largest / most
    tl.store(sums + (matrix * parts + part) * 2, most)
    tl.store(sums + (matrix * parts + part) * 2 + 1, tl.sum(squares * share * share, axis=0))


@jit
def _divide_kernel(
    batch: tl.tensor,
    pitch: tl.tensor,
    size: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    out_pitch: tl.tensor,
    tiles: tl.tensor,
    parts: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    matrix = (program // tiles).to(tl.int64)
    every = matrix * parts + tl.arange(0, parts)
    largest, squares = tl.load(sums + every * 2), tl.load(sums + every * 2 + 1)
    most = tl.max(largest, axis=0)
    share = largest / most
    root = tl.sqrt(tl.sum(squares * share * share, axis=0))  # the norm in units of ``most``
    root = tl.where(root == 0.0, 1.0, root)  # only zeros
    places = (program % tiles).to(tl.int64) * tile + tl.arange(0, tile)
    numbers = tl.load(batch + matrix * pitch + places, mask=places < size, other=0.0).to(tl.float32)
    divided = numbers / most / root
    tl.store(out + matrix * out_pitch + places, divided.to(out.dtype.element_ty), mask=places < size)


def normalise(batch: Tensor, out: Tensor, sums: Tensor) -> None:
    """``out`` ← each matrix of ``batch`` divided by its Frobenius norm; zeros stay.

    Args:
        batch: (count, rows, cols), each matrix dense in memory, in either order; at most float32.
        out: the same shape and order of memory; any dtype. May be ``batch``.
        sums: float32 memory of ``count · PARTS · 2`` elements.
    """
    count, size = batch.size(0), batch.size(1) * batch.size(2)
    assert batch.stride()[1:] == out.stride()[1:]
    if not count or not size:
        return
    # Triton launches on the current device; -1 changes nothing
    with torch.cuda.device(out.device if out.is_cuda else -1):
        # Whether products and sums are fused, by default, differs between versions of Triton.
        shape = {"parts": PARTS, "tile": TILE, "enable_fp_fusion": False}
        _sums_kernel[(count * PARTS,)](batch, batch.stride(0), size, sums, **shape)
        tiles = -(-size // TILE)
        pitches = batch.stride(0), out.stride(0)
        _divide_kernel[(count * tiles,)](batch, pitches[0], size, sums, out, pitches[1], tiles, **shape)
