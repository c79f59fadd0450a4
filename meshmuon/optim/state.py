"""Optimizer state: creating it, and refusing a state_dict that belongs to something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from .adamw import STATE_KEYS as ADAMW_KEYS
from .adamw import can_fuse
from .dtensors import layout_text, same_placement

__all__ = ["check", "check_current", "momentum_buffer", "restore"]

_MOMENTUM = "momentum_buffer"


def momentum_buffer(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The parameter's momentum, created as zeros at its first gradient."""
    if _MOMENTUM not in state:
        with torch.inference_mode(False):  # made inside inference_mode it could never be written outside
            state[_MOMENTUM] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    buffer: Tensor = state[_MOMENTUM]
    return buffer


def check(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raises StateError, naming the first parameter whose saved state cannot be its own."""
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    if len(saved_groups) != len(groups):
        raise StateError(f"the state_dict has {len(saved_groups)} groups, this optimizer {len(groups)}: build the same groups.")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise StateError(
                f"group {index} has {len(group['params'])} parameters, the state_dict's has {len(saved['params'])}: "
                "it was saved from another model."
            )
        for name, param, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            _check_entry(name, param, saved_state.get(key, {}), group["use_muon"])
        if saved.get("use_muon", group["use_muon"]) != group["use_muon"]:
            raise StateError(
                f"group {index} ({group['param_names'][0]}, …) has use_muon={group['use_muon']}, the state_dict's has "
                f"{saved['use_muon']}: the parameters were routed differently when it was saved."
            )
        _check_order(index, list(saved.get("param_names") or ()), group["param_names"])


def _check_order(index: int, saved: Sequence[str], names: Sequence[str]) -> None:
    """The same names in another order would hand each parameter another one's state."""
    if list(saved) != list(names) and sorted(saved) == sorted(names):
        first = next(k for k, name in enumerate(names) if saved[k] != name)
        raise StateError(
            f"group {index}: parameter {first} is {names[first]}, in the state_dict it is {saved[first]}. The parameters are the "
            "same in another order: build the groups in the order they were saved in."
        )


def check_current(name: str, param: Tensor, entry: Mapping[str, Any], use_muon: bool) -> None:
    """Raises StateError when a parameter has changed under its state, before a step writes anything."""
    for key in (_MOMENTUM,) if use_muon else ("exp_avg", "exp_avg_sq"):
        value = entry.get(key)
        if value is None:
            continue
        if value.shape != param.shape or value.device != param.device:
            raise StateError(
                f"{name} is now {tuple(param.shape)} on {param.device}, its {key} is {tuple(value.shape)} on {value.device}. "
                "Build a new optimizer after changing the shape or the device of parameters."
            )
        if not same_placement(param, value):
            raise StateError(
                f"{name} now lies on its mesh as {layout_text(name, param)}, its {key} as {layout_text(name, value)}. Build a "
                "new optimizer after sharding parameters anew, and load the old one's state into it."
            )
        if not use_muon and value.dtype != param.dtype:
            raise StateError(
                f"{name} is now {param.dtype}, its {key} is {value.dtype}. Build a new optimizer after changing dtypes."
            )


def _check_entry(name: str, param: Tensor, entry: Mapping[str, Any], use_muon: bool) -> None:
    expected = (_MOMENTUM,) if use_muon else ADAMW_KEYS
    if entry and not all(key in entry for key in expected):
        kind = "Muon" if use_muon else "AdamW"
        raise StateError(
            f"{name} is optimized by {kind} and needs {list(expected)}, but its saved state has {sorted(entry)}. "
            "It was saved from an optimizer that routed this parameter differently."
        )
    for key in expected:
        value = entry.get(key)
        if key != "step" and isinstance(value, Tensor) and value.shape != param.shape:
            raise StateError(
                f"{name} has shape {tuple(param.shape)}, but its saved {key} has {tuple(value.shape)}: "
                "it was saved from another model, or the parameters are in another order."
            )


def restore(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Undoes what torch's loading assumes: momentum keeps the dtype it was saved in, ``step`` goes where the step needs it."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            entry = state_dict["state"].get(key, {})
            value = entry.get(_MOMENTUM)
            if isinstance(value, Tensor) and value.dtype != state[param][_MOMENTUM].dtype:
                state[param][_MOMENTUM] = value.detach().clone().to(device=param.device)
            if "step" in entry and not group["use_muon"]:
                device = param.device if can_fuse(param) else torch.device("cpu")
                step = torch.as_tensor(entry["step"], dtype=torch.float32).detach().clone()
                state[param]["step"] = step.reshape(()).to(device)
