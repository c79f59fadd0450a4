"""Compositions of odd polynomials of any degree: the best ones, what they cost, and how matrices run them. A study
only.

A step of degree 2k + 1 is x·P(x²) with P of degree k. In a block (see ``meshmuon.ortho.iteration``) it costs the
products that evaluate P(R), one for Q ← P·Q unless it is the first, and two for R ← P·R·P unless it is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from mpmath import cos, log10, lu_solve, matrix, mp, mpf, pi, sqrt, workdps
from torch import Tensor

from meshmuon import Workspace
from meshmuon.ortho.cost import symmetric_flops
from meshmuon.ortho.kernels.products import Products

__all__ = [
    "SMALLEST_ERROR",
    "Counts",
    "GramRunner",
    "MatrixStep",
    "OddPolynomial",
    "best_odd",
    "cheapest",
    "compose",
    "counts_of",
    "evaluation_products",
    "gram_products",
    "least_flops",
    "octic",
    "search",
]

SMALLEST_ERROR = 1e-30  # no step is added to what is better
DIGITS = 50
mp.dps = DIGITS


@dataclass(frozen=True, slots=True)
class OddPolynomial:
    """x·(q₀ + q₁·t + q₂·t² + …) with t = (x² − centre)/radius, in many digits."""

    q: tuple[Any, ...]
    centre: Any
    radius: Any

    def __call__(self, x: Any) -> Any:
        """p(x)."""
        t, value = (x * x - self.centre) / self.radius, mpf(0)
        for coefficient in reversed(self.q):
            value = value * t + coefficient
        return x * value

    def scaled(self, factor: Any) -> OddPolynomial:
        """x ↦ factor · p(x)."""
        return OddPolynomial(tuple(coefficient * factor for coefficient in self.q), self.centre, self.radius)

    def stretched(self, factor: Any) -> OddPolynomial:
        """x ↦ p(x / factor)."""
        q = tuple(coefficient / factor for coefficient in self.q)
        return OddPolynomial(q, self.centre * factor**2, self.radius * factor**2)

    def about(self, shift: Any) -> tuple[Any, ...]:
        """The coefficients of p(x)/x in powers of x² − shift, lowest first."""
        zero, slope, powers = (shift - self.centre) / self.radius, 1 / self.radius, [mpf(0)]
        for coefficient in reversed(self.q):
            powers = [zero * a + slope * b for a, b in zip([*powers, mpf(0)], [mpf(0), *powers], strict=True)]
            powers[0] += coefficient
        return tuple(powers[: len(self.q)])


@cache
def best_odd(degree: int, low: Any, high: Any) -> tuple[OddPolynomial, Any]:
    """The odd polynomial of ``degree`` closest to 1 on [low, high] in the maximum norm, and its error: a Remez
    exchange.

    The error takes its largest value with alternating sign at k + 2 points, both ends among them (degree 2k + 1).
    Between two of them the derivative has a root, so that all its k roots are real and within the interval.
    """
    k = degree // 2
    # the system is nearly singular there
    with workdps(DIGITS + int((k + 2) * max(0, -log10((high - low) / (high + low))))):
        centre, radius = (low**2 + high**2) / 2, (high**2 - low**2) / 2
        points = [-cos(pi * j / (k + 1)) for j in range(k + 2)]
        for _ in range(60):
            xs = [sqrt(centre + radius * t) for t in points]
            rows = [
                [*(x * t**j for j in range(k + 1)), (-1) ** i] for i, (x, t) in enumerate(zip(xs, points, strict=True))
            ]
            *q, level = lu_solve(matrix(rows), matrix([mpf(1)] * (k + 2)))
            slope = [
                (2 * j + 1) * q[j] + 2 * (j + 1) * centre / radius * (q[j + 1] if j < k else 0) for j in range(k + 1)
            ]
            points = [mpf(-1), *_real_roots(slope), mpf(1)]
            polynomial = OddPolynomial(tuple(q), centre, radius)
            error = max(abs(1 - polynomial(sqrt(centre + radius * t))) for t in points)
            if error - abs(level) <= mpf(10) ** -15 * error:
                return polynomial, error
    raise ArithmeticError(f"the exchange for degree {degree} on [{low}, {high}] does not settle")


def _real_roots(coefficients: Sequence[Any]) -> Iterator[Any]:
    """The roots above −1, smallest first, of a polynomial that has only such: from the left Newton's steps never
    pass one.
    """
    rest, t = list(coefficients), mpf(-1)
    while len(rest) > 1:
        for _ in range(300):
            value = slope = mpf(0)
            for coefficient in reversed(rest):
                value, slope = value * t + coefficient, slope * t + value
            if slope == 0 or abs(value) <= abs(slope) * mpf(10) ** (5 - mp.dps):
                break
            t -= value / slope
        yield t
        for place in reversed(range(len(rest) - 1)):  # divides by the factor of that root
            rest[place] += t * rest[place + 1]
        del rest[0]


def compose(
    degrees: Sequence[int], low: float, safety: float = 0.0, cushion: float = 0.0
) -> tuple[list[OddPolynomial], float]:
    """The steps and the worst |1 − p(x)| over [low, 1]; ``safety`` and ``cushion`` are those of ``polar_express``."""
    bottom, top, steps = mpf(low), mpf(1), []
    for index, degree in enumerate(degrees):
        step, error = best_odd(degree, max(bottom, cushion * top), top)
        if cushion * top > bottom:
            step = step.scaled(2 / (step(bottom) + 1 + error))
        if index < len(degrees) - 1:
            step = step.stretched(1 + mpf(safety))
        steps.append(step)
        bottom = step(bottom)
        top = 2 - bottom
    return steps, float(1 - bottom)


def evaluation_products(degree: int) -> int:
    """Products that evaluate p(x)/x of an odd polynomial, a polynomial of degree k = degree // 2 in a matrix.

    No way with s products goes beyond degree 2ˢ, which k = 2, 4 and 8 reach (k = 8: ``octic``). For the others: all
    powers up to s, then one product per further group of s coefficients.
    """
    k = degree // 2
    return 3 if k == 8 else min(s - 1 + max(0, -(-k // s) - 1) for s in range(1, k + 1))


class Counts(NamedTuple):
    """Products of a composition: n × n symmetric and full ones, and blocks, each with X·Xᵀ and Q·X."""

    symmetric: int
    full: int
    blocks: int

    def flops(self, n: int, m: int) -> int:
        """FLOPs for one n × m matrix, n ≤ m, as meshmuon counts them."""
        long = self.blocks * (symmetric_flops(n, m) + 2 * n * n * m)
        return long + self.symmetric * symmetric_flops(n, n) + self.full * 2 * n**3


def counts_of(degrees: Sequence[int], blocks: int) -> Counts:
    inside = len(degrees) - blocks
    return Counts(sum(map(evaluation_products, degrees)) + 2 * inside, inside, blocks)


def gram_products(degrees: Sequence[int]) -> int:
    """n × n products when all steps are one block."""
    counts = counts_of(degrees, 1)
    return counts.symmetric + counts.full


def least_flops(degrees: Sequence[int], n: int, m: int) -> int:
    """Of the cheapest cut into blocks: the cost is linear in their number, so that it is one block or one per step."""
    return min(counts_of(degrees, blocks).flops(n, m) for blocks in (1, len(degrees)))


def search(low: float, budget: int, degrees: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The compositions that are the best for their number of steps and of products for evaluation, with their errors.

    All costs are functions of these two numbers, and a better start never leads to a worse end: nothing else need be
    kept.
    """
    errors: dict[tuple[int, ...], float] = {}
    level: dict[int, tuple[Any, tuple[int, ...]]] = {0: (1 - mpf(low), ())}
    while level:
        candidates: dict[int, tuple[Any, tuple[int, ...]]] = {}
        for spent, (error, chosen) in level.items():
            for degree in degrees if error > SMALLEST_ERROR else ():
                cost = spent + evaluation_products(degree)
                if gram_products((*chosen, degree)) <= budget:
                    after = best_odd(degree, 1 - error, 1 + error if chosen else mpf(1))[1]
                    candidates[cost] = min(candidates.get(cost, (mpf(2), ())), (after, (*chosen, degree)))
        level, least = {}, mpf(2)
        for cost in sorted(candidates):
            if candidates[cost][0] < least:
                least, level[cost] = candidates[cost][0], candidates[cost]
        errors |= {chosen: float(error) for error, chosen in level.values()}
    return errors


