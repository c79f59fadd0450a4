"""How far an orthogonalised matrix may be off because of rounding: derived from the arithmetic, for any device.

The same iteration runs in float64, where every product is moved at random by as much as its dtype may round it. What rounding
does early and later steps amplify is in this simulation. ``tests/support/bounds.py`` derives its bounds in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...ortho import Scheme, Scratch, Workspace, blocks_for, iterate
from ...ortho.kernels.products import Prepared, Products
from ...ortho.rational import Rational
from ...torch_compat import tf32_allowed

_DRAWS = 4
_ROOM = 4.0  # how many times the largest of the draws another draw, on another machine, may be
_SINGLE = 2.0**-24
_TF32 = 2.0**-11


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of one rounding; of float32 products on a GPU that may use TF32, of that."""
    if dtype == torch.float32 and device.type == "cuda" and tf32_allowed():
        return _TF32
    return torch.finfo(dtype).eps / 2


def exact_product(
    a: Tensor, b: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``alpha·a·b + beta·addend`` in float64, and the sum of the sizes of its terms."""
    a, b = a.double(), b.double()
    exact, size = alpha * (a @ b), abs(alpha) * (a.abs() @ b.abs())
    if addend is not None:
        exact, size = exact + beta * addend.double(), size + abs(beta) * addend.double().abs()
    return exact, size


class RoundedProducts(Products):
    """Products of float64 matrices, moved by as much as they would be rounded where the unit roundoff is ``stored``.

    They are plain ones of torch. A bound that used the products under test would grow with their faults.
    """

    def __init__(self, stored: float, seed: int) -> None:
        self._stored = stored
        self._summed = min(stored, _SINGLE)  # 16-bit products are added up in float32
        self._generator = torch.Generator().manual_seed(seed)

    def symmetric(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """As in ``Products``."""
        return out.copy_(self._moved(*exact_product(a, b.mT, addend, alpha=alpha, beta=beta), a.size(-1)))

    def general(self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 1.0) -> Tensor:
        """As in ``Products``."""
        return out.copy_(self._moved(*exact_product(a, b, addend, beta=beta), a.size(-1)))

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        """As in ``Products``. An inverse by Cholesky factors is that of a matrix which is off by a few roundings."""
        diagonal = gram.diagonal(dim1=1, dim2=2).abs().sqrt()
        moved = self._moved(gram, diagonal.unsqueeze(1) * diagonal.unsqueeze(2), gram.size(-1))
        moved = (moved + moved.mT) / 2
        identity = torch.eye(gram.size(-1), dtype=gram.dtype)
        out.copy_(step.constant * identity + step.linear * moved + step.quadratic * (moved @ moved))
        for pole, weight in zip(step.poles, step.weights, strict=True):
            out += weight * torch.linalg.inv(moved + pole * identity)
        return out

    def rounded(self, exact: Tensor, unit: float) -> Tensor:
        """Each number moved by up to ``unit`` of it."""
        return exact * (1 + unit * self._within(exact))

    def _moved(self, exact: Tensor, size: Tensor, terms: int) -> Tensor:
        return exact + self._within(exact) * (math.sqrt(terms + 2) * self._summed * size + self._stored * exact.abs())

    def _within(self, like: Tensor) -> Tensor:
        return 2 * torch.rand(like.shape, generator=self._generator, dtype=torch.float64) - 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products in float64 gain nothing from several threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def exact_result(matrix: Tensor, scheme: Scheme) -> Tensor:
    """What ``scheme`` makes of a matrix, from its singular value decomposition in float64 on the CPU."""
    left, values, right = torch.linalg.svd(matrix.detach().cpu().double(), full_matrices=False)
    norm = values.norm().clamp_min(torch.finfo(torch.float64).tiny)
    mapped = torch.tensor([scheme(float(value)) for value in values / norm], dtype=torch.float64)
    result: Tensor = (left * mapped) @ right
    return result


@one_thread()
def rounding_bound(matrix: Tensor, scheme: Scheme, compute: torch.dtype, *, form: str = "auto", sent: float = 0.0) -> float:
    """Bound on the Frobenius norm of the error of orthogonalising ``matrix`` with products of ``compute``.

    ``sent`` is the unit roundoff of what travels: the matrix is rounded to it before, and the result after.
    """
    unit = unit_roundoff(compute, matrix.device)
    x = matrix.detach().cpu().double()
    blocks = blocks_for(x.size(0), x.size(1), scheme, form=form, dtype=compute)

    def result_of(products: RoundedProducts, unit: float, sent: float) -> Tensor:
        batch = products.rounded(products.rounded(x, sent), unit).unsqueeze(0)
        result = torch.empty_like(batch)
        iterate(batch, scheme.steps, blocks, Scratch(Workspace(), batch, torch.float64, result), products)
        return products.rounded(result[0], sent)

    # Not against the singular value decomposition: a fault of the iteration would widen the bound and hide itself.
    unmoved = result_of(RoundedProducts(0.0, seed=0), 0.0, 0.0)
    draws = (result_of(RoundedProducts(unit, seed=draw), unit, sent) for draw in range(_DRAWS))
    return _ROOM * max(float((result - unmoved).norm()) for result in draws)
