"""What a rank finds out from its own shards: sums of squares, and its part of a product of a sharded weight and a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..layout import Layout, Ranges, Replicated, coordinates, local_indices
from ..matrices import StridedRange
from ..plan import PlannedParam
from .spectra import multiply_each

Selector: TypeAlias = "slice | Tensor"
"""Indices of a dim: a slice or, if they are in several pieces, a tensor of them."""

_ALL = slice(None)


def counts_here(layouts: Sequence[Layout], rank: int) -> bool:
    """Whether this rank counts what it holds: of all that hold the same elements, only the first does.

    ``layouts`` are those of a parameter; none for one that only this rank knows.
    """
    if not layouts:
        return True
    coordinate = coordinates(layouts[0].mesh).get(rank)
    if coordinate is None:
        return False
    return not any(coordinate[axis] for axis, place in enumerate(layouts[0].placements) if isinstance(place, Replicated))


@dataclass(frozen=True, slots=True)
class LocalMatrices:
    """The part of a planned parameter that this rank holds and counts: pieces of some of its matrices, all cut alike."""

    stack_dims: int
    numbers: tuple[int, ...]  # which of the parameter's matrices
    matrices: Selector  # the same
    local_rows: Selector  # where they are in the local tensor
    local_cols: Selector
    rows: Selector  # which rows of the matrices these are
    cols: Selector

    @classmethod
    def of(cls, planned: PlannedParam, rank: int, device: torch.device) -> LocalMatrices | None:
        """What ``rank`` holds and counts of a parameter; None if nothing."""
        layouts = planned.layouts
        rank = layouts[0].mesh.ranks[0] if planned.private else rank  # a private one is planned as if every rank held it
        if not counts_here(layouts, rank):
            return None
        layout, stack_dims = layouts[0], planned.stack_dims
        held = layout.held_ranges(rank)
        if not all(held):
            return None
        matrices = held[0] if stack_dims else ((0, 1),)
        piece = planned.sharded_matrices(layout)[matrices[0][0]].piece_of(rank)
        if piece is None:
            return None
        local_rows: Selector = _ALL
        local_cols: Selector = _ALL
        if planned.window is not None:
            local_rows = _selector(_in_window(held[stack_dims], planned.window[0]), device)
            if len(layout.shape) == stack_dims + 2:  # of more dims, a window takes all columns
                local_cols = _selector(_in_window(held[stack_dims + 1], planned.window[1]), device)
        rows, cols = _selector(piece.rows, device), _selector(piece.cols, device)
        numbers = tuple(number for start, stop in matrices for number in range(start, stop))
        return cls(stack_dims, numbers, _selector(matrices, device), local_rows, local_cols, rows, cols)

    def cut(self, local: Tensor) -> Tensor:
        """These pieces of a local tensor, (matrices, rows, cols): a view where one is possible."""
        stacked = local.reshape(local.shape[0] if self.stack_dims else 1, local.shape[self.stack_dims], -1)
        if self.local_rows is not _ALL:
            stacked = stacked[:, self.local_rows]
        return stacked if self.local_cols is _ALL else stacked[:, :, self.local_cols]

    def multiply(self, pieces: Tensor, vectors: Tensor, result: Tensor, *, transposed: bool) -> None:
        """Writes this rank's part of W·v, or Wᵀ·v, of each matrix into ``result``; both are (matrices, longer side).

        ``pieces`` are those of W, as ``cut`` returns them.
        """
        read, written = (self.rows, self.cols) if transposed else (self.cols, self.rows)
        pieces = pieces.to(vectors.dtype)
        held = result[self.matrices]  # a copy, if the matrices are not next to each other
        held[:, written] = multiply_each(pieces.mT if transposed else pieces, vectors[self.matrices][:, read])
        result[self.matrices] = held


def _selector(ranges: Ranges, device: torch.device) -> Selector:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)


def _in_window(held: Ranges, window: StridedRange) -> Ranges:
    """Where the indices of a window are in the local dim of a rank that holds ``held``."""
    parts = [(part, part.start + k * part.period) for part in local_indices(held, window) for k in range(part.count)]
    return tuple((start, start + part.size) for part, start in parts)
