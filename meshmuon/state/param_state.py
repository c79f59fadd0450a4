"""Optimizer state: creating it, storing it, and refusing a state_dict that belongs to something else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..errors import StateError
from ..matrices import MatrixSet, find_matrices
from ..params.dtensors import as_dtensor, layout_text, same_placement, zeros_laid_out_like
from ..params.groups import are_placeholders, matrix_options_of, storable_split
from ..params.options import FLOAT_DTYPES, shown
from ..params.rules import resolve_rule
from ..state.adamw_state import STATE_KEYS as ADAMW_KEYS
from ..state.adamw_state import can_fuse, init_state
from ..torch_compat import local_part, zeros_like

__all__ = [
    "MEMORY",
    "MOMENTUM",
    "check",
    "check_current",
    "create",
    "momentum_buffer",
    "restore",
    "restore_options",
    "rule_memory",
    "storable",
]

MOMENTUM, MEMORY = "momentum_buffer", "rule_memory"
_DTYPES = ("compute_dtype", "momentum_dtype")
_WHICH_MATRICES = ("rule", "split", "expert_keys", "expert_dims", "conv")  # a checkpoint changes these with a warning
_PLAIN = (Tensor, bool, int, float, str, bytes, type(None))
_NOT_STORED = "<not stored: "


def momentum_buffer(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The parameter's momentum, created as zeros at its first gradient."""
    if MOMENTUM not in state:
        with torch.inference_mode(False):  # made inside inference_mode it could never be written outside
            state[MOMENTUM] = zeros_like(param, dtype)
    buffer: Tensor = state[MOMENTUM]
    return buffer


def rule_memory(state: dict[str, Any], param: Tensor, matrices: MatrixSet) -> Tensor:
    """The numbers per output that a rule keeps of a parameter, created as zeros; never less than float32."""
    if MEMORY not in state:
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            state[MEMORY] = zeros_laid_out_like(param, matrices.memory_shape(param.shape), dtype)
    memory: Tensor = state[MEMORY]
    return memory


def _remembered(name: str, param: Tensor, group: Mapping[str, Any]) -> MatrixSet | None:
    """The parameter's matrices, when its group's rule remembers something of them."""
    rule = resolve_rule(group["rule"])
    return find_matrices(name, param.shape, matrix_options_of(group))[0] if rule is not None and rule.remembers() else None


