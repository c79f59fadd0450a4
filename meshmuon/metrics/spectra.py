"""Singular values of matrices, from a few products with vectors.

The largest singular value of A comes from a Lanczos iteration on A·Aᵀ with a fixed start vector. Its coefficients are
computed where the matrix is. What follows from them, the eigenvalues of a tiny tridiagonal matrix, is worked out on the
host, on demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from ..ortho import Scheme

PROBES = 4
"""Number of directions that estimate how far a matrix is from orthogonal."""

# what is shorter, relative to the largest coefficient so far, is rounding: there is no further direction
_EXHAUSTED = 1e-5
_SEED = 20_261

Multiply: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies a vector for each matrix of a batch, (batch, n), by that matrix, (n, n)."""


@lru_cache(maxsize=256)
def probes(size: int, count: int = PROBES) -> Tensor:
    """Fixed orthonormal directions, (count, size) or (size, size) if that is less: the same on all ranks and in all
    runs.
    """
    generator = torch.Generator("cpu").manual_seed(_SEED + size)
    gaussian = torch.randn(size, min(size, count), generator=generator, dtype=torch.float64, device="cpu")
    directions: Tensor = torch.linalg.qr(gaussian)[0]
    return directions.t().contiguous()


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


def defects(stacked: Tensor, directions: Tensor) -> Tensor:
    """How far the matrices of a batch are from being orthogonal, (batch, 2), in float64.

    For a matrix A with at most as many rows as columns and singular values s, these are the means of (1 − s²)² and (1 −
    s²)⁴ over its rows, estimated by the means of |(I − A·Aᵀ)·z|² and |(I − A·Aᵀ)²·z|² over the orthonormal rows z of
    ``directions``. With as many directions as rows they are exact.
    """
    a = wide(stacked)
    both = a.new_empty(a.size(0), 2, *directions.shape)
    between = directions.new_empty(directions.size(0), a.size(2))
    # One matrix after the other, so that it is read once from memory and three times from a cache.
    for matrix, transposed, (once, twice) in zip(a.unbind(), a.mT.unbind(), both.unbind(), strict=True):
        torch.addmm(directions, torch.mm(directions, matrix, out=between), transposed, beta=-1, out=once)
        torch.addmm(once, torch.mm(once, matrix, out=between), transposed, beta=-1, out=twice)
    return squares(both.flatten(0, 1)).view(-1, 2) / directions.size(0)


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


@lru_cache(maxsize=64)
def bound_of(scheme: Scheme) -> float:
    """The smallest singular value, relative to the Frobenius norm, that a scheme brings as near to 1 as it brings
    larger ones.

    For ``polar_express(l=1e-3)`` it is 1e-3. The worst distance from 1 is taken over [0.1, 1].
    """
    grid = [10 ** (-k / 1000) for k in range(7001)]  # from 1 down to 1e-7
    allowed = max(abs(1 - scheme(x)) for x in grid if x >= 0.1) * (1 + 1e-3)
    return min(itertools.takewhile(lambda x: abs(1 - scheme(x)) <= allowed, grid))
