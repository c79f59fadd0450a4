"""What orthogonalising a matrix costs. Form and scheme are chosen by ``orthogonalize_cost``, and plans balance it over
the ranks.

Products count as ``torch.utils.flop_counter`` counts them: a multiply and an add are two FLOPs.

With X of n × m, n ≤ m, and the steps cut into B blocks (see ``iteration``), each block costs one symmetric product X·Xᵀ
and one full product to apply the result. Inside a block every step but the first costs one full and two symmetric n × n
products, to compose it with the steps before. A quintic costs one more symmetric product, a rational step one inverse
per pole and, if it has a quadratic term, one symmetric product. The standard form has one step per block, the Gram form
as few blocks as the dtype allows.

Inverses take longer than their FLOPs say: LAPACK factors the small blocks on the diagonal (leaves), and the first
products after it are small, too. ``orthogonalize_cost`` counts both by the time they take, expressed as FLOPs of a
large product. By this count a rational scheme's cost over that of ``polar_express`` was within 35 % of the measured
ratio for 13 shapes of 96 to 1024 rows (one thread, AVX-512).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels.inverse import inverse_work
from .kernels.products import symmetric_panels
from .rational import Rational
from .schemes import Step

# measured on CPU: a FLOP in a 32 × 32 Cholesky factor and its inverse, in units of one in a large product
_LEAF_PENALTY = 40
_SHORT_SPEED = 4  # measured on a CPU with units for bfloat16: its products' rate over that of float32
_SMALL_PRODUCT = 600_000  # measured on CPU: FLOPs that a large product could have done while a small one is called


def symmetric_flops(n: int, k: int) -> int:
    """FLOPs of a symmetric n × n product with inner size k, computed by the panels of float32."""
    return sum(2 * (stop - start) * stop * k for start, stop in symmetric_panels(n, k))


def orthogonalize_flops(rows: int, cols: int, steps: Sequence[Step], blocks: Sequence[int]) -> int:
    """FLOPs of the products that orthogonalise one rows × cols matrix.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        steps: the scheme's steps.
        blocks: how many of the steps each block has.
    """
    n, m = min(rows, cols), max(rows, cols)
    symmetric, full = symmetric_flops(n, n), 2 * n**3  # of an n × n product
    poles = _poles(steps)
    quadratics = sum(not isinstance(step, Rational) or bool(step.quadratic) for step in steps)
    composed = len(steps) - len(blocks)
    per_block = symmetric_flops(n, m) + 2 * n * n * m
    in_blocks = quadratics * symmetric + composed * (2 * symmetric + full)
    if poles:
        in_blocks += poles * inverse_work(n).product_flops
    return len(blocks) * per_block + in_blocks


def orthogonalize_cost(
    rows: int, cols: int, steps: Sequence[Step], blocks: Sequence[int], dtype: torch.dtype = torch.float32
) -> int:
    """``orthogonalize_flops`` and the time that small blocks take beyond it: proportional to time, except for tiny
    matrices.

    Where a rational step is split, ``dtype`` being of 16 bits, products in that dtype count as the FLOPs that float32
    would have done in the same time: such matrices are planned beside smaller ones in float32.
    """
    flops, poles = orthogonalize_flops(rows, cols, steps, blocks), _poles(steps)
    if not poles:
        return flops
    n, m = min(rows, cols), max(rows, cols)
    work = inverse_work(n)
    if dtype.itemsize < torch.float32.itemsize:
        split = symmetric_flops(n, m) + 2 * n * n * m  # X·Xᵀ and its rest, the factor and its rest
        flops = poles * work.product_flops + (flops + split - poles * work.product_flops) // _SHORT_SPEED
    return flops + poles * (_LEAF_PENALTY * work.leaf_flops + _SMALL_PRODUCT * work.products)


def _poles(steps: Sequence[Step]) -> int:
    return sum(len(step.poles) for step in steps if isinstance(step, Rational))
