"""Muon for trainers that make the optimizer themselves: built from the module, with options by the names that trainers use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..errors import ConfigError
from ..optim import Muon
from ..params.checks import nearest, shown
from ..routing.model_names import ModelNames
from ..routing.param_groups import get_default_muon_param_groups

_Kind = TypeVar("_Kind")

_TRAINERS_NAMES = {"betas": "adamw_betas", "eps": "adamw_eps"}
_ROUTING_OPTIONS = tuple(inspect.signature(get_default_muon_param_groups).parameters)[1:]
_OPTIONS = {*_ROUTING_OPTIONS, *tuple(inspect.signature(Muon).parameters)[1:]}


def muon_for(
    model: nn.Module,
    *,
    decays: Callable[[str], bool] | None = None,
    keys: Callable[[str], Mapping[str, Any]] | None = None,
    **options: Any,
) -> Muon:
    """Builds the optimizer of a model in one call: default param groups, then ``Muon``.

    It is for trainers that would call ``optimizer_class(model.parameters(), lr=..., weight_decay=...)``: parameters without names
    do not say which of them are embeddings, heads and norms.

    Args:
        model: the model as it will be trained. Shard it first, unless the trainer exchanges the parameters of the optimizer, as
            Accelerate does.
        decays: ``name -> bool``: parameters for which it returns False get no weight decay.
        keys: ``name -> dict``: further keys of the param group that the parameter goes to, such as ``{"lr": 1e-4}``. Parameters
            with equal keys share a group.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``. ``betas`` and ``eps`` are AdamW's, as trainers
            call them.
    """
    options = by_own_names(options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be the torch.nn.Module that will be trained.")
    for given, function, kind in (("decays", decays, "bool"), ("keys", keys, "dict of keys of its group")):
        if not (function is None or callable(function)):
            raise ConfigError(f"{given}={shown(function)} must be a function of a parameter's name that returns a {kind}.")
    groups = get_default_muon_param_groups(model, **{name: options.pop(name) for name in _ROUTING_OPTIONS if name in options})
    if keys is not None:
        groups = _split_by_keys(groups, partial(_ask, "keys", keys, _further_keys), model)
    if decays is not None:
        groups = _split_by_keys(groups, lambda name: {} if _ask("decays", decays, bool, name) else {"weight_decay": 0.0}, model)
    return Muon(groups, **options)


def by_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names that ``Muon`` has for them."""
    for name, own in _TRAINERS_NAMES.items():
        if name in options and own in options:
            given = f"{name}={shown(options[name])} and {own}={shown(options[own])}"
            raise ConfigError(f"{given} are two names of one option: give {own} only.")
    for name in options:
        if name not in _OPTIONS and name not in _TRAINERS_NAMES:
            near = nearest(str(name), sorted(_OPTIONS))  # YAML has keys that are numbers
            raise ConfigError(
                f"{name}={shown(options[name])} is neither an option of Muon nor of get_default_muon_param_groups"
                + (f": did you mean {near}?" if near else "; docs/optimizer.md lists them.")
            )
    return {_TRAINERS_NAMES.get(name, name): value for name, value in options.items()}


def _split_by_keys(groups: list[dict[str, Any]], keys: Callable[[str], dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Each param group as one part for every different dict of keys. Parameters without further keys come first."""
    split = []
    for group in groups:
        parts: list[tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]] = [({}, [])]
        for name, param in zip(group["names"], group["params"], strict=True):
            wanted = keys(name)
            pairs = next((pairs for found, pairs in parts if found == wanted), None)
            if pairs is None:
                parts.append((wanted, pairs := []))
            pairs.append((name, param))
        for further, pairs in parts:
            if pairs:
                names, params = map(list, zip(*pairs, strict=True))
                split.append({**group, "names": ModelNames(model, names), "params": params, **further})
    return split


def _further_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    if reserved := {"params", "names", "param_names", "use_muon"} & set(keys):
        raise ConfigError(f"{min(reserved)} is decided by get_default_muon_param_groups; is_muon_func changes the route")
    return dict(keys)


def _ask(what: str, function: Callable[[str], Any], kind: Callable[[Any], _Kind], name: str) -> _Kind:
    try:
        return kind(function(name))
    except Exception as error:
        raise ConfigError(f"{what} failed for {name} with {type(error).__name__}: {error}") from error
