"""Rational steps, x ↦ x·(constant + Σ weight/(x² + pole)), and hybrid steps, which add a quintic. All are best on an
interval.

One rational step does the work of several quintics. On matrices it is X ← (constant·I + Σ weight·(R + pole·I)⁻¹)·X with
R = X·Xᵀ: every pole costs one inverse of a symmetric positive definite matrix. A hybrid step adds linear·R +
quadratic·R² to the factor. That costs one product, less than an inverse.

* ``zolotarev_step``: the best approximation of 1 on [l, 1] with a given number of poles (Zolotarev, 1877). Its poles
  are values of Jacobi's elliptic functions.
* ``halley_step``: the best step with one pole that maps [l, 1] into [y, 1] (Nakatsukasa, Bai, Gygi, "Optimizing
  Halley's iteration for computing the matrix polar decomposition", 2010). Further steps can follow it.
* ``HYBRID_STEP``: the best sum of a quintic and two poles on [1e-3, 1].

Everything is plain float64 arithmetic: every rank of a cluster must find the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rational(NamedTuple):
    """The odd function x ↦ x·(constant + linear·x² + quadratic·x⁴ + Σ weights[j]/(x² + poles[j])).

    Poles and weights are positive. ``linear`` and ``quadratic`` are 0 in the steps of Zolotarev and Halley.
    """

    constant: float
    poles: tuple[float, ...]
    weights: tuple[float, ...]
    linear: float = 0.0
    quadratic: float = 0.0

    @property
    def is_hybrid(self) -> bool:
        """Whether it has a linear or a quadratic term: the quintic of a hybrid step."""
        return bool(self.linear or self.quadratic)

    def __call__(self, x: float) -> float:
        """Its value at x."""
        square = x * x
        fractions = sum(weight / (square + pole) for pole, weight in zip(self.poles, self.weights, strict=True))
        return x * (self.constant + square * (self.linear + square * self.quadratic) + fractions)

    def scaled(self, factor: float) -> Rational:
        """x ↦ factor · r(x)."""
        constant, poles, weights, linear, quadratic = self
        return Rational(
            constant * factor, poles, tuple(w * factor for w in weights), linear * factor, quadratic * factor
        )


# The best sum of a quintic and two poles on [1e-3, 1], found by the Remez exchange in 30 digits. What is minimised is
# the largest value of its error plus what rounding in float32 may add, about 0.02·(1e-3/x)²: 0.1253, reached at eight
# points with alternating sign. The result is scaled by 0.9965, since rounding may also lift its maxima above 1 a little
# further.
HYBRID_STEP = Rational(
    constant=3.1704018547661341,
    poles=(3.5154490461642852e-6, 0.0011762572161433672),
    weights=(0.0037871130544655191, 0.062192209686380194),
    linear=-5.6380618940000232,
    quadratic=3.5270540107028435,
).scaled(0.9965)


def zolotarev_step(low: float, poles: int) -> Rational:
    """The odd rational function with ``poles`` poles that is closest to 1 on [low, 1] in the maximum norm.

    Its error takes its largest value at 2·poles + 2 points with alternating sign: 1 − E at ``low`` and 1 + E at 1.
    """
    count = 2 * poles + 1
    points = [low * low * tangent * tangent for tangent in _elliptic_tangents(low, poles)]
    # The points come in pairs whose product is low²; the second half would lose digits if it were computed directly.
    points += [low * low / point for point in reversed(points)]
    odd, even = points[0 : count - 1 : 2], points[1 : count - 1 : 2]
    weights = tuple(
        math.prod(zero - pole for zero in even) / math.prod(other - pole for other in odd if other != pole)
        for pole in odd
    )
    step = Rational(1.0, tuple(odd), weights)
    return step.scaled(2 / (step(low) + step(1.0)))


def halley_step(low: float) -> Rational:
    """Halley's step with the weights that lift ``low`` highest while 1 stays the largest value on [low, 1]."""
    square = low * low
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    c = a + b - 1
    return Rational(b / c, (1 / c,), ((a - b / c) / c,))


def _elliptic_tangents(low: float, poles: int) -> list[float]:
    """sn(u)/cn(u) for u = i·K/(2·poles + 1), i = 1 … poles, with the complementary modulus ``low``.

    By the arithmetic-geometric mean of 1 and ``low``: K = π/(2·mean), and the amplitude of u follows from its limit
    2^N·mean·u by one arcsine per halving.
    """
    means = [(1.0, math.sqrt((1 - low) * (1 + low)))]  # (a, c) of each step: c is half the distance of the two means
    arithmetic, geometric = 1.0, low
    while means[-1][1] > 1e-16 * means[-1][0]:
        difference = (arithmetic - geometric) / 2
        arithmetic, geometric = (arithmetic + geometric) / 2, math.sqrt(arithmetic * geometric)
        means.append((arithmetic, difference))
    tangents = []
    for index in range(1, poles + 1):
        amplitude = 2 ** (len(means) - 1) * (math.pi / 2) * index / (2 * poles + 1)
        for mean, difference in reversed(means[1:]):
            amplitude = (amplitude + math.asin(difference / mean * math.sin(amplitude))) / 2
        tangents.append(math.tan(amplitude))
    return tangents
