"""Checks of the arithmetic on this rank's device: products, the Triton kernel, orthogonalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ortho import AUTO, Rational, Scheme, Scratch, Workspace, default_compute_dtype, orthogonalize, polar_express, scheme_for
from ...ortho.kernels.products import Products, TritonProducts, products_for
from .check import Finding
from .context import Context
from .rounding import exact_product, exact_result, rounding_bound, unit_roundoff

_SHAPES = ((2, 33, 47), (1, 160, 300), (3, 129, 129))  # around the tiles of the kernel and the panels of its twin
_MATRICES = ((64, 64), (48, 200), (130, 40))
_POLE, _WEIGHT = 0.3, 0.7
_SUMMED = 2.0**-24


def dtypes_in_use(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes in which products are computed on ``device``, unless a user asks for another one."""
    if device.type == "cpu":  # 16-bit products are no default here, and kill the process on some virtual machines
        return torch.float32, torch.float64
    return default_compute_dtype(device, torch.float32), torch.bfloat16, torch.float32


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_products(context: Context) -> Finding:
    """Compares each kind of product with torch in float64, within the rounding of its dtype."""
    products, problems = products_for(context.device), list[str]()
    for dtype in dtypes_in_use(context.device):
        with context.doing(f"products in {dtype}"):
            for seed, shape in enumerate(_SHAPES):
                problems += _wrong_products(products, seeded(shape, seed).to(context.device, dtype))
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes_in_use(context.device))
    kernel = "the Triton kernel and torch's products" if isinstance(products, TritonProducts) else "torch's products"
    return Finding(f"{kernel} in {names} are within rounding of float64", problems)


def _wrong_products(products: Products, x: Tensor) -> list[str]:
    """The products of ``x`` that differ from torch's in float64 by more than rounding."""
    unit = unit_roundoff(x.dtype, x.device)
    gram = torch.bmm(x, x.mT) / x.size(-1)
    gram = (gram + gram.mT) / 2
    square, long = torch.empty_like(gram), torch.empty_like(x)
    cases: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # the result, its exact value, and the sum of the sizes of its terms
    exact, size = exact_product(x, x.mT)
    cases["symmetric"] = products.symmetric(x, x, square).clone(), exact, size
    exact, size = exact_product(gram, gram, gram, alpha=2.0, beta=-3.0)
    cases["quadratic"] = products.symmetric(gram, gram, square, gram, alpha=2.0, beta=-3.0).clone(), exact, size
    exact, size = exact_product(gram, x, x, beta=0.5)
    cases["general"] = products.general(gram, x, long, x, beta=0.5).clone(), exact, size
    wrong = []
    for name, (result, exact, size) in cases.items():
        allowed = (x.size(-1) + 4) * min(unit, _SUMMED) * size + 2 * unit * (exact.abs() + size * min(unit, _SUMMED))
        excess = ((result.double() - exact).abs() / allowed.clamp_min(torch.finfo(torch.float64).tiny)).max()
        if not excess <= 1.0:  # also for NaN
            wrong.append(_wrong(name, x, f"differs from torch by {excess:.3g} times what rounding allows"))
    if x.dtype in (torch.float32, torch.float64):
        wrong += _wrong_inverses(products, gram, x)
    return wrong


def _wrong_inverses(products: Products, gram: Tensor, x: Tensor) -> list[str]:
    """A rational step; A⁻¹ moves by about A⁻¹·δ·A⁻¹ if A moves by δ, and δ is at most n roundings of A."""
    scratch = Scratch(Workspace(), gram, gram.dtype, torch.empty_like(gram))
    result = products.inverses(gram, Rational(1.0, (_POLE,), (_WEIGHT,)), torch.empty_like(gram), scratch.inverses)
    identity = torch.eye(gram.size(-1), dtype=torch.float64, device=gram.device)
    shifted = gram.double() + _POLE * identity
    inverse = torch.linalg.inv(shifted)
    error = torch.linalg.matrix_norm(result.double() - (identity + _WEIGHT * inverse), 2)
    norms = torch.linalg.matrix_norm(inverse, 2) ** 2 * torch.linalg.matrix_norm(shifted, 2)
    allowed = 4 * gram.size(-1) * unit_roundoff(gram.dtype, gram.device) * (_WEIGHT * norms + 1)
    excess = (error / allowed).max()
    return [] if excess <= 1.0 else [_wrong("inverse", x, f"differs from torch by {excess:.3g} times what rounding allows")]


def _wrong(name: str, x: Tensor, text: str) -> str:
    return f"the {name} product of {'×'.join(map(str, x.shape))} in {str(x.dtype).removeprefix('torch.')} {text}"


def check_orthogonalisation(context: Context) -> Finding:
    """Compares the default scheme, and polar_express with ten steps, with a singular value decomposition in float64."""
    device, problems, largest = context.device, list[str](), 0.0
    compute = default_compute_dtype(device, torch.float32)
    for seed, shape in enumerate(_MATRICES):
        x = seeded(shape, 100 + seed).to(device)
        default = scheme_for(AUTO, *shape, compute)
        # Ten steps in the standard form: finding blocks that are safe for so many takes seconds.
        for scheme, form in ((default, "auto"), (polar_express(steps=10), "standard")):
            assert isinstance(scheme, Scheme)
            with context.doing(f"orthogonalising {shape[0]}×{shape[1]} by {scheme.name}"):
                result = orthogonalize(x, scheme, form=form)
                error = float((result.cpu().double() - exact_result(x, scheme)).norm())
                allowed = rounding_bound(x, scheme, compute, form=form)
                largest = max(largest, error / allowed)
                if not error <= allowed:
                    problems.append(
                        f"{shape[0]}×{shape[1]} by {len(scheme.steps)} steps of {scheme.name} is {error:.2e} from the SVD's "
                        f"result; rounding explains {allowed:.2e}"
                    )
    text = f"in {str(compute).removeprefix('torch.')}, the largest error is {largest:.2f} of what rounding allows"
    return Finding(text, problems)
