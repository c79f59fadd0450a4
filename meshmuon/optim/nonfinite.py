"""Gradients with infinities or NaN, found by this optimizer or by a GradScaler: all ranks skip the step, or none.

If gradients are in host memory, the host finds out and the step is not made. If they are on a device, finding out would
make the host wait. The step is made then, with gradients and a mask under which nothing changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import copy_to, known_to_host
from ..errors import GradientError
from ..execute import CheckedUpdates, Elementwise
from ..params.param_record import ParamRecord
from ..torch_compat import local_part
from ..transport import Exchange


@dataclass(frozen=True, slots=True)
class Scaling:
    """The two values that a ``torch.amp.GradScaler`` sets on the optimizer."""

    scale: Tensor | None  # what the gradients are multiplied by; None if they are not scaled
    # above zero if the scaler has found a gradient that is not finite; None if there is no scaler
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: Any) -> Scaling:
        """Reads the two attributes that a scaler sets before it calls ``step`` and removes afterwards."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and not isinstance(found_inf, Tensor):
            # The number 0, from a scaler that has seen no gradient. Other ranks may have seen some, and then this rank
            # must take part in the same reduction.
            params = (param for param_group in optimizer.param_groups for param in param_group["params"])
            first = next(params, None)
            found_inf = torch.full((), float(found_inf), device=None if first is None else first.device)
        return cls(scale, found_inf)

    def remove(self, gradients: Sequence[Tensor]) -> None:
        """Divides the gradients by the scale, in place, as ``GradScaler.unscale_`` does."""
        if self.scale is None:
            return
        inverse = self.scale.double().reciprocal().float().reshape(())
        for device in {grad.device for grad in gradients}:
            torch._foreach_mul_([grad for grad in gradients if grad.device == device], copy_to(inverse, device))


NO_SCALING = Scaling(None, None)


def asked_by_scaler() -> bool:
    """Whether the caller's caller is a method of a ``torch.amp.GradScaler``.

    Scalers and trainers read the same attribute and need different answers. Nothing that a scaler does before it reads
    it reaches the optimizer, so only the frame tells who asks.
    """
    return isinstance(sys._getframe(2).f_locals.get("self"), torch.amp.GradScaler)


class NonFinite:
    """Decides whether a step is skipped because a gradient is not finite, and counts the skipped steps.

    At every step, on every rank:

    1. ``known_to_host`` says what this rank's host knows. The planner's vote combines it over the ranks. If any rank
       says yes, no rank makes the step, and each adds 1 to ``skipped``.
    2. Otherwise ``reduce_skip_mask`` combines over the ranks what only devices know, and counts a skipped step on the
       device.
    3. After the step, ``count`` takes the updates that were not finite although all gradients were. Their matrices have
       kept weights and momentum. With ``"raise"``, ``known_to_host`` of the next step raises, and the vote tells the
       other ranks.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.skipped: int | Tensor = 0  # number of skipped steps; a tensor if only a device knows it
        self.skipped_matrices: int | Tensor = 0  # number of updates left out; also a tensor then
        self._checked: Sequence[CheckedUpdates] = ()  # by the last step

    @property
    def guards(self) -> bool:
        """Whether updates that are not finite are left out."""
        return self.policy != "propagate"

    def count(self, checked: Sequence[CheckedUpdates]) -> None:
        """Counts the matrices of this rank whose updates the step has left out."""
        self._checked = checked
        if checked:
            flags = sorted((flags for _, flags in checked), key=known_to_host)  # the host must not wait for a device
            joined = torch.cat([copy_to(of_batch, flags[0].device) for of_batch in flags])
            self.skipped_matrices = self.skipped_matrices + (joined != 0).sum()

    def known_to_host(self, params: Sequence[ParamRecord], scaling: Scaling) -> bool:
        """Whether the host of this rank knows that the step must be skipped; with ``"raise"`` it waits for devices
        and raises.
        """
        plain, (checked, self._checked) = Elementwise(), (self._checked, ())
        if self.policy == "raise":
            gradients = gradients_of(params) if scaling.found_inf is None else []
            if bool(plain.any_nonfinite([*gradients, *(flags for _, flags in checked)])):  # one wait for the device
                self._raise(params, checked)
        if scaling.found_inf is not None:
            return known_to_host(scaling.found_inf) and bool(scaling.found_inf > 0)
        if self.policy != "skip":
            return False
        on_host = [grad for grad in gradients_of(params) if known_to_host(grad)]
        return bool(on_host) and bool(plain.any_nonfinite(on_host))

    def _raise(self, params: Sequence[ParamRecord], checked: Sequence[CheckedUpdates]) -> None:
        flagged = (
            name for names, flags in checked for name, flag in zip(names, flags.tolist(), strict=True) if flag != 0
        )
        if (name := next(flagged, None)) is not None:
            raise GradientError(
                f"{name} had an update that is not finite in the last step, although its gradient was finite, and "
                "kept weights and momentum. Nothing was stepped now. Look for the cause, such as outliers in 16 bits, "
                "or pass "
                'nonfinite="skip" to leave out such updates.'
            )
        name = next(record.name for record in params if bool(Elementwise().any_nonfinite(gradients_of([record]))))
        raise GradientError(
            f"{name} has a gradient that is not finite. Nothing was stepped. Look for the cause, or pass "
            'nonfinite="skip" to skip such steps.'
        )

    def mask_like(self, params: Sequence[ParamRecord], scaling: Scaling) -> Tensor | None:
        """A mask that is not set, where ``reduce_skip_mask`` will make one; None if it will not."""
        asked = (
            [record.param for record in params if self.policy == "skip"]
            if scaling.found_inf is None
            else [scaling.found_inf]
        )
        device = next((tensor.device for tensor in asked if not known_to_host(tensor)), None)
        return None if device is None else torch.zeros((), dtype=torch.bool, device=device)

    def found(
        self, params: Sequence[ParamRecord], scaling: Scaling, elementwise: Elementwise, *, stand_ins: bool = False
    ) -> Tensor | None:
        """Whether a device of this rank has found such a gradient, as a boolean there; None if none has to be asked."""
        if scaling.found_inf is not None:
            return None if known_to_host(scaling.found_inf) else scaling.found_inf > 0
        on_device = [record for record in params if not known_to_host(record.param)] if self.policy == "skip" else []
        gradients = gradients_of(on_device, stand_ins=stand_ins)
        return elementwise.any_nonfinite(gradients, on_device[0].param.device) if on_device else None

    def reduce_skip_mask(
        self, params: Sequence[ParamRecord], scaling: Scaling, exchange: Exchange | None, elementwise: Elementwise
    ) -> Tensor | None:
        """Whether all ranks skip the step: a boolean tensor without dims on the device, or None if no device has to be
        asked.

        Also counts a skipped step. All ranks reduce or none: options and devices decide, which are the same on all
        ranks.
        """
        if (found := self.found(params, scaling, elementwise)) is None:
            return None
        flag = found.float().reshape(1)
        if exchange is not None:
            exchange.reduce_largest(flag)
        skip = flag[0] > 0
        self.skipped = self.skipped + skip.long()
        return skip


def gradients_of(params: Iterable[ParamRecord], *, stand_ins: bool = False) -> list[Tensor]:
    """The local tensors of all gradients; with ``stand_ins``, weights that train instead of gradients that are not
    there.
    """
    tensors = [record.param for record in params]
    gradients = [param if stand_ins and param.grad is None and param.requires_grad else param.grad for param in tensors]
    return [local_part(gradient) for gradient in gradients if gradient is not None]
