"""AdamW's state of a parameter, under the names that torch uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_compat import local_part, zeros_like

__all__ = ["STATE_KEYS", "can_fuse", "empty_laid_out_like", "init_state"]

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def can_fuse(param: Tensor) -> bool:
    """Whether torch's fused kernel supports this parameter. Its ``step`` is then kept on the parameter's device."""
    dense = param.is_contiguous() or param.stride() == torch.empty_like(param, device="meta").stride()
    return dense and param.is_floating_point() and param.device.type in _FUSED_DEVICES


def empty_laid_out_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory with the shape, device and memory order of ``param``."""
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)


def init_state(param: Tensor, state: dict[str, Any]) -> None:
    """Creates the state of a parameter: zeros."""
    fused = can_fuse(local_part(param))
    with torch.inference_mode(False):  # tensors created inside inference_mode could not be written outside
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        state["exp_avg"] = zeros_like(param)
        state["exp_avg_sq"] = zeros_like(param)
