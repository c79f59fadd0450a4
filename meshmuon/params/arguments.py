"""The arguments of the constructor: checked, under one name each, sorted into optimizer-wide options and defaults of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .checks import shown
from .option import Option
from .option_table import group_options, optimizer_options

__all__ = ["defaults_from", "optimizer_options_from"]


def optimizer_options_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer-wide options among ``arguments``, checked and by their names in the table.

    An option that has an older name may be given by either. In the constructor, the new name defaults to None and the older name
    to the option's default. If both are given, they must be equal.
    """
    return {option.name: _value_of(option, arguments) for option in optimizer_options()}


def _value_of(option: Option, arguments: Mapping[str, Any]) -> Any:
    given = {name: arguments[name] for name in (option.name, *option.aliases)}
    if option.aliases and given[option.name] is None:
        del given[option.name]
    if option.check is not None:
        for name in given:
            option.check(given, name, "Muon")  # errors show the name that the user wrote
    (name, value), *others = given.items()
    for other, other_value in others:
        if other_value not in (value, option.default):
            raise ConfigError(
                f"{name}={shown(value)} and {other}={shown(other_value)} are two names of one option: give {name} only."
            )
    return value


def defaults_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options of param groups among ``arguments``, in the form in which groups keep them."""
    return {option.name: option.kept_as(arguments[option.name]) for option in group_options()}
