"""How fast machines work and send: the parts of a calibration."""

from __future__ import annotations

from dataclasses import dataclass


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
