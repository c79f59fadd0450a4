"""Elementwise work of a step: from gradient and momentum to what travels, and from what arrives to the weight.

``Elementwise`` is all of it, in torch's own operations. ``FusedElementwise`` is its twin for GPUs: one launch per list.

The same element may be the 10th of a rank's shard and the 1000th of the whole tensor, and must get the same bits. torch's CPU
kernels process most elements of a tensor in vectors and the last few one by one. Operations that round once (a product, a sum)
give one result either way. ``a + alpha·b`` rounds once or twice, depending on whether the compiler fused the two. It is used
where a trial shows that all elements are rounded in the same way; elsewhere it is two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from typing import TypeAlias

import torch
from torch import Tensor

from ..device import copy_to
from ..errors import KernelError
from .int8 import Int8View, dequantise, quantise
from .rounding import Elements, RandomWords, RoundingScratch, apply_narrow, is_narrow

Tensors: TypeAlias = "list[Tensor]"

Counters: TypeAlias = "Sequence[tuple[Tensor, Elements]]"
"""For each tensor that is rounded stochastically, its counter and its elements, hashed."""

OldMomenta: TypeAlias = "tuple[list[Tensor], list[Tensor]]"
"""Momenta, and copies of what they were before the step."""

_TRIAL_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)


@lru_cache
def adds_uniformly(total: torch.dtype, addend: torch.dtype) -> bool:
    """Whether ``total.add_(addend, alpha=…)`` on this CPU rounds every element in the same way, at any length and stride.

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


def _all_add_uniformly(totals: list[Tensor], addends: list[Tensor]) -> bool:
    if totals[0].device.type != "cpu":
        return True
    return all(adds_uniformly(*dtypes) for dtypes in {(a.dtype, b.dtype) for a, b in zip(totals, addends, strict=True)})


def _scaled(grads: list[Tensor], gain: float) -> list[Tensor]:
    """The gradients times ``gain``, in at least float32; themselves if it is 1."""
    return grads if gain == 1 else [(grad.float() if is_narrow(grad.dtype) else grad) * gain for grad in grads]


def accumulate(momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor, gain: float = 1.0) -> None:
    """M ← retain·M + gain·G."""
    grads = _scaled(grads, gain)
    if not isinstance(retain, Tensor) and momenta[0].device.type == "cpu" and any(is_narrow(m.dtype) for m in momenta):
        for buffer, grad in zip(momenta, grads, strict=True):  # batched, a factor would be rounded to the buffer's 16 bits
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
    views: Tensors, grads: Tensors, momenta: Tensors, retain: float | Tensor, momentum: float | None, gain: float = 1.0
) -> None:
    """M ← retain·M + gain·G, and V ← gain·G + momentum·M, or V ← M if ``momentum`` is None."""
    grads = _scaled(grads, gain)
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
    counters: Counters | None = None,
    scratch: RoundingScratch | None = None,
) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there. May overwrite ``updates``.

    With ``cautious``, only elements whose update is zero or moves them towards zero decay. The parameters have one dtype, and so
    have the updates. Parameters of 16 bits are formed in float32, in ``scratch``, and rounded once; stochastically with
    ``counters``.
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
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(updates, 0.0)  # −0 becomes 0: at rate 0 a weight of −0 keeps its sign
        torch._foreach_sub_(params, updates)


