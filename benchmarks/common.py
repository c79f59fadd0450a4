"""What the benchmarks share: matrices of a GPT, and torch.optim.Muon's maths in float32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["float32_newton_schulz", "gpt_matrices"]


def gpt_matrices(layers: int, width: int) -> list[tuple[int, int]]:
    per_layer = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    return per_layer * layers


def float32_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What torch.optim.Muon computes, with float32 instead of bfloat16 products."""
    a, b, c = coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if grad.size(0) > grad.size(1) else x
