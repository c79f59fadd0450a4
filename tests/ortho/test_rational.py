"""Rational schemes: coefficients, what they do to singular values, inverses out of products, and what they cost."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from mpmath import ellipfun, ellipk, mp, mpf, workdps
from torch import Tensor

from meshmuon import ConfigError
from meshmuon.ortho import (
    AUTO,
    Rational,
    Scheme,
    fallback_reason,
    halley,
    hybrid,
    keller,
    orthogonalize,
    polar_express,
    resolve_scheme,
    scheme_for,
    zolotarev,
)
from meshmuon.ortho.blocks import _simulate, choose_blocks, is_safe, standard_blocks, worst_error
from meshmuon.ortho.kernels.inverse import ShiftedInverses, inverse_work, plain_inverses
from meshmuon.ortho.kernels.products import BlockedProducts
from meshmuon.ortho.rational import HYBRID_STEP, halley_step, zolotarev_step
from meshmuon.ortho.workspace import aligned_matrices
from tests.support.hostile import HostileArithmetic

from .oracle import SPECTRA, gaussian, largest_singular_value, of_kind, spectral_distance, spectrum, with_spectrum

BOUNDS = (0.9, 0.1, 1e-2, 1e-3, 1e-4)
SHAPES = ((1, 1), (1, 40), (40, 1), (7, 7), (31, 33), (32, 32), (33, 100), (96, 64), (130, 100), (260, 300))


@lru_cache
def exact_zolotarev(bound: float, poles: int) -> tuple[list[mpf], list[mpf], mpf]:
    """Poles, weights and constant in 50 digits, straight from the definition."""
    with workdps(50):
        low = mpf(bound)
        parameter = 1 - low**2
        quarter = ellipk(parameter)
        points = []
        for index in range(1, 2 * poles + 1):
            u = index * quarter / (2 * poles + 1)
            points.append((low * ellipfun("sn", u, m=parameter) / ellipfun("cn", u, m=parameter)) ** 2)
        odd, even = points[::2], points[1::2]
        weights = []
        for pole in odd:
            numerator = mp.fprod(zero - pole for zero in even)
            weights.append(numerator / mp.fprod(other - pole for other in odd if other != pole))

        def value(x: mpf) -> mpf:
            return x * (1 + mp.fsum(weight / (x * x + pole) for pole, weight in zip(odd, weights, strict=True)))

        scale = 2 / (value(low) + value(mpf(1)))
        return odd, [weight * scale for weight in weights], scale


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("poles", [1, 2, 3, 4, 8])
def test_zolotarev_coefficients_have_twelve_digits(bound: float, poles: int) -> None:
    step = zolotarev_step(bound, poles)
    exact_poles, exact_weights, exact_constant = exact_zolotarev(bound, poles)
    for ours, exact in zip(
        (*step.poles, *step.weights, step.constant), (*exact_poles, *exact_weights, exact_constant), strict=True
    ):
        assert abs(mpf(ours) / exact - 1) < 1e-12


@pytest.mark.parametrize(("poles", "worst"), [(2, 0.2021), (3, 0.06207), (4, 0.0189)])
def test_zolotarev_errors_alternate_and_are_the_published_ones(poles: int, worst: float) -> None:
    step = zolotarev_step(1e-3, poles)
    errors = [1 - step(10 ** (-3 * k / 30000)) for k in range(30001)]
    assert max(map(abs, errors)) == pytest.approx(worst, rel=1e-3)
    # The best approximation takes its largest error 2·poles + 2 times, with alternating sign.
    peak, turns, sign = max(map(abs, errors)), 0, 0.0
    for error in errors:
        if abs(error) > 0.999 * peak and math.copysign(1, error) != sign:
            turns, sign = turns + 1, math.copysign(1, error)
    assert turns == 2 * poles + 2


@pytest.mark.parametrize(
    "scheme", [zolotarev(poles=2), zolotarev(), zolotarev(poles=4), halley(), halley(quintics=1), hybrid()], ids=str
)
def test_values_below_the_bound_rise_and_never_pass_it(scheme: Scheme) -> None:
    peak = max(scheme(10 ** (-3 * k / 3000)) for k in range(3001))
    values = [scheme(1e-3 * k / 1000) for k in range(1001)]
    assert values[0] == 0
    assert all(low < high for low, high in pairwise(values))
    assert values[-1] < 1
    assert max(values) < peak


def test_halley_lifts_the_bound_as_high_as_one_pole_can() -> None:
    step = halley_step(1e-3)
    values = [step(10 ** (-3 * k / 3000)) for k in range(3001)]
    assert values[0] == pytest.approx(1, rel=1e-12)
    assert step(1e-3) == pytest.approx(0.248, abs=1e-3) == min(values)
    assert max(values) == pytest.approx(1, rel=1e-12)
    # Scaled to be centred on 1 it is Zolotarev's step with one pole.
    zolotarev_one = zolotarev_step(1e-3, 1)
    scale = 2 / (step(1e-3) + step(1.0))
    assert step.poles[0] == pytest.approx(zolotarev_one.poles[0], rel=1e-9)
    assert step.constant * scale == pytest.approx(zolotarev_one.constant, rel=1e-9)


def test_the_hybrid_step_is_the_best_one() -> None:
    """Chebyshev's criterion: error and room for rounding take their largest value 2·poles + 4 times, with
    alternating sign.
    """
    step = HYBRID_STEP.scaled(1 / 0.9965)  # as it was before rounding upwards was allowed for
    grid = [10 ** (-3 * k / 100_000) for k in range(100_001)]
    peaks: list[float] = []
    sign = 0.0
    for x in grid:
        error = 1 - step(x)
        if math.copysign(1, error) != sign:
            sign = math.copysign(1, error)
            peaks.append(0.0)
        peaks[-1] = max(peaks[-1], abs(error) + 0.02 * (1e-3 / x) ** 2)
    assert len(peaks) == 2 * len(step.poles) + 4
    assert max(peaks) - min(peaks) < 1e-7
    assert max(peaks) == pytest.approx(0.12530023, abs=1e-7)


@pytest.mark.parametrize(
    ("scheme", "worst"), [(halley(quintics=1), 0.157), (halley(), 0.0024), (hybrid(), 0.1284)], ids=str
)
def test_worst_distances_from_one(scheme: Scheme, worst: float) -> None:
    assert max(abs(1 - scheme(10 ** (-3 * k / 3000))) for k in range(3001)) == pytest.approx(worst, rel=0.02)


def test_a_linear_term_alone_counts() -> None:
    gram = gram_of("log", 64, torch.float64)
    plain = zolotarev_step(1e-2, 2)
    with_linear = Rational(plain.constant, plain.poles, plain.weights, linear=-0.25)
    for result in (plain_inverses(gram, with_linear), factor_of(gram, with_linear)):
        assert torch.allclose(result, plain_inverses(gram, plain) - 0.25 * gram, rtol=1e-12)


# Inverses


def factor_of(gram: Tensor, step: Rational) -> Tensor:
    """What ``BlockedProducts`` makes of a step, in buffers of its own."""
    buffers: dict[str, Tensor] = {}

    def take(name: str, rows: int, cols: int) -> Tensor:
        return buffers.setdefault(name, aligned_matrices((1, rows, cols), gram.dtype, gram.device)[0].fill_(math.nan))

    inverses = ShiftedInverses(gram.size(1), take)
    assert sum(buffer.numel() for buffer in buffers.values()) == inverse_work(gram.size(1)).scratch
    return BlockedProducts().inverses(gram, step, torch.empty_like(gram), lambda: inverses)


def gram_of(kind: str, n: int, dtype: torch.dtype) -> Tensor:
    values = spectrum(kind, n)
    x = with_spectrum(values / values.norm(), n, 2 * n, dtype=torch.float64)
    return (x @ x.mT).to(dtype).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5, 32, 33, 64, 100, 192, 260, 544])
def test_inverses_are_those_of_a_matrix_within_rounding(n: int, dtype: torch.dtype) -> None:
    """Backward error: the result is right for a matrix that differs from R by a few units of its last digit, times
    √n.
    """
    step, unit = zolotarev_step(1e-3, 3), torch.finfo(dtype).eps / 2
    for kind in ("random", "log", "rank8", "spike3"):
        gram = gram_of(kind, n, dtype)
        values, vectors = torch.linalg.eigh(gram[0].double())
        derivative = sum(
            weight / (values.clamp(min=0) + pole) ** 2 for pole, weight in zip(step.poles, step.weights, strict=True)
        )
        exact = step.constant + sum(
            weight / (values + pole) for pole, weight in zip(step.poles, step.weights, strict=True)
        )
        difference = factor_of(gram, step)[0].double() - (vectors * exact) @ vectors.mT
        assert largest_singular_value(difference) <= 4 * math.sqrt(n) * unit * float(derivative.max() + exact.max())


@pytest.mark.parametrize("n", [9, 32, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_has_the_bits_of_single_matrices_at_any_address(n: int, dtype: torch.dtype) -> None:
    step = zolotarev_step(1e-3, 3)
    grams = torch.cat([gram_of(kind, n, dtype) for kind in ("random", "log", "linear")])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)  # a fixture puts it back
        alone = torch.cat([factor_of(gram, step) for gram in grams.split(1)])
        assert torch.equal(factor_of(grams, step), alone)
    with HostileArithmetic() as hostile:
        assert torch.equal(factor_of(grams, step), alone)
    assert hostile.nudged == 0  # every operand begins at a multiple of 64 bytes


# Whole matrices


def expected(x: Tensor, scheme: Scheme) -> Tensor:
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    values = s / s.norm()
    return (u * torch.tensor([scheme(float(value)) for value in values], dtype=torch.float64)) @ vh


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("scheme", [zolotarev(poles=2), zolotarev(), halley(), halley(quintics=1), hybrid()], ids=str)
def test_adversarial_spectra_end_where_the_simulation_says(kind: str, scheme: Scheme) -> None:
    for rows, cols in ((96, 256), (200, 200)):
        x = of_kind(kind, rows, cols)
        result = orthogonalize(x, scheme)
        blocks = choose_blocks(rows, cols, scheme, torch.float32)
        simulated = _simulate(scheme, blocks, torch.finfo(torch.float32).eps / 2).deviation
        # The simulation rounds each entry of a product once. A BLAS rounds each of its partial sums, in an order of its
        # own.
        assert spectral_distance(result, expected(x, scheme)) <= 2 * simulated + 1e-4
        assert worst_error(scheme, torch.float32) >= simulated


@pytest.mark.parametrize("n", [640, 768])
@pytest.mark.parametrize("scheme", [zolotarev(), hybrid()], ids=["zolotarev", "hybrid"])
def test_small_directions_survive_beside_a_large_one(scheme: Scheme, n: int) -> None:
    """One direction of size 1, all others of 1e-3: the Cholesky factor must subtract the large one before it adds
    small ones.
    """
    values = torch.full((n,), 1e-3, dtype=torch.float64)
    values[0] = 1
    x = with_spectrum(values, n, n)
    ended, exact = (torch.linalg.svdvals(update.double()) for update in (orthogonalize(x, scheme), expected(x, scheme)))
    simulated = _simulate(scheme, (1,), torch.finfo(torch.float32).eps / 2).deviation
    # about 0.3 of it; 1.6 to 2.4 if all columns are subtracted at once
    assert float((ended - exact).abs().max()) <= simulated


@pytest.mark.parametrize("rows", [slice(0, 40), slice(-40, None), slice(17, 18), slice(0, None, 33)], ids=str)
def test_large_directions_in_a_few_rows_are_no_harder(rows: slice) -> None:
    """A factor built from the top left corner must not lose the small directions that a large one hides."""
    n = 192
    x = 1e-3 * torch.linalg.qr(gaussian(2 * n, n, dtype=torch.float64))[0].mT
    spike = torch.zeros(n, dtype=torch.float64)
    spike[rows] = 1
    x = x + torch.outer(spike / spike.norm(), gaussian(2 * n, dtype=torch.float64) / math.sqrt(2 * n))
    x = x.float()
    simulated = _simulate(zolotarev(), (1,), torch.finfo(torch.float32).eps / 2).deviation
    rational = orthogonalize(x, zolotarev())
    # Rounding in few rows does not average out: in 60 draws of such matrices it reached 1.5 times what is simulated.
    assert spectral_distance(rational, expected(x, zolotarev())) <= 3 * simulated
    polynomial = orthogonalize(x, polar_express(), form="gram")
    farthest, allowed = (
        float((torch.linalg.svdvals(update.double()) - 1).abs().max()) for update in (rational, polynomial)
    )
    assert farthest <= allowed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [zolotarev(), halley(), hybrid()], ids=str)
def test_any_shape_batched_or_not(shape: tuple[int, int], scheme: Scheme) -> None:
    batch = gaussian(3, *shape)
    together = orthogonalize(batch, scheme)
    for matrix, result in zip(batch, together, strict=True):
        assert torch.equal(orthogonalize(matrix, scheme), result)
        exact = expected(matrix, scheme)
        assert spectral_distance(result, exact) < 1e-3 * max(1.0, largest_singular_value(exact))
    one_by_one = orthogonalize(batch, scheme, products=BlockedProducts(one_by_one=True))
    assert torch.equal(one_by_one, together)


@pytest.mark.parametrize("scheme", [zolotarev(), halley(), hybrid()], ids=str)
def test_zero_rank_one_tiny_huge_and_not_finite(scheme: Scheme) -> None:
    assert torch.equal(orthogonalize(torch.zeros(40, 50), scheme), torch.zeros(40, 50))
    rank_one = torch.outer(gaussian(40), gaussian(50, seed=1))
    assert largest_singular_value(orthogonalize(rank_one, scheme)) == pytest.approx(scheme(1.0), rel=1e-4)
    x = gaussian(40, 50)
    for scale in (2.0**-100, 2.0**-20, 2.0**20, 2.0**100):
        assert torch.equal(orthogonalize(x * scale, scheme), orthogonalize(x, scheme))
    for value in (math.nan, math.inf):
        broken = torch.stack([x, x])
        broken[0, 3, 4] = value
        result = orthogonalize(broken, scheme)
        assert result[0].isnan().all()
        assert torch.equal(result[1], orthogonalize(x, scheme))


# Choice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_fall_back_to_polynomials(dtype: torch.dtype) -> None:
    assert not is_safe(zolotarev(), dtype)
    for scheme in (zolotarev(), halley(), hybrid()):
        assert scheme_for(scheme, 100, 200, dtype) == polar_express()
        assert "polar_express instead of" in str(fallback_reason(scheme, dtype))
        assert fallback_reason(scheme, torch.float32) is None
        x = gaussian(40, 60)
        assert torch.equal(orthogonalize(x, scheme, dtype=dtype), orthogonalize(x, polar_express(), dtype=dtype))
    assert scheme_for(keller(), 100, 200, dtype) == keller()
    assert fallback_reason(keller(), dtype) is None


def test_a_bound_that_float32_cannot_hold_is_refused() -> None:
    scheme = zolotarev(l=1e-4)
    with pytest.raises(ConfigError, match=r"not safe in float32.*compute_dtype=torch.float64"):
        orthogonalize(gaussian(40, 60), scheme)
    x = gaussian(40, 60, dtype=torch.float64)
    assert spectral_distance(orthogonalize(x, scheme), expected(x, scheme)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_is_the_cheapest_that_is_exact_enough(dtype: torch.dtype) -> None:
    bound = worst_error(polar_express(), dtype)
    for shape in ((512, 512), (768, 3072), (256, 4096)):
        chosen = scheme_for(AUTO, *shape, dtype)
        assert isinstance(chosen, Scheme)
        assert chosen == hybrid()
        assert worst_error(chosen, dtype) <= bound
    assert worst_error(zolotarev(poles=2), dtype) > bound  # else it would be cheaper still
    assert scheme_for(AUTO, 20, 4000, dtype) == polar_express()
    assert scheme_for(AUTO, 64, 64, dtype) == polar_express()  # there calls take longer than products
    assert scheme_for(AUTO, 512, 512, torch.bfloat16) == polar_express()
    assert torch.equal(orthogonalize(gaussian(256, 300), AUTO), orthogonalize(gaussian(256, 300), hybrid()))


def test_names_and_stored_numbers_resolve() -> None:
    assert resolve_scheme("zolotarev", 5) == zolotarev()
    assert resolve_scheme("halley", 5) == halley()
    assert resolve_scheme("hybrid", 5) == hybrid()
    assert resolve_scheme("auto", 5) == AUTO
    assert resolve_scheme("auto", 7) == polar_express(steps=7)  # a number of steps that was asked for is never ignored
    for scheme in (zolotarev(), halley(), hybrid()):
        assert resolve_scheme(scheme, 5) is scheme
        stored = tuple(tuple(step) for step in scheme.steps)
        resolved = resolve_scheme(stored, 5)
        assert isinstance(resolved, Scheme)
        assert resolved.steps == scheme.steps
    assert standard_blocks(halley()) == (1, 1, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: zolotarev(poles=0),
        lambda: zolotarev(poles=9),
        lambda: zolotarev(poles=2.0),  # type: ignore[arg-type]
        lambda: zolotarev(l=0.0),
        lambda: zolotarev(l=1.0),
        lambda: zolotarev(l=math.nan),
        lambda: halley(quintics=-1),
        lambda: halley(l="1e-3"),  # type: ignore[arg-type]
        lambda: Scheme("x", (Rational(1.0, (), ()),), ""),
        lambda: Scheme("x", (Rational(1.0, (1.0,), (1.0, 2.0)),), ""),
        lambda: Scheme("x", (Rational(1.0, (-1.0,), (1.0,)),), ""),
        lambda: Scheme("x", (Rational(math.inf, (1.0,), (1.0,)),), ""),
    ],
)
def test_what_makes_no_sense_is_refused(build: object) -> None:
    with pytest.raises(ConfigError):
        build()  # type: ignore[operator]
