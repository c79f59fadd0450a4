"""Momentum, look-ahead and update: what a step does element by element, with the same bits wherever an element lies.

The same element may be the 10th of a rank's shard and the 1000th of the whole tensor. torch's CPU kernels process most elements
of a tensor in vectors and the last few one by one. Operations that round once (a product, a sum, a quotient, a root) have one
correct result and give it either way. ``a + alpha·b`` rounds once or twice, depending on whether the compiler fused the two. It
is used where a trial shows that all elements are rounded alike; elsewhere it is two operations. Momentum is accumulated in two as
well where torch's fused kernel does so (see ``fused_momentum.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from .fused_momentum import fill_large, fused_rounding
from .one_pass import apply_to_large
from .portions import portion_size, portions_of_lists, portions_of_tensors
from .rounding import RandomWords, RoundingScratch, apply_nearest, apply_rounded, is_narrow
from .small_stack import SmallStacks

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


def accumulates_once(dtype: torch.dtype) -> bool:
    """Whether momentum and gradients of ``dtype`` on this CPU are added with one rounding, not two."""
    return adds_alike(dtype, dtype) and fused_rounding(dtype) != "twice"


def accumulate(momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor) -> None:
    """M ← retain·M + G."""
    if isinstance(retain, Tensor) or momenta[0].device.type != "cpu":
        torch._foreach_mul_(momenta, retain)
        torch._foreach_add_(momenta, grads)
        return
    first_dtype = momenta[0].dtype
    first_once = accumulates_once(first_dtype)  # asked once for the dtype that most tensors have
    for buffer, grad in zip(momenta, grads, strict=True):  # not batched: one operation reads memory once, two batched ones twice
        dtype = buffer.dtype
        if grad.dtype is dtype and (first_once if dtype is first_dtype else accumulates_once(dtype)):
            torch.add(grad, buffer, alpha=retain, out=buffer)
        else:
            buffer.mul_(retain).add_(grad)


def look_ahead(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
    """V ← G + momentum·M."""
    if views[0].device.type != "cpu":
        torch._foreach_copy_(views, grads)
        torch._foreach_add_(views, momenta, alpha=momentum)
        return
    first_dtype = views[0].dtype
    first_adds_alike = adds_alike(first_dtype, first_dtype)  # as in ``accumulate``
    for view, grad, buffer in zip(views, grads, momenta, strict=True):
        dtype, buffer_dtype = view.dtype, buffer.dtype
        both_first = dtype is first_dtype and buffer_dtype is first_dtype
        if not (first_adds_alike if both_first else adds_alike(dtype, buffer_dtype)):
            view.copy_(buffer).mul_(momentum).add_(grad)
        elif grad.dtype is dtype and buffer_dtype is dtype:
            torch.add(grad, buffer, alpha=momentum, out=view)
        else:
            view.copy_(grad).add_(buffer, alpha=momentum)


def fill_with_momentum(
    views: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    retain: float | Tensor,
    momentum: float | None,
    *,
    stacks: SmallStacks | None = None,
) -> None:
    """M ← retain·M + G, and V ← G + momentum·M, or V ← M if ``momentum`` is None.

    On a CPU large tensors are filled in one pass where possible (see ``fused_momentum.py``). Of others, both are done to one
    portion before the next portion has its turn (see ``portions.py``). ``stacks`` are given for small tensors only: all of them
    have the shape, and ``views`` the dtype, for which the stacks were made.
    """
    if isinstance(retain, Tensor) or views[0].device.type != "cpu":
        accumulate(momenta, grads, retain)
        _fill(views, grads, momenta, momentum)
    elif stacks is not None and {tensor.dtype for tensors in (grads, momenta) for tensor in tensors} == {views[0].dtype}:
        _fill_from_stacks(views, grads, momenta, retain, momentum, stacks)
    else:
        limit = portion_size()
        if adds_alike(views[0].dtype, views[0].dtype):
            views, grads, momenta = fill_large(views, grads, momenta, retain, momentum)
        for view_portion, grad_portion, momentum_portion in portions_of_lists(views, grads, momenta, limit=limit):
            view, grad, buffer = view_portion[0], grad_portion[0], momentum_portion[0]
            if view.numel() <= limit or not view.dtype == grad.dtype == buffer.dtype or not adds_alike(view.dtype, view.dtype):
                accumulate(momentum_portion, grad_portion, retain)
                _fill(view_portion, grad_portion, momentum_portion, momentum)
            else:
                _fill_large(view, grad, buffer, retain, momentum, limit)


def _fill_large(view: Tensor, grad: Tensor, buffer: Tensor, retain: float, momentum: float | None, limit: int) -> None:
    """``fill_with_momentum`` of a tensor that is larger than a portion, in a dtype for which ``adds_alike`` holds.

    It calls torch directly, to keep the loop short: each operation displaces the interpreter's own data from the cache, so that
    every line of Python after it is slow.
    """
    once = accumulates_once(buffer.dtype)
    for view_portion, grad_portion, buffer_portion in zip(*portions_of_tensors(view, grad, buffer, limit=limit), strict=True):
        if once:
            torch.add(grad_portion, buffer_portion, alpha=retain, out=buffer_portion)
        else:
            buffer_portion.mul_(retain).add_(grad_portion)
        if momentum is None:
            view_portion.copy_(buffer_portion)
        else:
            torch.add(grad_portion, buffer_portion, alpha=momentum, out=view_portion)


def _fill_from_stacks(
    views: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    retain: float,
    momentum: float | None,
    stacks: SmallStacks,
) -> None:
    for start, stop in stacks.spans(len(views)):
        (stacked_grads, _), (stacked_momenta, members) = (stacks.memory(name, stop - start) for name in ("grads", "momenta"))
        torch.stack(grads[start:stop], out=stacked_grads)
        torch.stack(momenta[start:stop], out=stacked_momenta)
        accumulate([stacked_momenta], [stacked_grads], retain)
        torch._foreach_copy_(momenta[start:stop], members)
        stacked_views, to_copy = stacks.views(start, stop), list[Tensor]()
        if stacked_views is None:
            stacked_views, to_copy = stacks.memory("views", stop - start)
        _fill([stacked_views], [stacked_grads], [stacked_momenta], momentum)
        if to_copy:
            torch._foreach_copy_(views[start:stop], to_copy)


def _fill(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float | None) -> None:
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
    add_alike: bool | None = None,
    words: Sequence[RandomWords | None] | None = None,
    scratch: RoundingScratch | None = None,
    stacks: SmallStacks | None = None,
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there. May overwrite ``updates``.

    With ``cautious``, only elements whose update is zero or moves them towards zero decay. ``add_alike`` is the result of
    ``all_add_alike`` for the parameters and updates, if the caller knows it. The parameters have one dtype. Those of 16 bits are
    formed in float32, in ``scratch``, and rounded once; stochastically where they have ``words``. ``stacks`` are given for small
    parameters only: all of them have the shape and dtype for which the stacks were made.
    """
    if params and is_narrow(params[0].dtype):
        scratch = RoundingScratch() if scratch is None else scratch
        if words is None and not cautious:
            apply_nearest(params, updates, decay, rate, scratch)
            return
        for param, update, param_words in zip(params, updates, words or [None] * len(params), strict=True):
            apply_rounded(param, update, decay, rate, cautious=cautious, words=param_words, scratch=scratch)
        return
    alike = not isinstance(rate, Tensor) and (all_add_alike(params, updates) if add_alike is None else add_alike)
    subtract = partial(torch._foreach_add_, alpha=-rate) if alike else partial(_subtract_in_two, rate=rate)
    if cautious:
        for param, update in zip(params, updates, strict=True):
            same_way = (param * update).mul_(rate) >= 0
            decayed = param * decay
            param.copy_(torch.where(same_way, decayed, param, out=decayed))
        subtract(params, updates)
    elif not isinstance(decay, Tensor) and decay == 1.0:
        subtract(params, updates)
    elif params[0].device.type != "cpu":
        torch._foreach_mul_(params, decay)
        subtract(params, updates)
    elif stacks is not None:
        _apply_to_stacks(params, updates, decay, subtract, stacks)
    else:
        limit = portion_size()
        # A tensor, since torch would turn a number into one for each parameter.
        factor = torch.as_tensor(decay, dtype=params[0].dtype, device=params[0].device)
        if alike and not isinstance(decay, Tensor) and not isinstance(rate, Tensor):
            params, updates = apply_to_large(params, updates, decay, rate)
        for param_portion, update_portion in portions_of_lists(params, updates, limit=limit):
            if param_portion[0].numel() <= limit:
                torch._foreach_mul_(param_portion, factor)
                subtract(param_portion, update_portion)
                continue
            for param, update in zip(*portions_of_tensors(param_portion[0], update_portion[0], limit=limit), strict=True):
                subtract([param.mul_(factor)], [update])


