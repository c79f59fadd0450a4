"""How far AdamW has moved its parameters, from the moments that it has left: small ones together, large ones in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_compat import local_part
from .sums import Segments

_CHUNK = 1 << 16  # elements that are worked on together, so that they stay in a cache


class Moments(NamedTuple):
    """AdamW's state of one parameter, as far as it is on this rank."""

    mean: Tensor
    square: Tensor
    step: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Moments:
        """From the state of a parameter."""
        return cls(*(local_part(state[key]) for key in ("exp_avg", "exp_avg_sq", "step")))


def batches(moments: Sequence[Moments]) -> list[list[int]]:
    """Which of them are worked on together: small ones that have made equally many steps, as far as the host knows."""
    found: list[list[int]] = []
    places: dict[tuple[object, ...], tuple[int, int]] = {}  # what a batch has in common → its place in ``found``, its elements
    for k, (mean, _, step) in enumerate(moments):
        key = (mean.dtype, float(step) if step.device.type == "cpu" else None)
        place, elements = places.get(key, (-1, _CHUNK))
        if elements + mean.numel() > _CHUNK:
            place, elements = len(found), 0
            found.append([])
        found[place].append(k)
        places[key] = place, elements + mean.numel()
    return found


def update_squares(moments: Sequence[Moments], betas: tuple[float, float], eps: float, segments: Segments) -> Tensor:
    """Of each parameter of a batch, the sum of squares of m̂ / (√v̂ + eps), in float64.

    ``segments`` are as large as the parameters.
    """
    steps = [one.step for one in moments]
    on_host = steps[0].device.type == "cpu"  # then the same for all of them; and a number need not be moved
    if len(moments) == 1:
        corrections: list[Any] = [1 - beta ** (float(steps[0]) if on_host else steps[0].double()) for beta in betas]
        pairs = zip(*(torch.split(moment.reshape(-1), _CHUNK) for moment in moments[0][:2]), strict=True)
        norms = [torch.linalg.vector_norm(_updates(m, v, corrections, eps)) for m, v in pairs]
        return torch.stack(norms).double().square_().sum().view(1)
    if on_host:
        corrections = [1 - beta ** float(steps[0]) for beta in betas]
    else:
        corrections = [segments.spread(1 - beta ** torch.stack(steps).double()).float() for beta in betas]
    mean, square = (torch.cat([one[k].reshape(-1) for one in moments]) for k in (0, 1))
    return segments.sums(_updates(mean, square, corrections, eps).double().square_())


def _updates(mean: Tensor, square: Tensor, corrections: Sequence[Any], eps: float) -> Tensor:
    """m̂ / (√v̂ + eps), in float32."""
    first, second = corrections
    return mean.float().div(square.float().div(second).sqrt_().add_(eps)).div_(first)
