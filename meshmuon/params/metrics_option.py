"""The option ``metrics``: how often a step is measured, and how closely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigError
from .checks import shown

_MOST_ITERATIONS = 64


@dataclass(frozen=True, slots=True)
class Metrics:
    """Which steps are measured, and how closely; ``Muon(metrics=10)`` is ``Muon(metrics=Metrics(every=10))``.

    Attributes:
        every: interval of measured steps; 1 measures each.
        iterations: steps of the Lanczos iteration from which the singular values of the momentum are estimated. Each
            reads the Gram matrix, or the matrix twice.
        weight_spectra: whether the largest singular value of each weight is tracked. It adds the longer side of every
            matrix to the numbers that ranks reduce.
    """

    every: int = 10
    iterations: int = 6
    weight_spectra: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"metrics: every={shown(self.every)} must be a whole number (int) of at least 1.")
        known = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        if not known or not 1 <= self.iterations <= _MOST_ITERATIONS:
            raise ConfigError(
                f"metrics: iterations={shown(self.iterations)} must be a whole number, 1 to {_MOST_ITERATIONS}."
            )
        if not isinstance(self.weight_spectra, bool):
            raise ConfigError(f"metrics: weight_spectra={shown(self.weight_spectra)} must be True or False.")


MetricsLike: TypeAlias = "int | Metrics | None"


def metrics_from(value: object) -> Metrics | None:
    """What a user may write as ``metrics``: None, a number of steps, or a ``Metrics``."""
    if value is None or isinstance(value, Metrics):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Metrics(every=value)
    raise ConfigError(
        f"metrics={shown(value)} must be None (off), a whole number k to measure every k-th step, or a "
        "meshmuon.metrics.Metrics(every=k)."
    )
