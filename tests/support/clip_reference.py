"""QK-clip from its formula, head by head on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon.params.param_record import GroupRecipe, ParamRecord


def parameters(tensors: Mapping[str, Tensor], *, split: Any = None, **group: Any) -> list[ParamRecord]:
    """Parameters as a Muon step sees them, all in one group."""
    options: Any = {
        "expert_keys": (),
        "conv": None,
        "split": split,
        "matrices": None,
        "use_muon": True,
        **group,
    }
    return [ParamRecord.of(name, tensor, 0, options, GroupRecipe()) for name, tensor in tensors.items()]


def gamma(logits: Sequence[float], threshold: float, dtype: torch.dtype) -> Tensor:
    """What a head's logits are to be multiplied by, from the largest of them."""
    largest = max(logits)
    number = torch.tensor(1.0, dtype=dtype)
    return torch.tensor(threshold, dtype=dtype) / torch.tensor(largest, dtype=dtype) if largest > threshold else number


def scale(weight: Tensor, start: int, stop: int, factor: Tensor) -> None:
    weight[start:stop] = (weight[start:stop].to(factor.dtype) * factor).to(weight.dtype)


def clipped(
    weight: Tensor, heads: Sequence[Sequence[float]], threshold: float, head_dim: int, start: int = 0
) -> Tensor:
    """``weight`` with the rows of each head scaled by √γ; ``heads`` are the logits of each head."""
    weight = weight.clone()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    for h, logits in enumerate(heads):
        if logits:
            first = start + h * head_dim
            scale(weight, first, first + head_dim, gamma(logits, threshold, dtype).sqrt())
    return weight


def clipped_mla(weight: Tensor, logits: Sequence[float], threshold: float, nope: int, full: int, rest: int) -> Tensor:
    """``weight`` whose heads are nope rows (√γ), ``full`` rows (γ) and ``rest`` rows (untouched)."""
    weight = weight.clone()
    for h, logit in enumerate(logits):
        factor = gamma([logit], threshold, torch.float32)
        first = h * (nope + full + rest)
        scale(weight, first, first + nope, factor.sqrt())
        scale(weight, first + nope, first + nope + full, factor)
    return weight
