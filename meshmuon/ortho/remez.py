"""The best odd quintic on an interval, by the Remez exchange, in plain float64 arithmetic.

The polynomial p(x) = a·x + b·x³ + c·x⁵ that minimises max |1 − p(x)| over [low, high] takes its largest error with
alternating sign at four points: both ends and the two inner extrema. The exchange alternates between solving for the
polynomial at four given points and moving the two inner points to the extrema.

Two changes of variable keep every digit when the interval becomes narrow, where the textbook system is singular:

* x is measured in units of the interval's middle, and the unknown is the *difference* from the limit polynomial
  (15x − 10x³ + 3x⁵)/8, whose own error 1 − p has the closed form (1 − x)³(3x² + 9x + 8)/8;
* powers of x² are replaced by powers of t = (x² − mid)/half, which runs over [−1, 1].

No linear algebra library is used: every rank of a cluster must find the same bits, whatever its LAPACK.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_MAX_EXCHANGES = 100
_LIMIT = (15 / 8, -10 / 8, 3 / 8)


class Quintic(NamedTuple):
    """The odd polynomial x ↦ a·x + b·x³ + c·x⁵."""

    a: float
    b: float
    c: float

    def __call__(self, x: float) -> float:
        """p(x)."""
        square = x * x
        return x * (self.a + square * (self.b + square * self.c))

    def scaled(self, factor: float) -> Quintic:
        """x ↦ factor · p(x)."""
        return Quintic(self.a * factor, self.b * factor, self.c * factor)

    def stretched(self, factor: float) -> Quintic:
        """x ↦ p(x / factor)."""
        return Quintic(self.a / factor, self.b / factor**3, self.c / factor**5)


def best_quintic(low: float, high: float) -> Quintic:
    """The odd quintic closest to 1 on [low, high] in the maximum norm.

    Args:
        low: lower end, 0 < low <= high.
        high: upper end.
    """
    if not 0 < low <= high < math.inf:
        raise ValueError(f"best_quintic needs 0 < low <= high, got [{low}, {high}]")
    middle = (low + high) / 2
    half = (high - low) / (high + low)
    return _best_around_one(half).stretched(middle)


def _best_around_one(half: float) -> Quintic:
    low, high = 1 - half, 1 + half
    if half < 1e-9:  # the difference from the limit is of order half², below the last digit
        return Quintic(*_LIMIT)
    centre, radius = 1 + half * half, 2 * half  # of x² over the interval
    inner = tuple(math.sqrt(centre + radius * t) for t in (-0.5, 0.5))
    error = math.inf
    for _ in range(_MAX_EXCHANGES):
        points = (low, *inner, high)
        delta = _solve_difference(points, centre, radius)
        quintic = _to_powers_of_x(delta, centre, radius)
        inner = _inner_extrema(quintic, low, high)
        previous, error = error, max(_distance_from_one(x, delta, centre, radius) for x in (low, *inner, high))
        if abs(previous - error) <= 1e-15 * error:
            break
    return quintic


def _limit_error(x: float) -> float:
    """1 − (15x − 10x³ + 3x⁵)/8 without cancellation near x = 1."""
    return (1 - x) ** 3 * (3 * x * x + 9 * x + 8) / 8


def _distance_from_one(x: float, delta: tuple[float, float, float], centre: float, radius: float) -> float:
    t = (x * x - centre) / radius
    return abs(_limit_error(x) - x * (delta[0] + t * (delta[1] + t * delta[2])))


def _solve_difference(points: tuple[float, ...], centre: float, radius: float) -> tuple[float, float, float]:
    """(d0, d1, d2) with limit(x) + x·(d0 + d1·t + d2·t²) ± E = 1 at the four points."""
    rows = []
    for index, x in enumerate(points):
        t = (x * x - centre) / radius
        rows.append([x, x * t, x * t * t, (-1.0) ** index, _limit_error(x)])
    d0, d1, d2, _ = _solve(rows)
    return d0, d1, d2


def _to_powers_of_x(delta: tuple[float, float, float], centre: float, radius: float) -> Quintic:
    d0, d1, d2 = delta
    a = d0 - d1 * centre / radius + d2 * (centre / radius) ** 2
    b = d1 / radius - 2 * d2 * centre / radius**2
    c = d2 / radius**2
    return Quintic(_LIMIT[0] + a, _LIMIT[1] + b, _LIMIT[2] + c)


def _inner_extrema(quintic: Quintic, low: float, high: float) -> tuple[float, float]:
    """The roots of p'(x) = a + 3b·x² + 5c·x⁴ inside the interval, smaller first."""
    a, b, c = quintic
    root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
    squares = ((-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c))
    first, second = (min(max(math.sqrt(max(s, 0.0)), low), high) for s in squares)
    return first, second


def _solve(rows: list[list[float]]) -> list[float]:
    """Gaussian elimination with partial pivoting on an augmented matrix."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(column + 1, size):
            factor = rows[r][column] / rows[column][column]
            rows[r] = [value - factor * above for value, above in zip(rows[r], rows[column], strict=True)]
    solution = [0.0] * size
    for r in reversed(range(size)):
        known = sum(rows[r][k] * solution[k] for k in range(r + 1, size))
        solution[r] = (rows[r][size] - known) / rows[r][r]
    return solution
