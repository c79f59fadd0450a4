"""What a ``state_dict`` means for this optimizer: which saved parameter is which, and whether all of it fits.

``fit`` reads only. It raises, or it returns all that loading then writes, so that a refused state changes nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..device import known_to_host
from ..dropped import OPTIONS as DROPPED
from ..dropped import SAVED
from ..errors import StateError
from ..execute import RULE_STATE
from ..matrices import entry_of, keys_of, without_wrappers
from ..params.checks import shown
from ..params.dtensors import as_dtensor, layout_text, same_placement, shard_place, shares_addresses
from ..params.groups import are_placeholders, check_group
from ..params.option_table import ParamGroup, group_options
from ..torch_compat import local_part
from .param_state import (
    COUNTER,
    FROZEN,
    MOMENTUM,
    NOT_STORED,
    can_fuse,
    check_kind,
    shapes_of,
)

_DTYPES = ("compute_dtype", "momentum_dtype")  # which are stored by name
# Options that decide what a parameter's matrices are, and the rule. Loading other values than the optimizer has warns.
_WHICH_MATRICES = tuple(option.name for option in group_options() if option.defines_matrices)
_LISTED = 4  # names of a kind that an error lists
_MISSING = object()
_MOVING = "docs/migrate.md#adamw shows how to go on with Muon: parameters that stay with AdamW keep their moments."


@dataclass(frozen=True, slots=True)
class Fitted:
    """A state_dict in the order of this optimizer's parameters, checked."""

    state: dict[int | str, Any]  # by the number of the parameter; by name what belongs to none
    param_groups: list[dict[str, Any]]  # as torch takes them: saved options
    overrides: list[dict[str, Any]]  # of each param group, what is not as it was saved


class _SavedParam(NamedTuple):
    """Where a state_dict has a parameter."""

    group: int
    key: Any  # in its ``state``


def fit(
    param_groups: Sequence[ParamGroup],
    defaults: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
) -> Fitted:
    """The state_dict as this optimizer loads it. Raises StateError, naming the first parameter that differs, if it does
    not fit.

    Parameters are matched by name if both sides have names, else by position. ``defaults`` are the optimizer's options.
    ``strict=False`` leaves out state of unknown parameters, and starts from zero those that have none, or had another
    route.
    """
    _check_structure(state_dict)
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    _refuse_other_optimizers(param_groups, saved_groups)
    frozen = set(state_dict.get(FROZEN, ()))  # when it was saved; of earlier versions it is not known
    found = _match(param_groups, saved_groups, frozen, strict)
    fitted, number = Fitted({}, [], []), 0
    for index, (param_group, members) in enumerate(zip(param_groups, found, strict=True)):
        options, names = _saved_options(param_group, index, members, saved_groups), list(param_group["param_names"])
        overrides = _overrides(param_group, options, defaults)
        overrides |= _with_entries_of_new(param_group, {**options, **overrides}, members)
        stored = _names_of(saved_groups[members[0].group]) if members[0] is not None else []
        if are_placeholders(names) and len(stored) == len(names) and not are_placeholders(stored):
            overrides["param_names"] = names = stored
        loaded = cast(ParamGroup, {**options, **overrides, "params": param_group["params"]})
        try:  # as the constructor checks its groups
            check_group(loaded, index)
        except Exception as error:  # whatever a wrong value makes a check raise
            raise StateError(f"group {index} of the state_dict has options that cannot be used. {error}") from error
        for name, param, member in zip(names, param_group["params"], members, strict=True):
            entry = {} if member is None else saved_state.get(member.key, _MISSING)
            lost = entry is _MISSING and saved_state and not (member is None or member.key in frozen)
            if lost and param.requires_grad and strict and member is not None:
                raise StateError(
                    f"{name} trains, but the state_dict has nothing for it, although it has state of other "
                    f"parameters. Either the state was lost, or {name} was frozen when it was saved. To start it from "
                    "zero on purpose, give it an "
                    f'empty state: state_dict["state"][{member.key!r}] = {{}}.'
                )
            if entry is not _MISSING and entry:
                _check_saved_state(name, param, entry, loaded)
                fitted.state[number] = dict(entry)  # the only mapping that torch loads
            number += 1
        fitted.param_groups.append({**options, "params": list(range(number - len(names), number))})
        fitted.overrides.append(overrides)
    _warn_of_matrices(param_groups, fitted)
    if not any(isinstance(member.key, str) for members in found for member in members if member is not None):
        # that of users' hooks
        fitted.state.update({key: value for key, value in saved_state.items() if isinstance(key, str)})
    return fitted


