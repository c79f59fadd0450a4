"""Gradients with infinities or NaN, found by this optimizer or by a GradScaler: one decision on all ranks.

Where the host knows the verdict, a step that must not be made is not made. On a device the host would have to wait to know it;
there the step is made with numbers under which nothing changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..errors import ConfigError, GradientError
from ..params.named_params import NamedParam
from ..torch_compat import local_part
from ..transport import Exchange

__all__ = ["NO_SCALING", "NonFinite", "Scaling", "asked_by_scaler", "gradients_of", "silence"]

_POLICIES = ("propagate", "skip", "raise")


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a ``torch.amp.GradScaler`` has told the optimizer: the scale of its gradients, and whether it found any not finite."""

    scale: Tensor | None
    found: Tensor | None

    @classmethod
    def of(cls, optimizer: Any) -> Scaling:
        """The scaler sets two attributes before it calls ``step`` and removes them afterwards."""
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found is not None and not isinstance(found, Tensor):
            # The number 0, from a scaler that met no gradient; other ranks may have some, and take part in one more reduction.
            first = next((param for group in optimizer.param_groups for param in group["params"]), None)
            found = torch.full((), float(found), device=None if first is None else first.device)
        return cls(scale, found)

    def remove(self, gradients: Sequence[Tensor]) -> None:
        """Divides the gradients by the scale, in place, as ``GradScaler.unscale_`` does."""
        if self.scale is None:
            return
        inverse = self.scale.double().reciprocal().float().reshape(())
        for device, members in _by_device(gradients).items():
            torch._foreach_mul_(members, _at(inverse, device))


NO_SCALING = Scaling(None, None)


def asked_by_scaler() -> bool:
    """Whether the caller's caller is a method of a ``torch.amp.GradScaler``."""
    return isinstance(sys._getframe(2).f_locals.get("self"), torch.amp.GradScaler)


class NonFinite:
    """What to do about gradients that are not finite, and how often it was done."""

    def __init__(self, policy: str) -> None:
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise ConfigError(f"nonfinite={policy!r} must be one of {', '.join(map(repr, _POLICIES))}.")
        self.policy = policy
        self._skipped: int | Tensor = 0

    @property
    def skipped(self) -> int:
        """Steps that were not made; reading it waits for the device."""
        return int(self._skipped)

    def known(self, parameters: Sequence[NamedParam], scaling: Scaling) -> bool:
        """This rank's verdict as far as the host knows it. Under ``"raise"`` it finds out and raises."""
        if scaling.found is not None:
            return known_to_host(scaling.found) and bool(scaling.found > 0)
        if self.policy == "raise":
            self._raise(parameters)
        if self.policy != "skip":
            return False
        near = [grad for grad in gradients_of(parameters) if known_to_host(grad)]
        return bool(near) and bool(_any_nonfinite(near))

    def mask_on_device(self, params: Sequence[NamedParam], scaling: Scaling, exchange: Exchange | None) -> Tensor | None:
        """Whether all ranks skip the step, a boolean tensor without dims on the device; None where the host knows everything.

        Whether ranks reduce here depends only on what is equal on all of them: options, and where parameters are.
        """
        flag = self._flag_on_device(params, scaling)
        if flag is None:
            return None
        if exchange is not None:
            exchange.largest(flag)
        skip = flag[0] > 0
        self._skipped = self._skipped + skip.long()
        return skip

    def _flag_on_device(self, params: Sequence[NamedParam], scaling: Scaling) -> Tensor | None:
        """This rank's verdict, (1,), where only the device knows it: 1.0 to skip the step."""
        if scaling.found is not None:
            return None if known_to_host(scaling.found) else (scaling.found > 0).float().reshape(1)
        on_device = [named for named in params if not known_to_host(named.param)] if self.policy == "skip" else []
        if not on_device:
            return None
        return _any_nonfinite(gradients_of(on_device), on_device[0].param.device).float().reshape(1)

    def count(self) -> None:
        """One more step was not made."""
        self._skipped = self._skipped + 1

    def _raise(self, parameters: Sequence[NamedParam]) -> None:
        if not bool(_any_nonfinite(gradients_of(parameters))):  # one wait for the device; only a culprit is worth one each
            return
        for one in parameters:
            if bool(_any_nonfinite(gradients_of([one]))):
                raise GradientError(
                    f"{one.name} has a gradient that is not finite. Nothing was stepped. Look for the cause, or pass "
                    'nonfinite="skip" to leave out such steps.'
                )


def silence(gradients: Sequence[Tensor], skip_mask: Tensor) -> None:
    """Gradients that add nothing where ``skip_mask`` is true. The zeros are negative: x + (−0) is x, bit for bit, also for −0."""
    for grad in gradients:
        grad.masked_fill_(_at(skip_mask, grad.device), -0.0)


def gradients_of(parameters: Iterable[NamedParam]) -> list[Tensor]:
    """This rank's parts of all gradients."""
    return [local_part(one.param.grad) for one in parameters if one.param.grad is not None]


def _any_nonfinite(gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Whether any element is infinite or NaN, as a tensor; smallest and largest of each gradient tell, and need one pass."""
    filled = [grad for grad in gradients if grad.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.bool, device=device)
    where = filled[0].device
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in filled) else torch.float32
    ends = [_at(end, where).to(dtype) for grad in filled for end in torch.aminmax(grad)]
    return ~torch.isfinite(torch.stack(ends)).all()


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. Only the host must wait for what comes to it: it would read what has not arrived yet."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
