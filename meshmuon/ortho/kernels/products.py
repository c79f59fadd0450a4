"""The products and inverses that the iteration needs, and who computes them where.

``symmetric`` knows that its result is symmetric (X·Xᵀ, or products of functions of one symmetric matrix, which commute) and
computes one triangle. ``general`` is an ordinary product. ``inverses`` is the factor of a rational step. All take (batch, rows,
cols) operands.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..aligned import is_dense
from ..rational import Rational
from .inverse import ShiftedInverses, plain_inverses
from .panels import symmetric_panels

Prepared: TypeAlias = Callable[[int, int], ShiftedInverses]


class Products(Protocol):
    """What an implementation offers. The result is returned and may or may not live in ``out``."""

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """``alpha · a·bᵀ + beta · addend``, known to be symmetric. ``out`` overlaps none of the operands."""
        ...

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        """``a·b + beta · addend``. ``out`` overlaps none of the operands."""
        ...

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        """``constant·I + linear·gram + quadratic·gram² + Σ weight·(gram + pole·I)⁻¹``.

        ``prepared`` gives buffers for a number of poles and of matrices.
        """
        ...


class BlockedProducts:
    """Torch's own matrix products; a symmetric one is computed as row panels of its lower triangle, then mirrored.

    Args:
        one_by_one: multiply the matrices of a batch one at a time, so that a batch gives the bits of a loop for any number of
            threads (batched products of some BLAS libraries differ there).
    """

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        panels = symmetric_panels(a.size(1), a.size(2))
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

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        self._multiply(a, b, out, addend, 1.0, beta)
        return out

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        if gram.device.type != "cpu":  # there one batched call per pole beats many small launches
            return plain_inverses(gram, step)
        together = 1 if self.one_by_one else gram.size(0)
        if step.is_hybrid:
            self.symmetric(gram, gram, out, gram, alpha=step.quadratic, beta=step.linear)
        for k in range(0, gram.size(0), together):
            part, fractions = out[k : k + together], prepared(len(step.poles), together).run(gram[k : k + together], step)
            if step.is_hybrid:
                part.add_(fractions)
            else:
                part.copy_(fractions)
        return out

    def _multiply(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
        # Matrices with gaps between them are multiplied as a batch of one is: BLAS has other code for batches.
        if a.size(0) > 1 and (self.one_by_one or not is_dense(out)):
            for i in range(a.size(0)):
                part = None if addend is None else addend[i : i + 1]
                self._multiply(a[i : i + 1], b[i : i + 1], out[i : i + 1], part, alpha, beta)
        elif addend is not None and alpha == 0.0:  # a cubic step; torch 2.13 forgets beta then, in 16 bits on CPU
            torch.mul(addend, beta, out=out)
        elif addend is not None:
            torch.baddbmm(addend, a, b, alpha=alpha, beta=beta, out=out)
        elif alpha != 1.0:
            torch.baddbmm(out, a, b, alpha=alpha, beta=0.0, out=out)
        else:
            torch.bmm(a, b, out=out)


class FunctionalProducts:
    """Plain products that return new tensors: what ``torch.compile`` can trace. ``out`` is ignored."""

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        if addend is None:
            return alpha * torch.bmm(a, b.mT) if alpha != 1.0 else torch.bmm(a, b.mT)
        if alpha == 0.0:  # as in ``BlockedProducts``
            return beta * addend
        return torch.baddbmm(addend, a, b.mT, alpha=alpha, beta=beta)

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        return torch.bmm(a, b) if addend is None else torch.baddbmm(addend, a, b, beta=beta)

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        return plain_inverses(gram, step)


class TritonProducts(BlockedProducts):
    """Symmetric products by the Triton kernel; the general one and the inverses stay torch's."""

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        if out.dtype == torch.float64:  # the kernel accumulates in float32
            return super().symmetric(a, b, out, addend, alpha=alpha, beta=beta)
        from .triton_symmetric import symmetric_product

        return symmetric_product(a, b, out=out, addend=addend, alpha=alpha, beta=beta)


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def products_for(device: torch.device, *, deterministic: bool = False) -> Products:
    """The implementation for ``device``: Triton on CUDA where it is installed, torch elsewhere."""
    if device.type == "cuda" and _has_triton():
        return TritonProducts()
    return BlockedProducts(one_by_one=deterministic)
