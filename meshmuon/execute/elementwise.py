"""Elementwise work of a step: from gradient and momentum to what travels, and from what arrives to the weight.

``Elementwise`` is all of it, in torch's own operations. ``FusedElementwise`` is its twin for GPUs: one launch per list.

The same element may be the 10th of a rank's shard and the 1000th of the whole tensor, and must get the same bits.
torch's CPU kernels process most elements of a tensor in vectors and the last few one by one. Operations that round once
(a product, a sum) give one result either way. ``a + alpha·b`` rounds once or twice, depending on whether the compiler
fused the two. It is used where a trial shows that all elements are rounded in the same way; elsewhere it is two
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import TypeAlias

import torch
from torch import Tensor

from ..device import copy_to
from .rounding import Elements, RandomWords, RoundingScratch, apply_narrow, chunks_of, is_narrow, scratch_for, together

Tensors: TypeAlias = "list[Tensor]"

Counters: TypeAlias = "Sequence[tuple[Tensor, Elements]]"
"""For each tensor that is rounded stochastically, its counter and its elements, hashed."""


@dataclass(frozen=True, slots=True)
class OldMomenta:
    """Momenta, and copies of what they were before the step."""

    momenta: list[Tensor]
    before: list[Tensor]

    def chosen(self, selectors: Sequence[bool]) -> OldMomenta:
        """Those of some of the shards."""
        return OldMomenta(*(list(compress(tensors, selectors)) for tensors in (self.momenta, self.before)))


_FILLED_AT_ONCE = 1 << 19  # elements, before they are rounded

_TRIAL_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)


@lru_cache
def adds_uniformly(total: torch.dtype, addend: torch.dtype) -> bool:
    """Whether ``total.add_(addend, alpha=…)`` on this CPU rounds every element in the same way, at any length and
    stride.

    In 16 bits it usually does not: the last elements are rounded once more than the others. Elements with gaps between
    them, as the parts of an interleaved weight have, are processed one by one too.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.rand(520, generator=generator, device="cpu").to(dtype) for dtype in (total, addend))
    whole = a.clone().add_(b, alpha=0.95)

    def in_pieces(size: int) -> Tensor:
        pieces = zip(torch.split(a.clone(), size), torch.split(b, size), strict=True)
        return torch.cat([x.add_(y, alpha=0.95) for x, y in pieces])

    with_gaps = a.repeat_interleave(2)[::2].add_(b, alpha=0.95)
    return torch.equal(with_gaps, whole) and all(torch.equal(in_pieces(size), whole) for size in _TRIAL_SIZES)


def _all_add_uniformly(totals: list[Tensor], addends: list[Tensor]) -> bool:
    if totals[0].device.type != "cpu":
        return True
    return all(adds_uniformly(*dtypes) for dtypes in {(a.dtype, b.dtype) for a, b in zip(totals, addends, strict=True)})


def accumulate(momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor) -> None:
    """M ← retain·M + G."""
    if not isinstance(retain, Tensor) and momenta[0].device.type == "cpu" and any(is_narrow(m.dtype) for m in momenta):
        # batched, a factor would be rounded to the buffer's 16 bits
        for buffer, grad in zip(momenta, grads, strict=True):
            buffer.mul_(retain).add_(grad)
        return
    torch._foreach_mul_(momenta, retain)
    torch._foreach_add_(momenta, grads)


