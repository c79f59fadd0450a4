"""Parameter groups: what users may write, checked once and put into one form.

Every hyperparameter lives in the group and is read at every step. After ``normalise_group`` a group has ``params`` (a list of
tensors), ``param_names`` (a list of as many names) and ``use_muon``; keys that meshmuon does not know are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..matrices import Inside, check_expert_keys, check_inside, matrices_inside
from ..ortho import Scheme, SchemeLike, resolve_scheme
from .dtensors import check_placement
from .lr import check_adjust_lr
from .rules import check_rule

__all__ = [
    "adamw_betas",
    "adamw_eps",
    "check_dtype",
    "check_group",
    "check_options",
    "inside_of",
    "normalise_group",
    "normalise_params",
    "storable_scheme",
]

_RIGHT_CALL = (
    "Write Muon(get_default_muon_param_groups(model), lr=...), or groups of your own: "
    'Muon([{"params": matrices, "names": their_names, "use_muon": True}, {"params": others, "use_muon": False}], lr=...).'
)


_WHOLE_OPTIMIZER = (
    "debug",
    "clip_config",
    "warmup_step",
    "chunk_size",
    "use_distributed_muon",
    "memory_budget",
    "form",
    "deterministic",
    "compile",
    "cuda_graphs",
    "comm_dtype",
    "replicas",
    "replica_group",
    "nonfinite",
)


def normalise_params(params: object) -> list[dict[str, Any]]:
    """Accepts an iterable of groups and nothing else, with a message that shows the right call."""
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ConfigError(f"params must be a list of groups, got {type(params).__name__}. {_RIGHT_CALL}")
    groups = list(params)
    if not groups:
        raise ConfigError(f"params is empty: there is nothing to optimize. {_RIGHT_CALL}")
    for group in groups:
        if not isinstance(group, dict):
            raise ConfigError(
                f"params must be a list of groups, got an iterable of {type(group).__name__}, such as model.parameters() or "
                f"model.named_parameters(). Muon must be told which parameters are matrices. {_RIGHT_CALL}"
            )
    return groups


def normalise_group(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy of a user's group in the one form that the optimizer works with."""
    group = dict(group)
    if not isinstance(group.get("use_muon"), bool):
        raise ConfigError(f"group {index} needs use_muon=True or use_muon=False, it has {sorted(map(str, group))}. {_RIGHT_CALL}")
    for key in _WHOLE_OPTIMIZER:
        if key in group:
            raise ConfigError(
                f"group {index}: {key} holds for the whole optimizer: write Muon(groups, {key}=...), not in a group."
            )
    if "params" not in group:
        raise ConfigError(f'group {index} has no "params". {_RIGHT_CALL}')
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise ConfigError(f"group {index}: params is a set, whose order changes from run to run. Pass a list.")
    params = [params] if isinstance(params, Tensor) else list(params)
    if not params:
        raise ConfigError(f"group {index} (use_muon={group['use_muon']}) is empty: leave it out.")
    names = group.pop("names", None)
    names = group.pop("param_names", None) if names is None else names
    if all(isinstance(entry, tuple) and len(entry) == 2 for entry in params):
        names = [name for name, _ in params]
        params = [param for _, param in params]
    names = [f"group{index}.param{k}" for k in range(len(params))] if names is None else list(names)
    if len(names) != len(params):
        raise ConfigError(f"group {index} has {len(params)} params but {len(names)} names: give each parameter its own name.")
    for name, param in zip(names, params, strict=True):
        if not isinstance(param, Tensor):
            raise ConfigError(f"group {index}: {name} is a {type(param).__name__}, not a tensor. {_RIGHT_CALL}")
    if len(set(params)) != len(params):
        raise ConfigError(f"group {index} holds a parameter twice, so it would be stepped twice: list each parameter once.")
    group["params"], group["param_names"] = params, names
    return group


def storable_scheme(scheme: SchemeLike) -> SchemeLike:
    """A Scheme as plain numbers, which survive ``torch.save`` and ``weights_only=True``; anything else as it is."""
    return tuple(tuple(step) for step in scheme.steps) if isinstance(scheme, Scheme) else scheme


