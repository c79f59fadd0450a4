"""Checks of the arithmetic on this rank's device: products, the Triton kernel, orthogonalisation.

How far an orthogonalised matrix may be off because of rounding is derived from the arithmetic, for any device: the same
iteration runs in float64, where every product is moved at random by as much as its dtype may round it. What rounding
does early and later steps amplify is in this simulation. ``tests/support/bounds.py`` derives its bounds in the same
way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...ortho import (
    AUTO,
    Rational,
    Scheme,
    Scratch,
    Workspace,
    blocks_for,
    default_compute_dtype,
    iterate,
    orthogonalize,
    polar_express,
    scheme_for,
)
from ...ortho.kernels.products import Prepared, Products, TritonProducts, products_for
from ...torch_compat import tf32_allowed
from .context import Context, Finding

_SHAPES = ((2, 33, 47), (1, 160, 300), (3, 129, 129))  # around the tiles of the kernel and the panels of its twin
_MATRICES = ((64, 64), (48, 200), (130, 40), (112, 128))
_POLE, _WEIGHT = 0.3, 0.7
_DRAWS = 4
_ROOM = 4.0  # how many times the largest of the draws another draw, on another machine, may be
_SINGLE = 2.0**-24  # unit roundoff of float32, in which 16-bit products are added up
_TF32 = 2.0**-11


def dtypes_in_use(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes in which products are computed on ``device``, unless a user asks for another one."""
    # where 16-bit products are no default they are slow, or kill the process on some virtual machines
    if device.type == "cpu":
        return *dict.fromkeys((default_compute_dtype(device, torch.float32), torch.float32)), torch.float64
    return default_compute_dtype(device, torch.float32), torch.bfloat16, torch.float32


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_products(context: Context) -> Finding:
    """Compares each kind of product with torch in float64, within the rounding of its dtype."""
    products, problems = products_for(context.device), list[str]()
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes_in_use(context.device)]
    for dtype, dtype_name in zip(dtypes_in_use(context.device), names, strict=True):
        with context.doing(f"products in {dtype}"):
            for seed, shape in enumerate(_SHAPES):
                for name, excess in _excesses(products, seeded(shape, seed).to(context.device, dtype)):
                    if not excess <= 1.0:  # also for NaN
                        what = f"the {name} product of {'×'.join(map(str, shape))} in {dtype_name}"
                        problems.append(f"{what} differs from torch by {excess:.3g} times what rounding allows")
    kernel = "the Triton kernel and torch's products" if isinstance(products, TritonProducts) else "torch's products"
    return Finding(f"{kernel} in {', '.join(names)} are within rounding of float64", problems)


def _excesses(products: Products, x: Tensor) -> Iterator[tuple[str, float]]:
    """By how much the products of ``x`` differ from torch's in float64, of what rounding allows."""
    unit = unit_roundoff(x.dtype, x.device)
    gram = torch.bmm(x, x.mT) / x.size(-1)
    gram = (gram + gram.mT) / 2
    square, long = torch.empty_like(gram), torch.empty_like(x)

    def excess(result: Tensor, exact: Tensor, size: Tensor) -> float:
        """``size`` is the sum of the sizes of the terms."""
        allowed = (x.size(-1) + 4) * min(unit, _SINGLE) * size + 2 * unit * (exact.abs() + size * min(unit, _SINGLE))
        return float(((result.double() - exact).abs() / allowed.clamp_min(torch.finfo(torch.float64).tiny)).max())

    yield "symmetric", excess(products.symmetric(x, x, square), *exact_product(x, x.mT))
    result = products.symmetric(gram, gram, square, gram, alpha=2.0, beta=-3.0)
    yield "quadratic", excess(result, *exact_product(gram, gram, gram, alpha=2.0, beta=-3.0))
    yield "general", excess(products.general(gram, x, long, x, beta=0.5), *exact_product(gram, x, x, beta=0.5))
    if x.dtype not in (torch.float32, torch.float64):
        return
    # A rational step. A⁻¹ moves by about A⁻¹·δ·A⁻¹ if A moves by δ, and δ is at most n roundings of A.
    scratch = Scratch(Workspace(), gram, gram.dtype, torch.empty_like(gram))
    result = products.inverses(gram, Rational(1.0, (_POLE,), (_WEIGHT,)), torch.empty_like(gram), scratch.inverses)
    identity = torch.eye(gram.size(-1), dtype=torch.float64, device=gram.device)
    shifted = gram.double() + _POLE * identity
    inverse = torch.linalg.inv(shifted)
    error = torch.linalg.matrix_norm(result.double() - (identity + _WEIGHT * inverse), 2)
    norms = torch.linalg.matrix_norm(inverse, 2) ** 2 * torch.linalg.matrix_norm(shifted, 2)
    yield "inverse", float((error / (4 * gram.size(-1) * unit * (_WEIGHT * norms + 1))).max())


