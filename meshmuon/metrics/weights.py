"""A rank's own pieces of the weights: what it counts of their norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout, Ranges, Replicated, coordinates, local_indices
from ..matrices import StridedRange
from ..plan import PlannedParam


def counts_here(layouts: Sequence[Layout], rank: int) -> bool:
    """Whether this rank counts what it holds: of all that hold the same elements, only the first does.

    ``layouts`` are those of a parameter; none for one that only this rank knows.
    """
    if not layouts:
        return True
    coordinate = coordinates(layouts[0].mesh).get(rank)
    if coordinate is None:
        return False
    return not any(
        coordinate[axis] for axis, place in enumerate(layouts[0].placements) if isinstance(place, Replicated)
    )


@dataclass(frozen=True, slots=True)
class LocalMatrices:
    """The part of a planned parameter that this rank holds and counts: pieces of some of its matrices, cut
    identically.
    """

    numbers: Tensor  # which of the parameter's matrices
    stack_dims: int
    local_rows: slice | Tensor  # where these are in the local tensor
    local_cols: slice | Tensor

    @classmethod
    def of(cls, planned: PlannedParam, rank: int, device: torch.device) -> LocalMatrices | None:
        """What ``rank`` holds and counts of a parameter; None if nothing."""
        layout, stack_dims = planned.layouts[0], planned.stack_dims
        rank = layout.mesh.ranks[0] if planned.private else rank  # a private one is planned as if every rank held it
        if not counts_here(planned.layouts, rank) or not all(held := layout.held_ranges(rank)):
            return None
        numbers = held[0] if stack_dims else ((0, 1),)
        if planned.sharded_matrices(layout)[numbers[0][0]].piece_of(rank) is None:
            return None
        local_rows: slice | Tensor = slice(None)
        local_cols: slice | Tensor = slice(None)
        if planned.window is not None:
            local_rows = _in_window(held[stack_dims], planned.window[0], device)
            if len(layout.shape) == stack_dims + 2:  # of more dims, a window takes all columns
                local_cols = _in_window(held[stack_dims + 1], planned.window[1], device)
        return cls(_indices(numbers).to(device), stack_dims, local_rows, local_cols)

    def cut(self, local: Tensor) -> Tensor:
        """These pieces of a local tensor, (matrices, rows, cols): a view where one is possible."""
        stacked = local.reshape(local.shape[0] if self.stack_dims else 1, local.shape[self.stack_dims], -1)
        return stacked[:, self.local_rows][:, :, self.local_cols]


def _indices(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in ranges])


def _in_window(held: Ranges, window: StridedRange, device: torch.device) -> slice | Tensor:
    """Where the indices of a window are in the local dim of a rank that holds ``held``."""
    parts = [
        (part.start + k * part.period, part.size) for part in local_indices(held, window) for k in range(part.count)
    ]
    ranges = [(start, start + size) for start, size in parts]
    return slice(*ranges[0]) if len(ranges) == 1 else _indices(tuple(ranges)).to(device)
