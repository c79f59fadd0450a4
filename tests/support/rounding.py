"""How far Newton–Schulz in bfloat16 ends from the same polynomial in exact arithmetic.

bfloat16 keeps 8 significant bits, so storing a number costs at most u = 2⁻⁸ of it, and u/√3 in the root mean square.
torch.optim.Muon stores in bfloat16: the gradient, the normalised gradient X, and in each step R = X·Xᵀ, P = b·R + c·R²
and the new X = a·X + P·X. Each stored matrix is therefore off by white noise of Frobenius norm (u/√3)·‖matrix‖.

To first order an error E in X reaches the end as the derivative of the remaining steps F. In the basis of the
singular vectors of X, with singular values xᵢ, that derivative only multiplies entries: the symmetric part of E by
(F(xᵢ) − F(xⱼ))/(xᵢ − xⱼ), the antisymmetric part by (F(xᵢ) + F(xⱼ))/(xᵢ + xⱼ), and what leaves the square part by F(xᵢ)/xᵢ.
Errors of R and P first become errors of X through P·X. All are independent, so their squares add.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support.reference import KELLER

UNIT = 2.0**-8 / math.sqrt(3)


def bf16_error(update: Tensor, steps: int = 5) -> float:
    """Expected Frobenius norm of the rounding error of ``steps`` Keller steps in bfloat16."""
    rows, cols = min(update.shape), max(update.shape)
    x = torch.linalg.svdvals(update.double())
    x = x / x.norm()
    a, b, c = KELLER
    square = 2 * UNIT**2 * _amplification(x, steps, cols)
    for step in range(steps):
        r = x**2
        p = b * r + c * r**2
        through_r = (b + c * (r[:, None] + r[None, :])) * x
        moved = a * x + p * x
        noise = (r**2).sum() * (through_r**2).sum() / rows**2 + (p**2).sum() * (x**2).sum() / rows + (moved**2).sum()
        square += UNIT**2 * noise.item() * _amplification(moved, steps - step - 1, cols)
        x = moved
    return math.sqrt(square)


def _amplification(x: Tensor, steps: int, cols: int) -> float:
    """Mean square factor by which white noise in X grows over ``steps`` more steps."""
    end, h = _quintics(x, steps), 1e-6
    slope = (_quintics(x + h, steps) - _quintics(x - h, steps)) / (2 * h)
    gap = x[:, None] - x[None, :]
    near = gap.abs() < 1e-7
    symmetric = torch.where(near, slope[:, None], (end[:, None] - end[None, :]) / torch.where(near, 1.0, gap))
    antisymmetric = (end[:, None] + end[None, :]) / (x[:, None] + x[None, :])
    total = ((symmetric**2 + antisymmetric**2) / 2).sum() + (cols - len(x)) * ((end / x) ** 2).sum()
    return total.item() / (len(x) * cols)


def _quintics(x: Tensor, steps: int) -> Tensor:
    a, b, c = KELLER
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x
