"""A parameter together with its name and its param group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .option_table import ParamGroup


class NamedParam(NamedTuple):
    """A parameter with its name, its param group, and the index of that group in ``optimizer.param_groups``."""

    group_index: int
    param_group: ParamGroup
    name: str
    param: Tensor


def named_params(groups: Sequence[ParamGroup]) -> list[NamedParam]:
    """All parameters, param group by param group."""
    return [
        NamedParam(group_index, group, name, param)
        for group_index, group in enumerate(groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]
