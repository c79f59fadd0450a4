"""Scratch memory that is allocated once and handed out again at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Named flat buffers, grown to the largest request and never given back.

    Two requests under one name share memory: the second overwrites the first. Buffers of different names never overlap.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor of ``shape`` in the buffer called ``name``."""
        size = math.prod(shape)
        key = (name, dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(shape)

    def bytes(self) -> int:
        """Memory held, over all devices."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._flat.clear()
