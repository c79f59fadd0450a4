"""Panels of a symmetric product, and what it costs."""

from __future__ import annotations

from itertools import pairwise

PANEL = 128
_ALIGN = 32
_SMALLEST_SPLIT = 384


def symmetric_panels(n: int) -> tuple[tuple[int, int], ...]:
    """Row ranges in which the blocked symmetric product computes the lower triangle of an n × n result.

    Rows [start, stop) are computed up to column ``stop``. Below 384 rows one full product is faster (measured, fp32 on CPU).
    """
    if n < _SMALLEST_SPLIT:
        return ((0, n),)
    count = -(-n // PANEL)
    inner = [round(n * k / count / _ALIGN) * _ALIGN for k in range(1, count)]
    return tuple(pairwise((0, *inner, n)))


def symmetric_flops(n: int, k: int) -> int:
    """FLOPs of a symmetric n × n product with inner size k, computed by panels."""
    return sum(2 * (stop - start) * stop * k for start, stop in symmetric_panels(n))