def _check_structure(state_dict: Mapping[str, Any]) -> None:
    """Refuses what is no state_dict: a dict with a dict ``state`` and a list ``param_groups`` of dicts with
    ``params``.
    """
    saved_groups, saved_state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(saved_groups, (list, tuple)) or not isinstance(saved_state, Mapping):
        kinds = ", ".join(f'"{key}" ({type(value).__name__})' for key, value in state_dict.items())
        raise StateError(
            'this is not the state_dict of an optimizer, which has a list "param_groups" and a dict "state": it has '
            f"{kinds or 'nothing'}."
        )
    keys: set[Any] = set()
    for index, saved in enumerate(saved_groups):
        params = saved.get("params") if isinstance(saved, Mapping) else None
        if not isinstance(params, (list, tuple)) or not all(isinstance(key, (int, str)) for key in params):
            raise StateError(
                f"group {index} of the state_dict is {shown(saved)}; it must be a dict with a list of numbers or of "
                "names under "
                '"params".'
            )
        if len(keys) + len(params) != len(keys := keys.union(params)):
            raise StateError(
                f"group {index} of the state_dict lists a parameter that is listed before, there or in another group."
            )
    for key in keys:
        entry = saved_state.get(key, {})
        if not isinstance(entry, Mapping) or not all(isinstance(name, str) for name in entry):
            raise StateError(
                f'state_dict["state"][{shown(key)}] is {shown(entry)}; it must be a dict with names as keys.'
            )


def _refuse_other_optimizers(param_groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses states of torch's own optimizers, which have some of our keys."""
    for index, saved in enumerate(saved_groups):
        if "ns_coefficients" in saved and "use_muon" not in saved:
            raise StateError(
                f"group {index} of the state_dict is from torch.optim.Muon, which keeps momentum as a mean of the "
                "gradients; meshmuon keeps it as a sum, so the next updates would be wrong. Convert it: "
                "optimizer.load_state_dict(meshmuon.checkpoint.convert_torch_state(optimizer, muon_state, "
                "adamw_state))."
            )
    of_adam = [{"betas", "amsgrad"} <= saved.keys() and "use_muon" not in saved for saved in saved_groups]
    if of_adam and all(of_adam) and any(param_group["use_muon"] for param_group in param_groups):
        raise StateError(
            f"the state_dict is that of AdamW or Adam, which keep no momentum that Muon could take. {_MOVING}"
        )


def _match(
    param_groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]], frozen: set[Any], strict: bool
) -> list[list[_SavedParam | None]]:
    """Where the state_dict has each parameter of each group; None if it does not know it."""
    names = [[without_wrappers(name) for name in param_group["param_names"]] for param_group in param_groups]
    saved_names = [[without_wrappers(name) for name in _names_of(saved)] for saved in saved_groups]
    keys = [[_SavedParam(index, key) for key in saved["params"]] for index, saved in enumerate(saved_groups)]
    if all(isinstance(saved.key, str) for saved in _flat(keys)):
        saved_names = _names_of_dcp(names, [[without_wrappers(saved.key) for saved in members] for members in keys])
    if not _comparable_names(names, saved_names, keys):
        _check_positions(names, saved_names, keys)
        return [list(members) for members in keys]
    by_name = dict(zip(_flat(saved_names), _flat(keys), strict=True))
    known = set(_flat(names))
    params = _flat(param_group["params"] for param_group in param_groups)
    new = [
        name for name, param in zip(_flat(names), params, strict=True) if name not in by_name and param.requires_grad
    ]
    unknown = [name for name, saved in by_name.items() if name not in known and saved.key not in frozen]
    if strict and (new or unknown):
        raise StateError(
            f"the state_dict is of other parameters. It lacks {_listed(new)}; the optimizer lacks {_listed(unknown)}. "
            "To load what fits, call optimizer.load_state_dict(state_dict, strict=False): parameters that it lacks "
            "start from zero, and state of parameters that the optimizer lacks is left out. If parameters were only "
            "renamed, write the new names "
            'into state_dict["param_groups"][k]["param_names"].'
        )
    found = []
    for group, use_muon in zip(names, (param_group["use_muon"] for param_group in param_groups), strict=True):
        others = (
            () if strict else [k for k, saved in enumerate(saved_groups) if saved.get("use_muon", use_muon) != use_muon]
        )
        found.append([None if one is None or one.group in others else one for one in map(by_name.get, group)])
    return found


