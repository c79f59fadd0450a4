"""The default param groups of a model: which parameters go to Muon and which to AdamW."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, RoutingWarning, level_of_user
from ..matrices import (
    ONE_MATRIX,
    MatrixOptions,
    Split,
    check_expert_keys,
    check_matrix_options,
    with_stars,
    without_wrappers,
)
from ..models import ModelContents, ParamContents, model_from_names
from ..params.checks import FLOAT_DTYPES, check_flag, refuse_uninitialised, shown
from ..params.flattened import refuse_flattened_model
from ..params.option_table import matrices_as_dicts
from .table import is_first_of_ranks

_UNSEEN = (
    "Muon was given names and parameters without the model, and routes by names and shapes alone. It cannot see tied "
    "weights, embeddings and output heads under unusual names, parts of fused weights that only a class or a config "
    "tells, matrices stored as (in, out) without a bias that shows it, and convolutions that are transposed or have "
    "groups. Pass the model, Muon(model, ...), or check print(optimizer.routing_table())."
)


class ModelNames(list[str]):
    """A list of names that knows the model they are from, and does not keep it alive.

    A list rather than a separate key: trainers pass param groups on as plain dicts, and checkpoints store all of their
    keys. A pickle of it is a plain list.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.model = weakref.ref(model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[[str, Tensor], bool] | None = None,
    expert_keys: Sequence[str] | None = None,
    *,
    conv: str | None = None,
    split: Split | None = None,
    frozen: bool = True,
) -> list[dict[str, Any]]:
    """Splits a model's parameters into a Muon group and two AdamW groups, the second without weight decay.

    Matrices go to Muon, each expert and each part of a fused weight separately. Embeddings, output heads and everything
    tied to these, tables, scales and parameters of fewer than two dims go to AdamW. Of these, norms, biases and all
    others of fewer than two dims have no weight decay. What is inside a parameter is known for the architectures of
    transformers, timm, torchvision, diffusers, torchtitan and PEFT; see docs/models.md.

    Frozen parameters are in the same groups, since they may be unfrozen later. Until then they cost nothing. Those of
    dtypes that no step could train, such as quantised ones, are left out.

    Args:
        model: the model. It may be wrapped by DDP, torch.compile or activation checkpointing.
        is_muon_func: ``(name, parameter) -> bool`` replaces the whole decision. It is not asked about parameters of
            fewer than two dims.
        expert_keys: a 3-D parameter whose name contains one of these is a stack of expert matrices.
        conv: convolution filters go to Muon, flattened, if they are large enough and do not see the pixels.
            ``"flatten"`` sends all of them, except grouped ones, and any other parameter of more than two dims;
            ``"adamw"`` sends none.
        split: how fused weights are cut, where it is not None, instead of how they are known to be; as the option of
            ``Muon``.
        frozen: False leaves out all frozen parameters. They are never trained then, even if they are unfrozen.

    Returns:
        Up to three param groups, in this order, each with ``params``, ``names``, ``use_muon`` and ``reasons``, ready
        for ``Muon``. Empty ones are left out; the last has ``weight_decay=0.0``. ``matrices`` says what is inside
        parameters, and ``reasons`` why they are where they are.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; get_default_muon_param_groups takes a torch.nn.Module.")
    if is_muon_func is not None and not callable(is_muon_func):
        raise ConfigError(
            f"is_muon_func={shown(is_muon_func)} must be a function of (name, parameter) that returns a bool."
        )
    keys = check_expert_keys(expert_keys)
    check_matrix_options(MatrixOptions(keys, conv, split))
    for name, param in model.named_parameters():
        refuse_uninitialised(name, param)
    refuse_flattened_model(model)
    check_flag({"frozen": frozen}, "frozen", "get_default_muon_param_groups")
    contents = _contents_of(model, keys, conv, is_muon_func)
    options = {"expert_keys": keys or None, "conv": None if conv == "adamw" else conv, "split": split}
    options = {key: value for key, value in options.items() if value is not None}
    param_groups: list[dict[str, Any]] = [
        {"params": [], "names": ModelNames(model), **further}
        for further in ({"use_muon": True, **options}, {"use_muon": False}, {"use_muon": False, "weight_decay": 0.0})
    ]
    params = dict(model.named_parameters())
    if not any(param.requires_grad for param in params.values()):
        raise ConfigError(
            "the model has no trainable parameters: every requires_grad is False, or it has no parameters."
        )
    for name, found in contents.items():
        if not (frozen or params[name].requires_grad):
            continue
        param_group = param_groups[0 if found.route == "muon" else 1 if found.decays else 2]
        param_group["params"].append(params[name])
        param_group["names"].append(name)
    filled = [param_group for param_group in param_groups if param_group["params"]]
    for param_group in filled:
        _describe(param_group, contents)
    return filled


def param_groups_from(params: Any, expert_keys: Sequence[str] | None, conv: str | None, split: Split | None) -> Any:
    """The default param groups of a model or, with one warning, of (name, parameter) pairs; anything else as it is."""
    if isinstance(params, nn.Module):
        return get_default_muon_param_groups(params, None, expert_keys, conv=conv, split=split)
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        return params
    entries = list(params)
    if not entries or not isinstance(entries[0], tuple):
        return entries
    named: dict[str, Tensor] = {}
    for entry in entries:
        name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(param, Tensor):
            raise ConfigError(
                f"{shown(entry)} is not a (name, parameter) pair, as the first of params is. Write Muon(model, "
                "lr=...), or Muon(model.named_parameters(), lr=...)."
            )
        refuse_uninitialised(name, param)
        if named.setdefault(name, param) is not param:
            raise ConfigError(
                f"two parameters are called {name}, and all names of an optimizer must differ: pass each once."
            )
    param_groups = param_groups_from(model_from_names(named.items()), expert_keys, conv, split)
    for param_group in param_groups:
        param_group["names"] = list(param_group["names"])  # there is no model to compare them with
    if is_first_of_ranks(param_groups):
        warnings.warn(_UNSEEN, RoutingWarning, stacklevel=level_of_user())
    return param_groups


def _contents_of(
    model: nn.Module, keys: Sequence[str], conv: str | None, is_muon_func: Callable[[str, Tensor], bool] | None
) -> dict[str, ParamContents]:
    """What the parameters are, by name, as the user's function says or as it is known."""
    known, contents = ModelContents(model, keys, conv), {}
    for name, param in model.named_parameters():
        dense = param.layout == torch.strided and not (param.is_nested or param.is_quantized)
        if not (param.requires_grad or (dense and param.dtype in FLOAT_DTYPES)):
            continue  # frozen for good
        found = known.of_param(name)
        if is_muon_func is not None and param.dim() >= 2:
            use_muon = _ask(is_muon_func, name, param)
            if use_muon or found.decays:  # the reason of a norm or a bias keeps it without weight decay
                found = ParamContents("muon" if use_muon else "adamw", "is_muon_func", found.matrices)
        contents[name] = found
    return contents


