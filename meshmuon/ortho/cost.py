"""Counted FLOPs of orthogonalising a matrix: the one formula that chooses the form and that planners rely on.

Only matrix products count (a multiply and an add are two FLOPs), exactly as ``torch.utils.flop_counter`` counts them.

With X of n × m, n ≤ m, and the T steps cut into B blocks (see ``iteration``): each block costs one symmetric product
X·Xᵀ and one full product to apply the result, and the steps inside cost 3T − 2B symmetric and T − B full n × n products.
The standard form is T blocks of one step; the Gram form is as few blocks as the dtype allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["PANEL", "orthogonalize_flops", "symmetric_flops", "symmetric_panels"]

PANEL = 128
_ALIGN = 32
_SMALLEST_SPLIT = 384


def symmetric_panels(n: int) -> tuple[tuple[int, int], ...]:
    """Row ranges in which the blocked symmetric product computes the lower triangle of an n × n result.

    Rows [start, stop) are computed up to column ``stop``. Below 384 rows one full product is faster (measured, fp32 on CPU).
    """
    if n < _SMALLEST_SPLIT:
        return ((0, n),)
    count = -(-n // PANEL)
    inner = [round(n * k / count / _ALIGN) * _ALIGN for k in range(1, count)]
    return tuple(pairwise((0, *inner, n)))


def symmetric_flops(n: int, k: int) -> int:
    """FLOPs of a symmetric n × n product with inner size k, computed by panels."""
    return sum(2 * (stop - start) * stop * k for start, stop in symmetric_panels(n))


def orthogonalize_flops(rows: int, cols: int, blocks: Sequence[int]) -> int:
    """FLOPs of orthogonalising one rows × cols matrix.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        blocks: how many steps each block has; ``(1,) * T`` is the standard form.
    """
    n, m = min(rows, cols), max(rows, cols)
    steps, count = sum(blocks), len(blocks)
    per_block = symmetric_flops(n, m) + 2 * n * n * m
    inside = (3 * steps - 2 * count) * symmetric_flops(n, n) + (steps - count) * 2 * n**3
    return count * per_block + inside