def _names_of_dcp(names: list[list[str]], keys: list[list[str]]) -> list[list[str]]:
    """The names of parameters whose keys are names, as those of torch.distributed.checkpoint.

    It has put them into this optimizer's order. Where neither side knows the name of the other, one is an alias: of a
    tied weight, or of a parameter that the optimizer was given without names.
    """
    if list(map(len, names)) != list(map(len, keys)):
        return keys
    own, theirs = set(_flat(names)), set(_flat(keys))
    return [
        [name if name not in theirs and key not in own else key for name, key in zip(group, members, strict=True)]
        for group, members in zip(names, keys, strict=True)
    ]


def _comparable_names(
    names: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], keys: Sequence[Sequence[Any]]
) -> bool:
    """Whether both sides name all their parameters, each differently, or have left out the names of the same groups."""
    complete = [len(group) for group in saved] == [len(group) for group in keys]
    distinct = all(len(set(_flat(side))) == sum(map(len, side)) for side in (names, saved))
    return complete and distinct and _placeholders(names) == _placeholders(saved)


def _placeholders(names: Sequence[Sequence[str]]) -> set[str]:
    return {name for name in _flat(names) if are_placeholders([name])}


def _check_positions(
    names: Sequence[Sequence[str]], saved_names: Sequence[Sequence[str]], keys: Sequence[Sequence[_SavedParam]]
) -> None:
    """Refuses a state_dict that must be matched by position and has other groups, or other names where it has any."""
    sizes, saved_sizes = list(map(len, names)), list(map(len, keys))
    if sizes != saved_sizes:
        raise StateError(
            f"the groups of the optimizer have {sizes} parameters, those of the state_dict {saved_sizes}: it was "
            "saved from another model, or with other groups."
        )
    for index, (own, saved) in enumerate(zip(names, saved_names, strict=True)):
        named = len(saved) == len(own) and not _placeholders([own, saved])
        if named and own != saved:
            first = next(k for k, name in enumerate(own) if saved[k] != name)
            raise StateError(
                f"group {index}: parameter {first} is {own[first]}, in the state_dict it is {saved[first]}, and not "
                "all groups have names by which to match them: give every group of the optimizer its names."
            )


