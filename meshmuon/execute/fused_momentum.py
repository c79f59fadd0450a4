"""Momentum and look-ahead of large tensors in one pass over memory instead of two, where that gives the same bits.

torch's fused SGD computes M ← momentum·M + G and p ← p − lr·(G + momentum·M) for each element. With lr = −1 and a p of −0 it
leaves the look-ahead in p: −0 + x is x, whatever the sign of x. Gradient and momentum are then read once. Separate operations
read both twice, and the second time from memory, since a portion that fits into the cache takes less time than starting its
operations.

torch processes most elements in vectors. Depending on how it was compiled, these accumulate with one rounding, as ``add`` with
``alpha`` does (seen on AVX-512), or with two, like a product and a sum (seen on AVX2). A trial finds out which, and all momentum
of this process is then accumulated that way, fused or not. The last elements of a tensor, which torch processes one by one, may
be rounded in the other way, so that only whole vectors are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..torch_compat import fused_momentum, is_lazy
from .one_pass import LARGE, VECTOR_MULTIPLE
from .portions import portions_of_lists

AT_A_TIME = 1 << 20  # elements that are set to −0 before they are filled: they stay in a cache that cores share until then


@lru_cache
def fused_rounding(dtype: torch.dtype) -> Literal["once", "twice"] | None:
    """How often the fused operation rounds momentum in whole vectors, wherever they begin; None if it cannot replace others.

    It is only asked for dtypes in which ``add`` with ``alpha`` rounds every element alike.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    size, kinds = 64 * VECTOR_MULTIPLE, set[Literal["once", "twice"]]()
    grads, momenta = (torch.randn(size + 3, generator=generator, device="cpu").to(dtype) for _ in range(2))
    for start, length, momentum in ((0, size, 0.95), (1, 3 * VECTOR_MULTIPLE, 0.9), (3, size, 0.99)):
        grad, before = grads[start : start + length], momenta[start : start + length]
        after, view = before.clone(), torch.empty_like(before)
        fused = _fill_whole_vectors([view], [grad], [after], momentum, nesterov=True)
        if not fused or not torch.equal(view, torch.add(grad, after, alpha=momentum)):
            return None
        if torch.equal(after, torch.add(grad, before, alpha=momentum)):
            kinds.add("once")
        elif torch.equal(after, before.mul(momentum).add_(grad)):
            kinds.add("twice")
        else:
            return None
    return kinds.pop() if len(kinds) == 1 else None


def fill_large(
    views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], retain: float, momentum: float | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """``fill_with_momentum`` of large tensors on a CPU, where one pass is possible.

    Returns what is still to be filled: views, gradients and momenta. All dtypes must be that of the first view to be filled here.
    """
    dtype = views[0].dtype
    if momentum not in (None, retain) or not retain or fused_rounding(dtype) is None:
        return views, grads, momenta
    left: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    taken: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for tensors in zip(views, grads, momenta, strict=True):
        for chosen, tensor in zip(taken if _fits(tensors, dtype) else left, tensors, strict=True):
            chosen.append(tensor)
    nesterov = momentum is not None
    for view_portion, grad_portion, momentum_portion in portions_of_lists(*taken, limit=AT_A_TIME):
        view, grad, buffer = view_portion[0], grad_portion[0], momentum_portion[0]
        if view.numel() <= AT_A_TIME:
            _fill_whole_vectors(view_portion, grad_portion, momentum_portion, retain, nesterov=nesterov)
            continue
        for parts in zip(*(torch.split(tensor.view(-1), AT_A_TIME) for tensor in (view, grad, buffer)), strict=True):
            _fill_whole_vectors(parts[:1], parts[1:2], parts[2:], retain, nesterov=nesterov)
    return left


def _fits(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> bool:
    size = tensors[0].numel()
    return (
        size >= LARGE
        and size % VECTOR_MULTIPLE == 0
        and all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)
        and not tensors[1].is_inference()  # torch takes the operation for one that writes gradients
        and not is_lazy(tensors[1])
    )


def _fill_whole_vectors(
    views: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, *, nesterov: bool
) -> bool:
    for view in views:
        view.fill_(-0.0)
    return fused_momentum(views, grads, momenta, momentum, nesterov=nesterov)
