"""The arguments of the constructor and param groups: what users may write, and the one form that the optimizer works
with.

Every hyperparameter lives in its param group and is read at every step. After ``normalise_group`` a group has
``params`` (a list of tensors), ``param_names`` (as many names) and ``use_muon``. Keys that meshmuon does not know are
kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..dropped import OPTIONS as DROPPED
from ..errors import ConfigError, UnknownOptionError
from ..execute import rule_memories
from ..matrices import MatrixOptions, MatrixSet, check_expert_keys, check_matrices, find_matrices
from .arguments import fill_own_names, torchs_update
from .checks import FLOAT_DTYPES, adamw_betas, adamw_eps, check_flag, refuse_uninitialised, shown
from .dtensors import check_memory, check_placement
from .flattened import refuse_flattened
from .lr import lr_factor
from .option_table import ParamGroup, group_options, optimizer_options, split_as_tuple
from .rules import UpdateRule, resolve_rules

_RIGHT_CALL = (
    "Write Muon(model, lr=...), or groups of your own: "
    'Muon([{"params": matrices, "names": their_names, "use_muon": True}, {"params": others, "use_muon": False}], '
    "lr=...)."
)
_CALL_OF_TRAINERS = (
    "If a trainer makes this call, let it call a factory, which sees the names of the parameters: for Transformers' "
    "Trainer, "
    'optimizer_cls_and_kwargs=(muon, {"lr": ...}) with muon from meshmuon.integrations.hf; elsewhere, muon_for(model, '
    "lr=...) "
    "of meshmuon.integrations.factory."
)
_CALL_OF_UNFREEZING = (
    "If a trainer adds parameters that it has unfrozen, as Lightning's BaseFinetuning does, build the optimizer with "
    "the whole model, Muon(model, lr=...): it keeps frozen parameters in its groups, and nothing has to be added."
)
_CHECKS = {
    use_muon: [(option.name, option.check) for option in group_options(use_muon) if option.check is not None]
    for use_muon in (True, False)
}
_OPTIMIZER_KEYS = tuple(option.name for option in optimizer_options())


def normalise_params(params: object, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups as a list. Anything else is refused, with a message that shows the right call.

    ``arguments`` are the constructor's.
    """
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ConfigError(f"params must be a list of groups, got {type(params).__name__}. {_RIGHT_CALL}")
    groups = list(params)
    if not groups:
        raise ConfigError(f"params is empty: there is nothing to optimize. {_RIGHT_CALL}")
    matrices = all(isinstance(entry, Tensor) and entry.dim() == 2 for entry in groups)
    for group in groups:
        if not isinstance(group, dict):
            raise ConfigError(
                f"params must be a list of groups, got an iterable of {type(group).__name__}, such as "
                "model.parameters(), which has no names. Muon must be told which parameters are matrices. "
                f"{_RIGHT_CALL} {_CALL_OF_TRAINERS}" + (f" {torchs_update(arguments)}" if matrices else "")
            )
    return groups


def normalise_group(group: Mapping[str, Any], index: int, others: Mapping[str, Tensor]) -> dict[str, Any]:
    """A copy of a user's param group in the form that the optimizer works with; ``others`` are the parameters of
    other groups.
    """
    if not isinstance(group, Mapping):
        raise ConfigError(f"group {index} is a {type(group).__name__}; it must be a dict. {_RIGHT_CALL}")
    group = dict(group)
    if not isinstance(group.get("use_muon"), bool):
        keys = sorted(map(str, group))
        raise ConfigError(
            f"group {index} needs use_muon=True or use_muon=False, it has {keys}. {_RIGHT_CALL} "
            + (_CALL_OF_UNFREEZING if others else _CALL_OF_TRAINERS)
        )
    for key in DROPPED.keys() & group.keys():
        raise UnknownOptionError(f"group {index}: {key} is no option of Muon any more: {DROPPED[key]}")
    for key in _OPTIMIZER_KEYS:
        if key in group:
            raise ConfigError(
                f"group {index}: {key} holds for the whole optimizer: write Muon(groups, {key}=...), not in a group."
            )
    if not group["use_muon"]:
        fill_own_names(group, f"group {index}")
    params = _listed_params(group, index)
    if all(isinstance(entry, tuple) and len(entry) == 2 for entry in params):
        group["names"] = [name for name, _ in params]
        params = [param for _, param in params]
    unused = next(k for k in count(index) if f"group{k}.param0" not in others)  # groups may have been removed by hand
    names, seen = _listed_names(group, unused, len(params)), dict(others)
    for name, param in zip(names, params, strict=True):
        if not isinstance(name, str):
            raise ConfigError(f"group {index}: the name {shown(name)} must be a string.")
        if not isinstance(param, Tensor):
            raise ConfigError(f"group {index}: {name} is a {type(param).__name__}, not a tensor. {_RIGHT_CALL}")
        refuse_uninitialised(name, param)
        # State and metrics are told apart by names.
        if seen.setdefault(name, param) is not param:
            raise ConfigError(
                f"group {index}: another parameter is called {name} as well, and all names of an optimizer must "
                "differ. For several models in one optimizer, write "
                'get_default_muon_param_groups(nn.ModuleDict({"first": first, "second": second})); in groups of your '
                "own, begin "
                f'the names with the part of the model that they are from, such as "first.{name}".'
            )
    if len(set(params)) != len(params):
        raise ConfigError(
            f"group {index} holds a parameter twice, so it would be stepped twice: list each parameter once."
        )
    stepped = set(map(id, others.values()))
    for name, param in zip(names, params, strict=True):
        if id(param) in stepped:
            raise ConfigError(
                f"group {index}: {name} is in another group of the optimizer already. If "
                "it has just been unfrozen, leave it there: it trains from now on, and nothing has to be added."
            )
    group["params"], group["param_names"] = params, names
    return group


