"""Cutting a scheme's steps into blocks: how far the Gram form may run before it must look at X again.

Inside a block the iteration lives in the n × n space of R = X·Xᵀ, where rounding of relative size u perturbs every
eigenvalue by about u·‖R‖. An eigenvalue that is truly tiny may become negative, and each step multiplies it by a² or
more; and what rounding mixes between a large and a small direction is amplified like the small one. Starting a new
block (X ← Q·X, then R = X·Xᵀ again) removes the error.

How many blocks are needed depends on the coefficients and on the dtype, so it is found by simulation, not by table: the
real iteration runs on 2 × 2 matrices in float64, with every product perturbed by the worst rounding of the dtype.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .cost import orthogonalize_cost
from .iteration import iterate
from .kernels.products import Prepared, Products
from .rational import Rational
from .schemes import Scheme
from .scratch import Scratch
from .workspace import Workspace

_EXHAUSTIVE_STEPS = 6  # up to here every way to cut the steps is tried; beyond, only cuts into few blocks,
_FEW_BLOCKS = 4
_MANY_CUTS = 150  # and only while there are not too many ways to do so
_OVERSHOOT = 1.05  # largest singular value, relative to the exact polynomial's
_SHARE_OF_SPREAD = 0.25  # how much of the scheme's own distance from 1 rounding may add
_OVER_STANDARD = 1.25  # how much worse than the standard form's deviation is still the same
_FLOOR = 16.0  # units of the dtype's epsilon below which a deviation never matters
_PATTERNS = (
    ((-1.0, -1.0), (-1.0, -1.0)),
    ((1.0, 1.0), (1.0, 1.0)),
    ((-1.0, 1.0), (1.0, -1.0)),
    ((1.0, -1.0), (-1.0, 1.0)),
)


class _Outcome(NamedTuple):
    overshoot: float  # largest value that any singular value ends at
    deviation: float  # largest distance from what exact arithmetic gives, of singular values that start above 1e-3
    error: float  # largest distance from 1 of any singular value that starts above 1e-3


def standard_blocks(scheme: Scheme) -> tuple[int, ...]:
    """Every step is a separate block: the standard form."""
    return (1,) * len(scheme.steps)


@lru_cache(maxsize=256)
def gram_blocks(scheme: Scheme, dtype: torch.dtype) -> tuple[int, ...]:
    """The fewest blocks that are safe for ``scheme`` in ``dtype``, as numbers of steps.

    Safe means, for every singular value in [0, 1] and the worst rounding: none ends more than 5 % above the exact
    polynomial's maximum, and none above 1e-3 ends further from its exact value than a quarter of the polynomial's own
    largest distance from 1, or than 1.25 times what the standard form suffers in that dtype, or than 16 of its
    epsilons.
    """
    steps = len(scheme.steps)
    noise = torch.finfo(dtype).eps / 2
    exact = _simulate(scheme, standard_blocks(scheme), 0.0)
    standard = _simulate(scheme, standard_blocks(scheme), noise)
    deviation_allowed = max(
        _SHARE_OF_SPREAD * _spread(scheme), _OVER_STANDARD * standard.deviation, _FLOOR * torch.finfo(dtype).eps
    )
    for count in range(1, steps):
        outcomes = {blocks: _simulate(scheme, blocks, noise) for blocks in _cuts(steps, count)}
        safe = {
            blocks: outcome
            for blocks, outcome in outcomes.items()
            if outcome.overshoot <= _OVERSHOOT * exact.overshoot and outcome.deviation <= deviation_allowed
        }
        if safe:
            return min(safe, key=lambda blocks: (safe[blocks].deviation, blocks))
    return standard_blocks(scheme)


@lru_cache(maxsize=256)
def is_safe(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether rounding lifts no singular value more than 5 % above the scheme's own maximum, with every step in its
    own block.
    """
    exact, rounded = (_simulate(scheme, standard_blocks(scheme), noise) for noise in (0.0, torch.finfo(dtype).eps / 2))
    return rounded.overshoot <= _OVERSHOOT * exact.overshoot


