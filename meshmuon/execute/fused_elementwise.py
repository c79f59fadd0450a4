"""Elementwise work on a GPU: ``Elementwise`` with one launch of a Triton kernel per list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..device import copy_to
from ..errors import KernelError
from .elementwise import Counters, Elementwise, OldMomenta, Tensors, first_columns
from .int8 import Int8Blocks, Numbers
from .int8_momentum import Int8Momentum
from .rounding import RoundingScratch


class _Nothing(Elementwise):
    """Leaves everything as it is."""

    fill = apply = copy = round_to_int8 = fill_if = lambda *_, **__: None  # type: ignore[assignment]


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
                "that cannot be "
                'mended, pass kernels="torch".'
            ) from error

    def fill(
        self,
        views: Sequence[Numbers] | None,
        grads: Tensors,
        momenta: Sequence[Tensor | Int8Momentum],
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        def joined(k: int) -> Sequence[Any] | None:
            buffer = momenta[k]
            in_blocks = buffer.as_blocks() if isinstance(buffer, Int8Momentum) else buffer
            operands = [grads[k], in_blocks] if views is None else [grads[k], in_blocks, views[k]]
            return _with_joined_columns(operands)

        rest = list[int]()
        for fused, indices, operands in _by_dtype(map(joined, range(len(grads)))):
            if fused:
                g, m, *v = operands
                self._kernels.fill(v[0] if v else None, g, m, retain, momentum)
            else:
                rest += indices
        if rest:
            views, momenta = None if views is None else [views[k] for k in rest], [momenta[k] for k in rest]
            self._plain.fill(views, [grads[k] for k in rest], momenta, retain, momentum)

    def apply(
        self,
        params: list[Tensor],
        updates: Sequence[Numbers],
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool = False,
        counters: Counters | None = None,
        scratch: RoundingScratch | None = None,
        old_momenta: OldMomenta | None = None,
    ) -> None:
        kept = () if old_momenta is None else (old_momenta.momenta, old_momenta.before)
        entries = [_with_joined_columns(operands) for operands in zip(params, updates, *kept, strict=True)]
        # The random bits of an element follow from its place in all dims.
        joins = counters is not None and any(
            len(u.shape) != param.dim() for u, param in zip(updates, params, strict=True)
        )
        if joins or any(entry is None for entry in entries):
            updates = self.numbers(updates, params, scratch)
            entries = [list(operands) for operands in zip(params, updates, *kept, strict=True)]
        ((fused, _, operands), *others) = _by_dtype(entries)
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
        if old_momenta is not None and old_momenta.scales:
            seen = [update.scales[..., 1:] if isinstance(update, Int8Blocks) else update for update in updates]
            self._kernels.restore(
                old_momenta.scales, old_momenta.scales_before, first_columns(seen, old_momenta.scales)
            )

    def copy(self, targets: Sequence[Numbers], sources: Sequence[Numbers]) -> None:
        for fused, _, (t, s) in _by_dtype(zip(targets, sources, strict=True)):
            (self._kernels if fused else self._plain).copy(t, s)

    def round_to_int8(self, numbers: Tensor) -> None:
        if _is_fused(numbers):
            self._kernels.copy([numbers], [numbers], through_int8=True)
        else:
            self._plain.round_to_int8(numbers)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        for fused, _, (of_dtype,) in _by_dtype(zip(tensors)):
            (self._kernels if fused else self._plain).fill_if(of_dtype, copy_to(mask, of_dtype[0].device), value)

    def any_nonfinite(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        device = tensors[0].device if device is None else device
        flags, others = {device: torch.zeros(1, device=device)}, list[Tensor]()
        for fused, _, (of_dtype,) in _by_dtype(zip(tensors)):
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


def _with_joined_columns(operands: Sequence[Numbers | None]) -> Sequence[Any] | None:
    """``operands`` of equal elements; if one is in int8, all with their columns as one dim. None if there is no
    such view.
    """
    blocks = [numbers for numbers in operands if isinstance(numbers, Int8Blocks)]
    if any(numbers is None for numbers in operands):
        return None
    if not blocks:
        return operands
    shape, first = blocks[0].shape, blocks[0].first
    if any(numbers.shape != shape or numbers.first != first for numbers in blocks):
        return None
    try:
        return [n.view(shape) if isinstance(n, Tensor) and n.shape != shape else n for n in operands]
    except RuntimeError:
        return None


def _by_dtype(entries: Iterable[Sequence[Numbers] | None]) -> Iterator[tuple[bool, list[int], list[list[Any]]]]:
    """The entries cut into such with the same dtypes and devices, as lists, and whether the kernels know them.

    Beside the lists there are the indices of their entries. Those that are None come together, without lists.
    """
    groups: dict[Hashable, list[int]] = {}
    entries = list(entries)
    for k, entry in enumerate(entries):
        kinds = None if entry is None else tuple((type(numbers), numbers.dtype, numbers.device) for numbers in entry)
        groups.setdefault(kinds, []).append(k)
    for indices in groups.values():
        members = [entry for entry in map(entries.__getitem__, indices) if entry is not None]
        place = members[0][0].device if members else None
        fused = bool(members) and all(_is_fused(numbers) and numbers.device == place for numbers in members[0])
        yield fused, indices, [list(of_list) for of_list in zip(*members, strict=True)]


def _is_fused(numbers: Numbers) -> bool:
    return numbers.device.type == "cuda" and numbers.dtype in _FUSED
