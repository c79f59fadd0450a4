"""Elementwise work of a step: from gradient and momentum to what travels, and from what arrives to the weight.

The same element may be the 10th of a rank's shard and the 1000th of the whole tensor, and must get the same bits. torch's CPU
kernels process most elements of a tensor in vectors and the last few one by one. Operations that round once (a product, a sum)
give one result either way. ``a + alpha·b`` rounds once or twice, depending on whether the compiler fused the two. It is used
where a trial shows that all elements are rounded alike; elsewhere it is two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .rounding import RandomWords, RoundingScratch, apply_narrow, is_narrow

_TRIAL_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)


@lru_cache
def adds_alike(total: torch.dtype, addend: torch.dtype) -> bool:
    """Whether ``total.add_(addend, alpha=…)`` on this CPU rounds every element alike, in tensors of any length and stride.

    In 16 bits it usually does not: the last elements are rounded once more than the others. Elements with gaps between them, as
    the parts of an interleaved weight have, are processed one by one too.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.rand(520, generator=generator, device="cpu").to(dtype) for dtype in (total, addend))
    whole = a.clone().add_(b, alpha=0.95)

    def in_pieces(size: int) -> Tensor:
        pieces = zip(torch.split(a.clone(), size), torch.split(b, size), strict=True)
        return torch.cat([x.add_(y, alpha=0.95) for x, y in pieces])

    with_gaps = a.repeat_interleave(2)[::2].add_(b, alpha=0.95)
    return torch.equal(with_gaps, whole) and all(torch.equal(in_pieces(size), whole) for size in _TRIAL_SIZES)


def _all_add_alike(totals: list[Tensor], addends: list[Tensor]) -> bool:
    if totals[0].device.type != "cpu":
        return True
    return all(adds_alike(*dtypes) for dtypes in {(a.dtype, b.dtype) for a, b in zip(totals, addends, strict=True)})


def accumulate(momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor) -> None:
    """M ← retain·M + G."""
    if isinstance(retain, Tensor) or momenta[0].device.type != "cpu":
        torch._foreach_mul_(momenta, retain)
        torch._foreach_add_(momenta, grads)
        return
    for buffer, grad in zip(momenta, grads, strict=True):  # batched on a CPU, a factor would be rounded to the buffer's 16 bits
        buffer.mul_(retain).add_(grad)


def look_ahead(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
    """V ← G + momentum·M."""
    if _all_add_alike(views, momenta):
        torch._foreach_copy_(views, grads)
        torch._foreach_add_(views, momenta, alpha=momentum)
        return
    for view, grad, buffer in zip(views, grads, momenta, strict=True):  # dtypes may differ, and decide tensor by tensor
        if adds_alike(view.dtype, buffer.dtype):
            view.copy_(grad).add_(buffer, alpha=momentum)
        else:
            view.copy_(buffer).mul_(momentum).add_(grad)


def fill_with_momentum(
    views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], retain: float | Tensor, momentum: float | None
) -> None:
    """M ← retain·M + G, and V ← G + momentum·M, or V ← M if ``momentum`` is None."""
    accumulate(momenta, grads, retain)
    if momentum is None:
        torch._foreach_copy_(views, momenta)
    else:
        look_ahead(views, grads, momenta, momentum)


def apply(
    params: list[Tensor],
    updates: list[Tensor],
    decay: float | Tensor,
    rate: float | Tensor,
    *,
    cautious: bool = False,
    words: Sequence[RandomWords | None] | None = None,
    scratch: RoundingScratch | None = None,
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there. May overwrite ``updates``.

    With ``cautious``, only elements whose update is zero or moves them towards zero decay. The parameters have one dtype, and so
    have the updates. Parameters of 16 bits are formed in float32, in ``scratch``, and rounded once; stochastically where they
    have ``words``.
    """
    if is_narrow(params[0].dtype):
        scratch = RoundingScratch() if scratch is None else scratch
        apply_narrow(params, updates, decay, rate, cautious=cautious, words=words, scratch=scratch)
        return
    if cautious:
        for param, update in zip(params, updates, strict=True):
            same_way = (param * update).mul_(rate) >= 0
            decayed = param * decay
            param.copy_(torch.where(same_way, decayed, param, out=decayed))
    elif isinstance(decay, Tensor) or decay != 1.0:
        torch._foreach_mul_(params, decay)
    if not isinstance(rate, Tensor) and _all_add_alike(params, updates):
        torch._foreach_add_(params, updates, alpha=-rate)
    else:
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
        torch._foreach_sub_(params, updates)
