"""The largest singular values of sharded weights: found at the first measured step, followed at later ones.

No rank holds a weight whole. Each adds its part of a product of the weight and a vector, and the sum over the ranks is the
product.

**First**, ``FIRST_STEPS`` steps of a Golub–Kahan bidiagonalisation from a fixed start vector, with a reduction after each of
their products. They give the vector v for which W·v is longest among all that those products can make.

**At every measured step**, half of a power iteration: W·v, then Wᵀ·(W·v) at the next one, and so on. These products travel in the
one reduction that the step makes anyway, and their lengths are the singular values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..transport import Exchange
from .packing import Packing
from .shards import LocalMatrices
from .spectra import start_vector
from .sums import Segments

FIRST_STEPS = 12
"""Steps of the bidiagonalisation at the first measured step of a plan."""

_EXHAUSTED = 1e-5  # what is shorter than this, relative to the longest so far, is rounding: the matrix has no further direction
_SQUARINGS = 12


class WeightVectors:
    """A unit vector for each matrix, flat and in the order of ``Packing.vector_starts``.

    All ranks call ``restart`` at the same steps, ``begin`` and ``finish`` at each measured one.

    Args:
        packing: where the vectors are in the packed tensor.
        local: of each parameter of the plan, what this rank counts.
        like: an empty tensor of the dtype and on the device of the packed one.
    """

    def __init__(self, packing: Packing, local: Sequence[LocalMatrices | None], like: Tensor) -> None:
        self._packing, self._local = packing, local
        self.half_iterations = 0
        order = sorted(range(len(packing.matrices)), key=packing.vector_starts.__getitem__)
        measured = [packing.matrices[k] for k in order for _ in range(packing.matrices[k].count)]
        places = [packing.sigma_starts[k] + matrix for k in order for matrix in range(packing.matrices[k].count)]
        self._segments = Segments([one.vector for one in measured], like.device)
        self._sigmas = torch.tensor(places, dtype=torch.long, device="cpu").to(like.device)
        starts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        for one in measured:
            starts += [start_vector(one.cols), torch.zeros(one.vector - one.cols, dtype=torch.float64, device="cpu")]
        self._start = torch.cat(starts).to(like.device, like.dtype)
        self._kept = self._start.clone()

    def restart(self) -> None:
        """Begins anew: the next ``begin`` is the first."""
        self.half_iterations = 0
        self._kept.copy_(self._start)

    def begin(
        self, pieces: Mapping[int, Tensor], packed: Tensor, exchange: Exchange | None, keep: Callable[[Exception], None]
    ) -> None:
        """Writes this rank's part of the products into ``packed``; at the first measured step, finds the vectors before.

        ``pieces`` are what this rank counts of each weight, by the index of its parameter in the plan. Errors go to ``keep``: the
        other ranks wait for the reductions.
        """
        if self.half_iterations == 0:
            self._find(pieces, exchange, keep)
        try:
            self._multiply(pieces, self._kept, packed, transposed=self.half_iterations % 2 == 1)
        except Exception as error:
            keep(error)
        self.half_iterations += 1

    def finish(self, packed: Tensor) -> None:
        """Keeps the products, which are complete now, for the next measured step, and writes their lengths as singular values."""
        lengths, self._kept = self._normalised(packed[: self._packing.vectors_end], otherwise=self._kept)
        packed.index_copy_(0, self._sigmas, lengths.to(packed.dtype))

    def _multiply(self, pieces: Mapping[int, Tensor], vectors: Tensor, result: Tensor, *, transposed: bool) -> None:
        """Writes this rank's part of W·v, or of Wᵀ·v, of each weight W into ``result``, which is zero elsewhere."""
        for k, piece in pieces.items():
            local = self._local[k]
            assert local is not None
            local.multiply(piece, self._of(vectors, k), self._of(result, k), transposed=transposed)

    def _of(self, flat: Tensor, k: int) -> Tensor:
        """The vectors of the matrices of parameter ``k`` of the plan, (matrices, longer side)."""
        measured, start = self._packing.matrices[k], self._packing.vector_starts[k]
        return flat[start : start + measured.count * measured.vector].view(measured.count, measured.vector)

    def _normalised(self, vectors: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
        """The lengths of ``vectors``, and the same with length 1; ``otherwise`` where that is impossible."""
        lengths = self._segments.sums(vectors.double().square_()).sqrt_()
        usable = self._segments.spread((lengths > 0) & lengths.isfinite())
        unit = (vectors / self._segments.spread(lengths)).to(vectors.dtype)
        return lengths, torch.where(usable, unit, otherwise)

    def _find(self, pieces: Mapping[int, Tensor], exchange: Exchange | None, keep: Callable[[Exception], None]) -> None:
        """Replaces the vectors by those that come out of a bidiagonalisation, the same on all ranks."""
        sides: tuple[list[Tensor], list[Tensor]] = [self._kept], []  # vectors as long as a row of the weight, and as a column
        lengths: list[Tensor] = []
        product = torch.zeros_like(self._kept)
        for half in range(2 * FIRST_STEPS - 1):
            transposed = half % 2 == 1
            product.zero_()
            try:
                self._multiply(pieces, sides[transposed][-1], product, transposed=transposed)
            except Exception as error:
                keep(error)
            shared = product[self._packing.reduced.start :]
            if exchange is not None and shared.numel():
                exchange.add_up(shared)
            try:
                self._extend(product, sides[not transposed], lengths)
            except Exception as error:  # for want of memory: the vectors that there are have to do
                keep(error)
                sides[not transposed].append(self._kept)
        if len(lengths) == 2 * FIRST_STEPS - 1:
            weights = longest(torch.stack(lengths[::2], dim=1), torch.stack(lengths[1::2], dim=1))
            found = sum(self._segments.spread(weights[:, k]) * vector for k, vector in enumerate(sides[0]))
            assert isinstance(found, Tensor)
            self._kept = self._normalised(found.to(self._kept.dtype), otherwise=self._kept)[1]

    def _extend(self, product: Tensor, side: list[Tensor], lengths: list[Tensor]) -> None:
        """Makes a product orthogonal to the vectors of its ``side`` and adds it to them, with length 1."""
        for earlier in side:
            shadow = self._segments.sums(product * earlier).to(product.dtype)
            product = product - self._segments.spread(shadow) * earlier
        length = self._segments.sums(product.double().square_()).sqrt_()
        longest_yet = torch.stack([*lengths, length]).amax(0)
        longer = length > _EXHAUSTED * longest_yet
        inverse = torch.where(longer, length.reciprocal(), 0.0).to(product.dtype)
        side.append(product * self._segments.spread(inverse))
        lengths.append(torch.where(longer, length, 0.0))


def longest(diagonal: Tensor, above: Tensor) -> Tensor:
    """The vectors that upper bidiagonal matrices lengthen most, (batch, n).

    They come from powers of a tiny matrix, not from a decomposition: the host does not wait, and NaN is not an error.

    Args:
        diagonal: (batch, n).
        above: the entries above it, (batch, n − 1).
    """
    bidiagonal = torch.diag_embed(diagonal) + torch.diag_embed(above, offset=1)
    power = bidiagonal.mT @ bidiagonal
    for _ in range(_SQUARINGS):
        power = power / torch.linalg.matrix_norm(power, keepdim=True)
        power = power @ power
    # All columns are multiples of the vector, up to what is left of the others. The longest has lost least to rounding.
    column = torch.linalg.vector_norm(power, dim=1).argmax(1)
    return power.gather(2, column.view(-1, 1, 1).expand(-1, power.size(1), 1)).squeeze(2)
