"""The state of another optimizer: what it must have, and how it becomes a state_dict for this one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, cast

import torch
from torch import Tensor

from ..errors import MeshmuonError, StateError
from ..optim import Muon
from ..params.checks import shown
from ..params.option_table import ParamGroup
from ..state.param_state import ADAMW_KEYS, MOMENTUM, start

StateDict: TypeAlias = Mapping[str, Any]

_Args = ParamSpec("_Args")
# options; True for Muon's
_NEEDED = {True: ("lr", "weight_decay", "momentum"), False: ("lr", "weight_decay", "betas", "eps")}
_OPTIONAL = ("initial_lr", "maximize", "cautious_weight_decay")


@dataclass(frozen=True, slots=True)
class SavedForm:
    """What an optimizer saves."""

    whose: str
    is_muon: Callable[[StateDict], bool]  # of a param group
    is_mean: bool = False  # its momentum is a mean, ``buf ← μ·buf + (1 − μ)·G``; here it is a sum
    momentum: str = MOMENTUM  # what it calls the momentum
    moments: tuple[str, ...] = ADAMW_KEYS  # what it calls Adam's state
    unsaved: Mapping[str, Any] | None = None  # options that matrices were stepped with and that it does not save
    names: str | None = None  # the option that has the names of a group's parameters


@dataclass(frozen=True, slots=True)
class SavedParam:
    """A parameter of another optimizer, whose state and options have the names that they have here."""

    form: SavedForm
    use_muon: bool
    state: Mapping[str, Tensor]  # empty before its first gradient
    options: Mapping[str, Any]  # those that are missing stay the optimizer's own


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group of another optimizer."""

    form: SavedForm
    use_muon: bool
    options: StateDict
    names: Mapping[Any, str]  # of its parameters, by their keys in the state

    def params(self, entries: Mapping[Any, StateDict], **translated: Any) -> dict[str, SavedParam]:
        """Its parameters by name; ``translated`` are options that have another name or meaning there."""
        saved = {**self.options, **translated}
        options = dict(self.form.unsaved or {}) if self.use_muon else {"maximize": False}
        optional = (*_OPTIONAL, "nesterov", "adjust_lr_fn") if self.use_muon else _OPTIONAL
        options |= {key: saved[key] for key in optional if key in saved}
        options |= {key: saved[key] for key in _NEEDED[self.use_muon]} | translated
        states = {name: self.state(name, entries.get(key)) for key, name in self.names.items()}
        return {name: SavedParam(self.form, self.use_muon, state, options) for name, state in states.items()}

    def state(self, name: str, entry: StateDict | None) -> dict[str, Tensor]:
        """The state of a parameter, with all that its optimizer saves; empty if there is none, so that it starts
        from zero.
        """
        if not entry:
            return {}
        expected = (self.form.momentum,) if self.use_muon else self.form.moments
        for key in expected:
            value = entry.get(key)
            if value is None or not (isinstance(value, Tensor) or key == "step"):
                raise StateError(
                    f"{name}: {key} is {shown(value)} in its saved state, which has {sorted(map(str, entry))}; "
                    f"{self.form.whose} saves {', '.join(expected)} for it. An empty entry starts it from zero on "
                    "purpose."
                )
        state = zip((MOMENTUM,) if self.use_muon else ADAMW_KEYS, (entry[key] for key in expected), strict=True)
        return {key: torch.tensor(float(value)) if key == "step" else value.detach() for key, value in state}


def raises_state_errors(convert: Callable[_Args, dict[str, Any]]) -> Callable[_Args, dict[str, Any]]:
    """``convert``, with a StateError for whatever a state that is not whole makes it raise; a wrong call is a
    TypeError.
    """
    signature = inspect.signature(convert)

    @functools.wraps(convert)
    def converted(*args: _Args.args, **options: _Args.kwargs) -> dict[str, Any]:
        optimizer = signature.bind(*args, **options).arguments["optimizer"]
        if not isinstance(optimizer, Muon):
            raise TypeError(
                f"{convert.__name__}: the first argument is the Muon that will load the result, got {shown(optimizer)}."
            )
        try:
            return convert(*args, **options)
        except MeshmuonError:
            raise
        except Exception as error:  # a missing option, or a value of another kind
            raise StateError(
                f"{convert.__name__}: this is not what the other optimizer saves ({type(error).__name__}: {error}): "
                "it is not whole, or the state of another optimizer, for which docs/migrate.md lists the function. "
                "Give what its state_dict() returned, and names as strings."
            ) from error

    return converted


