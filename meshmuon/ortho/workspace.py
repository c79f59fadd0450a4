"""Scratch memory that is allocated once, in which every matrix begins at a multiple of 64 bytes.

BLAS libraries may round a product by the alignment of its operands: MKL does on AMD, and cuBLAS chooses its kernels by
it. In a dense batch of 9 × 9 float32 matrices (324 bytes each) every matrix lies differently, so that its bits would
depend on its place in the batch, and thereby on the layout. Here the matrices of a batch are as far apart as they need
to be: 9 × 9 float32 matrices begin every 384 bytes. Whatever enters a product comes from this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and the longest vector of any CPU that torch knows


def pitch(rows: int, cols: int, dtype: torch.dtype) -> int:
    """Elements from the beginning of one rows × cols matrix to that of the next."""
    size = rows * cols
    line = max(1, ALIGNMENT // dtype.itemsize)
    return -(-size // line) * line


def aligned_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat uninitialised tensor that begins at a multiple of 64 bytes, whatever torch's allocator does."""
    flat = torch.empty(size, dtype=dtype, device=device)
    if flat.data_ptr() % ALIGNMENT == 0:
        return flat
    line = ALIGNMENT // dtype.itemsize
    roomy = torch.empty(size + line, dtype=dtype, device=device)
    skipped = -roomy.data_ptr() % ALIGNMENT // dtype.itemsize
    return roomy[skipped : skipped + size]


def as_matrices(flat: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(count, rows, cols) at the beginning of a flat tensor, each matrix ``pitch`` elements behind the one before."""
    count, rows, cols = shape
    apart = pitch(rows, cols, flat.dtype)
    return flat[: count * apart].view(count, apart)[:, : rows * cols].view(shape)


def aligned_matrices(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised matrices, (count, rows, cols), in newly allocated memory."""
    count, rows, cols = shape
    return as_matrices(aligned_empty(count * pitch(rows, cols, dtype), dtype, device), shape)


def is_aligned(batch: Tensor) -> bool:
    """Whether every matrix of a batch begins at a multiple of 64 bytes."""
    apart = 0 if batch.size(0) == 1 else batch.stride(0) * batch.element_size()
    return batch.data_ptr() % ALIGNMENT == 0 and apart % ALIGNMENT == 0


def is_dense(batch: Tensor) -> bool:
    """Whether the matrices of a batch, or their transposes, follow each other without a gap."""
    return batch.is_contiguous() or batch.mT.is_contiguous()


class Workspace:
    """Named flat buffers, grown to the largest request and never given back.

    Two requests under one name share memory: the second overwrites the first. Buffers of different names never overlap.
    Every buffer begins at a multiple of 64 bytes. ``allocate`` makes a flat tensor of a size and dtype on a device.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], Tensor] = aligned_empty) -> None:
        self._allocate = allocate
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor of ``shape`` in the buffer called ``name``."""
        return self._flat_of(name, math.prod(shape), dtype, device).view(shape)

    def take_matrices(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised matrices, (count, rows, cols), each of which begins at a multiple of 64 bytes."""
        count, rows, cols = shape
        return as_matrices(self._flat_of(name, count * pitch(rows, cols, dtype), dtype, device), shape)

    def _flat_of(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = self._allocate(size, dtype, device)
        return flat[:size]

    def bytes(self) -> int:
        """Memory held, over all devices."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._flat.clear()