def _ask(is_muon_func: Callable[[str, Tensor], bool], name: str, param: Tensor) -> bool:
    try:
        answer: object = is_muon_func(name, param)
        if answer is ...:  # as copied from a message, and true
            raise TypeError("it returned ...: write a condition in its place")
        return bool(answer)
    except Exception as error:
        raise ConfigError(f"is_muon_func failed for {name} with {type(error).__name__}: {error}") from error


def _describe(param_group: dict[str, Any], contents: Mapping[str, ParamContents]) -> None:
    """Writes what is inside the parameters of a group, and why they are there, as plain data."""
    names: list[str] = param_group["names"]
    param_group["reasons"] = _by_pattern({name: contents[name].reason for name in names})
    if param_group["use_muon"]:
        known = _by_pattern({name: contents[name].matrices for name in names})
        matrices = {name: entry.fields() for name, entry in known.items() if entry != ONE_MATRIX}
        if matrices:
            param_group["matrices"] = matrices_as_dicts(matrices)


def _by_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with one entry for all names that differ in numbers only, if they have the same value.

    The names are those without wrappers, unless two parameters differ in nothing else.
    """
    patterns: dict[str, list[str]] = {}
    for name in values:
        patterns.setdefault(with_stars(without_wrappers(name)), []).append(name)
    plain = Counter(map(without_wrappers, values))
    entries: dict[str, Any] = {}
    for pattern, names in patterns.items():
        alike = all(values[name] == values[names[0]] for name in names)
        by_name = {
            without_wrappers(name) if plain[without_wrappers(name)] == 1 else name: values[name] for name in names
        }
        entries |= {pattern: values[names[0]]} if alike else by_name
    return entries
