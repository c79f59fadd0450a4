"""Inverses of symmetric positive definite matrices out of large products.

A rational step needs (R + pole·I)⁻¹ for a few poles. LAPACK's own inverse runs at a third of the speed of a product, so that only
32 × 32 blocks on the diagonal are left to it. Everything else is products of large blocks: with A = L·Lᵀ cut in two,

    L₂₁ = A₂₁·W₁₁ᵀ,   A₂₂ ← A₂₂ − L₂₁·L₂₁ᵀ,   W₂₁ = −W₂₂·(L₂₁·W₁₁),   where W = L⁻¹ and A⁻¹ = Wᵀ·W,

and the same for both halves. Products with a triangular operand leave out the blocks that are zero.

Matrices are padded with an identity to a multiple of 32 rows, and rows to 16 more columns. Every block then begins at a multiple
of 64 bytes, and no result is contiguous: torch multiplies such batches one matrix at a time, so that what shares a batch cannot
change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..rational import Rational

LEAF = 32  # rows that LAPACK factors; smaller blocks cost more calls, larger ones run at LAPACK's speed
_PANEL = 64  # rows of a panel of a triangular product
_SMALLEST_SPLIT = 128  # below, panels cost more than the zeros that they leave out
_GAP = 16  # columns that keep results from being contiguous: 64 bytes in float32
_POLES_APART = 1024  # from here on poles are taken one after the other: the calls cost nothing any more, the memory does
_CACHED = 3 << 20  # bytes of shifted matrices and their inverse factors that are worked on together: about a core's caches

Range: TypeAlias = "tuple[int, int]"


def _padded(n: int) -> int:
    """Rows that an n × n matrix is padded to."""
    return -(-n // LEAF) * LEAF


def _poles_at_once(n: int, poles: int) -> int:
    """How many of the poles are inverted together for n × n matrices."""
    return poles if n < _POLES_APART else 1


def most_inverses(n: int, poles: int, itemsize: int) -> int:
    """How many n × n matrices are best inverted together: few enough to stay in the cache from one small product to the next.

    For 64 matrices of 256 rows and two poles, two at a time take 0.78 of the time of all at once. At least two, since each call
    serves all of them. No bit depends on it.
    """
    bytes_of_one = 2 * _poles_at_once(n, poles) * _padded(n) * (_padded(n) + _GAP) * itemsize
    return max(2, _CACHED // bytes_of_one) if n else 1


@lru_cache(maxsize=1024)
def _panels(n: int) -> tuple[Range, ...]:
    """Rows of a triangular n × n operand in panels, so that a panel's zeros need not be multiplied."""
    if n < _SMALLEST_SPLIT:
        return ((0, n),)
    count = n // _PANEL
    edges = [round(n * k / count / LEAF) * LEAF for k in range(count)]
    return tuple(zip(edges, [*edges[1:], n], strict=True))


def _column_ranges(half: int) -> tuple[Range, ...]:
    """The columns of L₂₁ in the order in which A₂₂ − L₂₁·L₂₁ᵀ subtracts them: those of the first leaf before all others.

    Where one direction of A is far larger than the rest, it is in these columns, and A₂₂ is small without it. One product would
    add the small columns to the large ones and round them away: at 768 rows values that ``zolotarev`` makes of 1e-3 were off by
    up to 0.12 instead of 0.014.
    """
    return ((0, LEAF), (LEAF, half)) if half > LEAF else ((0, half),)


