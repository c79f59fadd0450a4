"""Panels of a symmetric product, and what it costs."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

PANEL = 128
SHORT_PANEL = 96  # of results with few rows
_ALIGN = 32
_SMALLEST_SPLIT = 384
_SMALLEST_LONG_SPLIT = 192  # where the inner size is at least twice the rows: starting a panel then costs less than it saves


@lru_cache(maxsize=4096)
def symmetric_panels(n: int, k: int) -> tuple[tuple[int, int], ...]:
    """Row ranges in which the blocked symmetric product with inner size k computes the lower triangle of an n × n result.

    Rows [start, stop) are computed up to column ``stop``. Small results are one full product, which is faster (measured, fp32 on
    CPU: up to 191 rows, up to 383 where k < 2n).
    """
    if n < (_SMALLEST_LONG_SPLIT if k >= 2 * n else _SMALLEST_SPLIT):
        return ((0, n),)
    count = -(-n // (PANEL if n >= _SMALLEST_SPLIT else SHORT_PANEL))
    inner = [round(n * i / count / _ALIGN) * _ALIGN for i in range(1, count)]
    return tuple(pairwise((0, *inner, n)))


def symmetric_flops(n: int, k: int) -> int:
    """FLOPs of a symmetric n × n product with inner size k, computed by panels."""
    return sum(2 * (stop - start) * stop * k for start, stop in symmetric_panels(n, k))
