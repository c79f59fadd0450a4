"""Which matrices a parameter holds: itself, one per expert, or a flattened convolution filter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError

__all__ = ["CONV_OPTIONS", "MatrixSet", "check_expert_keys", "matrices_inside"]

CONV_OPTIONS = (None, "flatten")


@dataclass(frozen=True, slots=True)
class MatrixSet:
    """``count`` matrices of rows × cols, one behind the other in the parameter's index order.

    Attributes:
        count: number of matrices.
        rows: rows of each.
        cols: columns of each.
        lead: how many leading dims of the parameter count matrices; the next dim is the rows, all others are the columns.
    """

    count: int
    rows: int
    cols: int
    lead: int = 0


def check_expert_keys(keys: Sequence[str] | None) -> tuple[str, ...]:
    """``expert_keys`` as a tuple; a single string would be read letter by letter and is refused."""
    if isinstance(keys, str) or not all(isinstance(key, str) and key for key in keys or ()):
        raise ConfigError(f"expert_keys={keys!r} must be a list of parts of names, such as [{keys!r}].")
    return tuple(keys or ())


def matrices_inside(name: str, shape: Sequence[int], *, expert_keys: Sequence[str] = (), conv: str | None = None) -> MatrixSet:
    """Finds the matrices of a parameter that goes to Muon.

    Args:
        name: the parameter's name; an expert parameter contains one of ``expert_keys``.
        shape: the parameter's global shape: (rows, cols), (experts, rows, cols) or (out, in, *kernel).
        expert_keys: what marks a 3-D parameter as a stack of independent expert matrices.
        conv: ``"flatten"`` makes any other parameter of more than two dims one (out, in·kernel) matrix.
    """
    if len(shape) == 2:
        return MatrixSet(1, shape[0], shape[1])
    if len(shape) < 2:
        raise ConfigError(
            f"{name}: shape {tuple(shape)} has no rows and columns, so Muon cannot orthogonalise it. "
            "Put it into a group with use_muon=False; get_default_muon_param_groups(model) does so."
        )
    if len(shape) == 3 and any(key in name for key in expert_keys):
        return MatrixSet(shape[0], shape[1], shape[2], lead=1)
    if conv == "flatten":
        return MatrixSet(1, shape[0], math.prod(shape[1:]))
    raise ConfigError(
        f"{name}: shape {tuple(shape)} has more than two dims. If it is a stack of expert matrices (experts, out, in), "
        f"pass expert_keys=[...] with a part of its name (now {list(expert_keys)}). If it is a convolution filter, pass "
        'conv="flatten" to treat it as one (out, in·kernel) matrix, or put it into a group with use_muon=False.'
    )
