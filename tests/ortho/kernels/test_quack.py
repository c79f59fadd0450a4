"""Symmetric products by the library ``quack``, on a stand-in with the signature of ``gemm_symmetric`` of
quack-kernels 0.6.5.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import ConfigError, Muon
from meshmuon.execute import ExecutorSettings
from meshmuon.ortho import orthogonalize, polar_express
from meshmuon.ortho.kernels import products
from meshmuon.ortho.kernels.products import BlockedProducts, QuackProducts, TritonProducts, products_for
from tests.support.bounds import orthogonalize_error

CALLS: list[dict[str, Any]] = []


def gemm_symmetric(
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor | None = None,  # noqa: N803
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    dynamic_scheduler: bool = False,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    split_k: int | None = 1,
    split_k_mode: int = 0,
) -> Tensor:
    """As the library: (batch, m, k) and (batch, k, m) of 16 bits, vectors of 16 bytes, floats; one triangle is
    mirrored.
    """
    assert out is not None
    assert A.shape[0] == B.shape[0]
    assert A.shape[1:] == B.shape[:0:-1]
    assert out.shape == (len(A), A.shape[1], A.shape[1])
    for operand in (A, B, out, *([] if C is None else [C])):
        contiguous = [size for size, stride in zip(operand.shape[1:], operand.stride()[1:], strict=True) if stride == 1]
        assert operand.dtype in (torch.float16, torch.bfloat16)
        assert operand.data_ptr() % 16 == 0
        assert contiguous
        assert contiguous[0] % 8 == 0
        assert all(stride == 1 or stride % 8 == 0 for stride in operand.stride())
    assert type(alpha) is float
    assert type(beta) is float
    full = alpha * A.float() @ B.float() + (0.0 if C is None else beta * C.float())
    CALLS.append({"shape": tuple(A.shape), "C": C is not None})
    return out.copy_(full.triu() + full.triu(1).mT)


@pytest.fixture(autouse=True)
def quack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, interface = ModuleType("quack"), ModuleType("quack.gemm_interface")
    interface.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    products._quack.cache_clear()
    CALLS.clear()
    yield
    products._quack.cache_clear()


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_equal_torch(dtype: torch.dtype, transposed: bool) -> None:
    x = (randn(2, 24, 16, dtype=dtype).mT if transposed else randn(2, 16, 24, dtype=dtype)) / 8
    own, other = QuackProducts(BlockedProducts()), BlockedProducts()
    gram, expected = (each.symmetric(x, x, torch.empty(2, 16, 16, dtype=dtype)) for each in (own, other))
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(gram, expected, rtol=2 * unit, atol=2 * unit)
    gram, expected = (
        each.symmetric(gram, gram, torch.empty_like(gram), gram, alpha=2, beta=-3) for each in (own, other)
    )
    torch.testing.assert_close(gram, expected, rtol=8 * unit, atol=8 * unit)
    assert CALLS == [{"shape": (2, 16, 24), "C": False}, {"shape": (2, 16, 16), "C": True}]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 12, 16), torch.float16),
        ((1, 16, 12), torch.float16),
        ((1, 16, 16), torch.float32),
        ((1, 16, 0), torch.float16),
    ],
)
def test_what_it_does_not_take_is_computed_otherwise(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    out = torch.empty(1, shape[1], shape[1], dtype=dtype)
    result = QuackProducts(BlockedProducts()).symmetric(x, x, out)
    assert torch.equal(result, BlockedProducts().symmetric(x, x, torch.empty_like(out)))
    assert not CALLS


def test_an_operand_that_begins_between_two_vectors_is_computed_otherwise() -> None:
    x = torch.empty(16 * 16 + 1, dtype=torch.float16)[1:].view(1, 16, 16).copy_(randn(1, 16, 16))
    assert x.data_ptr() % 16
    QuackProducts(BlockedProducts()).symmetric(x, x, torch.empty(1, 16, 16, dtype=torch.float16))
    assert not CALLS


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_the_whole_orthogonalisation(form: str) -> None:
    x, scheme = randn(2, 16, 32, dtype=torch.float32), polar_express()
    options: dict[str, Any] = {"form": form, "dtype": torch.float16}
    ours = orthogonalize(x, scheme, products=QuackProducts(BlockedProducts()), **options)
    twin = orthogonalize(x, scheme, products=BlockedProducts(), **options)
    assert CALLS
    bound = 2 * orthogonalize_error(x, scheme, form=form, dtype=torch.float16)
    torch.testing.assert_close(ours, twin, rtol=0, atol=bound)


def test_only_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(products, "_has", lambda package: True)
    kinds = {kernels: type(products_for(cuda, kernels=kernels)) for kernels in ("auto", "triton", "quack", "torch")}
    assert kinds == {"auto": TritonProducts, "triton": TritonProducts, "quack": QuackProducts, "torch": BlockedProducts}
    assert type(ExecutorSettings(kernels="quack").products(cuda)) is QuackProducts
    assert {type(products_for(cpu, kernels=kernels)) for kernels in kinds} == {BlockedProducts}
    for kernels in kinds:
        chosen = products_for(cuda, deterministic=True, kernels=kernels)
        assert isinstance(chosen, BlockedProducts)
        assert chosen.one_by_one
    monkeypatch.setattr(products, "_has", lambda package: False)
    assert type(products_for(cuda)) is BlockedProducts


def test_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has", lambda package: False)
    group = {"params": [torch.nn.Parameter(torch.ones(4, 4))], "names": ["one"], "use_muon": True}
    for kernels, package in (("quack", "quack-kernels"), ("triton", "triton")):
        with pytest.raises(
            ConfigError, match=f"{kernels} is not installed. pip install {package}, or leave kernels out"
        ):
            Muon([group], kernels=kernels)
    with pytest.raises(ConfigError, match="kernels='cutlass' is unknown"):
        Muon([group], kernels="cutlass")


def test_compiled_kernels_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has", lambda package: True)
    with pytest.raises(ConfigError, match="compile and kernels='quack' exclude each other"):
        ExecutorSettings(compile=True, kernels="quack")
