"""float16, the default on GPUs: as matrix units compute it, at every scale, and beside bfloat16."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.ortho import keller, orthogonalize, orthogonalize_flops, polar_express
from meshmuon.ortho.blocks import choose_blocks
from meshmuon.ortho.kernels.products import Products
from tests.support.bounds import orthogonalize_error

from .oracle import SPECTRA, expected, gaussian, of_kind, spectral_distance

SCHEMES = {"polar_express": polar_express(), "keller": keller()}


class MatrixUnitProducts(Products):
    """Products as matrix units make them: 16-bit operands, sums in float32, one rounding at the end."""

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        product = alpha * (a.float() @ b.float().mT)
        return out.copy_(product if addend is None else product + beta * addend.float())

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        product = a.float() @ b.float()
        return out.copy_(product if addend is None else product + beta * addend.float())

    def inverses(self, *unused: object) -> Tensor:
        raise AssertionError("16 bits are too short for inverses")


def error(x: Tensor, scheme: str, dtype: torch.dtype, form: str = "auto") -> float:
    result = orthogonalize(x, SCHEMES[scheme], form=form, dtype=dtype, products=MatrixUnitProducts())
    return spectral_distance(result, expected(x, SCHEMES[scheme].steps))


@given(
    kind=st.sampled_from([*SPECTRA, "gaussian"]),
    scheme=st.sampled_from(list(SCHEMES)),
    form=st.sampled_from(["standard", "gram"]),
    rows=st.integers(1, 40),
    cols=st.integers(1, 160),
    exponent=st.integers(-37, 36),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_no_scale_and_no_shape_leaves_the_range(
    kind: str, scheme: str, form: str, rows: int, cols: int, exponent: int, seed: int
) -> None:
    x = gaussian(rows, cols, seed=seed) if kind == "gaussian" else of_kind(kind, rows, cols, seed=seed)
    x = x / float(x.abs().max().clamp(min=1e-30)) * 10.0**exponent
    assert error(x, scheme, torch.float16, form) < orthogonalize_error(x, SCHEMES[scheme], form=form, dtype=torch.float16)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", SPECTRA)
def test_less_than_half_the_error_of_bfloat16(kind: str, scheme: str) -> None:
    x = of_kind(kind, 96, 192)
    assert error(x, scheme, torch.float16) < 0.5 * error(x, scheme, torch.bfloat16)


def test_one_loud_entry_among_small_ones() -> None:
    """All other entries are 1e-5 of the largest: below the normal numbers of float16, once X is scaled to norm 1."""
    x = gaussian(64, 128)
    x[3, 5] = 1e5
    assert error(x, "polar_express", torch.float16) < 0.1 * error(x, "polar_express", torch.bfloat16)


@pytest.mark.parametrize("cols", [4096, 2**16])
def test_one_loud_entry_in_many_columns(cols: int) -> None:
    """The norm is read off R, in which the square of the loud entry must not be a subnormal number."""
    x = 1e-6 * gaussian(2, cols)
    x[1, 7] = 1.0
    assert error(x, "polar_express", torch.float16) < 0.1 * error(x, "polar_express", torch.bfloat16)


def test_fewer_flops_than_bfloat16() -> None:
    scheme, n = polar_express(), 1024
    flops = {
        dtype: orthogonalize_flops(n, 4 * n, scheme.steps, choose_blocks(n, 4 * n, scheme, dtype))
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert flops[torch.float16] < 0.9 * flops[torch.bfloat16]


def test_coefficients_are_far_from_overflow() -> None:
    """The factor that a block multiplies X by is at most the product of its steps' values at 0."""
    for scheme in SCHEMES.values():
        largest, start = 0.0, 0
        for length in choose_blocks(256, 1024, scheme, torch.float16):
            largest = max(largest, math.prod(float(step(1e-9)) / 1e-9 for step in scheme.steps[start : start + length]))
            start += length
        assert largest < torch.finfo(torch.float16).max / 64
