"""``ListKernels`` for twin tensors: each call is one piece of work of the current stream, computed by the kernels'
CPU twin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmuon.execute import elementwise, int8
from meshmuon.execute.int8 import Int8Blocks, Numbers
from meshmuon.execute.int8_momentum import Int8Momentum, ShardBlocks
from meshmuon.execute.rounding import Elements

from .recorder import recorder
from .twin_tensor import host_values


class TwinListKernels:
    """Reads and writes what the kernels read and write."""

    # what steps have launched that was not compiled when their plan was prepared
    compiled_late: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.only_compiles: Any = None
        self._compiled: set[tuple[str, str]] = set()

    def fill(
        self,
        views: Sequence[Numbers] | None,
        grads: Sequence[Tensor],
        momenta: Sequence[Numbers],
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        def compute() -> None:
            targets, sources, buffers = _host(views or [], grads, momenta)
            on_host = None if views is None else targets
            in_blocks = [in_int8(b.quanta, b.scales) if isinstance(b, Int8Blocks) else b for b in buffers]
            elementwise.Elementwise().fill(on_host, sources, in_blocks, _value(retain), momentum)

        both = _tensors(momenta)
        self._launch([*grads, *both, retain], [*both, *_tensors(views or [])], compute)

    def restore(self, targets: Sequence[Tensor], before: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        def compute() -> None:
            for now, old, update in zip(*_host(targets, before, updates), strict=True):
                stays = update & 0x7F != 0x7F if update.dtype == torch.int8 else torch.isfinite(update)
                now.copy_(torch.where(stays, now, old))

        self._launch([*targets, *before, *updates], targets, compute)

    def apply(
        self,
        params: Sequence[Tensor],
        updates: Sequence[Numbers],
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool,
        counters: Sequence[tuple[Tensor, Tensor, Tensor]] | None,
        old_momenta: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> None:
        def compute() -> None:
            targets, changes = _host(params, updates)
            hosts = None if counters is None else [_host(numbers)[0] for numbers in counters]
            pairs = None if hosts is None else [(counter, Elements(rows, cols)) for rows, cols, counter in hosts]
            wide = [change if isinstance(change, Int8Blocks) else change.float().clone() for change in changes]
            momenta, old = _host(*old_momenta) if old_momenta else ([], [])
            twin, guarded = elementwise.Elementwise(), elementwise.OldMomenta(momenta, old) if old_momenta else None
            twin.apply(
                targets, wide, _value(decay), _value(rate), cautious=cautious, counters=pairs, old_momenta=guarded
            )

        momenta, old = old_momenta or ([], [])
        numbers = [part for of_tensor in counters or () for part in of_tensor]
        self._launch([*params, *_tensors(updates), *old, decay, rate, *numbers], [*params, *momenta], compute)

    def copy(self, targets: Sequence[Numbers], sources: Sequence[Numbers], *, through_int8: bool = False) -> None:
        def compute() -> None:
            written, read = _host(targets, sources)
            if through_int8:
                for numbers in written:
                    int8.round_to_int8(numbers)
            else:
                elementwise.Elementwise().copy(written, read)

        self._launch(_tensors(sources), _tensors(targets), compute)

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        def compute() -> None:
            (targets,), ((flag,),) = _host(tensors), _host([mask])
            for target in targets:
                target.masked_fill_(flag != 0, value)

        self._launch([mask], tensors, compute)

    def mark_nonfinite(self, tensors: Sequence[Tensor], flag: Tensor) -> None:
        def compute() -> None:
            (values,), ((target,),) = _host(tensors), _host([flag])
            target.fill_(max(float(target), float(any(not bool(value.isfinite().all()) for value in values))))

        self._launch(tensors, [flag], compute)

    def _launch(self, reads: Sequence[Any], writes: Sequence[Tensor], compute: Callable[[], object]) -> None:
        rank = recorder()
        kinds = [
            (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else type(value) for value in reads
        ]
        variant = (
            sys._getframe(1).f_code.co_name,
            str([*kinds, *((tensor.dtype, tensor.stride()) for tensor in writes)]),
        )
        if self.only_compiles is not None:
            self._compiled.add(variant)
            return
        if variant not in self._compiled:
            self.compiled_late.append(variant[0])
        tensors = [value for value in reads if isinstance(value, Tensor)]
        assert all(tensor.is_cuda for tensor in (*tensors, *writes)), "a kernel of a GPU reads and writes device memory"
        rank.launch(tensors, writes, "list kernel", compute)


def in_int8(quanta: Tensor, scales: Tensor) -> Int8Momentum:
    """Momentum whose columns are whole blocks in order; ``scales`` may be bytes."""
    index = torch.arange(quanta.shape[-1]) // int8.BLOCK
    return Int8Momentum(quanta, scales.view(torch.bfloat16), ShardBlocks(slice(None), index, 0))


def _value(scalar: float | Tensor) -> float | Tensor:
    return _host([scalar])[0][0] if isinstance(scalar, Tensor) else scalar


def _tensors(numbers: Sequence[Numbers]) -> list[Tensor]:
    return [tensor for n in numbers for tensor in ((n.quanta, n.scales) if isinstance(n, Int8Blocks) else (n,))]


def _host(*lists: Sequence[Numbers]) -> list[list[Any]]:
    def on_host(numbers: Numbers) -> Numbers:
        if isinstance(numbers, Int8Blocks):
            return Int8Blocks(host_values(numbers.quanta), host_values(numbers.scales), numbers.first)
        return host_values(numbers)

    return [list(map(on_host, numbers)) for numbers in lists]
