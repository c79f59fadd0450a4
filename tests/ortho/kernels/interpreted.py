"""Properties of the kernels around the products in Triton's interpreter. Run by ``test_triton_kernels``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.ortho import Scheme, keller, orthogonalize, polar_express
from meshmuon.ortho.kernels import products, triton_normalise
from meshmuon.ortho.kernels.products import BlockedProducts, TritonProducts
from tests.ortho.oracle import highest
from tests.support.bounds import orthogonalize_error

slow = settings(max_examples=20, deadline=None)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small matrices have several tiles in a part, and are not left to torch."""
    monkeypatch.setattr(products, "_LARGEST_SHORT_SIDE", 0)
    monkeypatch.setattr(triton_normalise, "PARTS", 4)
    monkeypatch.setattr(triton_normalise, "TILE", 64)


@slow
@given(
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(1, 40),
    st.sampled_from([1.0, 1e-30, 1e30, 3e37]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
)
def test_norms_are_one(count: int, rows: int, cols: int, scale: float, dtype: torch.dtype, flipped: bool) -> None:
    generator = torch.Generator().manual_seed(count * 1000 + rows * 50 + cols)
    batch = torch.randn(count, rows, cols, generator=generator) * scale
    batch[-1] *= 1e-3  # no matrix is divided by another one's norm
    out = torch.empty(count, rows, cols, dtype=dtype)
    views = (batch.mT, out.mT) if flipped else (batch, out)
    triton_normalise.normalise(*views, torch.empty(count * 4 * 2))
    exact = batch.double() / batch.double().flatten(1).norm(dim=1)[:, None, None]
    unit = 2.0**-11 if dtype == torch.float16 else 2.0**-24
    # The norm is a root of a sum of at most 2⁵ terms per lane and 2⁸ lanes; then two divisions and one rounding.
    assert torch.allclose(
        out.double(), exact, rtol=unit + 24 * 2.0**-24, atol=2.0**-25 if dtype == torch.float16 else 0.0
    )


def test_zeros_stay_and_what_is_not_finite_spreads_over_its_matrix_alone() -> None:
    batch = torch.randn(3, 5, 7)
    batch[0] = 0.0
    batch[2, 1, 1] = float("nan")
    out = torch.empty_like(batch)
    triton_normalise.normalise(batch, out, torch.empty(3 * 4 * 2))
    assert torch.equal(out[0], torch.zeros(5, 7))
    assert out[1].norm() == pytest.approx(1.0)
    assert out[2].isnan().all()
    batch[2] = float("inf")
    triton_normalise.normalise(batch, out, torch.empty(3 * 4 * 2))
    assert out[2].isnan().all()


@pytest.mark.parametrize("size", [1e-38, 1e-40, 3e-44])
def test_subnormal_numbers_are_divided_by_their_norm(size: float) -> None:
    batch = torch.full((2, 30, 40), size)
    batch[1] = 1.0
    out = torch.empty_like(batch)
    triton_normalise.normalise(batch, out, torch.empty(2 * 4 * 2))
    assert out.flatten(1).norm(dim=1).tolist() == pytest.approx([1.0, 1.0])


@slow
@given(st.integers(1, 2), st.integers(1, 40), st.floats(-4.0, 4.0))
def test_the_factor_of_a_quintic(count: int, n: int, diagonal: float) -> None:
    x = torch.randn(count, n, 2 * n, generator=torch.Generator().manual_seed(n)) / n
    gram = x @ x.mT
    places = torch.empty(2, count, n, n)
    factors = [
        one.quintic_factor(gram, place, (diagonal, -4.7, 2.0))
        for one, place in zip((TritonProducts(), BlockedProducts()), places, strict=True)
    ]
    size = gram.abs() @ gram.abs() * 2 + gram.abs() * 4.7 + abs(diagonal)
    assert bool(((factors[0] - factors[1]).abs() <= (n + 6) * 2.0**-23 * size).all())


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize(
    ("shape", "scheme"),
    [((2, 20, 33), polar_express()), ((1, 40, 17), keller(3)), ((1, 24, 24), polar_express())],
    ids=str,
)
def test_the_whole_orthogonalisation_beside_the_torch_twin(
    shape: tuple[int, int, int], scheme: Scheme, form: str
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    bound = 2 * orthogonalize_error(x, scheme, form=form)  # float32 on both sides, another order of summation
    twin = orthogonalize(x, scheme, form=form, products=BlockedProducts())
    for scale in (1.0, 1e-20):
        ours = orthogonalize(x * scale, scheme, form=form, products=TritonProducts())
        torch.testing.assert_close(ours, twin, rtol=0, atol=bound)
    half = orthogonalize(x, scheme, form=form, dtype=torch.bfloat16, products=TritonProducts())
    assert torch.linalg.matrix_norm(half, 2).max() < 1.05 * highest(scheme.steps)
    wide = x.double()
    exact, same = (
        orthogonalize(wide, scheme, form=form, products=one) for one in (BlockedProducts(), TritonProducts())
    )
    assert torch.equal(same, exact)
