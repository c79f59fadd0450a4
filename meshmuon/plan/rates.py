"""How fast machines work and send: the parts of a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast n × n matrices are worked on by one rank, while all ranks work."""

    dtype: str
    size: int  # n
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a rank sends, while it receives as much and the other ranks do the same."""

    bytes_per_second: float
    seconds: float  # that an exchange of a few bytes takes


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Seconds per element of large float32 tensors, on one rank while all ranks work."""

    momentum: float  # accumulating it, and writing what is orthogonalised
    update: float  # of a parameter
    copy: float
    adamw: float


def rate_at(size: int, points: Iterable[tuple[int, float]]) -> float:
    """The rate at ``size`` on the line through ``points`` (size, rate), in logarithms of both; outside of them the nearest."""
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    for (low, at_low), (high, at_high) in pairwise(ordered):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(at_low * (at_high / at_low) ** share)
    return ordered[-1][1]
