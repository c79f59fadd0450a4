"""AdamW for the parameters that are not matrices: torch's own functional step, with torch's own state names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .groups import adamw_betas, adamw_eps

__all__ = ["STATE_KEYS", "adamw_step", "can_fuse"]

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def adamw_step(group: dict[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """One AdamW step on ``params``, which all have gradients, exactly as ``torch.optim.AdamW(fused=True)`` does it."""
    for fused in (True, False):
        chosen = [k for k, param in enumerate(params) if can_fuse(param) is fused]
        if chosen:
            _step(group, [params[k] for k in chosen], [states[k] for k in chosen], fused)


def _step(group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], fused: bool) -> None:
    for param, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            _init_state(param, state, fused)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = _in_layout_of(param, state[key], state[key].dtype)
    beta1, beta2 = adamw_betas(group)
    adamw(
        params,
        [_gradient(param) for param in params],
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


def can_fuse(param: Tensor) -> bool:
    """Whether torch's fused kernel takes this parameter; its ``step`` then lives on the parameter's device."""
    dense = param.is_contiguous() or param.stride() == torch.empty_like(param, device="meta").stride()
    return dense and param.is_floating_point() and param.device.type in _FUSED_DEVICES


def _gradient(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    return _in_layout_of(param, grad, param.dtype)


def _in_layout_of(param: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in the parameter's memory order: fused kernels walk both by address and would mix up the entries."""
    if tensor.stride() == param.stride() and tensor.dtype == dtype:
        return tensor
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(tensor)


def _init_state(param: Tensor, state: dict[str, Any], fused: bool) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
