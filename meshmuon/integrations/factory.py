"""Muon for trainers that make the optimizer themselves: built from the module, with options by the names that trainers use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..optim import Muon
from ..params.checks import nearest, shown
from ..routing.model_names import ModelNames
from ..routing.param_groups import get_default_muon_param_groups

_TRAINERS_NAMES = {"betas": "adamw_betas", "eps": "adamw_eps"}
_ROUTING_OPTIONS = tuple(inspect.signature(get_default_muon_param_groups).parameters)[1:]
_OPTIONS = {*_ROUTING_OPTIONS, *tuple(inspect.signature(Muon).parameters)[1:]}


def muon_for(model: nn.Module, *, decays: Callable[[str], bool] | None = None, **options: Any) -> Muon:
    """Builds the optimizer of a model in one call: default param groups, then ``Muon``.

    It is for trainers that would call ``optimizer_class(model.parameters(), lr=..., weight_decay=...)``: parameters without names
    do not say which of them are embeddings, heads and norms.

    Args:
        model: the model as it will be trained. Shard it first, unless the trainer exchanges the parameters of the optimizer, as
            Accelerate does.
        decays: ``name -> bool``: parameters for which it returns False get no weight decay.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``. ``betas`` and ``eps`` are AdamW's, as trainers
            call them.
    """
    options = by_own_names(options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be the torch.nn.Module that will be trained.")
    if decays is not None and not callable(decays):
        raise ConfigError(f"decays={shown(decays)} must be a function of a parameter's name that returns a bool.")
    groups = get_default_muon_param_groups(model, **{name: options.pop(name) for name in _ROUTING_OPTIONS if name in options})
    return Muon(groups if decays is None else _split_by_decay(groups, decays, model), **options)


def by_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names that ``Muon`` has for them."""
    for name, own in _TRAINERS_NAMES.items():
        if name in options and own in options:
            given = f"{name}={shown(options[name])} and {own}={shown(options[own])}"
            raise ConfigError(f"{given} are two names of one option: give {own} only.")
    for name in options:
        if name not in _OPTIONS and name not in _TRAINERS_NAMES:
            near = nearest(name, sorted(_OPTIONS))
            raise ConfigError(
                f"{name}={shown(options[name])} is neither an option of Muon nor of get_default_muon_param_groups"
                + (f": did you mean {near}?" if near else "; docs/optimizer.md lists them.")
            )
    return {_TRAINERS_NAMES.get(name, name): value for name, value in options.items()}


def _split_by_decay(groups: list[dict[str, Any]], decays: Callable[[str], bool], model: nn.Module) -> list[dict[str, Any]]:
    """Each param group as two, of which the second has no weight decay. Empty ones are left out."""
    split = []
    for group in groups:
        for decayed in (True, False):
            pairs = [pair for pair in zip(group["names"], group["params"], strict=True) if _ask(decays, pair[0]) == decayed]
            if pairs:
                names, params = map(list, zip(*pairs, strict=True))
                part = {"names": ModelNames(model, names), "params": params}
                split.append({**group, **part, **({} if decayed else {"weight_decay": 0.0})})
    return split


def _ask(decays: Callable[[str], bool], name: str) -> bool:
    try:
        return bool(decays(name))
    except Exception as error:
        raise ConfigError(f"decays failed for {name} with {type(error).__name__}: {error}") from error
