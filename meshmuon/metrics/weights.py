"""A rank's own pieces of the weights: what it counts of their norms, and its part in finding their largest singular
values.

No rank holds a weight whole. Each adds its part of a product of the weight and a vector, and the sum over the ranks is
the product. Every measured step makes half a power iteration: W·v, then Wᵀ·(W·v) at the next one, and so on. The
products travel in the one reduction that the step makes anyway, and their lengths approach the largest singular value
from below. The first measured step makes ``FIRST_HALVES`` of them, with a reduction between each and the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KeptError
from ..layout import Layout, Ranges, Replicated, coordinates, local_indices
from ..matrices import StridedRange
from ..plan import PlannedParam
from ..transport import Exchange
from .spectra import multiply_each, probes

FIRST_HALVES = 16
"""Half power iterations at the first measured step of a plan."""


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
    rows: Tensor  # which of their rows and columns
    cols: Tensor
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
        piece = planned.sharded_matrices(layout)[numbers[0][0]].piece_of(rank)
        if piece is None:
            return None
        local_rows: slice | Tensor = slice(None)
        local_cols: slice | Tensor = slice(None)
        if planned.window is not None:
            local_rows = _in_window(held[stack_dims], planned.window[0], device)
            if len(layout.shape) == stack_dims + 2:  # of more dims, a window takes all columns
                local_cols = _in_window(held[stack_dims + 1], planned.window[1], device)
        matrices, rows, cols = (_indices(ranges).to(device) for ranges in (numbers, piece.rows, piece.cols))
        return cls(matrices, rows, cols, stack_dims, local_rows, local_cols)

    def cut(self, local: Tensor) -> Tensor:
        """These pieces of a local tensor, (matrices, rows, cols): a view where one is possible."""
        stacked = local.reshape(local.shape[0] if self.stack_dims else 1, local.shape[self.stack_dims], -1)
        return stacked[:, self.local_rows][:, :, self.local_cols]

    def multiply(self, pieces: Tensor, vectors: Tensor, result: Tensor, *, transposed: bool) -> None:
        """Writes this rank's part of W·v, or Wᵀ·v, of each matrix into ``result``; both are (matrices, longer side).

        ``pieces`` are those of W, as ``cut`` returns them.
        """
        read, written = (self.rows, self.cols) if transposed else (self.cols, self.rows)
        pieces, numbers = pieces.to(vectors.dtype), self.numbers.unsqueeze(1)
        result[numbers, written] = multiply_each(pieces.mT if transposed else pieces, vectors[numbers, read])


def _indices(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in ranges])


def _in_window(held: Ranges, window: StridedRange, device: torch.device) -> slice | Tensor:
    """Where the indices of a window are in the local dim of a rank that holds ``held``."""
    parts = [
        (part.start + k * part.period, part.size) for part in local_indices(held, window) for k in range(part.count)
    ]
    ranges = [(start, start + size) for start, size in parts]
    return slice(*ranges[0]) if len(ranges) == 1 else _indices(tuple(ranges)).to(device)


class WeightVectors:
    """A unit vector for each matrix: by the index of its parameter in the plan, (matrices, longer side).

    All ranks call ``restart`` at the same steps, ``begin`` and ``finish`` at each measured one.

    Args:
        products: where ``begin`` writes this rank's part of the products, which are zeros before, and ``finish`` finds
            the sums over all ranks.
        shared: the memory of those products that several ranks know.
        local: what this rank counts of each parameter.
        cols: the columns of the matrices of each parameter.
    """

    def __init__(
        self,
        products: Mapping[int, Tensor],
        shared: Tensor,
        local: Mapping[int, LocalMatrices],
        cols: Mapping[int, int],
    ) -> None:
        self._products, self._shared, self._local = products, shared, local
        self._start = {k: torch.zeros_like(product) for k, product in products.items()}
        for k, start in self._start.items():
            start[:, : cols[k]] = probes(cols[k])[0]
        self.restart()

    def restart(self) -> None:
        """Starts over: the next ``begin`` is the first."""
        self.half_iterations = 0
        self._vectors = dict(self._start)

    def begin(self, pieces: Mapping[int, Tensor], exchange: Exchange | None, failure: KeptError) -> None:
        """Writes this rank's part of the products.

        ``pieces`` are what this rank counts of each weight, by the index of its parameter in the plan. ``failure``
        keeps errors: the other ranks wait for the reductions.
        """
        while True:
            with failure:
                for k, piece in pieces.items():
                    transposed = self.half_iterations % 2 == 1
                    self._local[k].multiply(piece, self._vectors[k], self._products[k], transposed=transposed)
            self.half_iterations += 1
            if self.half_iterations >= FIRST_HALVES:
                return
            if exchange is not None and self._shared.numel():
                exchange.add_up(self._shared)
            with failure:
                self.finish()
            for product in self._products.values():
                product.zero_()

    def finish(self) -> dict[int, Tensor]:
        """The lengths of the products, which are complete now: the singular values. Keeps the products for the next
        step.
        """
        lengths = {
            k: torch.linalg.vector_norm(product, dim=1, dtype=torch.float64) for k, product in self._products.items()
        }
        for k, product in self._products.items():
            unit = (product / lengths[k].unsqueeze(1)).to(product.dtype)
            # A weight of zeros, or one that is not finite, leaves the vector as it is.
            self._vectors[k] = torch.where(unit.isfinite().all(1, keepdim=True), unit, self._vectors[k])
        return lengths
