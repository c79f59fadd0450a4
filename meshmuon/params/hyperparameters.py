"""The hyperparameters that ranks compare at every step, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from ..device import known_to_host
from .option import Compared
from .option_table import group_options

__all__ = ["hyperparameters_of"]

_COMPARED_KEYS = {
    use_muon: tuple(
        key
        for option in group_options(use_muon)
        if option.compared is Compared.BY_VALUE
        for key in (option.name, *option.aliases)
    )
    for use_muon in (True, False)
}


def hyperparameters_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hyperparameters of each param group. Ranks that have different ones would silently diverge."""
    return [
        ", ".join(f"{key}={_value_text(group[key])}" for key in _COMPARED_KEYS[bool(group["use_muon"])] if key in group)
        for group in groups
    ]


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if known_to_host(value) else "a tensor on a device"  # reading it would wait for the device
    if type(value) is not bool and isinstance(value, Real):
        try:
            return repr(float(value))
        except OverflowError:  # beyond the range of floats; the step refuses it
            return str(value)
    return str(getattr(value, "__qualname__", value))  # the repr of a function would contain an address
