"""float16, the default on GPUs: as matrix units compute it, at every scale, and beside bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.ortho import keller, orthogonalize, polar_express
from meshmuon.ortho.kernels.products import BlockedProducts
from tests.support.bounds import orthogonalize_error

from .oracle import SPECTRA, expected, gaussian, of_kind, spectral_distance

SCHEMES = {"polar_express": polar_express(), "keller": keller()}


class MatrixUnitProducts(BlockedProducts):
    """Products as matrix units make them: 16-bit operands, sums in float32, one rounding at the end."""

    def symmetric(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, **factors: float) -> Tensor:
        return self.general(a, b.mT, out, addend, **factors)

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, **factors: float) -> Tensor:
        wide = None if addend is None else addend.float()
        return out.copy_(super().general(a.float(), b.float(), torch.empty(out.shape), wide, **factors))


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
@example(kind="random", scheme="keller", form="gram", rows=1, cols=45, exponent=0, seed=0)
def test_no_scale_and_no_shape_leaves_the_range(
    kind: str, scheme: str, form: str, rows: int, cols: int, exponent: int, seed: int
) -> None:
    x = gaussian(rows, cols, seed=seed) if kind == "gaussian" else of_kind(kind, rows, cols, seed=seed)
    x = x / float(x.abs().max().clamp(min=1e-30)) * 10.0**exponent
    assert error(x, scheme, torch.float16, form) < orthogonalize_error(
        x, SCHEMES[scheme], form=form, dtype=torch.float16
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", SPECTRA)
def test_less_than_half_the_error_of_bfloat16(kind: str, scheme: str) -> None:
    x = of_kind(kind, 96, 192)
    assert error(x, scheme, torch.float16) < 0.5 * error(x, scheme, torch.bfloat16)


@pytest.mark.parametrize(("rows", "cols", "loud"), [(64, 128, 1e5), (2, 4096, 1e6), (2, 2**16, 1e6)])
def test_one_loud_entry(rows: int, cols: int, loud: float) -> None:
    """All others are 1e-5 of it: below the normal numbers of float16, once X is scaled to norm 1.

    The norm is read off R, in which the square of the loud entry must not be a subnormal number, also in many columns.
    """
    x = gaussian(rows, cols)
    x[1, 7] = loud
    assert error(x, "polar_express", torch.float16) < 0.1 * error(x, "polar_express", torch.bfloat16)
