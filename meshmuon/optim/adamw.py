"""AdamW for the parameters that are not matrices: torch's own functional step, with torch's own state names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .groups import adamw_betas, adamw_eps

__all__ = ["STATE_KEYS", "adamw_step"]

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def adamw_step(group: dict[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """One AdamW step on ``params``, which all have gradients, exactly as ``torch.optim.AdamW(fused=True)`` does it."""
    if not params:
        return
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in params)
    for param, state in zip(params, states, strict=True):
        if not state:
            _init_state(param, state, fused)
    beta1, beta2 = adamw_betas(group)
    adamw(
        list(params),
        [p.grad for p in params if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=fused,
        foreach=None if fused else False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=adamw_eps(group),
        maximize=group["maximize"],
    )


def _init_state(param: Tensor, state: dict[str, Any], fused: bool) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
