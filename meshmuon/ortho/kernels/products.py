"""The products and inverses of the iteration, and their implementations for each kind of device.

``symmetric`` knows that its result is symmetric (X·Xᵀ, or products of functions of one symmetric matrix, which
commute), so that one triangle is enough. ``general`` is an ordinary product. ``inverses`` is the factor of a rational
step. All take (batch, rows, cols) operands.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ...errors import ConfigError, shown
from ..rational import Rational
from ..workspace import is_dense
from .inverse import ShiftedInverses, plain_inverses

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


class TritonProducts(BlockedProducts):
    """Symmetric products and norms by Triton kernels; general products, inverses and short sides stay torch's.

    The factor of a quintic is the kernel's also where it is short: the kernel adds the diagonal in the same launch.

    Args:
        one_by_one: as in ``BlockedProducts``.
    """

    def quintic_factor(self, gram: Tensor, out: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
        if out.dtype == torch.float64:
            return super().quintic_factor(gram, out, coefficients)
        a, b, c = coefficients
        from .triton_symmetric import symmetric_product

        return symmetric_product(gram, gram, out=out, addend=gram, alpha=c, beta=b, diagonal=a)

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
        from .triton_symmetric import symmetric_product

        return symmetric_product(a, b, out=out, addend=addend, alpha=alpha, beta=beta)


@lru_cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


KERNELS = "MESHMUON_KERNELS"
"""The environment variable that says who computes symmetric products on a GPU: ``triton``, or ``torch``."""


def kernels_asked_for() -> str:
    """What ``MESHMUON_KERNELS`` asks for; ``"auto"`` if it is not set."""
    kernels = os.environ.get(KERNELS) or "auto"
    if kernels not in ("auto", "triton", "torch"):
        raise ConfigError(f"{KERNELS}={shown(kernels)} is unknown; set it to triton or torch, or leave it out.")
    if kernels == "triton" and not _has("triton"):
        raise ConfigError(f"{KERNELS}=triton, but triton is not installed. pip install triton, or leave it out.")
    return kernels


def products_for(
    device: torch.device,
    *,
    deterministic: bool = False,
    kernels: str | None = None,
) -> Products:
    """The implementation for ``device``.

    On CUDA ``"auto"`` is Triton where it is installed; ``"triton"`` and ``"torch"`` insist on one, and None asks the
    environment. Elsewhere all are torch's own products.
    """
    kernels = kernels or kernels_asked_for()
    if device.type != "cuda" or kernels == "torch":
        return BlockedProducts(one_by_one=deterministic)
    if kernels != "triton" and not _has("triton"):
        return BlockedProducts(one_by_one=deterministic)
    return TritonProducts(one_by_one=deterministic)
