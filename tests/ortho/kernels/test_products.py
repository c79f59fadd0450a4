"""The torch implementations of the two products, against float64.

Bound per element: sums of k products in a precision of unit u are off by at most about k·u·(|a|·|b|), to which rounding
to the result's dtype adds u times the result.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from meshmuon import ConfigError, Muon
from meshmuon.ortho.kernels import products
from meshmuon.ortho.kernels.products import (
    BlockedProducts,
    Products,
    TritonProducts,
    products_for,
    symmetric_panels,
)

from ..oracle import gaussian

SIZES = (1, 2, 5, 17, 64, 127, 128, 129, 255, 383, 384, 385, 511, 512, 513, 640, 900)
IMPLEMENTATIONS: dict[str, Products] = {
    "blocked": BlockedProducts(),
    "one by one": BlockedProducts(one_by_one=True),
}


def assert_near(result: Tensor, exact: Tensor, size: Tensor, terms: int) -> None:
    unit = torch.finfo(result.dtype).eps / 2
    sums = max(unit, 2**-24) if result.dtype != torch.float64 else unit
    assert bool(((result.double() - exact).abs() <= (terms + 4) * sums * size + 2 * unit * exact.abs() + 1e-37).all())


def commuting(count: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Three symmetric matrices that commute up to rounding: polynomials of one."""
    r = gaussian(count, n, n, dtype=torch.float64) / n**0.5
    r = r @ r.mT
    return tuple(value.to(dtype) for value in (r, r @ r - 0.5 * r, 0.3 * r + torch.eye(n)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("alpha", [1.0, -2.0])
def test_product_with_its_own_transpose(n: int, alpha: float, name: str) -> None:
    """Without an addend neither beta nor the old contents count."""
    x = gaussian(2, n, 24)
    result = IMPLEMENTATIONS[name].symmetric(x, x, torch.full((2, n, n), torch.nan), alpha=alpha, beta=7.0)
    assert_near(result, alpha * (x.double() @ x.double().mT), 2 * (x.double().abs() @ x.double().abs().mT), 24)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [1, 17, 128, 383, 384, 513])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.0), (2.5, -1.5), (-0.75, 0.5), (0.0, 1.0)])
def test_symmetric_with_addend(n: int, alpha: float, beta: float, name: str) -> None:
    a, b, addend = commuting(1, n)
    result = IMPLEMENTATIONS[name].symmetric(a, b, torch.full((1, n, n), torch.nan), addend, alpha=alpha, beta=beta)
    exact = alpha * (a.double() @ b.double().mT) + beta * addend.double()
    size = abs(alpha) * (a.double().abs() @ b.double().abs().mT) + abs(beta) * addend.double().abs()
    # Above the threshold one triangle is computed: the other differs by as much as the operands fail to commute.
    assert_near(result, exact, size, n + 8)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("beta", [None, 1.0, -0.5, 3.0])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (8, 8), (17, 40), (390, 5)])
def test_general(n: int, m: int, beta: float | None, name: str) -> None:
    a, b, addend = gaussian(3, n, n), gaussian(3, n, m, seed=1), gaussian(3, n, m, seed=2)
    out = torch.full((3, n, m), torch.nan)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if beta is None:
        result = IMPLEMENTATIONS[name].general(a, b, out)
    else:
        result = IMPLEMENTATIONS[name].general(a, b, out, addend, beta=beta)
        exact, size = exact + beta * addend.double(), size + abs(beta) * addend.double().abs()
    assert_near(result, exact, size, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [384, 385, 500])
def test_blocked_results_are_symmetric_bit_for_bit_outside_the_diagonal_panels(n: int, dtype: torch.dtype) -> None:
    a, b, _ = commuting(1, n, dtype)
    result = BlockedProducts().symmetric(a, b, torch.empty(1, n, n, dtype=dtype))[0]
    panels = symmetric_panels(n, n, short=dtype == torch.bfloat16)
    assert len(panels) > 1
    for start, stop in panels:
        assert torch.equal(result[:start, start:stop], result[start:stop, :start].mT)


def test_blocked_takes_the_lower_triangle_of_the_product() -> None:
    # With operands that do not commute it shows which half is computed, and that the addend is cut in the same way.
    n = 400
    a, b, addend = gaussian(1, n, n), gaussian(1, n, n, seed=1), gaussian(1, n, n, seed=2)
    result = BlockedProducts().symmetric(a, b, torch.empty(1, n, n), addend, alpha=2.0, beta=-3.0)[0]
    full = (2 * a.double() @ b.double().mT - 3 * addend.double())[0]
    size = (2 * a.double().abs() @ b.double().abs().mT + 3 * addend.double().abs())[0]
    assert_near(result.tril(), full.tril(), size, n)
    first = symmetric_panels(n, n)[0][1]
    assert_near(result[:first, first:], full.mT[:first, first:], size.mT[:first, first:], n)


