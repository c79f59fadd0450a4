"""The options of a param group as one step applies them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..device import copy_to, known_to_host
from ..execute import StepSettings
from ..params.lr import lr_factor
from ..params.option_table import ParamGroup


def settings_of(group: ParamGroup, skip_mask: Tensor | None, device: torch.device) -> StepSettings:
    """The options for those parameters of a param group that are on ``device``."""
    lr = group["lr"]
    # An lr on a device stays a tensor: reading it would wait for the device. For weights in host memory the host has to read it.
    on_host = device.type == "cpu"
    lr = float(lr) if not isinstance(lr, Tensor) or known_to_host(lr) or on_host else lr.reshape(())
    skip_mask = copy_to(skip_mask, device) if skip_mask is not None and on_host else skip_mask
    momentum = float(group["momentum"])
    retain: float | Tensor = momentum
    decay = 1 - lr * float(group["weight_decay"])
    rate = -lr if group["maximize"] else lr
    if skip_mask is not None:  # a skipped step keeps momentum and weights: retain = decay = 1 and rate = 0
        exact = any(torch.float64 in (param.dtype, group["momentum_dtype"]) for param in group["params"])
        zero = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=skip_mask.device)
        retain, decay = (torch.where(skip_mask, zero + 1, value) for value in (momentum, decay))
        rate = torch.where(skip_mask, zero, rate)
    return StepSettings(
        momentum=momentum,
        retain=retain,
        nesterov=group["nesterov"],
        decay=decay,
        rate=rate,
        adjust=partial(lr_factor, group["adjust_lr_fn"]),
        free_grad=group["none_grad"],
        cautious=group["cautious_weight_decay"],
        skip_mask=skip_mask,
    )