def check_orthogonalisation(context: Context) -> Finding:
    """Compares the default scheme, and polar_express with ten steps, with a singular value decomposition in float64."""
    device, problems, largest = context.device, list[str](), 0.0
    for seed, shape in enumerate(_MATRICES):
        x = seeded(shape, 100 + seed).to(device)
        compute = default_compute_dtype(device, torch.float32, AUTO, min(shape))
        # Ten steps in the standard form: finding safe blocks for ten steps takes seconds.
        for named, form in ((AUTO, "auto"), (polar_express(steps=10), "standard")):
            scheme = scheme_for(named, *shape, compute, device)
            assert isinstance(scheme, Scheme)
            with context.doing(f"orthogonalising {shape[0]}×{shape[1]} by {scheme.name}"):
                result = orthogonalize(x, named, form=form)
                error = float((result.cpu().double() - exact_result(x, scheme)).norm())
                allowed = rounding_bound(x, scheme, compute, form=form)
                largest = max(largest, error / allowed)
                if not error <= allowed:
                    problems.append(
                        f"{shape[0]}×{shape[1]} by {len(scheme.steps)} steps of {scheme.name} is {error:.2e} from the "
                        f"SVD's result; rounding explains {allowed:.2e}"
                    )
    text = f"in {str(compute).removeprefix('torch.')}, the largest error is {largest:.2f} of what rounding allows"
    return Finding(text, problems)


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
        self._summed = min(stored, _SINGLE)
        self._generator = torch.Generator().manual_seed(seed)

    def general(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        return out.copy_(self._moved(*exact_product(a, b, addend, alpha=alpha, beta=beta), a.size(-1), self._stored))

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        """In at least 32 bits. An inverse by Cholesky factors is that of a matrix which is off by a few roundings."""
        diagonal = gram.diagonal(dim1=1, dim2=2).abs().sqrt()
        moved = self._moved(gram, diagonal.unsqueeze(1) * diagonal.unsqueeze(2), gram.size(-1), self._summed)
        moved = (moved + moved.mT) / 2
        identity = torch.eye(gram.size(-1), dtype=gram.dtype)
        out.copy_(step.constant * identity + step.linear * moved + step.quadratic * (moved @ moved))
        for pole, weight in zip(step.poles, step.weights, strict=True):
            out += weight * torch.linalg.inv(moved + pole * identity)
        return out

    def rounded(self, exact: Tensor, unit: float) -> Tensor:
        return exact * (1 + unit * self._within(exact))

    def _moved(self, exact: Tensor, size: Tensor, terms: int, stored: float) -> Tensor:
        return exact + self._within(exact) * (math.sqrt(terms + 2) * self._summed * size + stored * exact.abs())

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
def rounding_bound(
    matrix: Tensor, scheme: Scheme, compute: torch.dtype, *, form: str = "auto", sent: float = 0.0
) -> float:
    """Bound on the Frobenius norm of the error of orthogonalising ``matrix`` with products of ``compute``.

    ``sent`` is the unit roundoff of what travels: the matrix is rounded to it before, and the result after.
    """
    unit, short = unit_roundoff(compute, matrix.device), compute.itemsize < torch.float32.itemsize
    x = matrix.detach().cpu().double()
    blocks = blocks_for(x.size(0), x.size(1), scheme, form=form, dtype=compute)

    def result_of(products: RoundedProducts, unit: float, sent: float) -> Tensor:
        batch = products.rounded(products.rounded(x, sent), unit).unsqueeze(0)
        result = torch.empty_like(batch)
        iterate(batch, scheme.steps, blocks, Scratch(Workspace(), batch, torch.float64, result, splits=short), products)
        return products.rounded(result[0], sent)

    # Not against the singular value decomposition: a fault of the iteration would widen the bound and hide itself.
    unmoved = result_of(RoundedProducts(0.0, seed=0), 0.0, 0.0)
    draws = (result_of(RoundedProducts(unit, seed=draw), unit, sent) for draw in range(_DRAWS))
    return _ROOM * max(float((result - unmoved).norm()) for result in draws)
