"""Inverses of symmetric positive definite matrices out of large products.

A rational step needs (R + pole·I)⁻¹ for a few poles. LAPACK's own inverse runs at a third of the speed of a product, so
that only 32 × 32 blocks on the diagonal are left to it. Everything else is products of large blocks: with A = L·Lᵀ cut
in two,

    L₂₁ = A₂₁·W₁₁ᵀ,   A₂₂ ← A₂₂ − L₂₁·L₂₁ᵀ,   W₂₁ = −W₂₂·(L₂₁·W₁₁),   where W = L⁻¹ and A⁻¹ = Wᵀ·W,

and the same for both halves. Products with a triangular operand leave out the blocks that are zero.

Matrices are padded with an identity to a multiple of 32 rows, and rows to 16 more columns, so that every block begins
at a multiple of 64 bytes. One matrix and one pole are inverted at a time, in the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..rational import Rational

LEAF = 32  # rows that LAPACK factors; smaller blocks cost more calls, larger ones run at LAPACK's speed
_PANEL = 64  # rows of a panel of a triangular product
_SMALLEST_SPLIT = 128  # below, panels cost more than the zeros that they leave out
_GAP = 16  # columns that keep rows from following each other: 64 bytes in float32

Range: TypeAlias = "tuple[int, int]"


def _padded(n: int) -> int:
    """Rows that an n × n matrix is padded to."""
    return -(-n // LEAF) * LEAF


@lru_cache(maxsize=1024)
def _panels(n: int) -> tuple[Range, ...]:
    """Rows of a triangular n × n operand in panels, so that a panel's zeros need not be multiplied."""
    if n < _SMALLEST_SPLIT:
        return ((0, n),)
    count = n // _PANEL
    edges = [round(n * k / count / LEAF) * LEAF for k in range(count)]
    return tuple(zip(edges, [*edges[1:], n], strict=True))


def _column_ranges(half: int) -> tuple[Range, ...]:
    """The columns of L₂₁ in the order in which A₂₂ − L₂₁·L₂₁ᵀ subtracts them: those of the first leaf before all
    others.

    Where one direction of A is far larger than the rest, it is in these columns, and A₂₂ is small without it. One
    product would add the small columns to the large ones and round them away: at 768 rows values that ``zolotarev``
    makes of 1e-3 were off by up to 0.12 instead of 0.014.
    """
    return ((0, LEAF), (LEAF, half)) if half > LEAF else ((0, half),)


