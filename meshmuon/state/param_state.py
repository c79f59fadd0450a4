"""The state of all parameters: creating it, saving it, and refusing a state_dict that belongs to another optimizer."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..errors import StateError
from ..matrices import Interleaved, MatrixSet, find_matrices
from ..params.checks import FLOAT_DTYPES, check_dtype, shown
from ..params.dtensors import as_dtensor, layout_text, same_placement, zeros_laid_out_like
from ..params.groups import are_placeholders, matrix_options_of, rounds_stochastically
from ..params.option_table import ParamGroup, group_options, split_as_tuple
from ..params.rules import resolve_rule
from ..torch_compat import local_part, zeros_like

# Keys in the state of a parameter, also in checkpoints: torch's names, except for the update rule's state and for the key and
# count of stochastic rounding.
MOMENTUM, RULE_STATE, COUNTER = "momentum_buffer", "rule_memory", "rounding_counter"
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
_DTYPES = tuple(option.name for option in group_options() if option.check is check_dtype)  # stored by name
# Options that decide what a parameter's matrices are, and the rule. Loading other values than the optimizer has warns.
_WHICH_MATRICES = tuple(option.name for option in group_options() if option.defines_matrices)
_PLAIN = (Tensor, bool, int, float, str, bytes, type(None))
_NOT_STORED = "<not stored: "


def can_fuse(param: Tensor) -> bool:
    """Whether torch's fused kernel supports this parameter. Its ``step`` is then kept on the parameter's device."""
    dense = param.is_contiguous() or param.stride() == torch.empty_like(param, device="meta").stride()
    return dense and param.is_floating_point() and param.device.type in _FUSED_DEVICES


def empty_laid_out_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory with the shape, device and memory order of ``param``."""
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)


def init_adamw_state(param: Tensor, state: dict[str, Any]) -> None:
    """Creates AdamW's state of a parameter: zeros."""
    fused = can_fuse(local_part(param))
    with torch.inference_mode(False):  # tensors created inside inference_mode could not be written outside
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        state["exp_avg"] = zeros_like(param)
        state["exp_avg_sq"] = zeros_like(param)