def keep_options(group: dict[str, Any]) -> None:
    """Turns the options of a checked group into the form in which groups keep them.

    The checks must come first: a ``Scheme`` of one step is refused unless ``ns_steps`` is 1, but its numbers alone
    would be repeated.
    """
    for option in group_options(group["use_muon"]):
        if option.name in group:
            group[option.name] = option.kept_as(group[option.name])


def _listed_params(group: Mapping[str, Any], index: int) -> list[Any]:
    """The parameters, or (name, parameter) pairs, of a user's group."""
    if "params" not in group:
        raise ConfigError(f'group {index} has no "params". {_RIGHT_CALL}')
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise ConfigError(f"group {index}: params is a set, whose order changes from run to run. Pass a list.")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, Mapping)):
        raise ConfigError(f"group {index}: params={shown(params)} must be a list of parameters. {_RIGHT_CALL}")
    params = [params] if isinstance(params, Tensor) else list(params)
    if not params:
        raise ConfigError(f"group {index} (use_muon={group['use_muon']}) is empty: leave it out.")
    return params


def _listed_names(group: dict[str, Any], index: int, size: int) -> list[Any]:
    """Removes the names from a user's group: its ``names``, or torch's key ``param_names``; placeholders if it has
    neither.
    """
    names = group.pop("names", None)
    names = group.pop("param_names", None) if names is None else names
    # also of a group of another optimizer
    if names is None or (isinstance(names, list) and names and are_placeholders(names)):
        return [f"group{index}.param{k}" for k in range(size)]
    if not isinstance(names, Iterable) or isinstance(names, (str, bytes, Mapping, Tensor)):
        raise ConfigError(f"group {index}: names={shown(names)} must be a list of names, one for each parameter.")
    names = list(names)
    if len(names) != size:
        raise ConfigError(f"group {index} has {size} params but {len(names)} names: give each parameter its own name.")
    return names


def are_placeholders(names: Iterable[str]) -> bool:
    """Whether a group with these names was built without any."""
    return all(isinstance(name, str) and re.fullmatch(r"group\d+\.param\d+", name) for name in names)


def matrix_options_of(group: ParamGroup) -> MatrixOptions:
    """The options of a param group that say which matrices a parameter holds."""
    keys, split = check_expert_keys(group["expert_keys"]), split_as_tuple(group["split"])
    return MatrixOptions(keys, group["conv"], split, check_matrices(group["matrices"]))


