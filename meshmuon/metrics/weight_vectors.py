"""The largest singular values of sharded weights: found at the first measured step, followed at later ones.

No rank holds a weight whole. Each adds its part of a product of the weight and a vector, and the sum over the ranks is the
product.

**First**, ``FIRST_STEPS`` steps of a Lanczos iteration on Wᵀ·W from a fixed start vector, with a reduction after each of their
products. They give the vector v for which W·v is longest among all that those products can make.

**At every measured step**, half of a power iteration: W·v, then Wᵀ·(W·v) at the next one, and so on. These products travel in the
one reduction that the step makes anyway, and their lengths are the singular values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import KeptError
from ..transport import Exchange
from .numbers import DTYPE, Column, Numbers
from .shards import LocalMatrices
from .spectra import probes, top_eigenvectors, tridiagonal, tridiagonalise

FIRST_STEPS = 12
"""Steps of the Lanczos iteration at the first measured step of a plan."""


class Segments:
    """Vectors of different sizes, one behind the other in a flat tensor."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._count = len(sizes)
        owners, repeats = torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, dtype=torch.long, device="cpu")
        self._owners = torch.repeat_interleave(owners, repeats).to(device)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner product of each vector of ``a`` and that of ``b``, (vectors,), in float64."""
        totals = torch.zeros(self._count, dtype=torch.float64, device=a.device)
        return totals.index_add_(0, self._owners, a.double().mul_(b))

    def spread(self, values: Tensor) -> Tensor:
        """One value per vector, (vectors,), repeated for each of its elements."""
        return values.to(DTYPE).index_select(0, self._owners)


class WeightVectors:
    """A unit vector for each matrix, flat and in the order of ``Numbers.vector_starts``.

    All ranks call ``restart`` at the same steps, ``begin`` and ``finish`` at each measured one. ``local`` is what this
    rank counts, by the index of a parameter of the plan.
    """

    def __init__(self, numbers: Numbers, local: Mapping[int, LocalMatrices]) -> None:
        self._numbers, self._local = numbers, local
        self.half_iterations = 0
        device = numbers.packed.device
        places = [(k, matrix) for k in numbers.vector_starts for matrix in range(numbers.measured[k].matrices.count)]
        measured = [numbers.measured[k] for k, _ in places]
        self._rows = numbers.indices([numbers.first_rows[k] + matrix for k, matrix in places])
        self._segments = Segments([one.vector for one in measured], device)
        starts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        for one in measured:
            cols = one.matrices.cols
            starts += [probes(cols)[0], torch.zeros(one.vector - cols, dtype=torch.float64, device="cpu")]
        self._start = torch.cat(starts).to(device, DTYPE)
        self._kept = self._start

    def restart(self) -> None:
        """Begins anew: the next ``begin`` is the first."""
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
            self._multiply(pieces, self._kept, self._numbers.vectors, transposed=self.half_iterations % 2 == 1)
        self.half_iterations += 1

    def finish(self) -> None:
        """Keeps the products, which are complete now, for the next measured step, and writes their lengths as singular values."""
        lengths, self._kept = self._normalised(self._numbers.vectors)
        self._numbers.write(self._rows, Column.WEIGHT_SIGMA, lengths.unsqueeze(1))

    def _multiply(self, pieces: Mapping[int, Tensor], vectors: Tensor, result: Tensor, *, transposed: bool) -> None:
        """Writes this rank's part of W·v, or of Wᵀ·v, of each weight W into ``result``, which is zero elsewhere."""
        for k, piece in pieces.items():
            local, measured, start = self._local[k], self._numbers.measured[k], self._numbers.vector_starts[k]
            shape = measured.matrices.count, measured.vector
            stretch = slice(start, start + math.prod(shape))
            local.multiply(piece, vectors[stretch].view(shape), result[stretch].view(shape), transposed=transposed)

    def _normalised(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The lengths of ``vectors``, and the same with length 1; the kept ones where that is impossible."""
        lengths = self._segments.dot(vectors, vectors).sqrt_()
        usable = (lengths > 0) & lengths.isfinite()
        unit = vectors * self._segments.spread(lengths.reciprocal())
        return lengths, torch.where(self._segments.spread(usable) > 0, unit, self._kept)

    def _find(self, pieces: Mapping[int, Tensor], exchange: Exchange | None, failure: KeptError) -> None:
        """Replaces the vectors by those that come out of a Lanczos iteration, the same on all ranks."""
        product = torch.zeros_like(self._start)
        reductions = 0

        def reduce() -> None:
            nonlocal reductions
            shared = product[self._numbers.private_vectors :]
            reductions += 1
            if exchange is not None and shared.numel():
                exchange.add_up(shared)

        def multiply(vectors: Tensor) -> Tensor:
            for transposed in (False, True):
                factors = vectors if not transposed else product.clone()
                product.zero_()
                self._multiply(pieces, factors, product, transposed=transposed)
                reduce()
            return product.clone()

        with failure:
            coefficients, basis = tridiagonalise(multiply, self._start, FIRST_STEPS, self._segments, fully=True)
            weights = top_eigenvectors(tridiagonal(coefficients))
            vectors = torch.stack([self._segments.spread(weights[:, k]) * vector for k, vector in enumerate(basis)]).sum(0)
            self._kept = self._normalised(vectors)[1]
        product.zero_()
        while reductions < 2 * FIRST_STEPS:  # it failed, for want of memory, say: the other ranks wait for the reductions
            reduce()
