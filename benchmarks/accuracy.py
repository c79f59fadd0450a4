"""How far from orthogonal an update ends: measured by SVD, on gradients whose singular values are hard to
orthogonalise.

Every spectrum lies in [1e-3, 1] relative to its Frobenius norm, the range that all schemes promise to bring near 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["SHAPE", "SPECTRA", "matrix_with", "worst_error"]

LEAST = 1e-3  # smallest singular value ÷ Frobenius norm
SHAPE = (256, 512)


def _log_spaced(count: int) -> Tensor:
    """From the largest down to ``LEAST``, equal factors apart."""
    low, high = -8.0, 0.0  # of log10(smallest ÷ largest): find the ratio at which the smallest is LEAST of the norm
    for _ in range(60):
        middle = (low + high) / 2
        values = torch.logspace(0, middle, count, dtype=torch.float64)
        low, high = (middle, high) if values[-1] / values.norm() < LEAST else (low, middle)
    return torch.logspace(0, high, count, dtype=torch.float64)


def _spiked(count: int) -> Tensor:
    """One large value; all others are as small as the schemes allow."""
    values = torch.full((count,), LEAST * 1.01, dtype=torch.float64)
    values[0] = (1 - float(values[1:].square().sum())) ** 0.5
    return values


def _two_levels(count: int) -> Tensor:
    """A quarter large and equal, the rest small and equal."""
    values = torch.ones(count, dtype=torch.float64)
    values[count // 4 :] = 1.05 * LEAST * (count // 4) ** 0.5
    return values


def _low_rank(count: int) -> Tensor:
    """A quarter of the directions log-spaced, the others exactly zero."""
    values = torch.zeros(count, dtype=torch.float64)
    values[: count // 4] = _log_spaced(count // 4)
    return values


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "log-spaced": _log_spaced,
    "spiked": _spiked,
    "two levels": _two_levels,
    "low rank": _low_rank,
}


def matrix_with(values: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """A rows × cols float32 matrix with these singular values and random directions."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(cols, len(values), dtype=torch.float64, generator=generator))
    matrix: Tensor = (left * (values / values.norm())) @ right.mT
    return matrix.float()


def worst_error(orthogonalise: Callable[[Tensor], Tensor], rows: int = SHAPE[0], cols: int = SHAPE[1]) -> float:
    """The largest distance from 1 at which a singular value ends, over all spectra; directions that were zero do
    not count.
    """
    worst = 0.0
    for spectrum in SPECTRA.values():
        values = spectrum(min(rows, cols))
        update = orthogonalise(matrix_with(values, rows, cols))
        ended = torch.linalg.svdvals(update.double())[: int(values.count_nonzero())]
        worst = max(worst, float((ended - 1).abs().max()))
    return worst
