"""Momentum, look-ahead and update: what a step does element by element, with the same bits wherever an element lies.

The same element may be the 10th of a rank's shard and the 1000th of the whole tensor. torch's CPU kernels process most elements
of a tensor in vectors and the last few one by one. Operations that round once (a product, a sum, a quotient, a root) have one
correct result and give it either way. ``a + alpha·b`` rounds once or twice, depending on whether the compiler fused the two. It
is used where a trial shows that all elements are rounded alike; elsewhere it is two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .rounding import RandomWords, RoundingScratch, apply_nearest, apply_rounded, is_narrow

_TRIAL_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)


@lru_cache
def adds_alike(total: torch.dtype, addend: torch.dtype) -> bool:
    """Whether ``total.add_(addend, alpha=…)`` on this CPU rounds every element alike, in tensors of any length.

    In 16 bits it usually does not: the last elements are rounded once more than the others.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(520, generator=generator).to(dtype) for dtype in (total, addend))
    whole = a.clone().add_(b, alpha=0.95)

    def in_pieces(size: int) -> Tensor:
        pieces = zip(torch.split(a.clone(), size), torch.split(b, size), strict=True)
        return torch.cat([x.add_(y, alpha=0.95) for x, y in pieces])

    return all(torch.equal(in_pieces(size), whole) for size in _TRIAL_SIZES)


def accumulate(momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor) -> None:
    """M ← retain·M + G."""
    if isinstance(retain, Tensor) or momenta[0].device.type != "cpu":
        torch._foreach_mul_(momenta, retain)
        torch._foreach_add_(momenta, grads)
        return
    usual = momenta[0].dtype  # looked up once: each tensor's own dtypes decide, but they rarely differ
    usually = adds_alike(usual, usual)
    for buffer, grad in zip(momenta, grads, strict=True):  # not batched: one operation reads memory once, two batched ones twice
        kind = buffer.dtype
        if grad.dtype is kind and (usually if kind is usual else adds_alike(kind, kind)):
            torch.add(grad, buffer, alpha=retain, out=buffer)
        else:
            buffer.mul_(retain).add_(grad)


def look_ahead(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
    """V ← G + momentum·M."""
    if views[0].device.type != "cpu":
        torch._foreach_copy_(views, grads)
        torch._foreach_add_(views, momenta, alpha=momentum)
        return
    usual = views[0].dtype
    usually = adds_alike(usual, usual)
    for view, grad, buffer in zip(views, grads, momenta, strict=True):
        kind, buffer_kind = view.dtype, buffer.dtype
        if not (usually if kind is usual and buffer_kind is usual else adds_alike(kind, buffer_kind)):
            view.copy_(buffer).mul_(momentum).add_(grad)
        elif grad.dtype is kind and buffer_kind is kind:
            torch.add(grad, buffer, alpha=momentum, out=view)
        else:
            view.copy_(grad).add_(buffer, alpha=momentum)


def apply(
    params: list[Tensor],
    updates: list[Tensor],
    decay: float | Tensor,
    rate: float | Tensor,
    *,
    cautious: bool = False,
    add_alike: bool | None = None,
    words: Sequence[RandomWords | None] | None = None,
    scratch: RoundingScratch | None = None,
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there. May overwrite ``updates``.

    With ``cautious``, only elements whose update is zero or moves them towards zero decay. ``add_alike`` is the result of
    ``all_add_alike`` for the parameters and updates, if the caller knows it. The parameters have one dtype. Those of 16 bits are
    formed in float32, in ``scratch``, and rounded once; stochastically where they have ``words``.
    """
    if params and is_narrow(params[0].dtype):
        scratch = RoundingScratch() if scratch is None else scratch
        if words is None and not cautious:
            apply_nearest(params, updates, decay, rate, scratch)
            return
        for param, update, param_words in zip(params, updates, words or [None] * len(params), strict=True):
            apply_rounded(param, update, decay, rate, cautious=cautious, words=param_words, scratch=scratch)
        return
    if cautious:
        for param, update in zip(params, updates, strict=True):
            same_way = (param * update).mul_(rate) >= 0
            decayed = param * decay
            param.copy_(torch.where(same_way, decayed, param, out=decayed))
    elif isinstance(decay, Tensor) or decay != 1.0:
        torch._foreach_mul_(params, decay)
    if isinstance(rate, Tensor) or not (all_add_alike(params, updates) if add_alike is None else add_alike):
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-rate)


def all_add_alike(totals: list[Tensor], addends: list[Tensor]) -> bool:
    """Whether ``adds_alike`` holds for all pairs of tensors."""
    if totals[0].device.type != "cpu":
        return True
    return all(adds_alike(*dtypes) for dtypes in {(a.dtype, b.dtype) for a, b in zip(totals, addends, strict=True)})