def _half(n: int) -> int:
    return -(-n // (2 * LEAF)) * LEAF


class ShiftedInverses:
    """constant·I + Σ weight·(R + pole·I)⁻¹ for a batch of Gram matrices R, in buffers and views that are made once.

    Args:
        count: matrices of the batch.
        n: their rows.
        poles: how many poles a step has.
        take: gives an uninitialised (count, rows, cols) buffer for a name, each matrix at a multiple of 64 bytes.
    """

    def __init__(self, count: int, n: int, poles: int, take: Callable[[str, tuple[int, int, int]], Tensor]) -> None:
        size, together = _padded(n), _poles_at_once(n, poles)
        self._count, self._n, self._together = count, n, together
        shape, wide = (count * together, size, size + _GAP), (count, size, size + _GAP)
        self._shifted = take("shifted", shape)[:, :, :size]
        self._inverse_factor = take("inverse_factor", shape)[:, :, :size]
        self._half = take("half_factor", (count * together, size - _half(size) + LEAF, _half(size) + _GAP))
        self._total = take("inverses", wide)[:, :, :size]
        self._leaf = take("leaf", (count * together, LEAF, LEAF))
        self._leaf_inverse = take("leaf_inverse", (count * together, LEAF, LEAF))
        self._identity = take("leaf_identity", (count * together, LEAF, LEAF))
        # Never read, and overwritten by the inverse: a matrix that cannot be factored shows as NaN in the result.
        self._info = self._leaf_inverse.view(torch.int32).flatten()[: count * together]
        self._calls = [*self._factor(0, size)]
        self._squares = [*self._square(size)]

    @property
    def result(self) -> Tensor:
        """(count, n, n), where ``run`` leaves its result."""
        return self._total[:, : self._n, : self._n]

    def run(self, gram: Tensor, step: Rational) -> Tensor:
        """The step's factor for each Gram matrix, (count, n, n)."""
        self._inverse_factor.zero_()
        self._identity.zero_().diagonal(dim1=1, dim2=2).fill_(1.0)
        for first in range(0, len(step.poles), self._together):
            taken = slice(first, first + self._together)
            self._shift(gram, step.poles[taken])
            for call in self._calls:
                call()
            for index, weight in enumerate(step.weights[taken]):
                for square in self._squares[index]:
                    square(weight, fresh=first + index == 0)
        self._mirror()
        self._total.diagonal(dim1=1, dim2=2).add_(step.constant)
        return self.result

    def _shift(self, gram: Tensor, poles: tuple[float, ...]) -> None:
        n, size = self._n, self._shifted.size(1)
        for index, pole in enumerate(poles):
            shifted = self._shifted[index * self._count : (index + 1) * self._count]
            if size > n:
                shifted[:, n:].zero_()
                shifted[:, n:, n:].diagonal(dim1=1, dim2=2).fill_(1.0)
            shifted[:, :n, :n].copy_(gram)
            shifted[:, :n, :n].diagonal(dim1=1, dim2=2).add_(pole)

    def _factor(self, low: int, high: int) -> Iterator[Callable[[], object]]:
        """The calls that turn A[low:high, low:high] into W[low:high, low:high]; A is overwritten."""
        a, w = self._shifted, self._inverse_factor
        if high == low:  # parameters without elements
            return
        if high - low == LEAF:
            block = slice(low, high)
            yield partial(self._factor_leaf, a[:, block, block], w[:, block, block])
            return
        half = _half(high - low)
        mid = low + half
        upper, lower = slice(low, mid), slice(mid, high)
        w11, w22, a21, a22 = w[:, upper, upper], w[:, lower, lower], a[:, lower, upper], a[:, lower, lower]
        l21 = self._half[:, : high - mid, :half]
        yield from self._factor(low, mid)
        for start, stop in _panels(half):
            yield partial(torch.bmm, a21[:, :, :stop], w11[:, start:stop, :stop].mT, out=l21[:, :, start:stop])
        for first, last in _column_ranges(half):
            for start, stop in _panels(high - mid):
                out, columns = a22[:, start:stop, :stop], l21[:, :, first:last]
                yield partial(torch.baddbmm, out, columns[:, start:stop], columns[:, :stop].mT, alpha=-1.0, out=out)
        for start, stop in _panels(half):
            yield partial(torch.bmm, l21[:, :, start:], w11[:, start:, start:stop], out=a21[:, :, start:stop])
        yield from self._factor(mid, high)
        for start, stop in _panels(high - mid):
            out = w[:, mid + start : mid + stop, upper]
            yield partial(torch.baddbmm, out, w22[:, start:stop, :stop], a21[:, :stop], alpha=-1.0, beta=0.0, out=out)

    def _factor_leaf(self, block: Tensor, inverse: Tensor) -> None:
        factor = self._leaf.mT.copy_(block)  # in LAPACK's order, so that it makes no copy of its own
        torch.linalg.cholesky_ex(factor, out=(factor, self._info))
        torch.linalg.solve_triangular(factor, self._identity, upper=False, out=self._leaf_inverse)
        inverse.copy_(self._leaf_inverse)

    def _square(self, size: int) -> Iterator[list[Callable[..., object]]]:
        """For each pole, the calls that add weight·Wᵀ·W to the lower triangle of the total."""
        for index in range(self._together):
            w = self._inverse_factor[index * self._count : (index + 1) * self._count]
            yield [
                partial(_add_square, w[:, start:, start:stop].mT, w[:, start:, :stop], self._total[:, start:stop, :stop])
                for start, stop in _panels(size)
            ]

    def _mirror(self) -> None:
        for start, stop in _panels(self._total.size(1)):
            if start:
                self._total[:, :start, start:stop].copy_(self._total[:, start:stop, :start].mT)


def _add_square(left: Tensor, right: Tensor, out: Tensor, weight: float, *, fresh: bool) -> None:
    torch.baddbmm(out, left, right, alpha=weight, beta=0.0 if fresh else 1.0, out=out)


def plain_inverses(gram: Tensor, step: Rational) -> Tensor:
    """A step's factor by torch's own batched routines, into new tensors: what ``torch.compile`` can trace, and what GPUs run."""
    identity = torch.eye(gram.size(1), dtype=gram.dtype, device=gram.device)
    total = step.constant * identity
    if step.is_hybrid:
        total = torch.baddbmm(total + step.linear * gram, gram, gram, alpha=step.quadratic)
    for pole, weight in zip(step.poles, step.weights, strict=True):
        factor, _ = torch.linalg.cholesky_ex(gram + pole * identity)
        total = total + weight * torch.cholesky_inverse(factor)
    return total


def inverse_scratch(n: int, poles: int) -> int:
    """Elements of scratch that ``ShiftedInverses`` takes for each n × n matrix."""
    size, together = _padded(n), _poles_at_once(n, poles)
    square, half = size * (size + _GAP), (size - _half(size) + LEAF) * (_half(size) + _GAP)
    return square + together * (2 * square + half + 3 * LEAF * LEAF)


class InverseWork(NamedTuple):
    """What one inverse of an n × n matrix takes."""

    product_flops: int
    leaf_flops: int  # in the blocks that LAPACK factors and inverts
    products: int  # calls, most of them on blocks that are too small for the speed of large products


@lru_cache(maxsize=1024)
def inverse_work(n: int) -> InverseWork:
    """What one inverse of an n × n matrix takes: its triangular factor, the inverse of that, and its square."""
    size = _padded(n)
    flops, products = _factor_work(size)
    square = sum(2 * (stop - start) * stop * (size - start) for start, stop in _panels(size))
    return InverseWork(flops + square, size // LEAF * LEAF**3, products + len(_panels(size)))


@lru_cache(maxsize=1024)
def _factor_work(size: int) -> tuple[int, int]:
    """FLOPs and number of the products that ``ShiftedInverses`` needs for the inverse factor."""
    if size <= LEAF:  # 0 for parameters without elements
        return 0, 0
    half = _half(size)
    rest = size - half
    divide = sum(2 * rest * (stop - start) * stop for start, stop in _panels(half))
    update = sum(2 * (stop - start) * stop * half for start, stop in _panels(rest))
    back = sum(2 * rest * (half - start) * (stop - start) for start, stop in _panels(half))
    apply = sum(2 * (stop - start) * stop * half for start, stop in _panels(rest))
    (first_flops, first_products), (second_flops, second_products) = _factor_work(half), _factor_work(rest)
    products = 2 * len(_panels(half)) + (1 + len(_column_ranges(half))) * len(_panels(rest))
    products += first_products + second_products
    return divide + update + back + apply + first_flops + second_flops, products
