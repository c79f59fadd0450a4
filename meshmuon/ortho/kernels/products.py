"""The products and inverses of the iteration, and their implementations for each kind of device.

``symmetric`` knows that its result is symmetric (X·Xᵀ, or products of functions of one symmetric matrix, which
commute), so that one triangle is enough. ``general`` is an ordinary product. ``inverses`` is the factor of a rational
step. All take (batch, rows, cols) operands.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from ...errors import ConfigError, shown
from ..rational import Rational
from ..workspace import is_dense
from .inverse import ShiftedInverses, plain_inverses
from .tilings import ProductKind

_PANEL = 128
_PANEL_OF_16_BITS = 256
_SHORT_PANEL = 96  # of results with few rows
_EDGES = 32  # panels begin at multiples of it
_SMALLEST_SPLIT = 384
_LARGEST_SHORT_SIDE = 256  # up to which cuBLAS beats the Triton kernel: there are few tiles, and it can also split sums
_SHORT = (torch.bfloat16, torch.float16)
# where the inner size is at least twice the rows: starting a panel then costs less than it saves
_SMALLEST_LONG_SPLIT = 192

Prepared: TypeAlias = Callable[[], ShiftedInverses]
"""Returns what inverts one Gram matrix in preallocated buffers; only CPUs call it."""


NORM_PARTS = 64
"""Segments of a matrix whose sums of squares a kernel of ``normalise`` computes in parallel; each needs two numbers."""

Take: TypeAlias = Callable[[str, int, torch.dtype], Tensor]
"""Returns flat memory for a name, a number of elements and a dtype."""


class Products(Protocol):
    """The interface of an implementation. The result is returned and may or may not be in ``out``."""

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """``alpha · a·bᵀ + beta · addend``, known to be symmetric. ``out`` overlaps none of the operands."""
        return self.general(a, b.mT, out, addend, alpha=alpha, beta=beta)

    def quintic_factor(self, gram: Tensor, out: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
        """``a·I + b·gram + c·gram²``. ``out`` does not overlap ``gram``."""
        a, b, c = coefficients
        factor = self.symmetric(gram, gram, out, gram, alpha=c, beta=b)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        return factor

    def normalise(self, batch: Tensor, x: Tensor, take: Take) -> bool:
        """``x`` ← each matrix of ``batch`` divided by its Frobenius norm, if the device has a kernel for that; else
        False.

        ``take`` gives memory of a name, size and dtype.
        """
        return False

    def general(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """``alpha · a·b + beta · addend``. ``out`` overlaps none of the operands."""
        ...

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        """``constant·I + linear·gram + quadratic·gram² + Σ weight·(gram + pole·I)⁻¹``."""
        ...


@lru_cache(maxsize=4096)
def symmetric_panels(n: int, k: int, *, short: bool = False) -> tuple[tuple[int, int], ...]:
    """Row ranges in which the blocked symmetric product with inner size k computes the lower triangle of an n × n
    result.

    Rows [start, stop) are computed up to column ``stop``. Small results are one full product, which is faster
    (measured, fp32 on CPU: up to 191 rows, up to 383 where k < 2n; bfloat16, which is ``short``: up to 383).
    """
    if n < (_SMALLEST_LONG_SPLIT if k >= 2 * n and not short else _SMALLEST_SPLIT):
        return ((0, n),)
    count = -(-n // (_PANEL_OF_16_BITS if short else _PANEL if n >= _SMALLEST_SPLIT else _SHORT_PANEL))
    inner = [round(n * i / count / _EDGES) * _EDGES for i in range(1, count)]
    return tuple(pairwise((0, *inner, n)))


class BlockedProducts(Products):
    """Torch's own matrix products; a symmetric one is computed as row panels of its lower triangle, then mirrored.

    Args:
        one_by_one: multiply the matrices of a batch one at a time, so that a batch gives the bits of a loop for any
            number of threads (batched products of some BLAS libraries differ there).
    """

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        panels = symmetric_panels(a.size(1), a.size(2), short=out.dtype in _SHORT and out.device.type == "cpu")
        if len(panels) == 1:
            self._multiply(a, b.mT, out, addend, alpha, beta)
            return out
        for start, stop in panels:
            panel = out[:, start:stop, :stop]
            part = None if addend is None else addend[:, start:stop, :stop]
            self._multiply(a[:, start:stop], b[:, :stop].mT, panel, part, alpha, beta)
            if start:
                out[:, :start, start:stop].copy_(panel[:, :, :start].mT)
        return out

    def general(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        self._multiply(a, b, out, addend, alpha, beta)
        return out

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        if gram.device.type != "cpu":  # there one batched call per pole beats many small launches
            return plain_inverses(gram, step)
        if step.is_hybrid:
            self.symmetric(gram, gram, out, gram, alpha=step.quadratic, beta=step.linear)
        inverses = prepared()
        for k in range(len(gram)):
            factor, fractions = out[k], inverses.run(gram[k], step)
            if step.is_hybrid:
                factor.add_(fractions)
            else:
                factor.copy_(fractions)
        return out

    def _multiply(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
        if addend is not None and alpha == 0.0:  # a cubic step; torch 2.13 forgets beta then, in 16 bits on CPU
            torch.mul(addend, beta, out=out)
        elif out.dtype in _SHORT and out.device.type == "cpu":
            for k in range(a.size(0)):
                _short_product(a[k], b[k], out[k], None if addend is None else addend[k], alpha, beta)
        # Matrices with gaps between them are multiplied as a batch of one is: BLAS has other code for batches.
        elif a.size(0) > 1 and (self.one_by_one or not is_dense(out)):
            for i in range(a.size(0)):
                part = None if addend is None else addend[i : i + 1]
                self._multiply(a[i : i + 1], b[i : i + 1], out[i : i + 1], part, alpha, beta)
        elif addend is not None:
            torch.baddbmm(addend, a, b, alpha=alpha, beta=beta, out=out)
        elif alpha != 1.0:
            torch.baddbmm(out, a, b, alpha=alpha, beta=0.0, out=out)
        else:
            torch.bmm(a, b, out=out)


def _short_product(a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
    """``alpha · a·b + beta · addend`` of matrices in 16 bits on a CPU.

    Batched products of 16 bits copy strided operands, and a result that is transposed in memory is computed by a loop
    that is more than 1,000 times slower. Products of two matrices take operands as they are; a transposed result is
    computed as bᵀ·aᵀ.
    """
    if out.stride(0) < out.stride(1):
        a, b, out, addend = b.mT, a.mT, out.mT, None if addend is None else addend.mT
    if addend is None and alpha == 1.0:
        torch.mm(a, b, out=out)
    elif addend is None:
        torch.addmm(out, a, b, alpha=alpha, beta=0.0, out=out)
    else:
        torch.addmm(addend, a, b, alpha=alpha, beta=beta, out=out)


class FunctionalProducts(Products):
    """Plain products that return new tensors: what ``torch.compile`` can trace. ``out`` is ignored."""

    def general(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        if addend is None:
            return alpha * torch.bmm(a, b) if alpha != 1.0 else torch.bmm(a, b)
        if alpha == 0.0:  # as in ``BlockedProducts``
            return beta * addend
        return torch.baddbmm(addend, a, b, alpha=alpha, beta=beta)

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        return plain_inverses(gram, step)


class TritonProducts(BlockedProducts):
    """Symmetric products and norms by Triton kernels; general products, inverses and short sides stay torch's.

    The factor of a quintic is the kernel's also where it is short: the kernel adds the diagonal in the same launch.

    Args:
        one_by_one: as in ``BlockedProducts``.
        torch_kinds: kinds of symmetric products that torch computes, because it is faster. Its sums have another order
            than the kernel's, so ranks must have agreed on them. None if torch does not contend, and need not be
            measured.
    """

    def __init__(self, *, one_by_one: bool = False, torch_kinds: AbstractSet[str] | None = None) -> None:
        super().__init__(one_by_one=one_by_one)
        self._torch_kinds = torch_kinds

    def quintic_factor(self, gram: Tensor, out: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
        if out.dtype == torch.float64:
            return super().quintic_factor(gram, out, coefficients)
        a, b, c = coefficients
        return self._by_kernel(gram, gram, out, gram, alpha=c, beta=b, diagonal=a)

    def normalise(self, batch: Tensor, x: Tensor, take: Take) -> bool:
        if torch.float64 in (batch.dtype, x.dtype) or batch.stride()[1:] != x.stride()[1:]:
            return False
        from .triton_normalise import PARTS, normalise

        normalise(batch, x, take("sums", batch.size(0) * PARTS * 2, torch.float32))
        return True

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        if out.dtype == torch.float64:  # the kernel accumulates in float32
            return super().symmetric(a, b, out, addend, alpha=alpha, beta=beta)
        # else torch would take many launches
        if a.size(1) <= _LARGEST_SHORT_SIDE and not self.one_by_one and is_dense(out):
            self._multiply(a, b.mT, out, addend, alpha, beta)
            return out
        return self._by_kernel(a, b, out, addend, alpha=alpha, beta=beta)

    def _by_kernel(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        addend: Tensor | None,
        *,
        alpha: float,
        beta: float,
        diagonal: float = 0.0,
    ) -> Tensor:
        """``alpha · a·bᵀ + beta · addend + diagonal · I``, unless torch computes this kind of product."""

        def torch_product() -> None:
            self._multiply(a, b.mT, out, addend, alpha, beta)
            if diagonal:
                out.diagonal(dim1=1, dim2=2).add_(diagonal)

        contends = self._torch_kinds is not None and is_dense(out)
        if contends and self._torch_kinds and str(ProductKind.of(a, addend)) in self._torch_kinds:
            torch_product()
            return out
        from .triton_symmetric import symmetric_product

        factors = {"alpha": alpha, "beta": beta, "diagonal": diagonal}
        return symmetric_product(
            a, b, out=out, addend=addend, **factors, torch_product=torch_product if contends else None
        )


class QuackProducts(BlockedProducts):
    """Symmetric products by ``quack.gemm_interface.gemm_symmetric`` where it takes the operands; the others by
    ``otherwise``.

    It is never chosen by measurement. Its sums have another order than those of the Triton kernel, so that ranks which
    measured differently would compute different bits. What it takes follows from shapes and dtypes, which are equal on
    all ranks.
    """

    def __init__(self, otherwise: Products, *, one_by_one: bool = False) -> None:
        super().__init__(one_by_one=one_by_one)
        self._otherwise = otherwise

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        operands = [a, b, out] if addend is None else [a, b, out, addend]
        if not a.numel() or not all(_quack_takes(operand) for operand in operands):
            return self._otherwise.symmetric(a, b, out, addend, alpha=alpha, beta=beta)
        # It recompiles for an int, and takes the second operand as (batch, k, n).
        _quack()(a, b.mT, C=addend, out=out, alpha=float(alpha), beta=float(beta))
        return out


def _quack_takes(operand: Tensor) -> bool:
    """Whether its loads and stores, of 16 bytes each, fit the operand: 16 bits, one dim contiguous, everything else
    in eights.
    """
    batch, rows, cols = operand.stride()
    pitches = [cols] if rows == 1 else [rows]
    sizes = [size for size, stride in zip(operand.shape[1:], (rows, cols), strict=True) if stride == 1]
    whole = all(number % 8 == 0 for number in [batch, *pitches, *sizes])
    return (
        operand.dtype in (torch.float16, torch.bfloat16)
        and 1 in (rows, cols)
        and whole
        and operand.data_ptr() % 16 == 0
    )


@lru_cache
def _quack() -> Callable[..., object]:
    product: Callable[..., object] = importlib.import_module("quack.gemm_interface").gemm_symmetric
    return product


@lru_cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


Kernels: TypeAlias = Literal["auto", "triton", "quack", "torch"]
KERNELS = get_args(Kernels)
_PACKAGES = {"triton": "triton", "quack": "quack-kernels"}  # where each is found on PyPI


def check_kernels(kernels: object) -> None:
    """Refuses a value of the option ``kernels`` that is unknown, or whose library is not installed."""
    if not isinstance(kernels, str) or kernels not in KERNELS:
        raise ConfigError(f"kernels={shown(kernels)} is unknown; write one of {KERNELS}.")
    if kernels in _PACKAGES and not _has(kernels):
        raise ConfigError(
            f"kernels={kernels!r}: {kernels} is not installed. pip install {_PACKAGES[kernels]}, or leave kernels out."
        )


def products_for(
    device: torch.device,
    *,
    deterministic: bool = False,
    kernels: str = "auto",
    torch_kinds: AbstractSet[str] | None = None,
) -> Products:
    """The implementation for ``device``.

    On CUDA ``"auto"`` is Triton where it is installed; ``"triton"``, ``"quack"`` and ``"torch"`` insist on one.
    Elsewhere all are torch's own products. ``torch_kinds`` is for Triton.
    """
    if device.type != "cuda" or kernels == "torch":
        return BlockedProducts(one_by_one=deterministic)
    if kernels != "triton" and not _has("triton"):
        usual = BlockedProducts(one_by_one=deterministic)
    else:
        usual = TritonProducts(one_by_one=deterministic, torch_kinds=torch_kinds)
    return QuackProducts(usual, one_by_one=deterministic) if kernels == "quack" else usual
