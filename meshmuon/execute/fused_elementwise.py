"""Elementwise work on a GPU: ``Elementwise`` with one launch of a Triton kernel per list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

from ..device import copy_to
from ..errors import KernelError
from .elementwise import Counters, Elementwise, OldMomenta, Tensors
from .rounding import RoundingScratch


class _Nothing(Elementwise):
    """Leaves everything as it is."""

    fill = apply = copy = fill_if = lambda *_, **__: None  # type: ignore[assignment]


_PLAIN = Elementwise()


class FusedElementwise(Elementwise):
    """One launch of a Triton kernel per list and combination of dtypes. Float64 and tensors in host memory are torch's.

    ``fill`` rounds to the dtype of its views. ``compile`` raises KernelError if a kernel does not run on ``device``.
    """

    _plain: Elementwise = _PLAIN

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self._kernel_errors():
            from .list_kernels import ListKernels

            self._kernels = ListKernels()

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
                f"kernels over lists of tensors do not run on {self._device}: {type(error).__name__}: {error}. If "
                "that cannot be mended, set MESHMUON_KERNELS=torch."
            ) from error

    def fill(
        self,
        views: Tensors | None,
        grads: Tensors,
        momenta: Tensors,
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        lists = (grads, momenta) if views is None else (grads, momenta, views)
        for fused, (g, m, *v) in _by_dtype(zip(*lists, strict=True)):
            (self._kernels if fused else self._plain).fill(v[0] if v else None, g, m, retain, momentum)

    def apply(
        self,
        params: list[Tensor],
        updates: Tensors,
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool = False,
        counters: Counters | None = None,
        scratch: RoundingScratch | None = None,
        old_momenta: OldMomenta | None = None,
    ) -> None:
        kept = () if old_momenta is None else (old_momenta.momenta, old_momenta.before)
        ((fused, operands), *others) = _by_dtype(zip(params, updates, *kept, strict=True))
        assert old_momenta or not others, "the parameters have one dtype, and so have the updates"
        if not fused or others:
            self._plain.apply(
                params,
                updates,
                decay,
                rate,
                cautious=cautious,
                counters=counters,
                scratch=scratch,
                old_momenta=old_momenta,
            )
            return
        hashed = (
            None if counters is None else [(elements.rows, elements.cols, counter) for counter, elements in counters]
        )
        params, changes, *guarded = operands
        both = (guarded[0], guarded[1]) if guarded else None
        self._kernels.apply(params, changes, decay, rate, cautious=cautious, counters=hashed, old_momenta=both)

    def copy(self, targets: Tensors, sources: Tensors) -> None:
        for fused, (t, s) in _by_dtype(zip(targets, sources, strict=True)):
            (self._kernels if fused else self._plain).copy(t, s)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        for fused, (of_dtype,) in _by_dtype(zip(tensors)):
            (self._kernels if fused else self._plain).fill_if(of_dtype, copy_to(mask, of_dtype[0].device), value)

    def any_nonfinite(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        device = tensors[0].device if device is None else device
        flags, others = {device: torch.zeros(1, device=device)}, list[Tensor]()
        for fused, (of_dtype,) in _by_dtype(zip(tensors)):
            if fused:
                place = of_dtype[0].device
                if place not in flags:
                    flags[place] = torch.zeros(1, device=place)
                self._kernels.mark_nonfinite(of_dtype, flags[place])
            else:
                others += of_dtype
        found = [flag[0] > 0 for flag in flags.values()] + ([_PLAIN.any_nonfinite(others, device)] if others else [])
        return reduce(torch.logical_or, (copy_to(flag, device) for flag in found))


_FUSED = {torch.float32, torch.bfloat16, torch.float16}


def _by_dtype(entries: Iterable[Sequence[Tensor]]) -> Iterator[tuple[bool, list[list[Tensor]]]]:
    """The entries cut into such with the same dtypes and devices, as lists, and whether the kernels know them."""
    groups: dict[Hashable, list[Sequence[Tensor]]] = {}
    for entry in entries:
        groups.setdefault(tuple((tensor.dtype, tensor.device) for tensor in entry), []).append(entry)
    for members in groups.values():
        place = members[0][0].device
        fused = place.type == "cuda" and all(tensor.dtype in _FUSED and tensor.device == place for tensor in members[0])
        yield fused, [list(of_list) for of_list in zip(*members, strict=True)]