def look_ahead(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
    """V ← G + momentum·M."""
    if _all_add_uniformly(views, momenta):
        torch._foreach_copy_(views, grads)
        torch._foreach_add_(views, momenta, alpha=momentum)
        return
    for view, grad, buffer in zip(views, grads, momenta, strict=True):  # dtypes may differ, and decide tensor by tensor
        if adds_uniformly(view.dtype, buffer.dtype):
            view.copy_(grad).add_(buffer, alpha=momentum)
        else:
            view.copy_(buffer).mul_(momentum).add_(grad)


def fill_with_momentum(
    views: Tensors | None, grads: Tensors, momenta: Tensors, retain: float | Tensor, momentum: float | None
) -> None:
    """M ← retain·M + G; if there are views, V ← G + momentum·M, or V ← M if ``momentum`` is None."""
    accumulate(momenta, grads, retain)
    if views is None:
        return
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
    counters: Counters | None = None,
    scratch: RoundingScratch | None = None,
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there. May overwrite ``updates``.

    With ``cautious``, only elements whose update is zero or moves them towards zero decay. The parameters have one
    dtype, and so have the updates. Parameters of 16 bits are formed in float32, in ``scratch``, and rounded once;
    stochastically with ``counters``.
    """
    if is_narrow(params[0].dtype):
        scratch = RoundingScratch() if scratch is None else scratch
        words = None if counters is None else [RandomWords.of(counter, elements) for counter, elements in counters]
        apply_narrow(params, updates, decay, rate, cautious=cautious, words=words, scratch=scratch)
        return
    if cautious:
        for param, update in zip(params, updates, strict=True):
            same_way = (param * update).mul_(rate) >= 0
            decayed = param * decay
            param.copy_(torch.where(same_way, decayed, param, out=decayed))
    elif isinstance(decay, Tensor) or decay != 1.0:
        torch._foreach_mul_(params, decay)
    if not isinstance(rate, Tensor) and _all_add_uniformly(params, updates):
        torch._foreach_add_(params, updates, alpha=-rate)
    else:
        # from a wire of 16 bits: the product must not be rounded to these again
        if updates[0].dtype != params[0].dtype:
            narrow, updates = (
                updates,
                (scratch or scratch_for(params[0].device)).take_like("update", updates, params[0].dtype),
            )
            torch._foreach_copy_(updates, narrow)
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
        torch._foreach_sub_(params, updates)


class Elementwise:
    """What a step does to elements. Lists that belong together have equal lengths and shapes; gradients are only
    read.
    """

    def compile(self, work: Callable[[], object]) -> None:
        """Compiles the kernels that ``work`` would launch, and writes no element; only where there are any."""

    def fill(
        self,
        views: Tensors | None,
        grads: Tensors,
        momenta: Tensors,
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        """As ``fill_with_momentum``. Views of other dtypes than that of the update are rounded once."""
        wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        if views is None or all(view.dtype == wide for view in views):
            fill_with_momentum(views, grads, momenta, retain, momentum)
            return
        scratch = scratch_for(grads[0].device)
        cuts = (
            (view[cut], grad[cut], buffer[cut]) if cut else (view, grad, buffer)
            for view, grad, buffer in zip(views, grads, momenta, strict=True)
            for cut in chunks_of(view.shape, view.device)
        )
        for chunk in together(cuts, lambda cut: cut[1].numel(), _FILLED_AT_ONCE):
            v, g, m = (list(operand) for operand in zip(*chunk, strict=True))
            filled = scratch.take_like("filled", g, wide)
            fill_with_momentum(filled, g, m, retain, momentum)
            self.copy(v, filled)

    def apply(
        self,
        params: list[Tensor],
        updates: list[Tensor],
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool = False,
        counters: Counters | None = None,
        scratch: RoundingScratch | None = None,
        old_momenta: OldMomenta | None = None,
    ) -> None:
        """p ← p·decay − rate·update, as ``apply`` of this module.

        With ``old_momenta``, elements whose update is not finite keep weight and momentum.
        """
        finite = [torch.isfinite(update) for update in updates] if old_momenta else []
        before = [param.clone() for param in params] if old_momenta else []
        apply(params, updates, decay, rate, cautious=cautious, counters=counters, scratch=scratch)
        if old_momenta:
            now, old = [*params, *old_momenta.momenta], before + old_momenta.before
            for target, value, stays in zip(now, old, [*finite, *finite], strict=True):
                target.copy_(torch.where(stays, target, value))

    def copy(self, targets: Tensors, sources: Tensors) -> None:
        """Copies each source to its target."""
        torch._foreach_copy_(targets, sources)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        """Fills tensors with ``value`` where ``mask``, on a device, broadcast and constant along rows, is not 0."""
        mask = mask != 0
        for tensor in tensors:
            tensor.masked_fill_(copy_to(mask, tensor.device), value)

    def any_nonfinite(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        """Whether any element is infinite or NaN, as a boolean tensor; on ``device`` if there are no elements."""
        filled = [tensor for tensor in tensors if tensor.numel()]
        if not filled:
            return torch.zeros((), dtype=torch.bool, device=device)
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in filled) else torch.float32
        # The smallest and the largest of each tensor take a single pass.
        ends = [copy_to(end, filled[0].device).to(dtype) for tensor in filled for end in torch.aminmax(tensor)]
        return ~torch.isfinite(torch.stack(ends)).all()
