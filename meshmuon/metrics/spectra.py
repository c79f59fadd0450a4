"""Singular values of whole matrices, from a few products with vectors.

The largest singular value comes from a Golub–Kahan bidiagonalisation with a fixed start vector. Its coefficients are computed
where the matrix is. What follows from them, the singular values of a tiny bidiagonal matrix, is worked out on the host, when
somebody asks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..ortho import Scheme

PROBES = 4
"""How many directions are looked at to tell how far a matrix is from being orthogonal."""

_EXHAUSTED = 1e-5  # what is shorter than this, relative to the Frobenius norm, is rounding: the matrix has no further direction
_SEED = 20_261


@lru_cache(maxsize=256)
def probes(size: int, count: int = PROBES) -> Tensor:
    """Fixed orthonormal directions, (count, size) or (size, size) if that is less: the same on all ranks and in all runs."""
    generator = torch.Generator("cpu").manual_seed(_SEED + size)
    gaussian = torch.randn(size, min(size, count), generator=generator, dtype=torch.float64, device="cpu")
    directions: Tensor = torch.linalg.qr(gaussian)[0]
    return directions.t().contiguous()


def start_vector(size: int) -> Tensor:
    """A fixed direction in which to begin, (size,)."""
    return probes(size)[0]


def wide(stacked: Tensor) -> Tensor:
    """Matrices, (batch, rows, cols), or their transposes, so that there are at most as many rows as columns."""
    return stacked if stacked.size(1) <= stacked.size(2) else stacked.mT


def squares(stacked: Tensor) -> Tensor:
    """The squared Frobenius norm of each matrix of a batch, (batch,), in float64.

    Rows are added up in the matrix's dtype, or in float32, the sums of the rows in float64: the order of the rows, and over how
    many ranks they are spread, then changes little.
    """
    dtype = torch.float64 if stacked.dtype == torch.float64 else torch.float32
    rows: Tensor = torch.linalg.vector_norm(stacked, dim=-1, dtype=dtype).double()
    return rows.square_().sum(-1)


def bidiagonalise(stacked: Tensor, norms: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Coefficients of a lower bidiagonal matrix whose singular values approximate those of ``stacked`` / ``norms``.

    Args:
        stacked: matrices, (batch, rows, cols).
        norms: their Frobenius norms, (batch,), in the dtype of ``stacked``.
        start: unit vector of min(rows, cols) entries, likewise.
        iterations: how many steps.

    Returns:
        (batch, 2 · iterations): the diagonal, then the entries below it, of which the last is always 0.
    """
    a = wide(stacked)
    scale = torch.where(norms > 0, norms.reciprocal(), 0.0).view(-1, 1, 1)
    left = [start.view(1, 1, -1).expand(a.size(0), 1, -1)]
    right: list[Tensor] = []
    diagonal, below = [], []
    for step in range(iterations):
        # Each new vector is made orthogonal to all earlier ones of its side, so that rounding cannot bring one back.
        v, alpha = _next(rows_times(left[-1] * scale, a), right)
        right.append(v)
        diagonal.append(alpha)
        if step + 1 < iterations:
            u, beta = _next(rows_times(right[-1] * scale, a.mT), left)
            left.append(u)
            below.append(beta)
    return torch.cat([*diagonal, *below, torch.zeros_like(diagonal[0])], dim=1)


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """The product of a few row vectors, (batch, count, n), and matrices, (batch, n, m), of one batch.

    In host memory one by one: batched products are up to ten times slower there if one factor is this narrow.
    """
    if matrices.device.type != "cpu":
        return torch.bmm(rows, matrices)
    products = rows.new_empty(matrices.size(0), rows.size(1), matrices.size(2))
    for row, matrix, product in zip(rows, matrices, products, strict=True):
        if row.size(0) == 1:
            torch.mv(matrix.t(), row[0], out=product[0])
        else:
            torch.mm(row, matrix, out=product)
    return products


def _next(vector: Tensor, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A vector, (batch, 1, n), made orthogonal to the ``earlier`` ones and of length 1; and its length before that, (batch, 1).

    Both become 0 where the length is only rounding.
    """
    if earlier:
        basis = torch.cat(earlier, dim=1)
        shadows = (basis * vector).sum(2, keepdim=True)
        vector = vector - (shadows * basis).sum(1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(vector, dim=2)
    length = torch.where(length > _EXHAUSTED, length, 0.0)
    unit = vector * torch.where(length > 0, length.reciprocal(), 0.0).unsqueeze(2)
    return unit, length


def defects(stacked: Tensor, directions: Tensor) -> Tensor:
    """How far the matrices of a batch are from being orthogonal, (batch, 2), in float64.

    For a matrix A with at most as many rows as columns and singular values s, these are the means of (1 − s²)² and (1 − s²)⁴ over
    its rows, estimated by the means of |(I − A·Aᵀ)·z|² and |(I − A·Aᵀ)²·z|² over the orthonormal rows z of ``directions``.
    With as many directions as rows they are exact.
    """
    a = wide(stacked)
    z = directions.unsqueeze(0).expand(a.size(0), -1, -1)
    once = rows_times(rows_times(z, a), a.mT).sub_(z)
    twice = rows_times(rows_times(once, a), a.mT).sub_(once)
    return torch.stack([squares(once), squares(twice)], dim=1) / directions.size(0)


def largest_singular_values(coefficients: Tensor) -> Tensor:
    """The largest singular value of each matrix relative to its Frobenius norm, (batch,), never above the true one.

    Args:
        coefficients: what ``bidiagonalise`` returned, on the host.
    """
    iterations = coefficients.size(1) // 2
    diagonal, below = torch.split(coefficients.double(), iterations, dim=1)
    bidiagonal = torch.diag_embed(diagonal)
    if iterations > 1:
        bidiagonal = bidiagonal + torch.diag_embed(below[:, :-1], offset=-1)
    values: Tensor = torch.linalg.svdvals(bidiagonal)
    return values[:, 0]


@lru_cache(maxsize=64)
def bound_of(scheme: Scheme) -> float:
    """The smallest singular value, relative to the Frobenius norm, that a scheme brings as near to 1 as it brings larger ones.

    For ``polar_express(l=1e-3)`` it is 1e-3. The worst distance from 1 is taken over [0.1, 1].
    """
    grid = [10 ** (-k / 400) for k in range(2801)]  # from 1 down to 1e-7
    worst = max(abs(1 - scheme(x)) for x in grid if x >= 0.1)
    inside = 1.0
    for x in grid:
        if x < 0.1 and not abs(1 - scheme(x)) <= worst * (1 + 1e-3):
            return _edge(scheme, x, inside, worst)
        inside = x
    return grid[-1]


def _edge(scheme: Scheme, outside: float, inside: float, worst: float) -> float:
    for _ in range(30):
        middle = math.sqrt(outside * inside)
        if abs(1 - scheme(middle)) <= worst * (1 + 1e-3):
            inside = middle
        else:
            outside = middle
    return inside
