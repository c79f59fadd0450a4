"""Elementwise work on a GPU: ``Elementwise`` with one launch of a Triton kernel per list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

from ..device import copy_to
from ..errors import KernelError
from .elementwise import Counters, Elementwise, OldMomenta, Tensors, first_columns
from .int8 import Int8View
from .int8_momentum import Int8Momentum
from .rounding import RoundingScratch, is_narrow


class _Nothing(Elementwise):
    """Leaves everything as it is."""

    accumulate = fill = fill_int8 = apply = copy = fill_if = lambda *_, **__: None  # type: ignore[assignment]
    quantise = dequantise = staticmethod(lambda views: None)


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

    def fill_int8(
        self,
        views: Tensors | None,
        grads: Tensors,
        momenta: Sequence[Int8Momentum],
        retain: float | Tensor,
        momentum: float | None,
        gain: float = 1.0,
    ) -> None:
        by_dtypes: dict[Hashable, list[list[Tensor]]] = {}
        for k, (grad, buffer) in enumerate(zip(grads, momenta, strict=True)):
            tensors = [grad, buffer.quanta] if views is None else [grad, buffer.quanta, views[k]]
            ((fused, _),) = _by_dtype(*([tensor] for tensor in tensors))
            if fused and (joined := buffer.with_joined_columns(tensors)) is not None:
                by_dtypes.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(joined)
                continue
            wide = None if views is None else torch.empty_like(views[k], dtype=_wider(views[k].dtype))
            self._plain.fill_int8(None if wide is None else [wide], [grad], [buffer], retain, momentum, gain)
            if views is not None and wide is not None:  # rounded once, as by the kernels
                self._plain.copy([views[k]], [wide])
        for members in by_dtypes.values():
            g, quanta, *v, scales = (list(of_list) for of_list in zip(*members, strict=True))
            self._kernels.fill_int8(v[0] if v else None, g, (quanta, scales), retain, momentum, gain)

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
        ((fused, _), *others) = _by_dtype(params, updates, *((old_momenta.momenta, old_momenta.before) if old_momenta else ()))
        assert old_momenta or not others, "the parameters have one dtype, and so have the updates"
        if not fused or others:
            self._plain.apply(
                params, updates, decay, rate, cautious=cautious, counters=counters, scratch=scratch, old_momenta=old_momenta
            )
            return
        hashed = None if counters is None else [(elements.rows, elements.cols, counter) for counter, elements in counters]
        kept = None if old_momenta is None else (old_momenta.momenta, old_momenta.before)
        self._kernels.apply(params, updates, decay, rate, cautious=cautious, counters=hashed, old_momenta=kept)
        if old_momenta is not None and old_momenta.scales:
            self._kernels.restore(old_momenta.scales, old_momenta.scales_before, first_columns(updates, old_momenta.scales))

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


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_narrow(dtype) else dtype


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
