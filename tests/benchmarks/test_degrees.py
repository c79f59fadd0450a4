"""The study of higher degrees: polynomials that are the best, and products that are counted as they are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from compositions import (
    GramRunner,
    MatrixStep,
    best_odd,
    cheapest,
    compose,
    counts_of,
    evaluation_products,
    gram_products,
    least_flops,
    octic,
    search,
)
from degrees import MESHMUON, Contender, cuts, deviations, samples
from mpmath import mpf, sqrt, workdps
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshmuon import orthogonalize, polar_express
from meshmuon.ortho import orthogonalize_flops
from meshmuon.ortho.kernels import BlockedProducts
from meshmuon.ortho.remez import best_quintic
from tests.support.bounds import orthogonalize_error

DEGREES = (3, 5, 7, 9, 13, 17, 19)
INTERVALS = (("1e-3", "1"), ("0.02", "1"), ("0.3", "1.7"), ("0.9999", "1.0001"))


class CountingProducts(BlockedProducts):
    """Counts what it computes by kind: square symmetric, square full, and with the long side."""

    def __init__(self) -> None:
        super().__init__()
        self.symmetric_count = self.full_count = self.long_count = 0

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        square = a.size(1) == a.size(2)
        self.symmetric_count, self.long_count = self.symmetric_count + square, self.long_count + (not square)
        return super().symmetric(a, b, out, addend, alpha=alpha, beta=beta)

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        square = b.size(1) == b.size(2)
        self.full_count, self.long_count = self.full_count + square, self.long_count + (not square)
        return super().general(a, b, out, addend, beta=beta)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1.0), (0.02, 1.0), (0.3, 1.7), (0.99, 1.01), (5.0, 9.0)])
def test_degree_five_is_the_best_quintic(low: float, high: float) -> None:
    coefficients = tuple(map(float, best_odd(5, mpf(low), mpf(high))[0].about(mpf(0))))
    assert coefficients == pytest.approx(tuple(best_quintic(low, high)), rel=1e-12)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_the_error_alternates_at_as_many_points_as_the_best_must_have(degree: int, low: str, high: str) -> None:
    bottom, top = mpf(low), mpf(high)
    polynomial, error = best_odd(degree, bottom, top)
    with workdps(100):  # the smallest of these errors is 1e-41
        grid = [sqrt(bottom**2 + (top**2 - bottom**2) * k / 1500) for k in range(1501)]
        values = [1 - polynomial(x) for x in grid]
    assert max(map(abs, values)) <= error * (1 + mpf(10) ** -12)
    near = [value > 0 for value in values if abs(value) > 0.98 * error]
    alternations = [key for key, _ in itertools.groupby(near)]
    assert len(alternations) == degree // 2 + 2
    assert alternations[0]  # the steps of a composition take the lower end to 1 − error


def test_the_steps_of_quintics_are_those_of_polar_express() -> None:
    for safety, cushion in ((0.0, 0.0), (0.01, 0.02)):
        steps, error = compose((5,) * 5, 1e-3, safety, cushion)
        scheme = polar_express(1e-3, 5, safety, cushion)
        for ours, theirs in zip(steps, scheme.steps, strict=True):
            assert tuple(map(float, ours.about(mpf(0)))) == pytest.approx(tuple(theirs), rel=1e-11)
        assert error == pytest.approx(1 - scheme(1e-3), rel=1e-9)


@pytest.mark.parametrize("degrees", [(9, 17, 17), (3, 9), (5, 13), (7, 19)])
@pytest.mark.parametrize("rule", [(0.0, 0.0), (0.01, 0.02), (0.06, 0.02)])
def test_the_error_of_a_composition_is_the_worst_on_the_interval(degrees: tuple[int, ...], rule: tuple[float, float]) -> None:
    steps, error = compose(degrees, 1e-2, *rule)
    worst = 0.0
    for k in range(2001):
        x = mpf(10) ** (mpf(k - 2000) / 1000)
        for step in steps:
            x = step(x)
        worst = max(worst, abs(float(1 - x)))
    assert worst <= error * (1 + 1e-6)
    assert worst == pytest.approx(error, rel=0.02)


def test_octics_are_evaluated_by_their_own_numbers() -> None:
    polynomial, _ = best_odd(17, mpf("0.05"), mpf("1.95"))
    b = polynomial.about(polynomial.centre)
    c2, c1, c0, d2, d1, d0, f2, f1, f0 = octic(b)
    for t in (mpf(-1), mpf("-0.3"), mpf("0.2"), mpf("1.5")):
        y = t**2 * (c2 * t**2 + c1 * t + c0)
        value = (y + d2 * t**2 + d1 * t + d0) * y + f2 * t**2 + f1 * t + f0
        assert abs(value - sum(coefficient * t**j for j, coefficient in enumerate(b))) < mpf(10) ** -40
    with pytest.raises(ArithmeticError, match="move the shift"):
        octic(list(map(mpf, (0, 0, 0, -1, 10, 0, 0, 1, 1))))


def test_few_products_are_the_fewest() -> None:
    assert [evaluation_products(degree) for degree in (3, 5, 7, 9, 13, 17, 19)] == [0, 1, 2, 2, 3, 3, 4]
    for degree in (3, 5, 9, 17):  # s products do not go beyond degree 2ˢ
        assert 2 ** evaluation_products(degree) == degree // 2
    assert gram_products((5,) * 5) == 17
    assert gram_products((9, 17, 17)) == 14


@pytest.mark.parametrize("degrees", [(9, 17, 17), (5, 9, 9, 9), (3, 7, 13), (19, 5), (17,)])
def test_products_are_counted_as_they_are_computed(degrees: tuple[int, ...]) -> None:
    steps = list(map(MatrixStep.of, compose(degrees, 1e-2)[0]))
    for blocks in cuts(len(degrees)):
        n, m = (400, 480) if len(blocks) == 1 else (24, 32)  # symmetric products are cut into panels, or are not
        products = CountingProducts()
        with FlopCounterMode(display=False) as counter:
            GramRunner(steps, blocks, torch.float32, products)(torch.randn(1, n, m))
        counts = counts_of(degrees, len(blocks))
        assert (products.symmetric_count, products.full_count, products.long_count) == (*counts[:2], 2 * counts.blocks)
        assert counter.get_total_flops() == counts.flops(n, m)
        assert least_flops(degrees, n, m) <= counts.flops(n, m)


def test_flops_of_quintics_are_those_of_meshmuon() -> None:
    for blocks in ((5,), (1,) * 5, (2, 3)):
        assert counts_of((5,) * 5, len(blocks)).flops(768, 3072) == orthogonalize_flops(768, 3072, polar_express().steps, blocks)


@pytest.mark.parametrize("degrees", [(5, 9, 9), (9, 17, 17), (3, 7, 13), (5, 19)])
@pytest.mark.parametrize("batch", [1, 2])
def test_matrices_become_what_the_polynomial_says(degrees: tuple[int, ...], batch: int) -> None:
    contender = Contender.of(degrees)
    steps = list(map(MatrixStep.of, contender.polynomials))
    x = torch.randn(batch, 24, 40, dtype=torch.float64)
    u, values, vt = torch.linalg.svd(x, full_matrices=False)
    exact = contender.exact(values / values.norm(dim=1, keepdim=True))
    for blocks in cuts(len(degrees)):
        result = GramRunner(steps, blocks, torch.float64, BlockedProducts())(x)
        # As steep as quintics that do the same; a step of higher degree takes up to four times as many products.
        assert torch.allclose(result, (u * exact.unsqueeze(1)) @ vt, rtol=0, atol=4 * orthogonalize_error(x, polar_express()))


def test_quintics_run_here_are_meshmuons() -> None:
    x = torch.randn(1, 48, 96)
    expected = orthogonalize(x, polar_express(1e-3), form="gram", dtype=torch.float32)
    bound = 2 * orthogonalize_error(x, polar_express(1e-3), form="gram")
    for name in (MESHMUON, None):
        assert torch.allclose(Contender.of((5,) * 5, name).runner((5,), torch.float32)(x), expected, rtol=0, atol=bound)


def test_the_search_misses_nothing() -> None:
    kept = search(1e-2, 11, (3, 5, 9, 17))
    everything = [
        degrees
        for steps in (1, 2, 3, 4)
        for degrees in itertools.product((3, 5, 9, 17), repeat=steps)
        if gram_products(degrees) <= 11
    ]
    errors = {degrees: compose(degrees, 1e-2)[1] for degrees in everything}
    for degrees, error in kept.items():
        assert error == pytest.approx(errors[degrees], rel=1e-9)
    for allowed in sorted(errors.values())[::7]:
        for cost in (gram_products, lambda d: least_flops(d, 768, 768), lambda d: least_flops(d, 768, 3072)):
            least = min(cost(degrees) for degrees in everything if errors[degrees] <= allowed * (1 + 1e-9))
            assert cost(cheapest(kept, allowed, cost)) == least


def test_deviations_are_distances_from_the_exact_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, right = list(samples(16, 32, 1)), Contender.of((5, 5, 5))
    assert max(deviations(right, (3,), torch.float64, matrices).values()) < 1e-4  # the matrix itself is float32
    steep = Contender("steep", (5, 5, 5), tuple(polynomial.scaled(mpf("1e30")) for polynomial in right.polynomials), 0.0)
    assert max(deviations(steep, (3,), torch.float32, matrices).values()) == float("inf")
    exact = right.exact
    monkeypatch.setattr(Contender, "exact", lambda self, values: exact(values) + 0.25)
    for off in deviations(right, (3,), torch.float64, matrices).values():
        assert off == pytest.approx(0.25, abs=1e-4)
