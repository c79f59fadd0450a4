"""Which scheme a matrix gets: resolves ``"auto"``, and replaces rational schemes in 16 bits, which are too few for inverses."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..errors import ConfigError
from .blocks import choose_blocks, is_safe, worst_error
from .cost import orthogonalize_cost
from .rational import Rational
from .schemes import AUTO, Orthogonalizer, Scheme, hybrid, polar_express, zolotarev

_SHORT = (torch.bfloat16, torch.float16)  # too few digits for inverses


def scheme_for(scheme: Scheme | Orthogonalizer, rows: int, cols: int, dtype: torch.dtype) -> Scheme | Orthogonalizer:
    """The scheme that orthogonalises a rows × cols matrix with products in ``dtype``.

    ``AUTO`` becomes the cheapest scheme whose worst error on [1e-3, 1], rounding included, is at most that of ``polar_express``.
    A scheme with rational steps becomes ``polar_express`` in 16 bits. Everything else stays as it is.
    """
    if not isinstance(scheme, Scheme):
        return scheme
    if scheme == AUTO:
        return _cheapest(rows, cols, dtype)
    if not scheme.rational:
        return scheme
    if dtype in _SHORT:
        return polar_express()
    if not is_safe(scheme, dtype):
        raise ConfigError(
            f"scheme {scheme.name!r} ({scheme.source}) is not safe in {str(dtype).removeprefix('torch.')}: its smallest pole is "
            f"{_smallest_pole(scheme):.2g}, and rounding could make R + pole·I indefinite. Raise l (1e-3 is usual), or pass "
            "compute_dtype=torch.float64."
        )
    return scheme


def fallback_reason(scheme: Scheme | Orthogonalizer, dtype: torch.dtype) -> str | None:
    """Why a matrix is not orthogonalised by the scheme that its param group names; None where it is."""
    if isinstance(scheme, Scheme) and scheme.rational and dtype in _SHORT:
        name = str(dtype).removeprefix("torch.")
        return f"polar_express instead of {scheme.name}: {name} is too short for inverses"
    return None


@lru_cache(maxsize=4096)
def _cheapest(rows: int, cols: int, dtype: torch.dtype) -> Scheme:
    default = polar_express()
    if dtype in _SHORT:
        return default
    bound = worst_error(default, dtype)
    candidates = [default, *(scheme for scheme in (hybrid(), zolotarev()) if worst_error(scheme, dtype) <= bound)]
    return min(
        candidates, key=lambda scheme: orthogonalize_cost(rows, cols, scheme.steps, choose_blocks(rows, cols, scheme, dtype))
    )


def _smallest_pole(scheme: Scheme) -> float:
    return min(min(step.poles) for step in scheme.steps if isinstance(step, Rational))