def cheapest(
    errors: Mapping[tuple[int, ...], float], most: float, cost: Callable[[Sequence[int]], int]
) -> tuple[int, ...]:
    """The cheapest of the compositions whose error is at most ``most``."""
    good = (degrees for degrees, error in errors.items() if error <= most * (1 + 1e-9))
    return min(good, key=lambda degrees: (cost(degrees), errors[degrees]))


@dataclass(frozen=True, slots=True)
class MatrixStep:
    """How matrices run one step: ``numbers`` of a polynomial in R − shift·I, or of ``octic``, the constant last."""

    degree: int
    shift: float
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, step: OddPolynomial) -> MatrixStep:
        """In powers about the middle of the interval, where they cancel least; quintics and cubics as meshmuon,
        about 0.
        """
        degree = 2 * len(step.q) - 1
        shift = step.centre if degree > 5 else mpf(0)
        coefficients = step.about(shift)
        numbers = octic(coefficients) if degree == 17 else tuple(reversed(coefficients))
        return cls(degree, float(shift), tuple(map(float, numbers)))


def octic(b: Sequence[Any]) -> tuple[Any, ...]:
    """b₈·t⁸ + … + b₀ as (y + d₂t² + d₁t + d₀)·y + f₂t² + f₁t + f₀ with y = t²·(c₂t² + c₁t + c₀): three products.

    Comparing coefficients leaves one quadratic equation; of its two roots the one that leaves the more equal factors is
    taken.

    Returns:
        (c₂, c₁, c₀, d₂, d₁, d₀, f₂, f₁, f₀)
    """
    c2 = sqrt(b[8])
    c1 = b[7] / (2 * c2)
    total = (b[6] - c1**2) / c2  # 2·c₀ + d₂
    d1 = (b[5] - c1 * total) / c2
    middle = total - d1 * c2 / c1
    inside = middle**2 + 4 * (b[3] * c2 / c1 - b[4] + c1 * d1)
    if inside < 0:
        raise ArithmeticError("this octic has no real numbers of that form; move the shift")
    c0 = min(((middle + sign * sqrt(inside)) / 2 for sign in (1, -1)), key=lambda root: abs(root) + abs(total - root))
    d0 = (b[3] - d1 * c0) / c1
    return c2, c1, c0, total - 2 * c0, d1, d0, b[2] - d0 * c0, b[1], b[0]