@torch.no_grad()
def create(groups: Sequence[Mapping[str, Any]], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Gives zeros to every parameter that trains and has no state yet: what its first gradient would have found.

    Which parameters had a gradient so far then leaves no trace in a checkpoint: it has the same keys on every rank and fits
    everywhere. Frozen parameters get none, as in torch, whose loading passes over them.
    """
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if not param.requires_grad:
                continue
            entry = states.setdefault(param, {})
            if group["use_muon"]:
                momentum_buffer(entry, param, group["momentum_dtype"])
                if (matrices := _remembered(name, param, group)) is not None:
                    rule_memory(entry, param, matrices)
            elif "exp_avg" not in entry:
                init_state(param, entry)


def _step_device(param: Tensor) -> torch.device:
    return param.device if can_fuse(local_part(param)) else torch.device("cpu")


def storable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict with options that every way of storing takes: numbers, strings, tensors, None, lists, tuples, dicts of them.

    A dtype becomes its name. Of anything else (a function, a rule) only its name is told and the loading optimizer keeps its own.
    The key stays in any case, since loaders demand the same keys on both sides.
    """
    state_dict["param_groups"] = [
        {key: value if key == "params" else _storable(value) for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return state_dict


def _storable(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) is not bool and isinstance(value, Real):  # also numpy's numbers and fractions
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, Real) for one in value):
        return tuple(map(_storable, value)) if isinstance(value, tuple) else list(map(_storable, value))
    if _is_plain(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)  # repr() would hold an address
    return f"{_NOT_STORED}{named.__module__}.{named.__qualname__}>"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(one) for key, one in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def restore_options(group: dict[str, Any], own: Mapping[str, Any], saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Finishes a group that torch has loaded: what no checkpoint can know stays the optimizer's own.

    Args:
        group: the group as loaded.
        own: the group as it was before.
        saved: the group in the checkpoint.
        defaults: the optimizer's options.
    """
    group["use_muon"], group["param_names"] = own["use_muon"], _names_after_loading(own, saved)
    for key, value in saved.items():
        if isinstance(value, str) and value.startswith(_NOT_STORED):
            group[key] = own.get(key, defaults.get(key))
        elif key in _DTYPES:
            group[key] = _dtype(value)
    for key, value in defaults.items():
        if (
            key not in saved or group.get(key) is None
        ):  # the saving optimizer did not know the option: the group's own value holds
            group[key] = own.get(key, value)
    for key in _WHICH_MATRICES if own["use_muon"] else ():
        if _comparable(group[key]) != _comparable(own.get(key)):
            warnings.warn(
                f"{group['param_names'][0]}, …: the checkpoint was saved with {key}={shown(group[key])}, which holds from now on"
                f"; the optimizer was built with {shown(own.get(key))}. Set the group's {key} after loading to change it.",
                stacklevel=4,
            )


def _comparable(value: Any) -> Any:
    """Storing turns tuples into lists."""
    return storable_split(value) or None


def _names_after_loading(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The group's own names; the checkpoint's where the group was built without any."""
    names, stored = list(own["param_names"]), _saved_names(saved)
    return stored if len(stored) == len(names) and are_placeholders(names) else names


def _saved_names(saved: Mapping[str, Any]) -> list[str]:
    """The names in a checkpoint; none where it has something else."""
    names = saved.get("param_names")
    return list(names) if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names) else []


def _dtype(value: Any) -> Any:
    """A dtype from its name, with or without ``torch.``; anything else as it is."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) else value


def check(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raises StateError, naming the first parameter whose saved state cannot be its own."""
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise StateError(
                f'this is no optimizer\'s state_dict: it has no "{key}", its keys are {sorted(map(str, state_dict))}.'
            )
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    _refuse_torch_muon(saved_groups)
    if len(saved_groups) != len(groups):
        raise StateError(f"the state_dict has {len(saved_groups)} groups, this optimizer {len(groups)}: build the same groups.")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise StateError(
                f"group {index} has {len(group['params'])} parameters, the state_dict's has {len(saved['params'])}: "
                "it was saved from another model."
            )
        for name, param, key in zip(group["param_names"], group["params"], saved["params"], strict=True):
            if saved_state and key not in saved_state and param.requires_grad:
                raise _missing(name, key)
            _check_entry(name, param, saved_state.get(key, {}), {**group, "rule": _saved_rule(group, saved)})
        if saved.get("use_muon", group["use_muon"]) != group["use_muon"]:
            raise StateError(
                f"group {index} ({group['param_names'][0]}, …) has use_muon={group['use_muon']}, the state_dict's has "
                f"{saved['use_muon']}: the parameters were routed differently when it was saved."
            )
        _check_order(index, _saved_names(saved), group["param_names"])
        for option in _DTYPES:
            if isinstance(saved.get(option), str) and not isinstance(_dtype(saved[option]), torch.dtype):
                raise StateError(f"group {index}: the state_dict has {option}={saved[option]!r}, which is no dtype of torch.")


def _refuse_torch_muon(saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """torch's Muon has the same names for its state, but keeps momentum as a mean; its groups have coefficients and no route."""
    for index, saved in enumerate(saved_groups):
        if "ns_coefficients" in saved and "use_muon" not in saved:
            raise StateError(
                f"group {index} of the state_dict is from torch.optim.Muon, which keeps momentum as a mean of the gradients; "
                "meshmuon keeps it as a sum, so that the next updates would be wrong. Convert it: "
                "optimizer.load_state_dict(meshmuon.checkpoint.convert_torch_state(optimizer, muon_state, adamw_state))."
            )


def _missing(name: str, key: Any) -> StateError:
    return StateError(
        f"{name} trains, but the state_dict has nothing for it, although it has state of others: entries were lost, or {name} "
        "was frozen when it was saved. To start it from zero on purpose, give it an empty entry: "
        f'state_dict["state"][{key!r}] = {{}}.'
    )


def _check_order(index: int, saved: Sequence[str], names: Sequence[str]) -> None:
    """The same names in another order would hand each parameter another one's state."""
    if list(saved) != list(names) and sorted(saved) == sorted(names):
        first = next(k for k, name in enumerate(names) if saved[k] != name)
        raise StateError(
            f"group {index}: parameter {first} is {names[first]}, in the state_dict it is {saved[first]}. The parameters are the "
            "same in another order: build the groups in the order they were saved in."
        )


def _saved_rule(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Any:
    """The rule that the group has after loading."""
    rule = saved.get("rule", group.get("rule"))
    return group.get("rule") if isinstance(rule, str) and rule.startswith(_NOT_STORED) else rule


def check_current(name: str, param: Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises StateError when a parameter has changed under its state, before a step writes anything."""
    use_muon, shapes = group["use_muon"], _shapes(name, param, group)
    for key, shape in shapes.items():
        value = entry.get(key)
        if value is None:
            continue
        if key == "step":
            _check_step_count(name, key, value)  # not its value: reading it may wait for a device
            continue
        _check_kind(name, key, value, shape)
        if value.shape != shape or value.device != param.device:
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


def _shapes(name: str, param: Tensor, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What state a parameter has, and its shapes."""
    shape = tuple(param.shape)
    if not group["use_muon"]:
        return {key: () if key == "step" else shape for key in ADAMW_KEYS}
    matrices = _remembered(name, param, group)
    return {MOMENTUM: shape} if matrices is None else {MOMENTUM: shape, MEMORY: matrices.memory_shape(shape)}


def _check_entry(name: str, param: Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    shapes = _shapes(name, param, group)
    if entry and not all(key in entry for key in shapes):
        kind = "Muon" if group["use_muon"] else "AdamW"
        raise StateError(
            f"{name} is optimized by {kind} and needs {list(shapes)}, but its saved state has {sorted(entry)}. "
            "It was saved from an optimizer that routed this parameter differently, or had another rule; if dcp.load has read "
            "it, build the optimizer with the rule of the checkpoint before loading."
        )
    for key in shapes if entry else ():
        if key == "step":
            _check_step_count(name, f"saved {key}", entry[key])
            readable = not isinstance(entry[key], Tensor) or known_to_host(entry[key])  # one wait per parameter otherwise
            if readable and not 0 <= float(entry[key]) < math.inf:
                raise StateError(f"{name}: its saved {key} is {float(entry[key])}, it must be a count of steps.")
        else:
            _check_tensor(name, param, key, entry[key], shapes[key])


def _check_step_count(name: str, key: str, value: Any) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    if not real:
        raise StateError(f"{name}: its {key} is {_what(value)}, it must be one number.")


def _check_tensor(name: str, param: Tensor, key: str, value: Any, shape: tuple[int, ...]) -> None:
    _check_kind(name, f"saved {key}", value, shape)
    if value.shape != shape:
        raise StateError(
            f"{name} has shape {tuple(param.shape)}, but its saved {key} has {tuple(value.shape)} instead of {shape}: "
            "it was saved from another model, or the parameters are in another order."
        )
    if not same_placement(param, value):
        kinds = [layout_text(name, one) if as_dtensor(one) is not None else "a plain tensor" for one in (param, value)]
        raise StateError(
            f"{name} is {kinds[0]}, its saved {key} is {kinds[1]}. load_state_dict takes state that is cut like its parameters; "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict cuts it anew."
        )


def _check_kind(name: str, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        raise StateError(
            f"{name}: its {key} is {_what(value)}, it must be a tensor of shape {shape} in float16, bfloat16, float32 or float64."
        )


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} in {value.dtype}"
    return f"a {type(value).__name__}"


def restore(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Undoes what torch's loading assumes: momentum keeps the dtype it was saved in, ``step`` goes where the step needs it."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            entry = state_dict["state"].get(key, {})
            for name in (MOMENTUM, MEMORY):
                value = entry.get(name)
                if isinstance(value, Tensor) and value.dtype != state[param][name].dtype:
                    state[param][name] = value.detach().clone().to(device=param.device)
            if "step" in entry and not group["use_muon"]:
                step = torch.as_tensor(entry["step"], dtype=torch.float32).detach().clone()
                state[param]["step"] = step.reshape(()).to(_step_device(param))
