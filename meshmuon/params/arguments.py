"""The keywords of the constructors: which option each of them names, and what to say of one that names none."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from ..dropped import OPTIONS as DROPPED
from ..errors import ConfigError, OptionNameWarning, UnknownOptionError, level_of_user
from .checks import adamw_betas, adamw_eps, nearest, shown
from .option_table import OPTIONS, Option, Scope, group_options, optimizer_options

_NAMES = {name for option in OPTIONS for name in (option.name, *option.aliases)}
_OWN_NAMES = {alias: option.name for option in group_options() for alias in option.aliases}  # of torch's names
_NO_WARMUP = "Muon has no built-in warmup. Use a scheduler, such as torch.optim.lr_scheduler.LinearLR"
# What other optimizers have, and why it is no option here.
_WHY_NO_OPTION = {
    "learning_rate": "it is called lr",
    "fused": "AdamW's part is always fused. Leave it out",
    "foreach": "a step always works on many parameters at once. Leave it out",
    "capturable": "no CUDA graph can capture a whole step; cuda_graphs=True captures the orthogonalisation",
    "differentiable": "a step cannot be differentiated. Leave it out",
    "amsgrad": "AdamW's part has no such variant. Leave it out",
    "dampening": "momentum is a sum, M ← momentum·M + G. Leave it out",
    "form": "each matrix takes the form with the fewest FLOPs that is safe in its dtype. Leave it out",
    "ns_coefficients": "the coefficients are those of the scheme. Write scheme=[(a, b, c)]",
    "warmup": _NO_WARMUP,
    "warmup_steps": _NO_WARMUP,
    "num_warmup_steps": _NO_WARMUP,
}
# Older names that sound like something else, and what they do.
_MISLEADING = {
    "warmup_step": "is the number of waves that exchange ahead of the one that computes; it does not warm up the lr",
    "use_distributed_muon": "steps by the slow reference path, for verification only; Muon is distributed without it",
}
_unwarned = set(_MISLEADING)


def options_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the constructor's ``arguments`` by their names in the table, checked.

    An option with another name may be given by either. If both are given, they must be equal.
    """
    refuse_unknown(arguments["unknown"])
    return {option.name: _value_of(option, arguments) for option in OPTIONS}


def refuse_unknown(options: Mapping[Any, Any], further: Collection[str] = ()) -> None:
    """Refuses keywords that neither name an option nor are among ``further``."""
    for name, value in options.items():
        if name in DROPPED:
            raise UnknownOptionError(f"{name}={shown(value)} is no option of Muon any more: {DROPPED[name]}")
        if name not in _NAMES and name not in further:
            own = sorted({*(option.name for option in OPTIONS), *further})  # no older names
            why, near = _WHY_NO_OPTION.get(name), nearest(str(name), own)  # YAML has keys that are numbers
            hint = f": {why}." if why else f": did you mean {near}?" if near else "; docs/optimizer.md lists them."
            raise UnknownOptionError(f"{name}={shown(value)} is not an option of Muon{hint}")


def by_own_names(options: Mapping[str, Any], further: Collection[str] = ()) -> dict[str, Any]:
    """A user's options, with torch's names replaced by ours; ``further`` are other keywords that are allowed."""
    refuse_unknown(options, further)
    for option in group_options():
        _one_value(option, {name: options[name] for name in (option.name, *option.aliases) if name in options})
    return {_OWN_NAMES.get(name, name): value for name, value in options.items()}


def fill_own_names(group: dict[str, Any], where: str) -> None:
    """Gives a user's AdamW group the options that it has by torch's names by their own names as well."""
    for option in group_options(use_muon=False):
        given = {name: group[name] for name in (option.name, *option.aliases) if name in group}
        if option.aliases and given:
            group[option.name] = _one_value(option, given, where)


def warn_of_older_names(arguments: Mapping[str, Any]) -> None:
    """Warns, once per name, of options that were given by an older name which sounds like something else."""
    for option in optimizer_options():
        for alias in option.aliases:
            if arguments[alias] != option.default and alias in _unwarned:
                _unwarned.remove(alias)
                text = f"{alias}={arguments[alias]} {_MISLEADING[alias]}. Its clear name is {option.name}."
                warnings.warn(text, OptionNameWarning, stacklevel=level_of_user())


def _value_of(option: Option, arguments: Mapping[str, Any]) -> Any:
    if not option.aliases:
        if option.check is not None:  # also of param groups: no group may use it yet
            option.check(arguments, option.name, "Muon")
        return arguments[option.name]
    # In the signature one of the names has the option's default, an older name if there is one, and the others have
    # None.
    defaults = dict.fromkeys((option.name, *option.aliases))
    defaults[option.aliases[0] if option.scope is Scope.OPTIMIZER else option.name] = option.default
    given = {name: arguments[name] for name in defaults}
    given = {
        name: value
        for name, value in given.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]
    }
    return _one_value(option, given) if given else option.default


def _one_value(option: Option, given: Mapping[str, Any], where: str = "Muon") -> Any:
    """The value of an option that was given by one or several of its names, checked if it has several."""
    if not option.aliases or not given:
        return next(iter(given.values()), None)
    read = {"adamw_betas": adamw_betas, "adamw_eps": adamw_eps}.get(option.name)
    values = {}
    for name, value in given.items():
        assert option.check is not None
        option.check({option.name: value, name: value}, name, where)  # errors show the name that the user wrote
        values[name] = value if read is None else read({option.name: value})
    (first, value), *others = values.items()
    for other, other_value in others:
        if other_value != value:
            both = f"{first}={shown(given[first])} and {other}={shown(given[other])}"
            raise ConfigError(f"{where}: {both} are two names of one option: give {first} only.")
    return given[first]