def rounds_stochastically(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a step rounds this parameter stochastically. Only bfloat16 parameters are."""
    return group["rounding"] == "stochastic" and param.dtype == torch.bfloat16


def check_rounding(name: str, param: Tensor, rounding: str) -> None:
    if rounding == "stochastic" and param.dtype == torch.float16 and param.requires_grad:
        raise ConfigError(
            f'{name} is float16, and rounding="stochastic" is for bfloat16 parameters: convert it to bfloat16, or put '
            "it into a "
            'group with rounding="nearest".'
        )


def check_group(group: ParamGroup, index: int) -> None:
    """Refuses options and parameters that a step cannot use. Defaults are already filled in."""
    check_options(group, index)
    for name, param in zip(group["param_names"], group["params"], strict=True):
        _check_param(name, param, group)


def check_options(group: ParamGroup, index: int) -> None:
    """Refuses wrong options. It runs at every step, since users may change a param group by hand between steps."""
    where = f"group {index}"
    try:
        for key in ("params", "param_names"):
            if not isinstance(group[key], (list, tuple)):
                raise ConfigError(f"{where}: {key}={shown(group[key])} must be a list.")
        check_flag(group, "use_muon", where)
        for name, check in _CHECKS[group["use_muon"]]:
            check(group, name, where)
    except KeyError as error:
        raise ConfigError(f"{where} has lost its option {error}: set it again instead of deleting it.") from None


def largest_number(dtype: torch.dtype) -> float:
    """The largest number of the dtype in which a parameter of ``dtype`` is stepped, which is float32 or float64."""
    return float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max)


def check_overflow(group: ParamGroup, where: str, shape: tuple[int, int] | None, largest: float) -> None:
    """Refuses numbers whose products overflow: torch would raise in the middle of a step, or compute infinities.

    ``shape`` has the outputs and inputs of a matrix; it is None for AdamW, whose first step divides lr by 1 − beta1.
    """
    unread = isinstance(group["lr"], Tensor) and not known_to_host(group["lr"])
    lr = 0.0 if unread else float(group["lr"])
    decay = lr * float(group["weight_decay"])
    if shape is not None:
        factor, eps = lr_factor(group["adjust_lr_fn"], *shape), 0.0
        rate = lr * factor
    else:
        factor, eps = 1 - adamw_betas(group)[0], adamw_eps(group)
        rate = lr / factor
    if rate <= largest and decay <= largest and eps <= largest:
        return
    how = "divided by 1 - beta1, as in AdamW's first step,"
    if shape is not None:
        how = f"times adjust_lr_fn's {factor:g} for a {shape[0]}×{shape[1]} matrix"
    values = {
        f"lr={lr:g} {how}": rate,
        f"lr={lr:g} times weight_decay={float(group['weight_decay']):g}": decay,
        "adamw_eps": eps,
    }
    what = max(values, key=values.__getitem__)
    raise ConfigError(
        f"{where}: {what} is {values[what]:g}; the largest number that a step can work with is {largest:g}."
    )


def check_rule_memory(name: str, matrix_sets: Sequence[MatrixSet], rules: Sequence[UpdateRule]) -> None:
    """Refuses a rule that keeps state where it has no place: matrices of one weight that share what there is a
    number for.
    """
    for rule in (rule for rule in rules if rule.remembers()):
        per_input = [per_input for part in matrix_sets for per_input in rule_memories([rule], part.lr_shape).values()]
        dims = [int(part.flipped != along) for part, along in zip(matrix_sets, per_input, strict=True)]
        places = {part.window and part.window[dim] for part, dim in zip(matrix_sets, dims, strict=True)}
        if len(places) == len(matrix_sets) and len(set(dims)) <= 1:
            continue
        what = f"{name}: {type(rule).__name__}"
        blocks = len({part.window and part.window[0] for part in matrix_sets})
        if any(per_input):
            raise ConfigError(
                f"{what} keeps one number per column, for which the {len(matrix_sets)} parts of this weight have no "
                "place: give "
                'it a group whose rule has axis="rows", or make each part a parameter of its own.'
            )
        raise ConfigError(
            f"{what} keeps one number per output, for which {blocks} experts that are stored one below the other as "
            "(in, out) "
            f'have no place. Write matrices={{"{name}": {{"experts": {blocks}}}}} in the group, which takes their rows '
            "for "
            "outputs, or another rule."
        )


def _check_param(name: str, param: Tensor, group: ParamGroup) -> None:
    if param.layout != torch.strided or param.is_nested or param.is_quantized:
        kind = "nested" if param.is_nested else "quantised" if param.is_quantized else f"sparse ({param.layout})"
        raise ConfigError(
            f"{name} is a {kind} tensor; the optimizer needs plain dense ones. Leave it out, or convert it."
        )
    check_placement(name, param)
    check_memory(name, param)
    check_rounding(name, param, group["rounding"])
    if param.is_complex():
        raise ConfigError(
            f"{name} is complex ({param.dtype}). Optimize its real view instead: torch.view_as_real(param)."
        )
    if group["use_muon"]:
        refuse_flattened(name, param)
        if param.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{name} has dtype {param.dtype}; Muon needs floating point parameters of 16, 32 or 64 bits."
            )
        matrix_sets = find_matrices(name, param.shape, matrix_options_of(group))
        if not param.requires_grad:
            return  # a step checks the rest before it trains it
        check_rule_memory(name, matrix_sets, resolve_rules(group["rule"]))
        for matrix_set in matrix_sets:
            check_overflow(group, name, matrix_set.lr_shape, largest_number(param.dtype))
        return
    if param.requires_grad and param.dtype not in FLOAT_DTYPES:
        raise ConfigError(
            f"{name} has dtype {param.dtype}; AdamW needs floating point parameters of 16, 32 or 64 bits."
        )
    check_overflow(group, name, None, largest_number(param.dtype))
