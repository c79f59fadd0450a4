"""A rank's own pieces of the weights: what it counts of their norms, and its part in finding their largest singular values.

No rank holds a weight whole. Each adds its part of a product of the weight and a vector, and the sum over the ranks is the
product.

**At the first measured step**, ``FIRST_STEPS`` steps of a Lanczos iteration on Wᵀ·W from a fixed start vector, with a reduction
after each of their products. They give the vector v for which W·v is longest among all that those products can make.

**At every measured step**, half of a power iteration: W·v, then Wᵀ·(W·v) at the next one, and so on. These products travel in the
one reduction that the step makes anyway, and their lengths are the singular values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KeptError
from ..layout import Layout, Ranges, Replicated, coordinates, local_indices
from ..matrices import StridedRange
from ..plan import PlannedParam
from ..transport import Exchange
from .spectra import Inner, multiply_each, probes, top_eigenvectors, tridiagonal, tridiagonalise

FIRST_STEPS = 12
"""Steps of the Lanczos iteration at the first measured step of a plan."""


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
    """The part of a planned parameter that this rank holds and counts: pieces of some of its matrices, cut identically."""

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
    parts = [(part.start + k * part.period, part.size) for part in local_indices(held, window) for k in range(part.count)]
    ranges = [(start, start + size) for start, size in parts]
    return slice(*ranges[0]) if len(ranges) == 1 else _indices(tuple(ranges)).to(device)


class VectorPlace(NamedTuple):
    """Where the vectors of a parameter, (matrices, longer side), are in a flat tensor of all vectors: from ``start`` on."""

    start: int
    matrices: int
    longer: int
    cols: int  # of the matrices

    @property
    def stop(self) -> int:
        return self.start + self.matrices * self.longer

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.matrices, self.longer)


class WeightVectors:
    """A unit vector for each matrix, flat and in the order of ``places``.

    All ranks call ``restart`` at the same steps, ``begin`` and ``finish`` at each measured one.

    Args:
        products: where ``begin`` writes this rank's part of the products, and ``finish`` finds the sums over all ranks.
        private: how many elements at its beginning only this rank knows.
        places: of each parameter of the plan.
        local: what this rank counts of it.
    """

    def __init__(
        self, products: Tensor, private: int, places: Mapping[int, VectorPlace], local: Mapping[int, LocalMatrices]
    ) -> None:
        self._products, self._private, self._places, self._local = products, private, places, local
        self._inner = _segments([place.longer for place in places.values() for _ in range(place.matrices)], products.device)
        start = torch.zeros_like(products, device="cpu")
        for place in places.values():
            place.of(start)[:, : place.cols] = probes(place.cols)[0]
        self._start = start.to(products.device)
        self.restart()

    def restart(self) -> None:
        """Starts over: the next ``begin`` is the first."""
        self.half_iterations = 0
        self._kept = self._start

    def begin(self, pieces: Mapping[int, Tensor], exchange: Exchange | None, failure: KeptError) -> None:
        """Writes this rank's part of the products; at the first measured step, finds the vectors before.

        ``pieces`` are what this rank counts of each weight, by the index of its parameter in the plan. ``failure`` keeps errors:
        the other ranks wait for the reductions.
        """
        if self.half_iterations == 0:
            self._find(pieces, exchange, failure)
        with failure:
            self._multiply(pieces, self._kept, self._products, transposed=self.half_iterations % 2 == 1)
        self.half_iterations += 1

    def finish(self) -> Tensor:
        """The lengths of the products, which are complete now: the singular values. Keeps the products for the next step."""
        lengths, self._kept = self._normalised(self._products)
        return lengths

    def _multiply(self, pieces: Mapping[int, Tensor], vectors: Tensor, result: Tensor, *, transposed: bool) -> None:
        """Writes this rank's part of W·v, or of Wᵀ·v, of each weight W into ``result``, which is zero elsewhere."""
        for k, piece in pieces.items():
            place = self._places[k]
            self._local[k].multiply(piece, place.of(vectors), place.of(result), transposed=transposed)

    def _normalised(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The lengths of ``vectors``, and the same with length 1; the kept ones where that is impossible."""
        lengths = self._inner.dot(vectors, vectors).sqrt_()
        usable = (lengths > 0) & lengths.isfinite()
        unit = vectors * self._inner.spread(lengths.reciprocal())
        return lengths, torch.where(self._inner.spread(usable) > 0, unit, self._kept)

    def _find(self, pieces: Mapping[int, Tensor], exchange: Exchange | None, failure: KeptError) -> None:
        """Replaces the vectors by those that come out of a Lanczos iteration, the same on all ranks."""
        product = torch.zeros_like(self._start)
        reductions = 0

        def reduce() -> None:
            nonlocal reductions
            reductions += 1
            if exchange is not None and product.numel() > self._private:
                exchange.add_up(product[self._private :])

        def multiply(vectors: Tensor) -> Tensor:
            for transposed in (False, True):
                factors = product.clone() if transposed else vectors
                product.zero_()
                self._multiply(pieces, factors, product, transposed=transposed)
                reduce()
            return product.clone()

        with failure:
            coefficients, basis = tridiagonalise(multiply, self._start, FIRST_STEPS, self._inner, fully=True)
            weights = top_eigenvectors(tridiagonal(coefficients))
            vectors = torch.stack([self._inner.spread(weights[:, k]) * vector for k, vector in enumerate(basis)]).sum(0)
            self._kept = self._normalised(vectors)[1]
        product.zero_()
        while reductions < 2 * FIRST_STEPS:  # it failed, for want of memory, say: the other ranks wait for the reductions
            reduce()


def _segments(sizes: Sequence[int], device: torch.device) -> Inner:
    """Vectors of these sizes, one behind the other in a flat tensor of float32."""
    counts = torch.tensor(sizes, dtype=torch.long, device="cpu")
    vector_of = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts).to(device)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        totals = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        return totals.index_add_(0, vector_of, a.double().mul_(b))

    return Inner(dot, lambda values: values.float().index_select(0, vector_of))