def _half(n: int) -> int:
    return -(-n // (2 * LEAF)) * LEAF


class ShiftedInverses:
    """constant·I + Σ weight·(R + pole·I)⁻¹ for Gram matrices R of n rows, in buffers and views that are made once.

    ``take`` gives an uninitialised (rows, cols) buffer for a name, at a multiple of 64 bytes.
    """

    def __init__(self, n: int, take: Callable[[str, int, int], Tensor]) -> None:
        size, half = _padded(n), _half(_padded(n))
        self._n = n
        self._shifted, self._inverse_factor, self._total = (
            take(name, size, size + _GAP)[:, :size] for name in ("shifted", "inverse_factor", "inverses")
        )
        self._half = take("half_factor", size - half + LEAF, half + _GAP)
        self._leaf, self._leaf_inverse, self._identity = (
            take(name, LEAF, LEAF) for name in ("leaf", "leaf_inverse", "leaf_identity")
        )
        # Never read, and overwritten by the inverse: a matrix that cannot be factored shows as NaN in the result.
        self._info = self._leaf_inverse.view(torch.int32).flatten()[0]
        self._calls = [*self._factor(0, size)]
        w, total = self._inverse_factor, self._total
        self._squares = [
            (total[start:stop, :stop], w[start:, start:stop].mT, w[start:, :stop]) for start, stop in _panels(size)
        ]
        self._mirrors = [
            (total[:start, start:stop], total[start:stop, :start].mT) for start, stop in _panels(size) if start
        ]

    def run(self, gram: Tensor, step: Rational) -> Tensor:
        """The step's factor for one Gram matrix, (n, n), in a buffer that the next call overwrites."""
        self._inverse_factor.zero_()
        self._identity.zero_().diagonal().fill_(1.0)
        for index, (pole, weight) in enumerate(zip(step.poles, step.weights, strict=True)):
            self._shift(gram, pole)
            for call in self._calls:
                call()
            for out, left, right in self._squares:  # the lower triangle of weight·Wᵀ·W
                torch.addmm(out, left, right, alpha=weight, beta=1.0 if index else 0.0, out=out)
        for upper, lower in self._mirrors:
            upper.copy_(lower)
        self._total.diagonal().add_(step.constant)
        return self._total[: self._n, : self._n]

    def operands(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Both factors of every product that one pole takes."""
        for call in self._calls:
            if call.func != self._factor_leaf:
                *_, left, right = call.args
                yield left, right
        yield from ((left, right) for _, left, right in self._squares)

    def _shift(self, gram: Tensor, pole: float) -> None:
        n = self._n
        if n < len(self._shifted):
            self._shifted[n:].zero_().diagonal(n).fill_(1.0)
        self._shifted[:n, :n].copy_(gram).diagonal().add_(pole)

    def _factor(self, low: int, high: int) -> Iterator[partial[Any]]:
        """The calls that turn A[low:high, low:high] into W[low:high, low:high]; A is overwritten."""
        a, w = self._shifted, self._inverse_factor
        if high == low:  # parameters without elements
            return
        if high - low == LEAF:
            yield partial(self._factor_leaf, a[low:high, low:high], w[low:high, low:high])
            return
        half = _half(high - low)
        mid = low + half
        w11, w22, a21, a22 = w[low:mid, low:mid], w[mid:high, mid:high], a[mid:high, low:mid], a[mid:high, mid:high]
        l21 = self._half[: high - mid, :half]
        yield from self._factor(low, mid)
        for start, stop in _panels(half):
            yield partial(torch.mm, a21[:, :stop], w11[start:stop, :stop].mT, out=l21[:, start:stop])
        for first, last in _column_ranges(half):
            columns = l21[:, first:last]
            for start, stop in _panels(high - mid):
                out = a22[start:stop, :stop]
                yield partial(torch.addmm, out, columns[start:stop], columns[:stop].mT, alpha=-1.0, out=out)
        for start, stop in _panels(half):
            yield partial(torch.mm, l21[:, start:], w11[start:, start:stop], out=a21[:, start:stop])
        yield from self._factor(mid, high)
        for start, stop in _panels(high - mid):
            out = w[mid + start : mid + stop, low:mid]
            yield partial(torch.addmm, out, w22[start:stop, :stop], a21[:stop], alpha=-1.0, beta=0.0, out=out)

    def _factor_leaf(self, block: Tensor, inverse: Tensor) -> None:
        factor = self._leaf.mT.copy_(block)  # in LAPACK's order, so that LAPACK makes no copy
        torch.linalg.cholesky_ex(factor, out=(factor, self._info))
        torch.linalg.solve_triangular(factor, self._identity, upper=False, out=self._leaf_inverse)
        inverse.copy_(self._leaf_inverse)


def plain_inverses(gram: Tensor, step: Rational) -> Tensor:
    """A step's factor by torch's own batched routines, into new tensors: what GPUs run."""
    identity = torch.eye(gram.size(1), dtype=gram.dtype, device=gram.device)
    total = step.constant * identity
    if step.is_hybrid:
        total = torch.baddbmm(total + step.linear * gram, gram, gram, alpha=step.quadratic)
    for pole, weight in zip(step.poles, step.weights, strict=True):
        factor, _ = torch.linalg.cholesky_ex(gram + pole * identity)
        total = total + weight * torch.cholesky_inverse(factor)
    return total


class InverseWork(NamedTuple):
    """What one inverse of an n × n matrix takes."""

    product_flops: int
    leaf_flops: int  # in the blocks that LAPACK factors and inverts
    products: int  # calls, most of them on blocks that are too small for the speed of large products
    scratch: int  # elements of the buffers


@lru_cache(maxsize=1024)
def inverse_work(n: int) -> InverseWork:
    """What one inverse of an n × n matrix takes, counted on tensors without memory."""
    buffers: list[Tensor] = []

    def take(name: str, rows: int, cols: int) -> Tensor:
        buffers.append(torch.empty(rows, cols, device="meta"))
        return buffers[-1]

    inverses = ShiftedInverses(n, take)
    operands = [*inverses.operands()]
    flops = sum(2 * left.size(0) * left.size(1) * right.size(1) for left, right in operands)
    return InverseWork(flops, _padded(n) * LEAF**2, len(operands), sum(buffer.numel() for buffer in buffers))
