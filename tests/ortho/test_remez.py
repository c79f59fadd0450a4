"""The best odd quintic: against 60 and more digits, and by the property that makes it the best."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpmath import mpf, workdps

from meshmuon.ortho.remez import Quintic, best_quintic

from .oracle import mp_best_quintic

INTERVALS = (
    (1e-6, 1.0),
    (1e-3, 1.0),
    (0.02, 1.0),
    (0.3, 1.7),
    (0.9, 1.1),
    (5.0, 9.0),
    (1e-4, 3e-4),
    (7e5, 7.7e5),
)
HALF_WIDTHS = (1e-12, 1e-10, 0.9e-9, 1.1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)


def mp_coefficients(low: float, high: float) -> tuple[float, float, float]:
    with workdps(200):
        quintic, _ = mp_best_quintic(mpf(low), mpf(high))
        return float(quintic.a), float(quintic.b), float(quintic.c)


def size(quintic: Quintic, x: float) -> float:
    """What the rounding of p(x) is relative to."""
    return abs(quintic.a * x) + abs(quintic.b * x**3) + abs(quintic.c * x**5)


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_agrees_with_high_precision(low: float, high: float) -> None:
    assert best_quintic(low, high) == pytest.approx(mp_coefficients(low, high), rel=1e-12)


@pytest.mark.parametrize("half", HALF_WIDTHS)
def test_narrow_intervals_keep_every_digit(half: float) -> None:
    # The textbook system loses 3·log10(1/half) of the 16 digits.
    low, high = 1 - half, 1 + half
    assert best_quintic(low, high) == pytest.approx(mp_coefficients(low, high), rel=2e-15)


def test_an_interval_of_one_point_has_the_limit_polynomial() -> None:
    assert best_quintic(1.0, 1.0) == (15 / 8, -10 / 8, 3 / 8)
    assert best_quintic(2.0, 2.0) == (15 / 16, -10 / 64, 3 / 256)


def inner_extrema(quintic: Quintic) -> list[float]:
    a, b, c = quintic
    root = math.sqrt(9 * b * b - 20 * a * c)
    return sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))


@settings(max_examples=150, deadline=None)
@given(
    share=st.floats(-6, -0.05).map(lambda exponent: 10**exponent),
    high=st.floats(-3, 3).map(lambda exponent: 10**exponent),
)
@example(share=1e-6, high=1.0)
def test_error_alternates_over_four_points_and_is_nowhere_larger(share: float, high: float) -> None:
    # Chebyshev: a quintic of three free coefficients with this property is the best one, and the only one.
    low = share * high
    quintic = best_quintic(low, high)
    points = [low, *inner_extrema(quintic), high]
    errors = [1 - quintic(x) for x in points]
    slack = 1e-14 * max(size(quintic, x) for x in points)
    level = abs(errors[0])
    assert low < points[1] < points[2] < high
    assert [error > 0 for error in errors] == [True, False, True, False]
    assert [abs(error) for error in errors] == pytest.approx([level] * 4, rel=1e-12, abs=slack)
    samples = [low + (high - low) * k / 400 for k in range(401)] + [low * (high / low) ** (k / 400) for k in range(401)]
    assert max(abs(1 - quintic(x)) for x in samples) <= level + slack


@given(
    low=st.floats(1e-6, 1.0),
    share=st.floats(1.0, 1e3),
    factor=st.floats(-10, 10).map(lambda exponent: 2.0 ** round(exponent)),
)
def test_a_scaled_interval_has_the_stretched_quintic(low: float, share: float, factor: float) -> None:
    # With a power of two every operation scales exactly.
    high = low * share
    assert best_quintic(low * factor, high * factor) == best_quintic(low, high).stretched(factor)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.5), (1.0, math.inf), (math.nan, 1.0), (0.5, math.nan)]
)
def test_refuses_what_is_no_interval(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"0 < low <= high, got \["):
        best_quintic(low, high)
