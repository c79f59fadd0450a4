"""``ListKernels`` for twin tensors: each call is one piece of work of the current stream, computed by the kernels'
CPU twin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from meshmuon.execute import elementwise
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
        views: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        def compute() -> None:
            targets, sources, buffers = _host(views or [], grads, momenta)
            on_host = None if views is None else targets
            elementwise.Elementwise().fill(on_host, sources, buffers, _value(retain), momentum)

        self._launch([*grads, *momenta, retain], [*momenta, *(views or [])], compute)

    def apply(
        self,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
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
            wide = [change.float().clone() for change in changes]
            momenta, old = _host(*old_momenta) if old_momenta else ([], [])
            twin, guarded = elementwise.Elementwise(), elementwise.OldMomenta(momenta, old) if old_momenta else None
            twin.apply(
                targets, wide, _value(decay), _value(rate), cautious=cautious, counters=pairs, old_momenta=guarded
            )

        momenta, old = old_momenta or ([], [])
        numbers = [part for of_tensor in counters or () for part in of_tensor]
        self._launch([*params, *updates, *old, decay, rate, *numbers], [*params, *momenta], compute)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        def compute() -> None:
            elementwise.Elementwise().copy(*_host(targets, sources))

        self._launch(sources, targets, compute)

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


def _value(scalar: float | Tensor) -> float | Tensor:
    return _host([scalar])[0][0] if isinstance(scalar, Tensor) else scalar


def _host(*lists: Sequence[Tensor]) -> list[list[Any]]:
    return [list(map(host_values, tensors)) for tensors in lists]