def momentum_buffer(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The momentum of a parameter, created as zeros if there is none."""
    if MOMENTUM not in state:
        with torch.inference_mode(False):
            state[MOMENTUM] = zeros_like(param, dtype)
    buffer: Tensor = state[MOMENTUM]
    return buffer


def rule_state(state: dict[str, Any], param: Tensor, matrix_set: MatrixSet) -> Tensor:
    """What an update rule keeps of a parameter, one number per output, created as zeros if there is none.

    Its dtype is float64 for float64 parameters and float32 for all others.
    """
    if RULE_STATE not in state:
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            state[RULE_STATE] = zeros_laid_out_like(param, matrix_set.rule_state_shape(param.shape), dtype)
    kept: Tensor = state[RULE_STATE]
    return kept


def new_counter(name: str, device: torch.device) -> Tensor:
    """Key and count, two int64 numbers, of the random bits with which a parameter is rounded. The key is a hash of its name."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    with torch.inference_mode(False):
        return torch.tensor([key, 0], dtype=torch.int64, device=device)


def rounding_counter(state: dict[str, Any], name: str, param: Tensor, param_group: Mapping[str, Any]) -> Tensor | None:
    """The counter of a parameter, created if there is none; None if the parameter is rounded to nearest."""
    if not rounds_stochastically(param, param_group):
        return None
    if COUNTER not in state:
        state[COUNTER] = new_counter(name, param.device)
    counter: Tensor = state[COUNTER]
    return counter


def _matrices_with_rule_state(name: str, param: Tensor, param_group: ParamGroup) -> MatrixSet | None:
    """The parameter's matrices if its rule keeps state of them, else None."""
    rule = resolve_rule(param_group["rule"])
    return find_matrices(name, param.shape, matrix_options_of(param_group))[0] if rule is not None and rule.remembers() else None


def start_memories(state: dict[str, Any], name: str, param: Tensor, param_group: ParamGroup) -> None:
    """Adds what other optimizers do not keep, where it is missing: the rule's state and the counter of rounding."""
    matrix_set = _matrices_with_rule_state(name, param, param_group) if param_group["use_muon"] else None
    if matrix_set is not None:
        rule_state(state, param, matrix_set)
    rounding_counter(state, name, param, param_group)


@torch.no_grad()
def create(param_groups: Sequence[ParamGroup], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Creates the state, zeros, of every parameter that trains and has none yet.

    A checkpoint then has the same keys on every rank, regardless of which parameters have had a gradient so far. Frozen
    parameters get no state: torch skips them in loading.
    """
    for param_group in param_groups:
        for name, param in zip(param_group["param_names"], param_group["params"], strict=True):
            if not param.requires_grad:
                continue
            param_state = states.setdefault(param, {})
            if param_group["use_muon"]:
                momentum_buffer(param_state, param, param_group["momentum_dtype"])
            elif "exp_avg" not in param_state:
                init_adamw_state(param, param_state)
            start_memories(param_state, name, param, param_group)


def storable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict with options that every way of saving supports: numbers, strings, tensors, None, and containers of these.

    A dtype is replaced by its name. So is every other value (a function, a rule); the loading optimizer then keeps its own. All
    keys stay, since loaders require the same keys on both sides.
    """
    state_dict["param_groups"] = [
        {key: value if key == "params" else _storable(value) for key, value in param_group.items()}
        for param_group in state_dict["param_groups"]
    ]
    return state_dict


def _storable(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Interleaved):  # set in a group by hand
        return split_as_tuple(value)
    if type(value) is not bool and isinstance(value, Real):  # includes numpy numbers and fractions
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Real) for item in value):
        return tuple(map(_storable, value)) if isinstance(value, tuple) else list(map(_storable, value))
    if _is_plain(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)  # repr() may contain an address
    return f"{_NOT_STORED}{named.__module__}.{named.__qualname__}>"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def restore_options(
    param_group: dict[str, Any], previous: Mapping[str, Any], saved: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Completes a param group that torch has loaded with what a checkpoint cannot hold.

    ``previous`` is the param group as it was before, ``saved`` the one in the checkpoint, ``defaults`` the optimizer's options.
    """
    param_group["use_muon"], param_group["param_names"] = previous["use_muon"], _names_after_loading(previous, saved)
    for key, value in saved.items():
        if isinstance(value, str) and value.startswith(_NOT_STORED):
            param_group[key] = previous.get(key, defaults.get(key))
        elif key in _DTYPES:
            param_group[key] = _dtype(value)
    for key, value in defaults.items():
        if key not in saved or param_group.get(key) is None:  # saved by a version without this option
            param_group[key] = previous.get(key, value)
    for key in _WHICH_MATRICES if previous["use_muon"] else ():
        if _comparable(param_group[key]) != _comparable(previous.get(key)):
            warnings.warn(
                f"{param_group['param_names'][0]}, …: the checkpoint was saved with {key}={shown(param_group[key])}, which is "
                f"used from now on; the optimizer was built with {shown(previous.get(key))}. Set the group's {key} after loading "
                "to change it.",
                stacklevel=4,
            )


def _comparable(value: Any) -> Any:
    """The value as saving leaves it: tuples as lists."""
    return (tuple(value) if isinstance(value, list) else value) or None


def _names_after_loading(previous: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The param group's own names; the checkpoint's if the param group was built without names."""
    names, stored = list(previous["param_names"]), _saved_names(saved)
    return stored if len(stored) == len(names) and are_placeholders(names) else names


def _saved_names(saved: Mapping[str, Any]) -> list[str]:
    """The names in a checkpoint; empty if it has none."""
    names = saved.get("param_names")
    return list(names) if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names) else []


def _dtype(value: Any) -> Any:
    """The dtype that ``value`` names, with or without ``torch.``; any other value unchanged."""
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    return dtype if isinstance(dtype, torch.dtype) else value