class Elementwise:
    """What a step does to elements. Lists that belong together have equal lengths and shapes; gradients are only read."""

    def compile(self, work: Callable[[], object]) -> None:
        """Compiles the kernels that ``work`` would launch, and writes no element; only where there are any."""

    accumulate = staticmethod(accumulate)
    fill = staticmethod(fill_with_momentum)

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
            for now, old, stays in zip([*params, *old_momenta[0]], [*before, *old_momenta[1]], finite * 2, strict=True):
                now.copy_(torch.where(stays, now, old))

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copies each source to its target."""
        torch._foreach_copy_(targets, sources)

    def quantise(self, views: Sequence[Int8View]) -> None:
        """Writes the numbers of each view, which have one dtype and device, as int8."""
        scratch = RoundingScratch()
        for view in views:
            quantise(view.numbers, view.quanta, view.scales, view.first, scratch=scratch)

    def dequantise(self, views: Sequence[Int8View]) -> None:
        """Writes the int8 of each view as numbers, which have one dtype and device."""
        scratch = RoundingScratch()
        for view in views:
            dequantise(view.quanta, view.scales, view.numbers, view.first, scratch=scratch)

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


class _Nothing(Elementwise):
    """Leaves everything as it is."""

    accumulate = fill = apply = copy = quantise = dequantise = fill_if = lambda *_, **__: None  # type: ignore[assignment]


_PLAIN = Elementwise()


class FusedElementwise(Elementwise):
    """One launch of a Triton kernel per list and combination of dtypes. Float64 and tensors in host memory are torch's.

    ``fill`` rounds to the dtype of its views. ``compile`` raises KernelError if a kernel does not run on ``device``.
    """

    _plain: Elementwise = _PLAIN

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self._kernel_errors():
            from .int8_kernels import Int8ListKernels

            self._kernels = Int8ListKernels()

    def compile(self, work: Callable[[], object]) -> None:
        self._plain, self._kernels.only_compiles = _Nothing(), self._kernel_errors
        try:
            work()
        finally:
            self._plain, self._kernels.only_compiles = _PLAIN, None

    @contextmanager
    def _kernel_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise KernelError(
                f"kernels over lists of tensors do not run on {self._device}: {type(error).__name__}: {error}. If that cannot be "
                'mended, pass kernels="torch".'
            ) from error

    def accumulate(self, momenta: list[Tensor], grads: list[Tensor], retain: float | Tensor, gain: float = 1.0) -> None:
        for fused, (m, g) in _by_dtype(momenta, grads):
            (self._kernels if fused else self._plain).accumulate(m, g, retain, gain)

    def fill(
        self, views: Tensors, grads: Tensors, momenta: Tensors, retain: float | Tensor, momentum: float | None, gain: float = 1.0
    ) -> None:
        for fused, (v, g, m) in _by_dtype(views, grads, momenta):
            if fused:
                self._kernels.fill(v, g, m, retain, momentum, gain)
                continue
            narrow = is_narrow(v[0].dtype)
            wide = [torch.empty_like(view, dtype=torch.float32) for view in v] if narrow else v
            self._plain.fill(wide, g, m, retain, momentum, gain)
            if narrow:  # rounded once, as by the kernels
                torch._foreach_copy_(v, wide)

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
        ((fused, _), *others) = _by_dtype(params, updates, *(old_momenta or ()))
        assert old_momenta or not others, "the parameters have one dtype, and so have the updates"
        if not fused or others:
            self._plain.apply(
                params, updates, decay, rate, cautious=cautious, counters=counters, scratch=scratch, old_momenta=old_momenta
            )
            return
        hashed = None if counters is None else [(elements.rows, elements.cols, counter) for counter, elements in counters]
        self._kernels.apply(params, updates, decay, rate, cautious=cautious, counters=hashed, old_momenta=old_momenta)

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        for fused, (t, s) in _by_dtype(targets, sources):
            (self._kernels if fused else self._plain).copy(t, s)

    def quantise(self, views: Sequence[Int8View]) -> None:
        (self._kernels if _is_fused(views[0].numbers) else self._plain).quantise(views)

    def dequantise(self, views: Sequence[Int8View]) -> None:
        (self._kernels if _is_fused(views[0].numbers) else self._plain).dequantise(views)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        for fused, (of_dtype,) in _by_dtype(tensors):
            (self._kernels if fused else self._plain).fill_if(of_dtype, copy_to(mask, of_dtype[0].device), value)

    def any_nonfinite(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        device = tensors[0].device if device is None else device
        flags, others = {device: torch.zeros(1, device=device)}, list[Tensor]()
        for fused, (of_dtype,) in _by_dtype(tensors):
            if fused:
                place = of_dtype[0].device
                if place not in flags:
                    flags[place] = torch.zeros(1, device=place)
                self._kernels.mark_nonfinite(of_dtype, flags[place])
            else:
                others += of_dtype
        found = [flag[0] > 0 for flag in flags.values()] + ([_PLAIN.any_nonfinite(others, device)] if others else [])
        return reduce(torch.logical_or, (copy_to(flag, device) for flag in found))


_FUSED = {torch.float32, torch.bfloat16, torch.float16, torch.int8}


def _by_dtype(*lists: Sequence[Tensor]) -> Iterator[tuple[bool, list[list[Tensor]]]]:
    """The lists cut into such with one dtype and device each, and whether the kernels know them."""
    groups: dict[Hashable, list[tuple[Tensor, ...]]] = {}
    for tensors in zip(*lists, strict=True):
        groups.setdefault(tuple((tensor.dtype, tensor.device) for tensor in tensors), []).append(tensors)
    for members in groups.values():
        place = members[0][0].device
        fused = all(_is_fused(tensor) and tensor.device == place for tensor in members[0])
        yield fused, [list(of_list) for of_list in zip(*members, strict=True)]


def _is_fused(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.dtype in _FUSED
