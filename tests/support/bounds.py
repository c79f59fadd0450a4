"""How far results may be apart because of rounding: derived from the arithmetic, never read off a machine.

A dtype with p significant bits rounds each operation by at most u = 2⁻ᵖ of its result. From this follow

- a sum of k numbers, in whatever order and with or without fused operations: off by at most k·u·Σ|summands|
  (``sum_error``);
- a product a·b over k terms: off by at most k·u·|a|·|b| (``product_error``), and if it is stored in fewer bits than it
  is summed in, by u of the stored number;
- Newton–Schulz: the same iteration in float64, where every product is moved at random by up to √k·u·|a|·|b|
  (``orthogonalize_error``). Of k roundings in independent directions, each at most u of a partial sum, and a partial
  sum is at most |a|·|b|, so that √k·u·|a|·|b| is more than their standard deviation on any machine. The amplification
  of what is rounded early by what follows is in the simulation, not assumed;
- whole training runs, whose gradients depend on the weights: the same run again, from weights that are moved by as much
  as all roundings of the run together (``nudge``). How far it ends from the first shows how far rounding may lead
  (``led_astray``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshmuon.ortho import Scheme, blocks_for

SINGLE = 2.0**-24
_ROUNDINGS_OF_A_VALUE = 4  # of a mean of a few thousand numbers, added in pairs
DRAWS = 6  # of all roundings of an iteration; large matrices need fewer, their norms are alike
_DRAWS_OF_FEW_ROWS = 48  # whose error is one of a few numbers, of which six show the largest too seldom

Steps = Sequence[Any]  # of quintics


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sum_error(count: int, dtype: torch.dtype) -> float:
    """Bound on the error of a sum of ``count`` numbers, relative to the sum of their sizes."""
    return count * unit(dtype) / (1 - count * unit(dtype))


def product_error(a: Tensor, b: Tensor) -> Tensor:
    """Bound, entry by entry, on the error of ``a @ b`` computed in the dtype of ``a``."""
    return sum_error(a.size(-1), a.dtype) * (a.double().abs() @ b.double().abs())


def norm_error(count: int, dtype: torch.dtype, order: float = 2.0, *, blocks: int = 1) -> float:
    """Bound on the relative error of the norm of ``count`` numbers that are added up in ``dtype``.

    The root takes the error of the sum to 1/order of it. Powers and roots are off by at most 4 units each. Of many
    roundings in independent directions, six standard deviations: 6·√k·u instead of k·u (Higham and Mary, 2019). If they
    are added up in ``blocks``, the errors of these are independent, too.
    """
    if math.isinf(order):
        return 0.0
    summed = min(float(count), 6 * math.sqrt(count / blocks)) / math.sqrt(blocks)
    return ((summed + 4) / order + 4) * unit(dtype)


def room(dtype: torch.dtype) -> float:
    """How many times the largest simulated error another draw may have.

    What is stored in 16 bits is rounded just as it is simulated. Sums are taken in other orders on every machine.
    """
    return 2.0 if dtype.itemsize == 2 else 4.0


def orthogonalize_error(
    x: Tensor,
    scheme: Scheme,
    *,
    form: str | tuple[int, ...] = "auto",
    dtype: torch.dtype | None = None,
    given: torch.dtype | None = None,
    frobenius: bool = False,
) -> float:
    """Bound on the error of ``orthogonalize``: for one matrix, or the worst of a batch, and 0 for zeros.

    Args:
        x: one matrix or a batch.
        scheme: the polynomial.
        form: the form of the iteration, or its blocks.
        dtype: of the products; that of ``x`` unless given.
        given: what ``x`` is rounded to before it enters; ``dtype`` unless given.
        frobenius: whether the error is the Frobenius norm. Otherwise it is the spectral norm, which no entry and no
            singular value is further off than.
    """
    dtype = dtype or x.dtype
    blocks = form if isinstance(form, tuple) else blocks_for(x.size(-2), x.size(-1), scheme, form=form, dtype=dtype)
    worst = 0.0
    for matrix in x.double().reshape(-1, *x.shape[-2:]):
        if bool((matrix == 0).all()):
            continue
        rounding = Rounding(dtype, given or dtype)
        exact = rounded_iteration(matrix, scheme.steps, blocks, None)
        fewest = min(matrix.shape)
        for draw in range(_DRAWS_OF_FEW_ROWS if fewest < 4 else DRAWS if fewest < 200 else 2):
            rounded = rounded_iteration(matrix, scheme.steps, blocks, rounding, mirrored=draw % 2 == 1)
            worst = max(worst, float(torch.linalg.matrix_norm(rounded - exact, "fro" if frobenius else 2)))
    return room(dtype) * worst


@lru_cache
def _relative_error(rows: int, cols: int, scheme: Scheme, dtype: torch.dtype, given: torch.dtype) -> float:
    """The same for a matrix of normal random numbers and the worse form, relative to the norm of the result."""
    x = torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    size = rounded_iteration(x, scheme.steps, (1,) * len(scheme.steps), None).norm()
    forms = ("standard", "gram")
    worst = max(orthogonalize_error(x, scheme, form=form, dtype=dtype, given=given, frobenius=True) for form in forms)
    return worst / float(size)


def moved_error(
    start: Tensor,
    end: Tensor,
    *,
    updates: int,
    scheme: Scheme,
    dtype: torch.dtype | None = None,
    momentum: torch.dtype | None = None,
) -> float:
    """Bound on the difference between two runs of Muon from ``start`` to ``end`` on normal random gradients, relative
    to the way.

    Both are off by the error of each update, and by the rounding of the parameter where it is decayed and where it is
    moved. Errors of different updates are independent, so that their squares add; no single update is longer than the
    whole way.

    Args:
        start: a parameter before the steps, in the dtype that it is stored in.
        end: the same after the steps.
        updates: number of steps.
        scheme: the polynomial. For the polar factor by SVD, many steps of ``polar_express``: they are as steep as it
        is. dtype: of the products; that of the parameter, but at least float32, unless given. momentum: dtype that the
        momentum is stored in; that of the products unless given.
    """
    products = dtype or (torch.float32 if start.dtype.itemsize == 2 else start.dtype)
    shapes = {(start.size(0), start.numel() // start.size(0)), (start.size(-2), start.size(-1))}  # a filter, or experts
    update = max(_relative_error(*shape, scheme, products, momentum or products) for shape in shapes)
    way = float((end.double() - start.double()).norm())
    stored = unit(start.dtype) * (float(start.double().norm()) + way) / way
    return math.sqrt(2 * updates) * update + math.sqrt(4 * updates) * stored


class Rounding:
    """Moves each number by as much as ``dtype`` may round it, up or down at random."""

    def __init__(self, dtype: torch.dtype, given: torch.dtype) -> None:
        self.stored = unit(dtype)
        self.given = max(unit(given), unit(dtype))
        self.summed = min(self.stored, SINGLE)  # 16-bit products are summed in float32
        self._generator = torch.Generator().manual_seed(11)

    def __call__(self, exact: Tensor, size: Tensor, terms: int) -> Tensor:
        """``exact`` after ``terms`` roundings of numbers that add up to ``size`` and the one of what is stored."""
        within = 2 * torch.rand(exact.shape, generator=self._generator, dtype=torch.float64) - 1
        return exact + within * (math.sqrt(terms) * self.summed * size + self.stored * exact.abs())


def rounded_iteration(
    x: Tensor, steps: Steps, blocks: Sequence[int], rounding: Rounding | None, *, mirrored: bool = False
) -> Tensor:
    """Newton–Schulz in float64 with every product rounded by ``rounding``; exact without.

    ``mirrored`` takes one triangle of each symmetric product for both, as happens where products are computed by
    panels.
    """
    if x.size(0) > x.size(1):
        return rounded_iteration(x.mT, steps, blocks, rounding, mirrored=mirrored).mT

    def product(a: Tensor, b: Tensor, addend: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        exact = alpha * (a @ b) if addend is None else alpha * (a @ b) + beta * addend
        if rounding is None:
            return exact
        size = abs(alpha) * (a.abs() @ b.abs())
        return rounding(exact, size if addend is None else size + abs(beta) * addend.abs(), a.size(1) + 2)

    def symmetric(a: Tensor, b: Tensor) -> Tensor:
        # As the library multiplies: by the transpose, which is the same on paper and rounds worse where one value is
        # large.
        result = product(a, b.mT)
        return result.tril() + result.tril(-1).mT if mirrored else result

    def quadratic(gram: Tensor, step: Sequence[float], diagonal: bool) -> Tensor:
        a, b, c = step
        result = product(gram, gram.mT, gram, alpha=c, beta=b)
        if not diagonal:
            return result
        shifted = result.diagonal() + a
        return result.diagonal_scatter(shifted if rounding is None else rounding(shifted, shifted.abs(), 1))

    x = x / x.abs().max()
    x = x / x.norm()
    if rounding is not None:
        norm = torch.ones(1, dtype=torch.float64)  # a sum of all squares, so its error is that of all entries alike
        x = rounding(x / rounding(norm, norm, x.size(0) + x.size(1)), x.abs() * rounding.given / rounding.summed, 1)
    remaining = list(steps)
    for length in blocks:
        first, *others = remaining[:length]
        remaining = remaining[length:]
        gram = symmetric(x, x)
        if not others:
            x = product(quadratic(gram, first, diagonal=False), x, x, beta=first[0])
            continue
        factor = polynomial = quadratic(gram, first, diagonal=True)
        for step in others:
            gram = symmetric(symmetric(polynomial, gram), polynomial)
            polynomial = quadratic(gram, step, diagonal=True)
            factor = product(polynomial, factor)
        x = product(factor, x)
    return x


def nudge(parameters: Iterable[Tensor], steps: int, *, seed: int) -> None:
    """Moves every weight at random by up to ten roundings for each of ``steps`` steps."""
    generator = torch.Generator().manual_seed(seed)
    for param in parameters:
        within = 2 * torch.rand(param.shape, generator=generator, dtype=torch.float64) - 1
        param.data.copy_(param.data.double() * (1 + 10 * steps * unit(param.dtype) * within))


def led_astray(run: Sequence[float], nudged: Sequence[Sequence[float]]) -> list[float]:
    """Bound on what rounding changes of a series, such as losses, from the same series of ``nudged`` runs.

    At every step the largest difference up to there. The room is for directions in which a gradient is zero but for
    rounding, which Muon takes as seriously as the others: there a nudge does no more than another order of summation.
    Each value is itself a float32 sum, rounded in another order on another number of processes: differences of that
    size are always allowed, also where all nudged runs happen to give the same number.
    """
    bounds, largest = [], 0.0
    for k, value in enumerate(run):
        largest = max(
            largest, _ROUNDINGS_OF_A_VALUE * SINGLE * abs(value), *(abs(other[k] - value) for other in nudged)
        )
        bounds.append(4 * largest)
    return bounds