@lru_cache(maxsize=256)
def worst_error(scheme: Scheme, dtype: torch.dtype) -> float:
    """The largest distance from 1 at which a singular value in [1e-3, 1] may end, rounding in ``dtype`` included."""
    noise = torch.finfo(dtype).eps / 2
    return max(_spread(scheme), _simulate(scheme, gram_blocks(scheme, dtype), noise, points=385).error)


def _spread(scheme: Scheme) -> float:
    return max(abs(1 - scheme(10 ** (-3 * k / 200))) for k in range(201))


@lru_cache(maxsize=4096)
def choose_blocks(rows: int, cols: int, scheme: Scheme, dtype: torch.dtype) -> tuple[int, ...]:
    """The cheaper of the standard form and the safe Gram form for a rows × cols matrix, by counted FLOPs."""
    candidates = (standard_blocks(scheme), gram_blocks(scheme, dtype))
    return min(candidates, key=lambda blocks: orthogonalize_cost(rows, cols, scheme.steps, blocks))


def _cuts(steps: int, count: int) -> list[tuple[int, ...]]:
    if steps > _EXHAUSTIVE_STEPS and (count > _FEW_BLOCKS or math.comb(steps - 1, count - 1) > _MANY_CUTS):
        return []
    edges = combinations(range(1, steps), count - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, steps))) for cut in edges]


class _NoisyProducts(Products):
    """Exact float64 products, each result shifted by a fixed pattern of ``noise`` times its largest entry."""

    def __init__(self, noise: float, pattern: Tensor) -> None:
        self._shift = noise * pattern

    def general(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        result = alpha * (a @ b) if addend is None else alpha * (a @ b) + beta * addend
        return out.copy_(self._rounded(result))

    def inverses(self, gram: Tensor, step: Rational, out: Tensor, prepared: Prepared) -> Tensor:
        """Cholesky's rounding is like one more of the matrix that it factors; the inverse is rounded like a product."""
        identity = torch.eye(gram.size(1), dtype=gram.dtype, device=gram.device)
        total = step.constant * identity
        if step.is_hybrid:
            total = total + self._rounded(step.quadratic * (gram @ gram.mT) + step.linear * gram)
        for pole, weight in zip(step.poles, step.weights, strict=True):
            total = total + weight * self._rounded(
                torch.linalg.inv(self._rounded(self._rounded(gram + pole * identity)))
            )
        return out.copy_(total)

    def _rounded(self, result: Tensor) -> Tensor:
        return result + result.abs().amax(dim=(1, 2), keepdim=True) * self._shift


def _simulate(scheme: Scheme, blocks: tuple[int, ...], noise: float, *, points: int = 49) -> _Outcome:
    """Runs the real iteration on diag(1, s), every product rounded in the worst way; s is 0 and ``points`` values
    up to 1.
    """
    sizes = torch.logspace(-6, 0, points, dtype=torch.float64, device="cpu")
    small = torch.cat([torch.zeros_like(sizes[:1]), sizes])
    pairs = torch.diag_embed(torch.stack([torch.ones_like(small), small], dim=1))

    def run(products: Products) -> Tensor:
        result = torch.empty_like(pairs)
        iterate(pairs, scheme.steps, blocks, Scratch(Workspace(), pairs, torch.float64, result), products)
        return result

    exact, counted = run(_NoisyProducts(0.0, torch.zeros(2, 2, device="cpu"))), small >= 1e-3
    results = torch.stack([run(_NoisyProducts(noise, torch.tensor(pattern, device="cpu"))) for pattern in _PATTERNS])
    deviations, errors = _singular_values((results - exact)[:, counted]), _singular_values(results[:, counted]) - 1
    return _Outcome(*(float(values.abs().max()) for values in (_singular_values(results), deviations, errors)))


def _singular_values(matrices: Tensor) -> Tensor:
    """Those of each matrix; infinite if any of them is not finite."""
    if not bool(matrices.isfinite().all()):
        return torch.full((1,), math.inf, dtype=matrices.dtype, device=matrices.device)
    values: Tensor = torch.linalg.svdvals(matrices)
    return values
