"""AdamW for the parameters that are not matrices: torch's own functional step, with torch's own state names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..execute import local_part
from .groups import adamw_betas, adamw_eps

__all__ = ["STATE_KEYS", "adamw_step", "can_fuse"]

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def adamw_step(
    group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[dict[str, Any]]
) -> None:
    """One AdamW step on the local part of ``params``, exactly as ``torch.optim.AdamW(fused=True)`` does it."""
    for fused in (True, False):
        chosen = [k for k, param in enumerate(params) if can_fuse(local_part(param)) is fused]
        if chosen:
            _step(group, [params[k] for k in chosen], [grads[k] for k in chosen], [states[k] for k in chosen], fused)


def _step(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], fused: bool) -> None:
    for param, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            _init_state(param, state, fused)
        for key in ("exp_avg", "exp_avg_sq"):
            if local_part(state[key]).stride() != local_part(param).stride():
                state[key] = _like(param, state[key].dtype).copy_(state[key])
    local = [local_part(param) for param in params]
    beta1, beta2 = adamw_betas(group)
    adamw(
        local,
        [_in_layout_of(param, local_part(grad)) for param, grad in zip(local, grads, strict=True)],
        [local_part(state["exp_avg"]) for state in states],
        [local_part(state["exp_avg_sq"]) for state in states],
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


def _in_layout_of(param: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the parameter's memory order: fused kernels walk both by address and would mix up the entries."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    return _like(param, param.dtype).copy_(grad)


def _like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _init_state(param: Tensor, state: dict[str, Any], fused: bool) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
