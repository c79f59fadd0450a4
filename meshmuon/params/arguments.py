"""The keywords of the constructors: which option each of them names, and what to say of one that names none."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..dropped import OPTIONS as DROPPED
from ..errors import ConfigError, OptionNameWarning, UnknownOptionError, level_of_user
from ..ortho import keller
from .checks import adamw_betas, adamw_eps, nearest, shown
from .option_table import OPTIONS, Option, group_options

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
# Names of Motif's optimizer that sound like something else, and what they do.
_MISLEADING = {
    "warmup_step": "is the number of waves that exchange ahead of the one that computes; it does not warm up the lr",
    "use_distributed_muon": "steps by the slow reference path, for verification only; Muon is distributed without it",
}
# or about what torch leaves to AdamW
_AS_IN_TORCH = ("lr", "adamw_lr", "weight_decay", "momentum", "nesterov", "ns_steps")
_RULE_OF_BOTH = "match_rms_adamw"  # torch's other rule and the default here: nobody can tell whether the user gave it
_unwarned = set(_MISLEADING)


def options_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the constructor's ``arguments`` by their names in the table, checked.

    An option with another name, torch's, may be given by either. If both are given, they must be equal.
    """
    coefficients = arguments["unknown"].get("ns_coefficients")
    if isinstance(coefficients, (list, tuple)) and len(coefficients) == 3:
        raise UnknownOptionError(
            f"ns_coefficients={shown(coefficients)} is not an option of Muon. {torchs_update(arguments)}"
        )
    if arguments["adjust_lr_fn"] is None:
        raise ConfigError(f'adjust_lr_fn=None is what torch.optim.Muon calls "original". {torchs_update(arguments)}')
    refuse_unknown(arguments["unknown"])
    return {option.name: _value_of(option, arguments) for option in OPTIONS}


def torchs_update(arguments: Mapping[str, Any]) -> str:
    """The call that updates as ``torch.optim.Muon`` does with the constructor's ``arguments``, for those who moved
    from there.
    """
    params, rule = arguments["params"], arguments["adjust_lr_fn"]
    what = '[{"params": matrices, "use_muon": True}]'
    if isinstance(params, nn.Module):
        what = "model"
    elif isinstance(params, (list, tuple)) and any(
        isinstance(group, Mapping) and "use_muon" in group for group in params
    ):
        what = "groups"
    values = {option: arguments[option.name] for option in OPTIONS if option.name in _AS_IN_TORCH}
    words = [
        f"{option.name}={shown(value)}" for option, value in values.items() if shown(value) != shown(option.default)
    ]
    coefficients = arguments["unknown"].get("ns_coefficients")
    words.append(f"scheme=[{tuple(coefficients if isinstance(coefficients, (list, tuple)) else keller(1).steps[0])}]")
    of_both = isinstance(rule, str) and rule == _RULE_OF_BOTH
    words.append(f"adjust_lr_fn={shown('original' if rule is None or of_both else rule)}")
    either = f", or that without adjust_lr_fn if you wrote {_RULE_OF_BOTH!r}" if of_both else ""
    if what == "model" and arguments["adamw_lr"] is None:
        either += ", and an adamw_lr for all that is no matrix"
    return (
        "The update of torch.optim.Muon is that of "
        f"{type(arguments['self']).__name__}({', '.join([what, *words])}){either}."
    )


def refuse_unknown(options: Mapping[Any, Any], further: Collection[str] = ()) -> None:
    """Refuses keywords that neither name an option nor are among ``further``."""
    for name, value in options.items():
        if name in DROPPED:
            raise UnknownOptionError(f"{name}={shown(value)} is no option of Muon any more: {DROPPED[name]}")
        if name not in _NAMES and name not in further:
            own = sorted({*(option.name for option in OPTIONS), *further})
            why, near = _WHY_NO_OPTION.get(name), nearest(str(name), own)  # YAML has keys that are numbers
            hint = f": {why}." if why else f": did you mean {near}?" if near else "; docs/optimizer.md lists them."
            raise UnknownOptionError(f"{name}={shown(value)} is not an option of Muon{hint}")


def by_own_names(options: Mapping[str, Any], further: Collection[str] = ()) -> dict[str, Any]:
    """A user's options, with torch's names replaced by ours; ``further`` are other keywords that are allowed."""
    refuse_unknown(options, further)
    for option in group_options():
        _one_value(option, {name: options[name] for name in (option.name, *option.aliases) if name in options})
    return {_OWN_NAMES.get(name, name): value for name, value in options.items()}


def misspelt_keys(param_groups: Sequence[Mapping[str, object]], first: int = 0) -> list[str]:
    """Warnings of keys that are nearly options, one for each, in users' groups of which ``first`` is the first one's
    number.

    Trainers and schedulers add keys of their own. None is that near, except where it has an option's name in it, as
    ``max_momentum`` and ``weight_decay_mult`` have.
    """
    names = [name for option in group_options() for name in (option.name, *option.aliases)]
    warned: dict[str, str] = {}
    for index, group in enumerate(param_groups, first):
        for key in (key for key in map(str, group) if key not in names):
            near = "lr" if key == "learning_rate" else nearest(key.lower(), names, count=1, alike=0.85)
            if near and not f"_{key}_".startswith(f"_{near}_") and not key.endswith(f"_{near}"):
                warned.setdefault(key, f"group {index}: {key} is no option and has no effect: did you mean {near}?")
    return list(warned.values())


def fill_own_names(group: dict[str, Any], where: str) -> None:
    """Gives a user's AdamW group the options that it has by torch's names by their own names as well."""
    for option in group_options(use_muon=False):
        given = {name: group[name] for name in (option.name, *option.aliases) if name in group}
        if option.aliases and given:
            group[option.name] = _one_value(option, given, where)


def warn_of_names(arguments: Mapping[str, Any]) -> None:
    """Warns, once per name, of options whose name sounds like something else."""
    for option in OPTIONS:
        if option.name in _unwarned and arguments[option.name] != option.default:
            _unwarned.remove(option.name)
            text = f"{option.name}={arguments[option.name]} {_MISLEADING[option.name]}."
            warnings.warn(text, OptionNameWarning, stacklevel=level_of_user())


def _value_of(option: Option, arguments: Mapping[str, Any]) -> Any:
    if not option.aliases:
        if option.check is not None:  # also of param groups: no group may use it yet
            option.check(arguments, option.name, "Muon")
        return arguments[option.name]
    defaults = {option.name: option.default, **dict.fromkeys(option.aliases)}  # those of the signature
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