def _saved_options(
    param_group: ParamGroup,
    index: int,
    members: Sequence[_SavedParam | None],
    saved_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The options with which the parameters of a param group were saved, where these agree.

    Where parameters of several saved groups are in one group now, an option that these had different values of stays
    the optimizer's own, with a warning.
    """
    sources = [saved_groups[group] for group in dict.fromkeys(member.group for member in members if member is not None)]
    own = set(map(without_wrappers, param_group["param_names"]))
    if len(sources) == 1 and set(sources[0]) == {"params"}:
        # torch.distributed.checkpoint gives the options of a saved group to one group only, if its parameters are now
        # in several.
        sources = [saved for saved in saved_groups if own & set(map(without_wrappers, _names_of(saved)))]
    options: dict[str, Any] = {}
    for saved in sources:
        if saved.get("use_muon", param_group["use_muon"]) != param_group["use_muon"]:
            there = next((k for k, member in enumerate(members) if member and saved_groups[member.group] is saved), 0)
            name, param = param_group["param_names"][there], param_group["params"][there]
            raise StateError(
                f"group {index} ({name}, …) has use_muon={param_group['use_muon']}, the state_dict's has "
                f"{shown(saved['use_muon'])}: the parameters were routed differently when it was saved. "
                f"{_hint_of_filters(param, param_group)}With strict=False they start from zero."
            )
        options = {**saved, **options}
    options = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    for key, loads in SAVED.items():
        if (value := options.pop(key, loads)) != loads:
            raise StateError(
                f"group {index} of the state_dict was saved with {key}={shown(value)}: {DROPPED[key]}, in the "
                f"optimizer and, instead of {key}, in that group."
            )
    for key in list(options):
        values = [saved.get(key, _MISSING) for saved in sources]
        if any(not _same(value, values[0]) for value in values):
            options[key] = f"{NOT_STORED}different>"
            shown_values = ", ".join(shown(value) for value in values if value is not _MISSING)
            warnings.warn(
                f"group {index} ({param_group['param_names'][0]}, …): its parameters were in {len(values)} groups "
                f"with {key}={shown_values}; it keeps its own, {shown(cast(Mapping[str, Any], param_group).get(key))}.",
                stacklevel=6,
            )
    return options


def _overrides(previous: ParamGroup, saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group has after loading instead of ``saved``: what a checkpoint cannot hold, or does not know."""
    own = cast(Mapping[str, Any], previous)
    if not saved:
        return {key: value for key, value in own.items() if key != "params"}
    overrides: dict[str, Any] = {"use_muon": own["use_muon"], "param_names": own["param_names"]}
    for key, value in saved.items():
        if isinstance(value, str) and value.startswith(NOT_STORED):
            overrides[key] = own.get(key, defaults.get(key))
        elif key in _DTYPES and isinstance(value, str):
            overrides[key] = getattr(torch, value.removeprefix("torch."), None)  # with or without it
            if not isinstance(overrides[key], torch.dtype):
                raise StateError(
                    f"{own['param_names'][0]}, …: the state_dict has {key}={value!r}, which is no dtype of torch."
                )
    for key, value in defaults.items():
        if overrides.get(key, saved.get(key)) is None:  # saved by a version without this option
            overrides[key] = own.get(key, value)
    return overrides


def _with_entries_of_new(
    previous: ParamGroup, loaded: Mapping[str, Any], members: Sequence[_SavedParam | None]
) -> dict[str, Any]:
    """What is inside parameters that the state_dict does not know, and why they are here, beside what it says of
    others.
    """
    names = previous["param_names"]
    known = {key for name, member in zip(names, members, strict=True) if member for key in keys_of(name)}
    merged: dict[str, Any] = {}
    for option in ("matrices", "reasons"):
        own, saved = cast(Mapping[str, Any], previous).get(option), loaded.get(option)
        if not (isinstance(own, Mapping) and isinstance(saved, Mapping)):
            continue
        new: dict[str, Any] = {}
        for name in (name for name, member in zip(names, members, strict=True) if member is None):
            key = next((key for key in keys_of(name) if key in own), None)
            if key is not None and entry_of(saved, name) is None:
                new[without_wrappers(name) if key in known else key] = own[key]
        merged |= {option: {**saved, **new}} if new else {}
    return merged


def _warn_of_matrices(param_groups: Sequence[ParamGroup], fitted: Fitted) -> None:
    for previous, options, overrides in zip(param_groups, fitted.param_groups, fitted.overrides, strict=True):
        for key in _WHICH_MATRICES if previous["use_muon"] else ():
            built, loaded = cast(Mapping[str, Any], previous).get(key), overrides.get(key, options.get(key))
            if not _same(_comparable(loaded), _comparable(built)):
                warnings.warn(
                    f"{overrides['param_names'][0]}, …: the checkpoint was saved with {key}={shown(loaded)}, which is "
                    f"used from now on; the optimizer was built with {shown(built)}. Set the group's {key} after "
                    "loading to change it.",
                    stacklevel=5,
                )


def _comparable(value: Any) -> Any:
    """The value as saving leaves it: tuples as lists."""
    return (tuple(value) if isinstance(value, list) else value) or None


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    try:
        return value is other or bool(value == other)
    except (RuntimeError, ValueError, TypeError):  # a tensor in a container, or an object that refuses to be compared
        return False


def _names_of(saved: Mapping[str, Any]) -> list[str]:
    """The names in a saved group; empty if it has none."""
    names = saved.get("param_names")
    return list(names) if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names) else []


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{rest}" if names else "none"