def adamw_betas(group: Mapping[str, Any]) -> tuple[float, float]:
    """The group's betas; a group may also use torch's own key."""
    betas = group.get("betas", group["adamw_betas"])
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ConfigError(f"adamw_betas={betas!r} must be a pair of numbers, such as (0.9, 0.95).") from None
    return float(beta1), float(beta2)


def adamw_eps(group: Mapping[str, Any]) -> float:
    """The group's epsilon; a group may also use torch's own key."""
    return float(group.get("eps", group["adamw_eps"]))


def inside_of(group: Mapping[str, Any]) -> Inside:
    """The group's options that say which matrices a parameter holds."""
    keys = check_expert_keys(group["expert_keys"])
    return Inside(keys, group["conv"], storable_split(group["split"]), group["expert_dims"])


def storable_split(split: Any) -> Any:
    """Sizes as a tuple, which can be compared and stored; anything else as it is."""
    return tuple(split) if isinstance(split, list) else split


def check_group(group: Mapping[str, Any], index: int) -> None:
    """Refuses what a step cannot work with. Defaults are already filled in."""
    check_options(group, index)
    for name, param in zip(group["param_names"], group["params"], strict=True):
        _check_param(name, param, group)


def check_options(group: Mapping[str, Any], index: int) -> None:
    """Refuses hyperparameters out of range; cheap, since groups may be changed by hand between steps."""
    where = f"group {index}"
    _check_lr(group["lr"], where)
    _check_range(group["weight_decay"], "weight_decay", where, low=0.0)
    if group["use_muon"]:
        _check_range(group["momentum"], "momentum", where, low=0.0, below=1.0)
        check_adjust_lr(group["adjust_lr_fn"])
        resolve_scheme(group["scheme"], group["ns_steps"])
        check_rule(group["rule"])
        if not isinstance(group["cautious_weight_decay"], bool):
            raise ConfigError(f"{where}: cautious_weight_decay={group['cautious_weight_decay']!r} must be True or False.")
        check_inside(inside_of(group))
        check_dtype(group["compute_dtype"], "compute_dtype", where)
        check_dtype(group["momentum_dtype"], "momentum_dtype", where)
    else:
        for k, beta in enumerate(adamw_betas(group)):
            _check_range(beta, f"adamw_betas[{k}]", where, low=0.0, below=1.0)
        _check_range(adamw_eps(group), "adamw_eps", where, low=0.0)


def _check_param(name: str, param: Tensor, group: Mapping[str, Any]) -> None:
    check_placement(name, param)
    if param.is_complex():
        raise ConfigError(f"{name} is complex ({param.dtype}). Optimize its real view instead: torch.view_as_real(param).")
    if group["use_muon"]:
        if not param.is_floating_point():
            raise ConfigError(f"{name} has dtype {param.dtype}; Muon needs floating point parameters.")
        matrices_inside(name, param.shape, inside_of(group))


def _check_lr(lr: Any, where: str) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(f"{where}: lr is a tensor of {lr.numel()} elements; it must have one.")
        if lr.device.type != "cpu":  # reading it would wait for the device
            return
        lr = float(lr)
    _check_range(lr, "lr", where, low=0.0)


def _check_range(value: Any, what: str, where: str, *, low: float, below: float = float("inf")) -> None:
    if not isinstance(value, (Real, Tensor)):
        raise ConfigError(f"{where}: {what}={value!r} must be a number.")
    if not low <= (value if isinstance(value, Tensor) else float(value)) < below:
        bound = f"at least {low:g} and finite" if below == float("inf") else f"in [{low:g}, {below:g})"
        raise ConfigError(f"{where}: {what}={value} must be {bound}.")


def check_dtype(dtype: Any, what: str, where: str) -> None:
    """Refuses what is neither a floating point dtype nor None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{where}: {what}={dtype!r} must be a floating point dtype such as torch.float32, or None.")