def _apply_to_stacks(
    params: list[Tensor],
    updates: list[Tensor],
    decay: float | Tensor,
    subtract: Callable[[list[Tensor], list[Tensor]], None],
    stacks: SmallStacks,
) -> None:
    for start, stop in stacks.spans(len(params)):
        stacked_params, members = stacks.memory("momenta", stop - start)  # ``fill_with_momentum`` is done with this buffer
        torch.stack(params[start:stop], out=stacked_params)
        stacked_updates = stacks.views(start, stop)
        if stacked_updates is None:
            stacked_updates = torch.stack(updates[start:stop], out=stacks.memory("views", stop - start)[0])
        subtract([stacked_params.mul_(decay)], [stacked_updates])
        torch._foreach_copy_(params[start:stop], members)


def _subtract_in_two(params: list[Tensor], updates: list[Tensor], rate: float | Tensor) -> None:
    torch._foreach_mul_(updates, rate)
    torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
    torch._foreach_sub_(params, updates)


def all_add_alike(totals: list[Tensor], addends: list[Tensor]) -> bool:
    """Whether ``adds_alike`` holds for all pairs of tensors."""
    if totals[0].device.type != "cpu":
        return True
    return all(adds_alike(*dtypes) for dtypes in {(a.dtype, b.dtype) for a, b in zip(totals, addends, strict=True)})
