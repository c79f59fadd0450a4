"""How the shape of a matrix scales its learning rate.

An orthogonalised rows × cols update has Frobenius norm √min(rows, cols), so its entries have a root mean square of
1/√max(rows, cols). Each rule keeps another quantity equal over all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from ..errors import ConfigError
from .checks import check_range, number, shown

LRRule: TypeAlias = Literal["match_rms_adamw", "original", "spectral", "spectral_unclamped"]
AdjustLR: TypeAlias = LRRule | Callable[[int, int], float]
"""Name of a rule, or a function of the global (rows, cols) of a matrix."""

_RULES: dict[LRRule, Callable[[int, int], float]] = {
    # Update RMS 0.2, as of AdamW in long training (Moonlight, arXiv:2502.16982).
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # The rule of Keller Jordan's Muon and of nanochat.
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Spectral norm √(rows/cols): the same change of the output's RMS for every shape (arXiv:2310.17813).
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),  # torch's name for it
}


def check_adjust_lr(rule: AdjustLR) -> None:
    if not callable(rule) and (not isinstance(rule, str) or rule not in _RULES):
        raise ConfigError(
            f"adjust_lr_fn={shown(rule)} is unknown. Write one of {sorted(_RULES)} or a function of (rows, cols)."
        )


def lr_factor(rule: AdjustLR, rows: int, cols: int) -> float:
    """The factor of the learning rate of a rows × cols matrix."""
    if rows == 0 or cols == 0:
        return 1.0  # an empty matrix: rows / cols may not exist
    if not callable(rule):
        return _RULES[rule](rows, cols)
    what = f"adjust_lr_fn({rows}, {cols})"
    try:
        factor = rule(rows, cols)
    except Exception as error:
        raise ConfigError(f"{what} failed with {type(error).__name__}: {error}") from error
    check_range(factor, what, "learning rate", low=0.0)
    return number(factor, what, "learning rate")


def update_rms(rule: AdjustLR, rows: int, cols: int) -> float:
    """Root mean square of the entries of a step at learning rate 1."""
    return lr_factor(rule, rows, cols) / math.sqrt(max(rows, cols, 1))
