"""Muon for trainers that make the optimizer themselves: built from the module, with options by the names that
trainers use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..optim import Muon
from ..params import arguments
from ..params.checks import shown
from ..routing.param_groups import ModelNames, get_default_muon_param_groups
from ..torch_compat import module_behind

_ROUTING_OPTIONS = tuple(inspect.signature(get_default_muon_param_groups).parameters)[1:]


def muon_for(
    model: nn.Module | Iterator[nn.Parameter], *, keys: Callable[[str], Mapping[str, Any]] | None = None, **options: Any
) -> Muon:
    """Builds the optimizer of a model in one call: default param groups, then ``Muon``.

    It is for trainers that would call ``optimizer_class(model.parameters(), lr=..., weight_decay=...)``: parameters
    without names do not say which of them are embeddings, heads and norms.

    Args:
        model: the model as it will be trained, or torch's ``model.parameters()`` as it was returned, for configurations
            that only name a function. Shard it first, unless the trainer exchanges the parameters of the optimizer, as
            Accelerate does.
        keys: ``name -> dict``: further keys of the param group that the parameter goes to, such as ``{"lr": 1e-4}`` or
            ``{"weight_decay": 0.0}``. Parameters of one default group with equal keys share a group.
        options: options of ``get_default_muon_param_groups`` and of ``Muon``. ``betas`` and ``eps`` are AdamW's, as
            trainers call them.
    """
    options = by_own_names(options)
    module = module_behind(model)
    if module is None:
        raise ConfigError(
            f"model is a {type(model).__name__}, which does not say which module it is from, or may be only a part of "
            "its parameters; muon_for needs the torch.nn.Module that will be trained, or the result of torch's own "
            "module.parameters() before it is read. To train a part, call requires_grad_(False) on the rest."
        )
    if not (keys is None or callable(keys)):
        raise ConfigError(f"keys={shown(keys)} must be a function of a parameter's name that returns a dict of keys.")
    groups = get_default_muon_param_groups(
        module, **{name: options.pop(name) for name in _ROUTING_OPTIONS if name in options}
    )
    if keys is not None:
        groups = _split_by_keys(groups, keys, module)
    return Muon(groups, **options)


def by_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options, with torch's names replaced by those of ``Muon``. Unknown ones are refused."""
    return arguments.by_own_names(options, _ROUTING_OPTIONS)


def _split_by_keys(
    groups: list[dict[str, Any]], keys: Callable[[str], Mapping[str, Any]], model: nn.Module
) -> list[dict[str, Any]]:
    """Each param group as one part for every different dict of keys. Parameters without further keys come first."""
    split = []
    for group in groups:
        parts: list[tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]] = [({}, [])]
        for name, param in zip(group["names"], group["params"], strict=True):
            wanted = _further_keys(keys, name)
            pairs = next((pairs for found, pairs in parts if found == wanted), None)
            if pairs is None:
                parts.append((wanted, pairs := []))
            pairs.append((name, param))
        for further, pairs in parts:
            if pairs:
                names, params = map(list, zip(*pairs, strict=True))
                split.append({**group, "names": ModelNames(model, names), "params": params, **further})
    return split


def _further_keys(keys: Callable[[str], Mapping[str, Any]], name: str) -> dict[str, Any]:
    try:
        further = dict(keys(name))
    except Exception as error:
        raise ConfigError(f"keys failed for {name} with {type(error).__name__}: {error}") from error
    if reserved := {"params", "names", "param_names", "use_muon"} & set(further):
        raise ConfigError(
            f"keys({name!r}): {min(reserved)} is decided by get_default_muon_param_groups, or is_muon_func."
        )
    return further
