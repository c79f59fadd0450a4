"""Singular values of matrices, from a few products with vectors.

The largest singular value of A comes from a Lanczos iteration on A·Aᵀ with a fixed start vector. Its coefficients are
computed where the matrix is. What follows from them, the eigenvalues of a tiny tridiagonal matrix, is worked out on the
host, on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

ITERATIONS = 6
"""Steps of the Lanczos iteration. Each reads the Gram matrix, or the matrix twice."""

# what is shorter, relative to the largest coefficient so far, is rounding: there is no further direction
_EXHAUSTED = 1e-5
_SEED = 20_261

Multiply: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies a vector for each matrix of a batch, (batch, n), by that matrix, (n, n)."""


@lru_cache(maxsize=256)
def start_vector(size: int) -> Tensor:
    """A fixed unit vector, (size,): the same on all ranks and in all runs."""
    generator = torch.Generator("cpu").manual_seed(_SEED + size)
    # Another vector has other errors: the tests hold those of this one.
    gaussian = torch.randn(size, min(size, 4), generator=generator, dtype=torch.float64, device="cpu")[:, 0].clone()
    return gaussian.div_(torch.linalg.vector_norm(gaussian))


def wide(stacked: Tensor) -> Tensor:
    """Matrices, (batch, rows, cols), or their transposes, so that there are at most as many rows as columns."""
    return stacked if stacked.size(1) <= stacked.size(2) else stacked.mT


def squares(stacked: Tensor) -> Tensor:
    """The squared Frobenius norm of each matrix of a batch, (batch,), in float64.

    Rows are added up in the matrix's dtype, or in float32, the sums of the rows in float64: the order of the rows, and
    over how many ranks they are spread, then changes little.
    """
    dtype = torch.float64 if stacked.dtype == torch.float64 else torch.float32
    rows: Tensor = torch.linalg.vector_norm(stacked, dim=-1, dtype=dtype).double()
    return rows.square_().sum(-1)


def tridiagonalise(multiply: Multiply, start: Tensor, iterations: int) -> Tensor:
    """Coefficients of tridiagonal matrices whose eigenvalues approximate those of larger symmetric matrices.

    A Lanczos iteration in which each new vector is made orthogonal to the two before it. Rounding may bring earlier
    ones back, which repeats eigenvalues of a tridiagonal matrix but makes none of them larger than the largest of the
    matrix.

    Args:
        multiply: multiplies the vectors by the matrices.
        start: unit vectors, (batch, n).
        iterations: number of steps.

    Returns:
        (batch, 2 · iterations): the diagonal, then the entries beside it, of which the last is always 0.
    """
    previous, vectors = torch.zeros_like(start), start
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(iterations):
        product = multiply(vectors)
        diagonal.append((product * vectors).sum(1))
        for earlier in (previous, vectors):
            product = product - (product * earlier).sum(1, keepdim=True) * earlier
        length = (product * product).sum(1).sqrt()
        longer = length > _EXHAUSTED * torch.stack([*diagonal, *beside]).amax(0)
        beside.append(torch.where(longer, length, 0.0))
        previous, vectors = vectors, product * torch.where(longer, length.reciprocal(), 0.0).unsqueeze(1)
    return torch.stack([*diagonal, *beside[:-1], torch.zeros_like(diagonal[0])], dim=1)


def by_matrices(stacked: Tensor, norms: Tensor) -> Multiply:
    """Multiplies by A·Aᵀ for each A of ``stacked`` / ``norms``, with A transposed if it has more rows than columns.

    Args:
        stacked: matrices, (batch, rows, cols).
        norms: their Frobenius norms, (batch,), in the dtype of ``stacked``.
    """
    a = wide(stacked)
    scale = norms.reciprocal().unsqueeze(1)  # a matrix of zeros gives NaN, which counts as 0
    # Multiplied before and after, not by the square: that would leave the range of float32.
    return lambda vectors: multiply_each(a, multiply_each(a.mT, vectors * scale)).mul_(scale)


def multiply_each(matrices: Tensor, vectors: Tensor) -> Tensor:
    """The product of each matrix, (batch, n, m), and its vector, (batch, m).

    In host memory one by one: batched products are up to ten times slower there if one factor is this narrow.
    """
    if matrices.device.type != "cpu":
        return torch.bmm(matrices, vectors.unsqueeze(2)).squeeze(2)
    return torch.stack(
        [torch.mv(matrix, vector) for matrix, vector in zip(matrices.unbind(), vectors.unbind(), strict=True)]
    )


def largest_singular_values(coefficients: Tensor) -> Tensor:
    """The largest singular value of each matrix relative to its Frobenius norm, (batch,), never above the true one.

    ``coefficients`` are what ``tridiagonalise`` returned, on the host. Those of a broken run, and of a matrix of zeros,
    count as zeros: LAPACK refuses infinities and NaN.
    """
    finite = torch.where(coefficients.isfinite().all(1, keepdim=True), coefficients.double(), 0.0)
    diagonal, beside = torch.tensor_split(finite, 2, dim=1)
    # Only the lower triangle is read.
    values: Tensor = torch.linalg.eigvalsh(torch.diag_embed(diagonal) + torch.diag_embed(beside[:, :-1], offset=-1))
    return values[:, -1].clamp_min(0.0).sqrt()
