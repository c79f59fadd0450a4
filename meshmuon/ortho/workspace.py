"""Scratch memory that is allocated once and handed out again at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .aligned import aligned_empty, as_matrices, pitch


class Workspace:
    """Named flat buffers, grown to the largest request and never given back.

    Two requests under one name share memory: the second overwrites the first. Buffers of different names never overlap. Every
    buffer begins at a multiple of 64 bytes. ``allocate`` makes a flat tensor of a size and dtype on a device.
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
