"""Launches the kernels of ``triton_elements``: one launch for a whole list of tensors.

torch's own ``_foreach`` operations launch one kernel per tensor unless all tensors have one dtype and equal strides,
which pieces of sharded matrices do not have. The table of a list is written again only if an address or a stride has
changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ..device import copy_to
from .triton_elements import (
    DIMS,
    KINDS,
    copy_kernel,
    fill_kernel,
    momentum_kernel,
    nonfinite_kernel,
    update_kernel,
)

TILE = 2048
"""Elements of a tile."""


class ListTable:
    """The table of a list of tensors on one device, and how a kernel is launched over it.

    ``operands`` has one list per operand; tensors at the same place have the same shape. The last ``broadcast`` ones
    are read element by element.
    """

    def __init__(self, operands: Sequence[Sequence[Tensor]], broadcast: int = 0) -> None:
        rows = [row for tensors in zip(*operands, strict=True) for row in _rows(tensors)]
        self.tile_cols = min(TILE, triton.next_power_of_2(max([1, *(row[DIMS - 1] for row in rows)])))
        self.tile_rows = TILE // self.tile_cols
        numbers: list[int] = []
        self.tiles = 0
        for row in rows:
            across, outer = -(-row[DIMS - 1] // self.tile_cols), row[0] * row[1] * row[2]
            numbers += [self.tiles, across, *row]
            self.tiles += across * -(-outer // self.tile_rows)
        self.tensors = len(rows)
        self.width = 2 + DIMS + len(operands) * (1 + DIMS)
        vectors = operands[: len(operands) - broadcast]
        bytes_each = min((tensor.itemsize for tensors in vectors for tensor in tensors), default=2)
        self.dense = all(_is_dense(row, len(vectors), max(8, 16 // bytes_each)) for row in rows)
        device = vectors[0][0].device
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever torch's default device is
        self.numbers = copy_to(host if device.type == "cpu" else host.pin_memory(), device)

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        if not self.tiles:
            return
        # Triton launches on the current device, which need not be that of the tensors. -1 changes nothing.
        with torch.cuda.device(self.numbers.device if self.numbers.is_cuda else -1):
            shape = {"width": self.width, "tile_rows": self.tile_rows, "tile_cols": self.tile_cols, "dense": self.dense}
            # A product and a sum round separately, as in the twin: the kernels wait for memory anyway.
            kernel[(self.tiles,)](self.numbers, self.tensors, *arguments, **constants, **shape, enable_fp_fusion=False)

    def emptied(self) -> ListTable:
        """A table of one tensor without elements: what is launched over it is the same kernel, and writes nothing."""
        empty = copy(self)
        empty.tensors, empty.tiles = min(1, self.tensors), min(1, self.tiles)
        head = [0, 1, *[1] * (DIMS - 1), 0]
        # memory that may be read
        operands = [self.numbers.data_ptr(), *[0] * DIMS] * ((self.width - len(head)) // (1 + DIMS))
        empty.numbers = copy_to(torch.tensor([*head, *operands], device="cpu"), self.numbers.device)
        return empty


def _rows(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Rows of the table for one tensor of each operand: sizes, then address and strides per operand.

    Neighbouring dims are joined if the strides of all operands allow it. A tensor of too many dims takes several rows.
    """
    shape = tensors[0].shape
    if not tensors[0].numel():
        return []
    sizes: list[int] = []
    strides: list[list[int]] = []
    for dim in reversed(range(len(shape))):
        step = [tensor.stride(dim) for tensor in tensors]
        if shape[dim] == 1:
            continue
        if sizes and all(outer == inner * sizes[0] for outer, inner in zip(step, strides[0], strict=True)):
            sizes[0] *= shape[dim]
        else:
            sizes.insert(0, shape[dim])
            strides.insert(0, step)
    if len(sizes) > DIMS:
        split = next(dim for dim in range(len(shape)) if shape[dim] > 1)
        return [
            row for parts in zip(*(tensor.unbind(split) for tensor in tensors), strict=True) for row in _rows(parts)
        ]
    missing = DIMS - len(sizes)
    row = [1] * missing + sizes
    for operand, tensor in enumerate(tensors):
        row += [tensor.data_ptr(), *[0] * missing, *(step[operand] for step in strides)]
    return [row]


def _is_dense(row: Sequence[int], operands: int, vector: int) -> bool:
    """Whether the first operands of a row can move in vectors of 16 bytes: elements adjacent, lines at multiples of
    them.

    ``vector`` is the number of elements of which all have 16 bytes or more.
    """
    places = [row[at : at + 1 + DIMS] for at in range(DIMS, DIMS + operands * (1 + DIMS), 1 + DIMS)]
    return row[DIMS - 1] % vector == 0 and all(
        address % 16 == 0 and inner == 1 and all(stride % vector == 0 for stride in outer)
        for address, *outer, inner in places
    )


