"""What orthogonalising a matrix costs: the one formula that chooses form and scheme and that planners rely on.

Products count as ``torch.utils.flop_counter`` counts them: a multiply and an add are two FLOPs.

With X of n × m, n ≤ m, and the steps cut into B blocks (see ``iteration``), each block costs one symmetric product X·Xᵀ and one
full product to apply the result. Inside a block every step but the first costs one full and two symmetric n × n products, to
compose it with the steps before. A quintic costs one more symmetric product, a rational step one inverse per pole.
The standard form is T blocks of one quintic; the Gram form is as few blocks as the dtype allows.

Two things run slower than products: the small blocks that LAPACK factors, and everything on tiny matrices. ``expected_cost``
counts the former as what they take in time, in units of a product's FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kernels.inverse import inverse_flops
from .kernels.panels import symmetric_flops
from .rational import Rational
from .schemes import Step

_LAPACK_PENALTY = 12  # measured: a FLOP in a 32 × 32 Cholesky factor and its inverse, in units of one in a product (CPU)


def orthogonalize_flops(rows: int, cols: int, steps: Sequence[Step], blocks: Sequence[int]) -> int:
    """FLOPs of the products that orthogonalise one rows × cols matrix.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        steps: the scheme's steps.
        blocks: how many of the steps each block has.
    """
    n, m = min(rows, cols), max(rows, cols)
    square, full = symmetric_flops(n, n), 2 * n**3
    poles = sum(len(step.poles) for step in steps if isinstance(step, Rational))
    quintics = sum(not isinstance(step, Rational) for step in steps)
    composed = len(steps) - len(blocks)
    per_block = symmetric_flops(n, m) + 2 * n * n * m
    return len(blocks) * per_block + quintics * square + composed * (2 * square + full) + poles * inverse_flops(n)[0]


def orthogonalize_cost(rows: int, cols: int, steps: Sequence[Step], blocks: Sequence[int]) -> int:
    """The same with what LAPACK does, in units of a product's FLOPs: proportional to time on large matrices."""
    poles = sum(len(step.poles) for step in steps if isinstance(step, Rational))
    return orthogonalize_flops(rows, cols, steps, blocks) + _LAPACK_PENALTY * poles * inverse_flops(min(rows, cols))[1]