def ranks_of(states: Any, form: SavedForm) -> Sequence[StateDict]:
    """The saved state of every rank, after checking that it is a state_dict."""
    ranks = [states] if isinstance(states, Mapping) or not isinstance(states, Iterable) else list(states)
    if not ranks:
        raise StateError("states is empty: give the state_dict, or a list with that of every rank.")
    for state in ranks:
        is_dict = isinstance(state, Mapping)
        if not (
            is_dict and isinstance(state.get("state"), Mapping) and isinstance(state.get("param_groups"), list | tuple)
        ):
            found = f"a dict with the keys {sorted(map(str, state))[:6]}" if is_dict else f"a {type(state).__name__}"
            raise StateError(
                f"the saved state is {found}, which is not a state_dict of {form.whose}: pass what its state_dict() "
                "returned, a dict with a dict 'state' and a list 'param_groups'."
            )
    return ranks


def saved_groups(
    ranks: Sequence[StateDict], names: Iterable[str] | None, form: SavedForm, argument: str = "names"
) -> Iterator[SavedGroup]:
    """The param groups of a saved state, whose parameters a user may name; ``argument`` is where."""
    groups = ranks[0]["param_groups"]
    for number, rank in enumerate(ranks):
        if [group["params"] for group in rank["param_groups"]] != [group["params"] for group in groups]:
            raise StateError(
                f"the state of rank {number} has other param groups than that of rank 0: they are from different runs."
            )
    if names is None and form.names is not None:
        if not all(len(group.get(form.names, ())) == len(group["params"]) for group in groups):
            raise StateError(
                f"not all groups of the saved state have names, which {form.whose} saves only where it was given "
                f"them: pass {argument}=[...], the names of its parameters in its order, group after group."
            )
        names = [name for group in groups for name in group[form.names]]
    count = sum(len(group["params"]) for group in groups)
    listed = [] if isinstance(names, str | set | frozenset) or not isinstance(names, Iterable) else list(names)
    if not all(isinstance(name, str) for name in listed) or not len(listed) == len(set(listed)) == count:
        raise StateError(
            f"{argument}={shown(names)} must be the list of the names of the saved optimizer's {count} parameters, "
            "each once, in its order, group after group; docs/migrate.md shows how to list them."
        )
    rest = iter(listed)
    for group in groups:
        yield SavedGroup(form, form.is_muon(group), group, {key: next(rest) for key in group["params"]})


def loadable(optimizer: Muon, saved: dict[str, SavedParam]) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from the parameters of another optimizer by name."""
    param_groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    state: dict[int, dict[str, Any]] = {}
    for param_group, live in zip(param_groups, optimizer.param_groups, strict=True):
        options: dict[str, dict[str, Any]] = {}
        for name, param, key in zip(live["param_names"], live["params"], param_group["params"], strict=True):
            member = saved.pop(name, None)
            if member is None:
                if param.requires_grad:
                    raise StateError(
                        f"{name} is in neither state: give states of the same model, with the optimizer's names."
                    )
                continue
            if member.use_muon != live["use_muon"]:
                needed, given = (
                    ("torch.optim.AdamW", "torch.optim.Muon")[muon] for muon in (live["use_muon"], member.use_muon)
                )
                raise StateError(
                    f"{name} needs the state of {needed}, but its state is from {given}: route it the same way."
                )
            # A param group may have torch's own keys for AdamW's options instead of meshmuon's.
            renamed = {} if live["use_muon"] else {k: f"adamw_{k}" for k in ("betas", "eps") if k not in live}
            options[name] = {renamed.get(k, k): value for k, value in member.options.items()}
            dtype = live["momentum_dtype"] if live["use_muon"] else None
            state[key] = _state_here(name, member, dtype)
            if state[key]:
                start(state[key], name, param, cast(ParamGroup, live))
        _set_options(param_group, options)
    if saved:
        raise StateError(
            f"{next(iter(saved))} has state but is not one of the optimizer's parameters ({len(saved)} such names)."
        )
    return {"state": state, "param_groups": param_groups}


def _state_here(name: str, saved: SavedParam, momentum_dtype: torch.dtype | None) -> dict[str, Any]:
    state = {key: value.to(momentum_dtype or value.dtype, copy=True) for key, value in saved.state.items()}
    if state and saved.use_muon:
        momentum = float(saved.options["momentum"])
        if not 0 <= momentum < 1:
            raise StateError(
                f"{name}: momentum={momentum} in its saved state; only momentum in [0, 1) can be converted."
            )
        if saved.form.is_mean:
            state[MOMENTUM] /= 1 - momentum
    return state


def _set_options(param_group: dict[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets the options that all parameters of a param group were stepped with; raises if they differ."""
    if not options:
        return
    first = next(iter(options))
    for name, param_options in options.items():
        for key, value in param_options.items():
            if value != options[first].get(key):
                raise StateError(
                    f"{first} was stepped with {key}={options[first].get(key)}, {name} with {value}, but here they "
                    "are in one group: build a group for each."
                )
    param_group.update(options[first])