@pytest.mark.parametrize("n", [192, 250])
def test_long_operands_are_multiplied_in_panels_one_by_one(n: int) -> None:
    x, cols = gaussian(3, n, 2 * n), 2 * n
    result = BlockedProducts().symmetric(x, x, torch.empty(3, n, n))
    assert_near(result, x.double() @ x.double().mT, x.double().abs() @ x.double().abs().mT, cols)
    assert len(symmetric_panels(n, cols)) > 1
    for start, stop in symmetric_panels(n, cols):
        assert torch.equal(result[:, :start, start:stop], result[:, start:stop, :start].mT)
    for k in range(3):
        alone = BlockedProducts().symmetric(x[k : k + 1], x[k : k + 1], torch.empty(1, n, n))
        assert torch.equal(alone[0], result[k])


@pytest.mark.parametrize("n", [20, 400])
def test_any_strides(n: int) -> None:
    x = gaussian(2, n, 30)
    exact, size = x.double() @ x.double().mT, x.double().abs() @ x.double().abs().mT
    for operand in (x.mT.contiguous().mT, torch.stack([x, x], dim=3)[..., 0], x.flip(0)[[1, 0]]):
        for out in (
            torch.empty(2, n, n).mT,
            torch.empty(2, n + 2, n + 3)[:, 1:-1, 2:-1],
            torch.empty(2, n, 2 * n)[..., ::2],
        ):
            result = BlockedProducts().symmetric(operand, operand, out)
            assert result is out
            assert_near(result, exact, size, 30)


def test_results_are_written_into_out() -> None:
    x, out = gaussian(2, 6, 9), torch.empty(2, 6, 6)
    general = torch.empty(2, 6, 9)
    for implementation in (BlockedProducts(), BlockedProducts(one_by_one=True)):
        assert implementation.symmetric(x, x, out) is out
        assert implementation.general(out, x, general, x, beta=2.0) is general


# Who computes where


def test_who_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(products, "_has", lambda package: True)
    kinds = {kernels: type(products_for(cuda, kernels=kernels)) for kernels in ("auto", "triton", "torch")}
    assert kinds == {"auto": TritonProducts, "triton": TritonProducts, "torch": BlockedProducts}
    assert {type(products_for(cpu, kernels=kernels)) for kernels in kinds} == {BlockedProducts}
    for kernels in kinds:
        chosen = products_for(cuda, deterministic=True, kernels=kernels)
        assert isinstance(chosen, BlockedProducts)
        assert chosen.one_by_one
    monkeypatch.setattr(products, "_has", lambda package: False)
    assert type(products_for(cuda)) is BlockedProducts


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, group = torch.device("cuda"), {"params": [torch.nn.Parameter(torch.ones(4, 4))], "use_muon": True}
    monkeypatch.setattr(products, "_has", lambda package: True)
    for asked, kind in (("", TritonProducts), ("triton", TritonProducts), ("torch", BlockedProducts)):
        monkeypatch.setenv("MESHMUON_KERNELS", asked)
        assert type(products_for(cuda)) is kind
        assert type(Muon([group])._settings.products(cuda)) is kind
    monkeypatch.setattr(products, "_has", lambda package: False)
    monkeypatch.setenv("MESHMUON_KERNELS", "triton")
    with pytest.raises(ConfigError, match=r"triton is not installed\. pip install triton, or leave it out"):
        Muon([group])
    monkeypatch.setenv("MESHMUON_KERNELS", "cutlass")
    with pytest.raises(ConfigError, match="MESHMUON_KERNELS='cutlass' is unknown; set it to triton or torch"):
        Muon([group])


def test_libraries_are_looked_for_by_name() -> None:
    assert products._has("triton") == (importlib.util.find_spec("triton") is not None)
    assert not products._has("no_such_package")


def test_triton_leaves_float64_and_general_products_to_torch() -> None:
    # Neither reaches the kernel, so this runs without a GPU.
    x = gaussian(2, 6, 9, dtype=torch.float64)
    out = torch.empty(2, 6, 6, dtype=torch.float64)
    assert torch.equal(
        TritonProducts().symmetric(x, x, out, alpha=2.0), BlockedProducts().symmetric(x, x, out.clone(), alpha=2.0)
    )
    general = TritonProducts().general(out, x, torch.empty_like(x))
    assert torch.equal(general, BlockedProducts().general(out, x, torch.empty_like(x)))


@pytest.mark.parametrize(("n", "kernel"), [(16, False), (256, False), (257, True), (272, True)])
@pytest.mark.parametrize("how", ["dense", "gaps", "one by one"])
def test_triton_leaves_short_sides_to_torch_where_that_is_one_launch(
    n: int, kernel: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    stand_in = SimpleNamespace(symmetric_product=lambda a, b, *, out, **factors: (launched.append("kernel"), out)[1])
    monkeypatch.setitem(sys.modules, "meshmuon.ortho.kernels.triton_symmetric", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "bmm", lambda a, b, *, out: launched.append("torch"))
    x, out = torch.empty(2, n, 12), torch.empty(2, n, n) if how != "gaps" else torch.empty(2, n + 1, n)[:, :n]
    assert TritonProducts(one_by_one=how == "one by one").symmetric(x, x, out) is out
    assert launched == ["kernel" if kernel or how != "dense" else "torch"]
    launched.clear()
    assert TritonProducts().quintic_factor(out, torch.empty(2, n, n), (3.0, -4.0, 2.0)).shape == out.shape
    assert launched == ["kernel"]
