"""The state of all parameters: creating it, saving it, and refusing what no longer fits a parameter."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..dropped import SAVED
from ..errors import StateError
from ..execute import RULE_STATE, rule_memories
from ..matrices import Interleaved, find_matrices
from ..params.checks import FLOAT_DTYPES
from ..params.dtensors import layout_text, same_placement, zeros_laid_out_like
from ..params.groups import matrix_options_of, rounds_stochastically
from ..params.option_table import ParamGroup, split_as_tuple
from ..params.rules import resolve_rules
from ..torch_compat import local_part, zeros_like

# Keys in the state of a parameter, also in checkpoints: torch's names, except for the update rule's state, and for the
# key and count of stochastic rounding.
MOMENTUM, COUNTER = "momentum_buffer", "rounding_counter"
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
_ORDER = {key: place for place, key in enumerate((MOMENTUM, RULE_STATE, *ADAMW_KEYS, COUNTER))}
FROZEN = "frozen"
"""Key of a state_dict beside its groups: the parameters, as groups list them, that are frozen and have no state."""
NOT_STORED = "<not stored: "
"""How the text begins that stands in a state_dict for a value that cannot be stored."""


def can_fuse(param: Tensor) -> bool:
    """Whether torch's fused kernel supports this parameter. Its ``step`` is then kept on the parameter's device."""
    dense = param.is_contiguous() or param.stride() == torch.empty_like(param, device="meta").stride()
    return dense and param.is_floating_point() and param.device.type in _FUSED_DEVICES


def empty_laid_out_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory with the shape, device and memory order of ``param``."""
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)


@torch.inference_mode(False)  # tensors created inside inference_mode could not be written outside
@torch.no_grad()
def start(state: dict[str, Any], name: str, param: Tensor, param_group: ParamGroup) -> None:
    """Creates what is missing of the state of a parameter: zeros, and the counter of stochastic rounding.

    What an update rule keeps is in float64 for float64 parameters and in float32 for all others.
    """
    if not param_group["use_muon"]:
        if "exp_avg" not in state:
            step_device = param.device if can_fuse(local_part(param)) else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"], state["exp_avg_sq"] = zeros_like(param), zeros_like(param)
    else:
        if MOMENTUM not in state:
            state[MOMENTUM] = zeros_like(param, param_group["momentum_dtype"])
        for key, shape in shapes_of(name, param, param_group).items():
            if key.startswith(RULE_STATE) and key not in state:
                dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
                state[key] = zeros_laid_out_like(param, shape, dtype)
    rounding_counter(state, name, param, param_group)


@torch.inference_mode(False)
def rounding_counter(state: dict[str, Any], name: str, param: Tensor, param_group: Mapping[str, Any]) -> Tensor | None:
    """The counter of a parameter, created if there is none; None if the parameter is rounded to nearest.

    It is the key and the count, two int64 numbers, of the random bits with which the parameter is rounded. The key is a
    hash of its name.
    """
    if not rounds_stochastically(param, param_group):
        return None
    if COUNTER not in state:
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        state[COUNTER] = torch.tensor([key, 0], dtype=torch.int64, device=param.device)
    counter: Tensor = state[COUNTER]
    return counter