class GramRunner:
    """meshmuon's iteration for steps of any degree: blocks, products and their order are the same."""

    def __init__(
        self, steps: Sequence[MatrixStep], blocks: Sequence[int], dtype: torch.dtype, products: Products
    ) -> None:
        self._steps, self._blocks, self._dtype, self._products = steps, blocks, dtype, products
        self._workspace = Workspace()

    def __call__(self, x: Tensor) -> Tensor:
        """Of (batch, n, m), n <= m; the result lives in the workspace."""
        buffers = [self._take(name, *x.shape) for name in ("x", "x_next")]
        torch.div(x, torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True), out=buffers[0])
        steps = iter(self._steps)
        for length in self._blocks:
            gram = self._products.symmetric(buffers[0], buffers[0], self._square("gram", x))
            self._block(buffers[0], gram, [next(steps) for _ in range(length)], buffers[1])
            buffers.reverse()
        return buffers[0]

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._workspace.take(name, shape, self._dtype, torch.device("cpu"))

    def _square(self, name: str, like: Tensor) -> Tensor:
        return self._take(name, like.size(0), like.size(1), like.size(1))

    def _block(self, x: Tensor, gram: Tensor, steps: Sequence[MatrixStep], target: Tensor) -> None:
        if len(steps) == 1:
            self._products.general(self._evaluate(steps[0], gram, "factor"), x, target, x, beta=steps[0].numbers[-1])
            return
        factor, spare = self._square("factor", x), self._square("factor_next", x)
        for index, step in enumerate(steps):
            polynomial = self._evaluate(step, gram, "polynomial" if index else "factor")
            polynomial.diagonal(dim1=1, dim2=2).add_(step.numbers[-1])
            if index:
                factor, spare = self._products.general(polynomial, factor, spare), factor
            if index < len(steps) - 1:
                half_step = self._products.symmetric(polynomial, gram, self._square("left", x))
                gram = self._products.symmetric(half_step, polynomial, self._square("gram", x))
        self._products.general(factor, x, target)

    def _evaluate(self, step: MatrixStep, gram: Tensor, name: str) -> Tensor:
        """The polynomial without its constant."""
        symmetric, numbers, out = self._products.symmetric, step.numbers, self._square(name, gram)
        if step.degree == 3:
            return torch.mul(gram, numbers[0], out=out)
        if step.degree == 5:
            return symmetric(gram, gram, out, gram, alpha=numbers[0], beta=numbers[1])
        t = self._square("shifted", gram).copy_(gram)
        t.diagonal(dim1=1, dim2=2).sub_(step.shift)
        square, left = symmetric(t, t, self._square("square", gram)), self._square("left", gram)
        if step.degree == 17:
            c2, c1, c0, d2, d1, d0, f2, f1, _ = numbers
            torch.mul(square, c2, out=left).add_(t, alpha=c1).diagonal(dim1=1, dim2=2).add_(c0)
            y = symmetric(square, left, self._square("cube", gram))
            torch.add(y, square, alpha=d2, out=left).add_(t, alpha=d1).diagonal(dim1=1, dim2=2).add_(d0)
            return symmetric(left, y, out, t.mul_(f1).add_(square, alpha=f2))
        powers = [t, square]
        if step.degree > 9:
            powers.append(symmetric(square, t, self._square("cube", gram)))
        return self._by_groups(numbers, powers, left, out)

    def _by_groups(self, numbers: Sequence[float], powers: Sequence[Tensor], left: Tensor, out: Tensor) -> Tensor:
        """As many coefficients at a time as there are powers; at most three groups, so that two buffers are enough."""
        size, degree = len(powers), len(numbers) - 1
        coefficients, products = iter(numbers), (degree - 1) // size
        _blend(left, powers[: degree - products * size], coefficients)
        for turn in range(products):
            left.diagonal(dim1=1, dim2=2).add_(next(coefficients))
            rest = _blend(self._square("rest", out), powers[:-1], coefficients)
            target = out if turn == products - 1 else self._square("group", out)
            left = self._products.symmetric(left, powers[-1], target, rest)
        return left


def _blend(out: Tensor, powers: Sequence[Tensor], coefficients: Iterator[float]) -> Tensor:
    """The next coefficients times these powers, highest first."""
    torch.mul(powers[-1], next(coefficients), out=out)
    for power in reversed(powers[:-1]):
        out.add_(power, alpha=next(coefficients))
    return out


PRODUCTS, FLOPS = "n × n products, one block", "FLOPs ÷ 2n³, m = 4n"


def fronts_drawn(
    drawn: Mapping[str, Mapping[tuple[int, ...], float]], n: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each way to count cost and each set of degrees: costs at which the error falls, with that error."""
    costs: dict[str, Callable[[tuple[int, ...]], float]] = {
        PRODUCTS: gram_products,
        FLOPS: lambda degrees: least_flops(degrees, n, 4 * n) / 2 / n**3,
    }
    fronts: dict[str, dict[str, list[tuple[float, float]]]] = {label: {name: [] for name in drawn} for label in costs}
    for label, cost in costs.items():
        for name, errors in drawn.items():
            points = fronts[label][name]
            for spent, error in sorted((cost(degrees), error) for degrees, error in errors.items()):
                if error < (points[-1][1] if points else 1.0):
                    points.append((spent, error))
    return fronts
