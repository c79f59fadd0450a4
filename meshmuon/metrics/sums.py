"""Sums of squares of many tensors at once, with few calls: what a call costs is more than the sums of a small tensor do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_norms(tensor: Tensor) -> Tensor:
    """The norms of the last dim of a tensor, flat, in its dtype or in float32 if that has less digits."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype)
    return norms.reshape(-1)


class Segments:
    """Numbers that belong together, one behind the other in a flat tensor.

    Args:
        sizes: how many numbers each segment has.
        device: where they are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.count = len(sizes)
        owners, repeats = torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, dtype=torch.long, device="cpu")
        self._owners = torch.repeat_interleave(owners, repeats).to(device)

    def sums(self, numbers: Tensor) -> Tensor:
        """The sum of each segment, (segments,), in float64."""
        totals = torch.zeros(self.count, dtype=torch.float64, device=numbers.device)
        return totals.index_add_(0, self._owners, numbers.double())

    def spread(self, values: Tensor) -> Tensor:
        """One value per segment, (segments,), repeated for each of its numbers."""
        return values.index_select(0, self._owners)


class SquareSums:
    """Adds up the squares of tensors, of which each rank has a part, and writes the sums where they belong.

    Rows are added up in their own dtype, or in float32, the sums of the rows in float64: the order of the rows, and over how many
    ranks they are spread, then changes little.

    Args:
        places: where in the packed tensor each sum belongs.
        rows: how many norms of rows make up each sum.
        device: where all of this is.
    """

    def __init__(self, places: Sequence[int], rows: Sequence[int], device: torch.device) -> None:
        self._places = torch.tensor(places, dtype=torch.long, device="cpu").to(device)
        self._segments = Segments(rows, device)

    def write(self, packed: Tensor, norms: Sequence[Tensor]) -> None:
        """Writes the sums of the squares of ``norms``, flat tensors that together have as many numbers as there are rows."""
        if norms:
            sums = self._segments.sums(torch.cat(tuple(norms)).double().square_())
            packed.index_copy_(0, self._places, sums.to(packed.dtype))