def create(param_groups: Sequence[ParamGroup], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Creates the state, zeros, of every parameter that trains and has none yet.

    A checkpoint then has the same keys on every rank, regardless of which parameters have had a gradient so far. Frozen
    parameters get no state: torch skips them in loading.
    """
    for param_group in param_groups:
        for name, param in zip(param_group["param_names"], param_group["params"], strict=True):
            if not param.requires_grad:
                continue
            start(states.setdefault(param, {}), name, param, param_group)
    put_in_order(param_groups, states)


def put_in_order(param_groups: Sequence[ParamGroup], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Sorts the state by parameters, and the entry of each by its keys.

    torch gathers sharded state entry by entry in this order, which must be the same on all ranks. Ranks create state at
    different times: one alone may have called ``state_dict()``.
    """
    params = [param for param_group in param_groups for param in param_group["params"] if param in states]
    if not all(map(operator.is_, states, params)):
        entries = dict(states)
        states.clear()
        states.update({param: entries.pop(param) for param in params} | entries)  # the rest is that of users' hooks
    for entry in map(states.__getitem__, params):
        keys = sorted(entry, key=lambda key: (_ORDER.get(key, len(_ORDER)), str(key)))
        if keys != list(entry):
            values = dict(entry)
            entry.clear()
            entry.update((key, values[key]) for key in keys)


def storable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict with options that every way of saving supports: numbers, strings, tensors, None, and containers of
    these.

    A dtype is replaced by its name. So is every other value (a function, a rule); the loading optimizer then keeps its
    own. All keys stay, since loaders require the same keys on both sides.
    """
    state_dict["param_groups"] = [
        {**SAVED, **{key: value if key == "params" else _storable(value) for key, value in param_group.items()}}
        for param_group in state_dict["param_groups"]
    ]
    return state_dict


def _storable(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Interleaved):  # set in a group by hand
        return split_as_tuple(value)
    try:
        return _plain(value)
    except (TypeError, RecursionError):  # of another type, or a container that holds itself
        named = value if hasattr(value, "__qualname__") else type(value)  # repr() may contain an address
        module = getattr(named, "__module__", None) or "builtins"  # methods of types that are written in C have none
        return f"{NOT_STORED}{module}.{named.__qualname__}>"


def _plain(value: Any) -> Any:
    """The value with Python's own numbers and containers for others, such as numpy's; TypeError if it cannot be
    stored.
    """
    if isinstance(value, (Tensor, bool, str, bytes, type(None))):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError


def check_current(name: str, param: Tensor, param_state: Mapping[str, Any], param_group: ParamGroup) -> None:
    """Raises StateError if the state of a parameter no longer fits it, before a step writes anything."""
    for key, shape in shapes_of(name, param, param_group).items():
        value: Any = param_state.get(key)
        if value is None:
            continue
        check_kind(name, key, value, shape)
        if key in ("step", COUNTER):  # without the number of steps: reading it may wait for a device
            continue
        same_dtype = param_group["use_muon"] or value.dtype == param.dtype
        placed = same_placement(param, value)
        if value.shape != shape or value.device != param.device or not placed or not same_dtype:
            now, then = (
                f"{tuple(tensor.shape)} in {tensor.dtype} on {layout_text(name, tensor)}" for tensor in (param, value)
            )
            raise StateError(
                f"{name} is now {now}, its {key} is {then}. Build a new optimizer after resharding or converting "
                "parameters, and load the state of the old optimizer into it."
            )


def shapes_of(name: str, param: Tensor, param_group: ParamGroup) -> dict[str, tuple[int, ...]]:
    """The keys of a parameter's state, and the shape of each."""
    shape = tuple(param.shape)
    counter: dict[str, tuple[int, ...]] = {COUNTER: (2,)} if rounds_stochastically(param, param_group) else {}
    if not param_group["use_muon"]:
        return {key: () if key == "step" else shape for key in ADAMW_KEYS} | counter
    rules, rule_state = resolve_rules(param_group["rule"]), dict[str, tuple[int, ...]]()
    if any(rule.remembers() for rule in rules):
        matrix_set = find_matrices(name, param.shape, matrix_options_of(param_group))[0]
        memories = rule_memories(rules, matrix_set.lr_shape).items()
        rule_state = {key: matrix_set.rule_state_shape(shape, per_input=per_input) for key, per_input in memories}
    return {MOMENTUM: shape, **rule_state, **counter}


def check_kind(name: str, key: str, value: Any, shape: tuple[int, ...], saved: str = "") -> None:
    """Refuses anything but what a key stands for: one number, a key and a count, or a floating point tensor to
    compute with.
    """
    what = f"{name}: its {saved}{key}"
    if key == "step":
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, Tensor):
            real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        if not real:
            raise StateError(f"{what} is {_described(value)}, it must be one number.")
    elif key == COUNTER:
        if not isinstance(value, Tensor) or value.shape != (2,) or value.dtype != torch.int64:
            raise StateError(f"{what} is {_described(value)}, it must be a tensor of shape (2,) in torch.int64.")
        if known_to_host(value) and int(value[1]) < 0:
            raise StateError(f"{what} has the count {int(value[1])}, it must be a count of steps.")
    else:
        if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES or value.layout != torch.strided:
            choice = "in float16, bfloat16, float32 or float64"
            raise StateError(f"{what} is {_described(value)}, it must be a tensor of shape {shape} {choice}.")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        sparse = "" if value.layout == torch.strided else "sparse "
        return f"a {sparse}tensor of shape {tuple(value.shape)} in {value.dtype}"
    return f"a {type(value).__name__}"
