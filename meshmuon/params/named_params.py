"""A parameter together with its name and its param group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["NamedParam", "named_params"]


class NamedParam(NamedTuple):
    """A parameter with its group and the place of that group among the groups."""

    place: int
    group: dict[str, Any]
    name: str
    param: Tensor


def named_params(groups: Sequence[dict[str, Any]]) -> list[NamedParam]:
    """All parameters, group by group."""
    return [
        NamedParam(place, group, name, param)
        for place, group in enumerate(groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]
