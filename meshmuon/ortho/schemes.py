"""Schemes: which odd quintics are composed, step by step, to drive every singular value towards 1.

A scheme is data: a name, the coefficients of each step, and where they come from.

* ``keller``: Keller Jordan's one triple, repeated (https://kellerjordan.github.io/posts/muon/). Steepest at zero, never
  settles: singular values end anywhere in about [0.68, 1.21].
* ``polar_express``: each step is the minimax quintic on the interval that the step before leaves behind (Amsel, Persson,
  Musco, Gower, "The Polar Express", arXiv:2505.16932). Computed here, by ``remez``, for any bound and number of steps.
* your own list of triples, or a callable that orthogonalises a batch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import ConfigError
from .remez import Quintic, best_quintic

__all__ = ["Orthogonalizer", "Scheme", "SchemeLike", "keller", "polar_express", "resolve_scheme"]

MAX_STEPS = 64
_LARGEST = 65504.0  # of float16, the narrowest dtype that products are computed in

Orthogonalizer: TypeAlias = Callable[[Tensor], Tensor]
"""A callable scheme: (batch, rows, cols) in, its orthogonalisation of the same shape out."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A composition of odd quintics, applied to singular values in [0, 1], first step first."""

    name: str
    steps: tuple[Quintic, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError(f"scheme {self.name!r} has no steps, so that nothing would be orthogonalised: give at least one.")
        for step in self.steps:
            if len(step) != 3 or not all(isinstance(one, (int, float)) and abs(one) <= _LARGEST for one in step):
                raise ConfigError(
                    f"scheme {self.name!r} has the step {step!r}: each is three numbers (a, b, c), for a·x + b·x³ + c·x⁵, "
                    f"finite and of at most {_LARGEST:g}, the largest that float16 holds."
                )

    def __call__(self, x: float) -> float:
        """What the scheme makes of one singular value."""
        for quintic in self.steps:
            x = quintic(x)
        return x


SchemeLike: TypeAlias = "str | Scheme | Sequence[Sequence[float]] | Orthogonalizer"


@lru_cache
def keller(steps: int = 5) -> Scheme:
    """Keller Jordan's coefficients, the same at every step."""
    _check_steps(steps)
    return Scheme("keller", (Quintic(3.4445, -4.7750, 2.0315),) * steps, "Keller Jordan, Muon, 2024")


@lru_cache
def polar_express(l: float = 1e-3, steps: int = 5, safety: float = 0.01, cushion: float = 0.02) -> Scheme:  # noqa: E741
    """Minimax quintics, composed.

    Args:
        l: smallest singular value, relative to the Frobenius norm, that the scheme promises to bring near 1.
        steps: number of quintics.
        safety: every step but the last is stretched by ``1 + safety``, so that a singular value which rounding pushed
            above the interval still converges. Use 0 in exact arithmetic.
        cushion: a step never looks below ``cushion`` times the upper end of its interval, which keeps the early steps
            from a steepness that amplifies rounding.
    """
    _check_steps(steps)
    if not 0 < l < 1:
        raise ConfigError(f"polar_express: l={l} is outside (0, 1). It is a bound on the smallest singular value; use 1e-3.")
    if not 0 <= safety < 1 or not 0 <= cushion < 1:
        raise ConfigError(f"polar_express: safety={safety} and cushion={cushion} must be in [0, 1); use 0.01 and 0.02.")
    low, high = l, 1.0
    quintics = []
    for step in range(steps):
        quintic = best_quintic(max(low, cushion * high), high)
        if cushion * high > low:  # centre what the interval [low, high] really becomes on 1
            quintic = quintic.scaled(2 / (quintic(low) + quintic(high)))
        if step < steps - 1:
            quintic = quintic.stretched(1 + safety)
        quintics.append(quintic)
        low = min(quintic(low), 1.0)  # never above 1 but for the last digit
        high = 2 - low
    source = f"minimax by Remez, l={l:g}, safety={safety:g}, cushion={cushion:g}"
    return Scheme("polar_express", tuple(quintics), source)


_NAMED: dict[str, Callable[[int], Scheme]] = {
    "keller": lambda steps: keller(steps),
    "polar_express": lambda steps: polar_express(steps=steps),
}


def resolve_scheme(scheme: SchemeLike, steps: int) -> Scheme | Orthogonalizer:
    """Turns what a user may write as ``scheme`` into a Scheme, or leaves a callable as it is.

    Args:
        scheme: a name, a Scheme, a list of (a, b, c) triples (one triple is repeated), or a callable.
        steps: ``ns_steps``; an explicit list of several triples must have exactly this length.
    """
    _check_steps(steps)  # here and not only where coefficients are made: a cache takes 5.0 and True for 5 and 1
    if isinstance(scheme, str):
        if scheme not in _NAMED:
            raise ConfigError(
                f"scheme={scheme!r} is unknown. Write one of {sorted(_NAMED)}, a list of (a, b, c) triples, "
                "a Scheme, or a callable that orthogonalises a (batch, rows, cols) tensor."
            )
        return _NAMED[scheme](steps)
    if isinstance(scheme, Scheme):
        _check_length(len(scheme.steps), steps)
        return scheme
    if callable(scheme):
        return scheme
    return _from_triples(scheme, steps)


def _from_triples(triples: Any, steps: int) -> Scheme:
    try:
        rows = list(triples)
        if len(rows) == 3 and all(isinstance(value, (int, float)) for value in rows):
            rows = [rows]  # one bare triple, as torch.optim.Muon's ns_coefficients
        quintics = tuple(Quintic(*(float(value) for value in row)) for row in rows)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"scheme={triples!r}: every step is a triple (a, b, c) of numbers, for a·x + b·x³ + c·x⁵.") from None
    if len(quintics) == 1:
        quintics *= steps
    _check_length(len(quintics), steps)
    return Scheme("custom", quintics, "given by the user")


def _check_length(length: int, steps: int) -> None:
    if length != steps:
        raise ConfigError(f"the scheme has {length} steps but ns_steps={steps}. Pass ns_steps={length}.")


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"ns_steps={steps!r} must be a whole number from 1 to {MAX_STEPS}; 5 is usual.")