def check(param_groups: Sequence[ParamGroup], state_dict: Mapping[str, Any]) -> None:
    """Raises StateError for a state_dict that does not fit, naming the first parameter that differs."""
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise StateError(
                f'this is not the state_dict of an optimizer: it has no "{key}"; its keys are {sorted(map(str, state_dict))}.'
            )
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    _refuse_torch_muon(saved_groups)
    if len(saved_groups) != len(param_groups):
        raise StateError(
            f"the state_dict has {len(saved_groups)} groups, this optimizer {len(param_groups)}: build the same groups."
        )
    for index, (param_group, saved) in enumerate(zip(param_groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(param_group["params"]):
            raise StateError(
                f"group {index} has {len(param_group['params'])} parameters, the state_dict's has {len(saved['params'])}: "
                "it was saved from another model."
            )
        for name, param, key in zip(param_group["param_names"], param_group["params"], saved["params"], strict=True):
            if saved_state and key not in saved_state and param.requires_grad:
                raise StateError(
                    f"{name} trains, but the state_dict has nothing for it, although it has state of other parameters. Either "
                    f"the state was lost, or {name} was frozen when it was saved. To start it from zero on purpose, give it an "
                    f'empty state: state_dict["state"][{key!r}] = {{}}.'
                )
            loaded_group: Any = {"rule": _saved_rule(param_group, saved), "rounding": saved.get("rounding", "nearest")}
            _check_saved_state(name, param, saved_state.get(key, {}), {**param_group, **loaded_group})
        if saved.get("use_muon", param_group["use_muon"]) != param_group["use_muon"]:
            raise StateError(
                f"group {index} ({param_group['param_names'][0]}, …) has use_muon={param_group['use_muon']}, the state_dict's "
                f"has {saved['use_muon']}: the parameters were routed differently when it was saved."
            )
        _check_order(index, _saved_names(saved), param_group["param_names"])
        for option in _DTYPES:
            if isinstance(saved.get(option), str) and not isinstance(_dtype(saved[option]), torch.dtype):
                raise StateError(f"group {index}: the state_dict has {option}={saved[option]!r}, which is no dtype of torch.")


def _refuse_torch_muon(saved_groups: Sequence[Mapping[str, Any]]) -> None:
    for index, saved in enumerate(saved_groups):
        if "ns_coefficients" in saved and "use_muon" not in saved:
            raise StateError(
                f"group {index} of the state_dict is from torch.optim.Muon, which keeps momentum as a mean of the gradients; "
                "meshmuon keeps it as a sum, so the next updates would be wrong. Convert it: "
                "optimizer.load_state_dict(meshmuon.checkpoint.convert_torch_state(optimizer, muon_state, adamw_state))."
            )


def _check_order(index: int, saved: Sequence[str], names: Sequence[str]) -> None:
    """Raises for the same names in another order: each parameter would get the state of another."""
    if list(saved) != list(names) and sorted(saved) == sorted(names):
        first = next(k for k, name in enumerate(names) if saved[k] != name)
        raise StateError(
            f"group {index}: parameter {first} is {names[first]}, in the state_dict it is {saved[first]}. The parameters are the "
            "same, but in another order: build the groups in the order in which they were saved."
        )


def _saved_rule(param_group: ParamGroup, saved: Mapping[str, Any]) -> Any:
    """The rule that the param group will have after loading."""
    rule = saved.get("rule", param_group.get("rule"))
    return param_group.get("rule") if isinstance(rule, str) and rule.startswith(_NOT_STORED) else rule


def check_current(name: str, param: Tensor, param_state: Mapping[str, Any], param_group: ParamGroup) -> None:
    """Raises StateError if the state of a parameter no longer fits it, before a step writes anything."""
    use_muon, shapes = param_group["use_muon"], _shapes(name, param, param_group)
    for key, shape in shapes.items():
        value = param_state.get(key)
        if value is None:
            continue
        if key == "step":
            _check_step_count(name, key, value)  # without its value: reading that may wait for a device
            continue
        if key == COUNTER:
            _check_counter(name, key, value)
            continue
        _check_dtype(name, key, value, shape)
        if value.shape != shape or value.device != param.device:
            raise StateError(
                f"{name} is now {tuple(param.shape)} on {param.device}, its {key} is {tuple(value.shape)} on {value.device}. "
                "Build a new optimizer after changing the shape or the device of parameters."
            )
        if not same_placement(param, value):
            raise StateError(
                f"{name} now lies on its mesh as {layout_text(name, param)}, its {key} as {layout_text(name, value)}. Build a "
                "new optimizer after resharding parameters, and load the state of the old optimizer into it."
            )
        if not use_muon and value.dtype != param.dtype:
            raise StateError(
                f"{name} is now {param.dtype}, its {key} is {value.dtype}. Build a new optimizer after changing dtypes."
            )


def _shapes(name: str, param: Tensor, param_group: ParamGroup) -> dict[str, tuple[int, ...]]:
    """The keys of a parameter's state, and the shape of each."""
    shape = tuple(param.shape)
    counter: dict[str, tuple[int, ...]] = {COUNTER: (2,)} if rounds_stochastically(param, param_group) else {}
    if not param_group["use_muon"]:
        return {key: () if key == "step" else shape for key in ADAMW_KEYS} | counter
    matrix_set = _matrices_with_rule_state(name, param, param_group)
    rule_state = {} if matrix_set is None else {RULE_STATE: matrix_set.rule_state_shape(shape)}
    return {MOMENTUM: shape, **rule_state, **counter}


def _check_saved_state(name: str, param: Tensor, param_state: Mapping[str, Any], param_group: ParamGroup) -> None:
    shapes = _shapes(name, param, param_group)
    if COUNTER not in param_state:  # counts from zero: the checkpoint rounded to nearest, or the parameter was frozen
        shapes.pop(COUNTER, None)
    if param_state and not all(key in param_state for key in shapes):
        kind = "Muon" if param_group["use_muon"] else "AdamW"
        raise StateError(
            f"{name} is optimized by {kind} and needs {list(shapes)}, but its saved state has {sorted(param_state)}. "
            "It was saved from an optimizer that routed this parameter differently, or had another rule or rounding. If dcp.load "
            "has read it, build the optimizer with the rule and the rounding of the checkpoint before loading."
        )
    for key in shapes if param_state else ():
        if key == "step":
            _check_step_count(name, f"saved {key}", param_state[key])
            count = param_state[key]
            readable = not isinstance(count, Tensor) or known_to_host(count)  # reading others would wait for the device
            if readable and not 0 <= float(count) < math.inf:
                raise StateError(f"{name}: its saved {key} is {float(count)}, it must be a count of steps.")
        elif key == COUNTER:
            _check_counter(name, f"saved {key}", param_state[key])
        else:
            _check_tensor(name, param, key, param_state[key], shapes[key])


def _check_step_count(name: str, key: str, value: Any) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    if not real:
        raise StateError(f"{name}: its {key} is {_described(value)}, it must be one number.")


def _check_counter(name: str, key: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.shape != (2,) or value.dtype != torch.int64:
        raise StateError(f"{name}: its {key} is {_described(value)}, it must be a tensor of shape (2,) in torch.int64.")
    if known_to_host(value) and int(value[1]) < 0:
        raise StateError(f"{name}: its {key} has the count {int(value[1])}, it must be a count of steps.")


def _check_tensor(name: str, param: Tensor, key: str, value: Any, shape: tuple[int, ...]) -> None:
    _check_dtype(name, f"saved {key}", value, shape)
    if value.shape != shape:
        raise StateError(
            f"{name} has shape {tuple(param.shape)}, but its saved {key} has {tuple(value.shape)} instead of {shape}: "
            "it was saved from another model, or the parameters are in another order."
        )
    if not same_placement(param, value):
        layouts = ["a plain tensor" if as_dtensor(tensor) is None else layout_text(name, tensor) for tensor in (param, value)]
        raise StateError(
            f"{name} is {layouts[0]}, its saved {key} is {layouts[1]}. load_state_dict takes state that is sharded like its "
            "parameters; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict reshards it."
        )


def _check_dtype(name: str, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        raise StateError(
            f"{name}: its {key} is {_described(value)}, it must be a tensor of shape {shape} in float16, bfloat16, float32 or "
            "float64."
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} in {value.dtype}"
    return f"a {type(value).__name__}"


def restore(param_groups: Sequence[ParamGroup], state: Mapping[Tensor, dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Corrects what torch has loaded: state keeps the dtype it was saved in, and ``step`` goes to the device that needs it."""
    for param_group, saved in zip(param_groups, state_dict["param_groups"], strict=True):
        for param, key in zip(param_group["params"], saved["params"], strict=True):
            param_state = state_dict["state"].get(key, {})
            for name in (MOMENTUM, RULE_STATE, COUNTER):
                value = param_state.get(name)
                if isinstance(value, Tensor) and value.dtype != state[param][name].dtype:
                    state[param][name] = value.detach().clone().to(device=param.device)
            if "step" in param_state and not param_group["use_muon"]:
                step = torch.as_tensor(param_state["step"], dtype=torch.float32).detach().clone()
                state[param]["step"] = step.reshape(()).to(param.device if can_fuse(local_part(param)) else "cpu")