def _check_saved_state(name: str, param: Tensor, param_state: Mapping[str, Any], param_group: ParamGroup) -> None:
    shapes = shapes_of(name, param, param_group)
    if COUNTER not in param_state:  # counts from zero: the checkpoint rounded to nearest, or the parameter was frozen
        shapes.pop(COUNTER, None)
    if not all(key in param_state for key in shapes):
        kind = "Muon" if param_group["use_muon"] else "AdamW"
        raise StateError(
            f"{name} is optimized by {kind} and needs {list(shapes)}, but its saved state has {sorted(param_state)}. "
            "It was saved from an optimizer that routed this parameter differently, or had another rule or rounding. "
            f"{_hint_of_filters(param, param_group)}If dcp.load has read it, build the optimizer with the rule and "
            "the rounding of the checkpoint before loading."
        )
    for key, shape in shapes.items():
        value = param_state[key]
        check_kind(name, key, value, shape, "saved ")
        if key == "step":
            readable = not isinstance(value, Tensor) or known_to_host(value)  # reading others would wait for the device
            if readable and not 0 <= float(value) < math.inf:
                raise StateError(f"{name}: its saved {key} is {float(value)}, it must be a count of steps.")
        elif key != COUNTER:
            _check_tensor(name, param, key, value, shape)


def _hint_of_filters(param: Tensor, param_group: ParamGroup) -> str:
    """What to write if the parameter may be a filter that had the other route, with the space that follows it."""
    if param.dim() < 3:
        return ""
    if param_group["use_muon"]:
        return 'If it is the filter of a convolution that AdamW had, write Muon(model, conv="adamw"). '
    return (
        'If it is the filter of a convolution that Muon had, leave out conv="adamw", or write '
        'Muon(model, conv="flatten"). '
    )


def _check_tensor(name: str, param: Tensor, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise StateError(
            f"{name} has shape {tuple(param.shape)}, but its saved {key} has {tuple(value.shape)} instead of {shape}: "
            "it was saved from another model, or the parameters are in another order."
        )
    if not same_placement(param, value):
        layouts = [
            "a plain tensor" if as_dtensor(tensor) is None else layout_text(name, tensor) for tensor in (param, value)
        ]
        raise StateError(
            f"{name} is {layouts[0]}, its saved {key} is {layouts[1]}. load_state_dict takes state that is sharded "
            "like its parameters; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict reshards it."
        )
    if shares_addresses(local_part(value)):
        raise StateError(
            f"{name}: several elements of its saved {key} share one address, as after expand(), and a step would "
            "write all of them there. Give it separate memory: clone(memory_format=torch.contiguous_format)."
        )
    here, saved = shard_place(param), shard_place(value)
    if saved != here:
        raise StateError(
            f"{name}: its saved {key} is the shard at {saved} of its mesh, this rank holds the shard at {here}. A "
            "file that one rank has saved with torch.save can be loaded by that rank only: load each rank's own file, "
            "or save with torch.distributed.checkpoint, which loads on any rank and any mesh."
        )


def restore(param_groups: Sequence[ParamGroup], state: Mapping[Tensor, dict[str, Any]], fitted: Fitted) -> None:
    """Corrects what torch has loaded: state keeps the dtype it was saved in, and ``step`` goes to the device that
    needs it.
    """
    params = ((param_group, param) for param_group in param_groups for param in param_group["params"])
    for number, (param_group, param) in enumerate(params):
        saved = fitted.state.get(number, {})
        for key, value in saved.items():
            ours = key in (MOMENTUM, COUNTER) or key.startswith(RULE_STATE)
            if ours and isinstance(value, Tensor) and value.dtype != state[param][key].dtype:
                state[param][key] = value.detach().clone().to(device=param.device)
        if "step" in saved and not param_group["use_muon"]:
            step = torch.as_tensor(saved["step"], dtype=torch.float32).detach().clone()
            state[param]["step"] = step.reshape(()).to(param.device if can_fuse(local_part(param)) else "cpu")
