"""Schemes: which odd functions are composed, step by step, to drive every singular value towards 1.

A scheme is data: a name, the coefficients of each step, and where they come from. A step is a quintic, which costs
products, or a rational function, which costs one inverse per pole and does the work of several quintics.

* ``keller``: Keller Jordan's one triple, repeated (https://kellerjordan.github.io/posts/muon/). Steepest at zero, never
  settles: singular values end anywhere in about [0.68, 1.21].
* ``polar_express``: each step is the minimax quintic on the interval that the step before leaves behind (Amsel,
  Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932). Computed here, by ``remez``, for any bound and number
  of steps.
* ``zolotarev``: one rational step, the best approximation of 1 on [l, 1] with a given number of poles.
* ``halley``: one rational step with one pole, then minimax quintics.
* ``hybrid``: one hybrid step, the best sum of a quintic and two poles on [1e-3, 1].
* ``auto``: the cheapest of these for a matrix whose error is no larger than that of ``polar_express``. On a GPU, and
  with another number of steps than 5, it is ``polar_express``.
* your own list of triples, or a callable that orthogonalises a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ..errors import ConfigError, shown
from .rational import HYBRID_STEP, Rational, halley_step, zolotarev_step
from .remez import Quintic, best_quintic

DEFAULT_STEPS = 5
MAX_STEPS = 64
_MOST_POLES = 8
_SMALLEST_BOUND = 1e-5  # below, float64 loses too many digits of the coefficients
_LARGEST = 65504.0  # of float16, the narrowest dtype that products are computed in

Step: TypeAlias = "Quintic | Rational"
"""What one step does to a singular value."""

Orthogonalizer: TypeAlias = Callable[[Tensor], Tensor]
"""A callable scheme: (batch, rows, cols) in, its orthogonalisation of the same shape out."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A composition of odd functions, applied to singular values in [0, 1], first step first."""

    name: str
    steps: tuple[Step, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.steps and self.name != "auto":
            raise ConfigError(
                f"scheme {self.name!r} has no steps, so that nothing would be orthogonalised: give at least one."
            )
        for step in self.steps:
            if isinstance(step, Rational):
                _check_rational(self.name, step)
            else:
                _check_quintic(self.name, step)

    def __call__(self, x: float) -> float:
        """What the scheme makes of one singular value."""
        for step in self.steps:
            x = step(x)
        return x

    @property
    def rational(self) -> bool:
        """Whether any step needs inverses, which 16 bits are too short for."""
        return any(isinstance(step, Rational) for step in self.steps)


def _check_quintic(name: str, step: Any) -> None:
    if len(step) != 3 or not all(isinstance(value, (int, float)) and abs(value) <= _LARGEST for value in step):
        raise ConfigError(
            f"scheme {name!r} has the step {step!r}: each is three numbers (a, b, c), for a·x + b·x³ + c·x⁵, "
            f"finite and of at most {_LARGEST:g}, the largest that float16 holds."
        )


def _check_rational(name: str, step: Rational) -> None:
    constant, poles, weights, linear, quadratic = step
    values = (constant, *poles, *weights, linear, quadratic)
    paired = bool(poles) and len(poles) == len(weights) and all(isinstance(value, (int, float)) for value in values)
    if not paired or not all(math.isfinite(value) for value in values) or min(poles) <= 0 or min(weights) < 0:
        raise ConfigError(
            f"scheme {name!r} has the step {step!r}: it needs a constant, and as many poles as weights, at least one "
            "of each; poles must be positive, weights at least 0, all of them finite."
        )


AUTO = Scheme("auto", (), "chosen for each matrix by dtype and cost")
"""Stands for the cheapest scheme that is as exact as ``polar_express``; ``scheme_for`` says which one that is for a
matrix.
"""

SchemeName: TypeAlias = Literal["auto", "halley", "hybrid", "keller", "polar_express", "zolotarev"]
SchemeLike: TypeAlias = SchemeName | Scheme | Sequence[Sequence[float]] | Orthogonalizer


@lru_cache(typed=True)
def keller(steps: int = 5) -> Scheme:
    """Keller Jordan's coefficients, the same at every step."""
    _check_steps(steps)
    return Scheme("keller", (Quintic(3.4445, -4.7750, 2.0315),) * steps, "Keller Jordan, Muon, 2024")


@lru_cache(typed=True)
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
        raise ConfigError(
            f"polar_express: l={l} is outside (0, 1). It is a bound on the smallest singular value; use 1e-3."
        )
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


@lru_cache(typed=True)
def zolotarev(l: float = 1e-3, poles: int = 3) -> Scheme:  # noqa: E741
    """One rational step: the best odd function with ``poles`` poles on [l, 1].

    The worst distance from 1 on [1e-3, 1] is 0.202 with 2 poles, 0.062 with 3 and 0.019 with 4. Singular values below
    ``l`` end below 1, the smaller the lower.

    Args:
        l: smallest singular value, relative to the Frobenius norm, that the scheme promises to bring near 1.
        poles: number of poles; each costs one inverse.
    """
    _check_bound("zolotarev", l)
    if not _is_count(poles, 1, _MOST_POLES):
        raise ConfigError(f"zolotarev: poles={poles!r} must be a whole number from 1 to {_MOST_POLES}; 3 is usual.")
    return Scheme("zolotarev", (zolotarev_step(l, poles),), f"Zolotarev, 1877, l={l:g}, {poles} poles")


@lru_cache(typed=True)
def halley(l: float = 1e-3, quintics: int = 2) -> Scheme:  # noqa: E741
    """One rational step with one pole, then minimax quintics on what it leaves.

    The worst distance from 1 on [1e-3, 1] is 0.157 with 1 quintic and 0.0027 with 2.

    Args:
        l: smallest singular value, relative to the Frobenius norm, that the scheme promises to bring near 1.
        quintics: number of quintics after the rational step.
    """
    _check_bound("halley", l)
    if not _is_count(quintics, 0, MAX_STEPS - 1):
        raise ConfigError(
            f"halley: quintics={quintics!r} must be a whole number from 0 to {MAX_STEPS - 1}; 2 is usual."
        )
    first = halley_step(l)
    steps: list[Step] = [first]
    low, high = first(l), 1.0
    for _ in range(quintics):
        quintic = best_quintic(low, high)
        steps.append(quintic)
        low = min(quintic(low), 1.0)
        high = 2 - low
    return Scheme("halley", tuple(steps), f"Halley with the weights of QDWH, then minimax by Remez, l={l:g}")


@lru_cache
def hybrid() -> Scheme:
    """One hybrid step, a quintic plus two poles: the fewest FLOPs of all schemes that are as exact as
    ``polar_express``.

    The worst distance from 1 on [1e-3, 1] is 0.128.
    """
    return Scheme("hybrid", (HYBRID_STEP,), "quintic and two poles, minimax by Remez, l=0.001")


def _check_bound(name: str, l: float) -> None:  # noqa: E741
    if isinstance(l, bool) or not isinstance(l, (int, float)) or not _SMALLEST_BOUND <= l < 1:
        raise ConfigError(
            f"{name}: l={l!r} is outside [{_SMALLEST_BOUND:g}, 1). It is a bound on the smallest singular value; use "
            "1e-3."
        )


_NAMED: dict[str, Callable[[int], Scheme]] = {
    "auto": lambda steps: AUTO if steps == DEFAULT_STEPS else polar_express(steps=steps),
    "halley": lambda steps: halley(),
    "hybrid": lambda steps: hybrid(),
    "keller": lambda steps: keller(steps),
    "polar_express": lambda steps: polar_express(steps=steps),
    "zolotarev": lambda steps: zolotarev(),
}


def resolve_scheme(scheme: SchemeLike | str, steps: int) -> Scheme | Orthogonalizer:
    """Turns what a user may write as ``scheme`` into a Scheme, or leaves a callable as it is.

    Args:
        scheme: a name, a Scheme, a list of (a, b, c) triples (one triple is repeated), or a callable.
        steps: ``ns_steps``; an explicit list of several triples must have exactly this length. Schemes with rational
            steps have a fixed number of steps.
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
        if not scheme.rational and scheme != AUTO:
            _check_length(len(scheme.steps), steps)
        return scheme
    if callable(scheme):
        return scheme
    return _from_rows(scheme, steps)


def _from_rows(rows: Any, steps: int) -> Scheme:
    """A scheme from plain numbers, as checkpoints store them: triples, and the fields of ``Rational`` for rational
    steps.
    """
    try:
        listed = list(rows)
        if len(listed) == 3 and all(isinstance(value, (int, float)) for value in listed):
            listed = [listed]  # one bare triple, as torch.optim.Muon's ns_coefficients
        parsed = tuple(_parsed_step(row) for row in listed)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"scheme={shown(rows)}: every step is a triple (a, b, c) of numbers, for a·x + b·x³ + c·x⁵."
        ) from None
    if any(isinstance(step, Rational) for step in parsed):
        return Scheme("custom", parsed, "given by the user")
    if len(parsed) == 1:
        parsed *= steps
    _check_length(len(parsed), steps)
    return Scheme("custom", parsed, "given by the user")


def _parsed_step(row: Any) -> Step:
    first, second, third, *rest = row
    if isinstance(second, (list, tuple)):
        linear, quadratic = rest or (0.0, 0.0)
        return Rational(
            float(first), tuple(map(float, second)), tuple(map(float, third)), float(linear), float(quadratic)
        )
    a, b, c = row
    return Quintic(float(a), float(b), float(c))


def _check_length(length: int, steps: int) -> None:
    if length != steps:
        raise ConfigError(f"the scheme has {length} steps but ns_steps={steps}. Pass ns_steps={length}.")


def _check_steps(steps: int) -> None:
    if not _is_count(steps, 1, MAX_STEPS):
        raise ConfigError(f"ns_steps={shown(steps)} must be a whole number from 1 to {MAX_STEPS}; 5 is usual.")


def _is_count(number: Any, least: int, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= most
