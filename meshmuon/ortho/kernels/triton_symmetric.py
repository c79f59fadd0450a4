"""A batched product whose result is known to be symmetric, as a Triton kernel.

Newton-Schulz spends most of its time in products with symmetric results: ``X @ X.mT``, ``b * A + c * A @ A``,
and products of commuting symmetric matrices in the Gram form. Computing one triangle and mirroring it takes
half of the work.

The result is cut into square tiles. A launch has one program per tile on or above the diagonal, and none
below. Every program computes its tile once; off the diagonal it stores it twice, in place and transposed on
the other side. A tile on the diagonal keeps its own upper triangle and mirrors it, so the result is symmetric
bit for bit even where rounding, or operands that commute only approximately, would make it differ.

How a product is cut into tiles: `tilings`.

Not yet run on a GPU: the tests run the kernel in Triton's interpreter, and compile it for sm_80, sm_90 and
sm_100.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ...torch_compat import tf32_allowed
from .tilings import TILINGS, default_tiling


def jit(function: Callable[..., Any]) -> Any:
    # triton.jit carries no types; this one place says so to the type checker.
    return triton.jit(function)


@jit
def _triangle_root(index: tl.tensor) -> tl.tensor:
    # The largest c with c * (c + 1) / 2 <= index. Next to a triangular number a root in single precision can
    # fall on the wrong side (and the device's root is approximate), so integers have the last word.
    root = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    root -= (root * (root + 1) // 2 > index).to(tl.int32)
    root += ((root + 1) * (root + 2) // 2 <= index).to(tl.int32)
    return root


@jit
def _tile_position(index: tl.tensor, tiles: tl.tensor, strip: tl.constexpr) -> tl.tensor:
    # Counts the tiles of the upper triangle strip by strip, a strip being `strip` neighbouring columns. The
    # columns before column c hold c * (c + 1) / 2 tiles, so a triangular root tells an index's strip. A strip
    # is a rectangle, counted row by row, on top of a small triangle, counted column by column.
    first = _triangle_root(index) // strip * strip
    width = tl.minimum(tiles - first, strip)
    local = index - first * (first + 1) // 2
    rectangle = first * width
    corner = tl.maximum(local - rectangle, 0)
    corner_column = _triangle_root(corner)
    corner_row = corner - corner_column * (corner_column + 1) // 2
    above = local < rectangle
    row = tl.where(above, local // width, first + corner_row)
    column = first + tl.where(above, local % width, corner_column)
    return row, column


@jit
def _symmetric_kernel(
    a: tl.tensor,
    b: tl.tensor,
    addend: tl.tensor,  # or None
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    diagonal: tl.tensor,  # or None
    a_batch: tl.tensor,
    a_row: tl.tensor,
    a_column: tl.tensor,
    b_batch: tl.tensor,
    b_row: tl.tensor,
    b_column: tl.tensor,
    addend_batch: tl.tensor,
    addend_row: tl.tensor,
    addend_column: tl.tensor,
    out_batch: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    tile: tl.constexpr,
    depth: tl.constexpr,
    strip: tl.constexpr,
    precision: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    tiles = (n + tile - 1) // tile
    tiles_per_matrix = tiles * (tiles + 1) // 2
    program = tl.program_id(0)
    row_tile, column_tile = _tile_position(program % tiles_per_matrix, tiles, strip)

    # Indices are 64-bit before they meet a stride: a batch, or one padded matrix, can exceed 2**31 elements.
    matrix = (program // tiles_per_matrix).to(tl.int64)
    rows = row_tile.to(tl.int64) * tile + tl.arange(0, tile)
    columns = column_tile.to(tl.int64) * tile + tl.arange(0, tile)
    inner = tl.arange(0, depth).to(tl.int64)
    slice_length = tl.full((1, 1), depth, tl.int64)

    left_at = a + matrix * a_batch + rows[:, None] * a_row + inner[None, :] * a_column
    right_at = b + matrix * b_batch + inner[:, None] * b_column + columns[None, :] * b_row
    product = tl.full((tile, tile), 0.0, tl.float32)
    for start in range(0, k, depth):
        left = tl.load(left_at, mask=(rows < n)[:, None] & (inner < k - start)[None, :], other=0.0)
        right = tl.load(right_at, mask=(inner < k - start)[:, None] & (columns < n)[None, :], other=0.0)
        if widen:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        product = tl.dot(left, right, product, input_precision=precision)
        left_at += slice_length * a_column
        right_at += slice_length * b_column

    inside = (rows < n)[:, None] & (columns < n)[None, :]
    result = alpha * product
    if addend is not None:
        addend += matrix * addend_batch
        addend_at = addend + rows[:, None] * addend_row + columns[None, :] * addend_column
        result += beta * tl.load(addend_at, mask=inside, other=0.0).to(tl.float32)
    # Symmetry is made in registers, not by masking the stores: a mask along the diagonal would break the
    # vector loads and stores of every tile into single elements.
    if row_tile == column_tile:
        result = tl.where(rows[:, None] > columns[None, :], tl.trans(result), result)
        if diagonal is not None:
            result += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    rounded = result.to(out.dtype.element_ty)

    out += matrix * out_batch
    tl.store(out + rows[:, None] * out_row + columns[None, :] * out_column, rounded, mask=inside)
    if row_tile != column_tile:
        # The values are transposed, not the addresses, so that both stores walk along the rows of `out`.
        mirror_at = out + columns[:, None] * out_row + rows[None, :] * out_column
        tl.store(mirror_at, tl.trans(rounded), mask=(columns < n)[:, None] & (rows < n)[None, :])


# Triton decides when it decorates, from TRITON_INTERPRET, whether a kernel is compiled or interpreted.
_INTERPRETED = not isinstance(_symmetric_kernel, triton.JITFunction)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Computes ``out = beta * addend + alpha * a @ b.mT + diagonal * I`` where the caller knows the result to be
    symmetric.

    Only the upper triangle is computed, with the upper triangle of `addend`; the lower one is its mirror, bit
    for bit, whatever the full product would have there. Sums are kept in fp32, `alpha` and `beta` included,
    and rounded once to the dtype of `out`. fp32 operands are multiplied in fp32 unless torch is allowed to
    use tf32 for matrix products.

    Every operand may have any strides: transposed, padded rows, and, for inputs, dimensions of stride 0.

    Args:
        a: Shape (B, n, k), bf16, fp16 or fp32.
        b: Shape and dtype of `a`. May be `a`.
        out: Shape (B, n, n), any of these dtypes. Overlaps neither `a`, `b` or `addend` nor itself: while one
            program writes, others still read.
        addend: Shape (B, n, n), any of these dtypes. May be `a` or `b`.
        alpha: Factor of the product.
        beta: Factor of `addend`, which is not read if this is 0 (so its NaNs do not count). Without an addend
            it has no effect.
        diagonal: Added to the diagonal, in fp32 as everything else.
    """
    if beta == 0.0:
        addend = None
    batch, n, k = a.shape
    assert a.shape == b.shape and a.dtype == b.dtype and out.shape == (batch, n, n)  # noqa: PT018
    assert {a.dtype, out.dtype} <= set(TILINGS)
    assert not out.numel() or out.data_ptr() not in (
        a.data_ptr(),
        b.data_ptr(),
        addend is not None and addend.data_ptr(),
    )
    if batch == 0 or n == 0:
        return out

    precision = "tf32" if tf32_allowed() else "ieee"

    tiling = default_tiling(a.dtype, n)
    # Triton launches on the current device, which need not be that of the tensors. -1 changes nothing.
    with torch.cuda.device(out.device if out.is_cuda else -1):
        tiles = -(-n // tiling.tile)
        _symmetric_kernel[(batch * (tiles * (tiles + 1) // 2),)](
            a,
            b,
            addend,
            out,
            n,
            k,
            float(alpha),  # an int would recompile the kernel
            float(beta),
            float(diagonal) if diagonal else None,
            *a.stride(),
            *b.stride(),
            *((0, 0, 0) if addend is None else addend.stride()),
            *out.stride(),
            tile=tiling.tile,
            depth=tiling.depth,
            strip=tiling.strip,
            precision=precision,
            # The interpreter keeps bf16 as raw 16-bit integers, and its `dot` multiplies those. Products of
            # bf16 values are exact in fp32, so widening changes nothing else.
            widen=_INTERPRETED and a.dtype == torch.bfloat16,
            enable_fp_fusion=True,  # versions of Triton have different defaults, which give different bits
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out
