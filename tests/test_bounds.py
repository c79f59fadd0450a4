"""The bounds that other tests rely on hold, scale as they should, and are small enough to see mistakes."""

from __future__ import annotations

import pytest
import torch

from meshmuon.ortho import Scheme, blocks_for, keller, orthogonalize, polar_express
from tests.support.bounds import (
    led_astray,
    norm_error,
    nudge,
    orthogonalize_error,
    product_error,
    rounded_iteration,
    sum_error,
    unit,
)

from .ortho.oracle import SPECTRA, expected, gaussian, of_kind, spectral_distance

SCHEMES = {"polar_express": polar_express(), "keller": keller()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("kind", SPECTRA)
def test_real_rounding_is_within_the_bound(kind: str, form: str, dtype: torch.dtype) -> None:
    for scheme in SCHEMES.values():
        for shape in ((5, 9), (40, 24)):
            x = of_kind(kind, *shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            result = orthogonalize(x, scheme, form=form, dtype=dtype)
            bound = orthogonalize_error(x, scheme, form=form, dtype=dtype)
            assert spectral_distance(result, expected(x, scheme.steps)) < bound


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_simulation_without_rounding_is_the_polynomial(name: str, form: str) -> None:
    x, scheme = gaussian(12, 30, dtype=torch.float64), SCHEMES[name]
    found = rounded_iteration(x, scheme.steps, blocks_for(12, 30, scheme, form=form, dtype=torch.float64), None)
    assert spectral_distance(found, expected(x, scheme.steps)) < orthogonalize_error(x, scheme, form=form)


def test_bounds_follow_the_unit_and_see_mistakes() -> None:
    x, scheme = gaussian(24, 40), polar_express()
    for form in ("standard", "gram"):
        wide, narrow = (
            orthogonalize_error(x, scheme, form=form, dtype=dtype) for dtype in (torch.float32, torch.float64)
        )
        # Errors so small are proportional to the unit; the simulation itself is rounded in float64.
        assert 0.5 < wide / (2.0**29 * narrow) < 2
        a, b, c = scheme.steps[1]
        wrong = Scheme("wrong", (scheme.steps[0], type(scheme.steps[1])(1.01 * a, b, c), *scheme.steps[2:]), "a test")
        assert spectral_distance(orthogonalize(x, wrong, form=form), expected(x, scheme.steps)) > 5 * wide


def test_sums_products_and_norms() -> None:
    a, b = gaussian(20, 300), gaussian(300, 10, seed=1)
    error = (a @ b).double() - a.double() @ b.double()
    assert bool((error.abs() <= product_error(a, b)).all())
    assert unit(torch.float32) == 2.0**-24
    assert sum_error(1, torch.float64) == pytest.approx(2.0**-53)
    for order in (0.5, 1.0, 2.0, 3.5):
        exact = torch.linalg.vector_norm(a.double(), order)
        assert (
            abs(torch.linalg.vector_norm(a, order).double() - exact)
            <= norm_error(a.numel(), torch.float32, order) * exact
        )
    assert norm_error(a.numel(), torch.float32, float("inf")) == 0


def test_nudges_are_small_and_what_they_do_only_grows() -> None:
    before, after = gaussian(30, 30), gaussian(30, 30)
    nudge([after], 4, seed=0)
    assert not torch.equal(before, after)
    assert bool(((after - before).abs() <= (4 * 10 + 1) * unit(torch.float32) * before.abs()).all())
    assert led_astray([1.0, 2.0, 3.0], [[1.0, 2.5, 3.0], [1.25, 2.0, 3.0]]) == [1.0, 2.0, 2.0]
    # Runs that agree by chance still leave room for the rounding of the values themselves, and for no more.
    (bound,) = led_astray([5.5], [[5.5], [5.5]])
    assert 5.5 * 2**-23 < bound < 5.5 * 2**-19