class ListKernels:
    """Launches the kernels. Keeps the tables of the last lists: in steady state tensors are where they were a step
    ago.
    """

    MOST_TABLES = 2048

    def __init__(self) -> None:
        self._tables: dict[Hashable, ListTable] = {}
        # If set, kernels are launched over tables without elements, inside of this context.
        self.only_compiles: Callable[[], AbstractContextManager[None]] | None = None

    def _table(self, *operands: Sequence[Tensor], **options: Any) -> ListTable:
        """``options`` are those of the table."""
        places = ((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensors in operands for tensor in tensors)
        key = len(operands), str(options), *places
        table = self._tables.pop(key, None) or ListTable(operands, **options)
        self._tables[key] = table  # the last one used is the last one in the dict
        if len(self._tables) > self.MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _launch(self, table: ListTable, kernel: Any, *arguments: Any, **constants: Any) -> None:
        if self.only_compiles is None:
            table.launch(kernel, *arguments, **constants)
            return
        with self.only_compiles():
            table.emptied().launch(kernel, *arguments, **constants)

    def fill(
        self,
        views: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        retain: float | Tensor,
        momentum: float | None,
    ) -> None:
        """M ← retain·M + G; then, if there are views, V ← G + momentum·M, or V ← M if ``momentum`` is None."""
        operands = [grads, momenta] if views is None else [grads, momenta, views]
        self._launch(
            self._table(*operands),
            momentum_kernel,
            *_as_arguments(retain, 1.0 if momentum is None else momentum),
            retain_in_memory=isinstance(retain, Tensor),
            looks_ahead=momentum is not None,
            fills=views is not None,
            **_kinds(operands, 3),
        )

    def apply(
        self,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        decay: float | Tensor,
        rate: float | Tensor,
        *,
        cautious: bool,
        counters: Sequence[tuple[Tensor, Tensor, Tensor]] | None,
        old_momenta: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        """p ← p·decay − rate·update, rounded once.

        Stochastically with ``counters``: of each tensor the hashed rows and columns of its elements, and its counter.
        With ``old_momenta``, momenta and what they were, elements whose update is not finite keep weight and momentum.
        """
        operands: list[Sequence[Tensor]] = [params, updates, *(old_momenta or ())]
        if counters is not None:
            pairs = list(zip(counters, params, strict=True))
            operands += [[numbers[k].expand(param.shape) for numbers, param in pairs] for k in range(2)]
            operands.append([numbers[2][:1].expand(param.shape) for numbers, param in pairs])
        kinds = _kinds(operands, 3) if old_momenta is not None else {**_kinds(operands, 2), "kind_2": 0}
        self._launch(
            self._table(*operands, broadcast=0 if counters is None else 3),
            update_kernel,
            *_as_arguments(decay, rate),
            decay_in_memory=isinstance(decay, Tensor),
            rate_in_memory=isinstance(rate, Tensor),
            cautious=cautious,
            stochastic=counters is not None,
            guarded=old_momenta is not None,
            **kinds,
        )

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies each source to its target, rounding to the target's dtype."""
        self._launch(self._table(targets, sources), copy_kernel, **_kinds([targets, sources], 2))

    def fill_if(self, tensors: Sequence[Tensor], mask: Tensor, value: float) -> None:
        """Fills ``tensors`` with ``value`` where ``mask``, on the device, broadcast and constant along rows, is not
        0.
        """
        (bits,) = struct.unpack("i", struct.pack("f", value))
        kinds = {"kind_0": KINDS[tensors[0].dtype], "kind_1": KINDS[mask.dtype]}
        table = self._table(tensors, [mask.expand(tensor.shape) for tensor in tensors], broadcast=1)
        self._launch(table, fill_kernel, bits, **kinds)

    def mark_nonfinite(self, tensors: Sequence[Tensor], flag: Tensor) -> None:
        """Sets ``flag``, float32 of one element, to 1 if any element of ``tensors`` is infinite or NaN."""
        self._launch(self._table(tensors), nonfinite_kernel, flag, kind_0=KINDS[tensors[0].dtype])


def _kinds(operands: Sequence[Sequence[Tensor]], count: int) -> dict[str, int]:
    """The kinds of the first ``count`` operands; 0 for those that there are not."""
    kinds = dict.fromkeys((f"kind_{k}" for k in range(count)), 0)
    return kinds | {name: KINDS[tensors[0].dtype] for name, tensors in zip(kinds, operands, strict=False)}


def _as_arguments(*scalars: float | Tensor) -> list[float | Tensor]:
    # an int would recompile the kernel
    return [scalar if isinstance(scalar, Tensor) else float(scalar) for scalar in scalars]
