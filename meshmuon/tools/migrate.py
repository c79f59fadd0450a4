"""States of Keller Jordan's Muon, nanochat's, dion's and Motif's, converted for this one.

The first two keep momentum as a mean, as ``torch.optim.Muon`` does; the others as a sum, as it is here. docs/migrate.md
translates the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import StateError
from ..optim import Muon
from ..params.checks import shown
from .checkpoint import SavedParam, is_state_dict, raises_state_errors, state_dict_from

StateDict: TypeAlias = Mapping[str, Any]

_LIKE_KELLER = {"nesterov": True, "adjust_lr_fn": "original"}
_KELLER_SCHEME = {"ns_steps": 5, "scheme": ((3.4445, -4.7750, 2.0315),) * 5}
_ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
_DION_ALGORITHMS = ("muon", "normuon", "adamw")
_DION_LR_RULES = {None: None, "spectral_norm": "spectral", "rms_norm": "match_rms_adamw"}


@dataclass(frozen=True, slots=True)
class _Form:
    """What an optimizer saves: keys of all its param groups, of those of each kind, and of the state of a parameter."""

    whose: str
    is_muon: Callable[[StateDict], bool]
    group: tuple[str, ...] = ()
    muon_group: tuple[str, ...] = ("momentum",)
    adam_group: tuple[str, ...] = ("betas", "eps")
    muon_state: tuple[str, ...] = ("momentum_buffer",)
    adam_state: tuple[str, ...] = _ADAMW_KEYS


_KELLER_FORM = _Form("Keller Jordan's Muon", lambda group: bool(group.get("use_muon", True)))
_NANOCHAT_FORM = _Form("nanochat's MuonAdamW", lambda group: bool(group["kind"] == "muon"), group=("kind",))
_MOTIF_FORM = _Form(
    "Motif's Muon",
    lambda group: bool(group["use_muon"]),
    group=("use_muon",),
    adam_group=("adamw_betas", "adamw_eps"),
    adam_state=("step", "moment1", "moment2"),
)
_DION_FORM = _Form(
    "dion's Muon or NorMuon",
    lambda group: bool(group["algorithm"] != "adamw"),
    group=("algorithm", "mu", "beta1", "beta2", "epsilon", "step"),
    muon_group=(),
    adam_group=(),
    muon_state=("momentum",),
    adam_state=("momentum", "variance"),
)


@dataclass(frozen=True, slots=True)
class _SavedGroup:
    """A param group of the saved state."""

    form: _Form
    use_muon: bool
    options: Mapping[str, Any]
    keys: Sequence[Any]
    names: Sequence[str]


@raises_state_errors
def convert_keller_state(optimizer: Muon, states: StateDict | Sequence[StateDict], names: Iterable[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of Keller Jordan's ``Muon``, ``MuonWithAuxAdam`` or their single-device variants.

    The momentum becomes ``buf / (1 − μ)``, which gives the same later updates. lr, weight decay, momentum, betas and eps are
    converted, with his coefficients and his learning-rate rule.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        states: its ``state_dict()``. The variants for several ranks keep each momentum on one rank: give the states of all ranks.
        names: names of its parameters in its own order, group after group. That order is by size in the variants for several
            ranks; docs/migrate.md shows how to list it.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks = _ranks(states, _KELLER_FORM)
    saved = list(_saved_groups(ranks, names, _KELLER_FORM))
    found = {key: rank["state"][key] for rank in reversed(ranks) for key in rank["state"] if rank["state"][key]}
    for group in saved:
        for key, name in zip(group.keys, group.names, strict=True):
            if found and key not in found:  # it makes state for every parameter at its first step
                raise StateError(
                    f"{name} has no state on the {len(ranks)} rank(s) whose states were given. Keller Jordan's Muon keeps each "
                    "momentum on one rank: pass the states of all ranks, states=[state of rank 0, state of rank 1, ...]."
                )
            _checked_entry(group, name, found.get(key))
    return _converted(optimizer, saved, found, {**_LIKE_KELLER, **_KELLER_SCHEME}, is_mean=True)


@raises_state_errors
def convert_nanochat_state(optimizer: Muon, states: StateDict | Sequence[StateDict], names: Iterable[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of nanochat's ``MuonAdamW``, whose ranks keep a part of the state each.

    Momentum becomes ``buf / (1 − μ)``; Adam's moments are joined. lr, weight decay, momentum, betas and eps are converted. The
    scheme and the update rule stay the optimizer's own. nanochat's second moment of updates is left out: it is kept per row or
    per column, whichever are more, after two other normalisations, and a rule here starts its memory from zero.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        states: its ``state_dict()`` of every rank, in the order of the ranks.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks = _ranks(states, _NANOCHAT_FORM)
    saved = list(_saved_groups(ranks, names, _NANOCHAT_FORM))
    shapes = {
        name: param.shape
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    found: dict[Any, dict[str, Any]] = {}
    for group in saved:
        found |= _stacked_momentum(group, ranks) if group.use_muon else _joined_moments(group, ranks, shapes)
    return _converted(optimizer, saved, found, _LIKE_KELLER, is_mean=True)


@raises_state_errors
def convert_motif_state(optimizer: Muon, state: StateDict, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of ``Muon`` of Motif's ``optimizer`` package.

    Momentum, Adam's moments, lr, weight decay, momentum, Nesterov, betas and eps are taken over as they are, with Motif's
    learning-rate rule. The scheme stays the optimizer's own.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        state: its ``state_dict()``. DTensors must be laid out as the optimizer's parameters are.
        names: names of its parameters in its own order, group after group. None if all of its groups have ``names``.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks = _ranks(state, _MOTIF_FORM, several=False)
    if names is None:
        groups = state["param_groups"]
        if not all(len(group.get("names", ())) == len(group["params"]) for group in groups):
            raise StateError(
                "not all groups of the saved state have names (Motif names the matrices only): pass names=[...], the names of "
                "its parameters in its order, group after group."
            )
        names = [name for group in groups for name in group["names"]]
    saved, found = [], {}
    renamed = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
    for group in _saved_groups(ranks, names, _MOTIF_FORM):
        options = {**group.options, "adjust_lr_fn": "match_rms_adamw"}
        if not group.use_muon:
            options |= {key: options[f"adamw_{key}"] for key in ("betas", "eps")}
        saved.append(replace(group, options=options))
        for key, name in zip(group.keys, group.names, strict=True):
            if entry := _checked_entry(group, name, state["state"].get(key)):
                found[key] = {renamed.get(k, k): value for k, value in entry.items()}
    return _converted(optimizer, saved, found)


@raises_state_errors
def convert_dion_state(optimizer: Muon, state: StateDict, names: Iterable[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of dion's ``Muon`` or ``NorMuon``.

    Momentum, Adam's moments, lr, weight decay, ``cautious_wd``, ``maximize``, momentum, Nesterov, betas, eps and the
    learning-rate rule are taken over as they are. The scheme and the update rule stay the optimizer's own; so does the
    learning-rate rule if dion's ``adjust_lr`` is None. NorMuon's second moment of updates is left out, and a rule here starts its
    memory from zero.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        state: its ``state_dict()``. DTensors must be laid out as the optimizer's parameters are.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    saved, found = [], {}
    for group in _saved_groups(_ranks(state, _DION_FORM, several=False), names, _DION_FORM):
        options = dict(group.options)
        _check_dions_choices(options)
        rule = _DION_LR_RULES.get(options.get("adjust_lr"))  # None keeps the rule that is here
        options |= {key: float(options[key]) for key in ("lr", "weight_decay", "initial_lr") if key in options}  # from tensors
        options |= {"momentum": float(options["mu"]), "eps": float(options["epsilon"])}
        options["betas"] = float(options["beta1"]), float(options["beta2"])
        if group.use_muon and "cautious_wd" in options:
            options["cautious_weight_decay"] = bool(options["cautious_wd"])
        saved.append(replace(group, options=options if rule is None else {**options, "adjust_lr_fn": rule}))
        if options["step"] == 0:  # dion makes state of zeros before its first step
            continue
        for key, name in zip(group.keys, group.names, strict=True):
            entry = _checked_entry(group, name, state["state"].get(key))
            if entry and group.use_muon:
                found[key] = {"momentum_buffer": entry["momentum"]}
            elif entry:
                step = float(entry.get("step_dev", 0)) or options["step"]  # older versions count per group only
                found[key] = {"step": step, "exp_avg": entry["momentum"], "exp_avg_sq": entry["variance"]}
    return _converted(optimizer, saved, found)


def _check_dions_choices(options: Mapping[str, Any]) -> None:
    """Refuses an algorithm or a learning-rate rule of a group that has no counterpart here."""
    if options["algorithm"] not in _DION_ALGORITHMS:
        raise StateError(
            f"a group of the saved state was stepped with algorithm={options['algorithm']!r}, which meshmuon does not have; it "
            f"converts {', '.join(map(repr, _DION_ALGORITHMS))}. Let dion step these parameters with 'adamw' for a while "
            "before you save, or begin without a converted state."
        )
    if options.get("adjust_lr") not in tuple(_DION_LR_RULES):
        raise StateError(
            f"a group of the saved state has adjust_lr={shown(options['adjust_lr'])}; convert_dion_state knows "
            f"{', '.join(map(repr, _DION_LR_RULES))}. For another rule, set it to None in the saved state and build the "
            "optimizer with adjust_lr_fn=lambda rows, cols: ..."
        )
    if options["algorithm"] == "adamw" and options.get("cautious_wd") and options["weight_decay"]:
        raise StateError(
            "a group of the saved state was stepped by AdamW with cautious_wd=True, which meshmuon has for Muon's matrices only. "
            "Set it to False in the saved state to go on with ordinary weight decay."
        )


def _ranks(states: Any, form: _Form, *, several: bool = True) -> Sequence[StateDict]:
    """The saved state of every rank, after checking that it has the form of a state_dict."""
    as_one = isinstance(states, Mapping) or not isinstance(states, Iterable) or not several
    ranks = [states] if as_one else list(states)
    if not ranks:
        raise StateError("states is empty: give the state_dict, or a list with that of every rank.")
    for state in ranks:
        if not is_state_dict(state):
            is_dict = isinstance(state, Mapping)
            found = f"a dict with the keys {sorted(map(str, state))[:6]}" if is_dict else f"a {type(state).__name__}"
            raise StateError(
                f"the saved state is {found}, which is not a state_dict of {form.whose}: pass what its state_dict() returned, a "
                "dict with a dict 'state' and a list 'param_groups'."
            )
    return ranks


def _checked_entry(group: _SavedGroup, name: str, entry: StateDict | None) -> StateDict:
    """The state of a parameter, with all that its optimizer saves; empty if there is none, so that it starts from zero."""
    expected = group.form.muon_state if group.use_muon else group.form.adam_state
    for key in expected if entry else ():
        value = (entry or {}).get(key)
        if value is None or not (isinstance(value, Tensor) or key == "step"):
            raise StateError(
                f"{name}: {key} is {shown(value)} in its saved state, which has {sorted(map(str, entry or ()))}; "
                f"{group.form.whose} saves {', '.join(expected)} for it. An empty entry starts it from zero on purpose."
            )
    return entry or {}


def _saved_groups(ranks: Sequence[StateDict], names: Iterable[str], form: _Form) -> Iterator[_SavedGroup]:
    groups = ranks[0]["param_groups"]
    for number, rank in enumerate(ranks):
        if [group["params"] for group in rank["param_groups"]] != [group["params"] for group in groups]:
            raise StateError(
                f"the state of rank {number} has other param groups than that of rank 0: they are from different runs."
            )
    listed = [] if isinstance(names, str | set | frozenset) or not isinstance(names, Iterable) else list(names)
    if not (listed and all(isinstance(name, str) for name in listed)):
        raise StateError(
            f"names={shown(names)} must be the list of the names of the saved optimizer's parameters in its order, group after "
            "group; docs/migrate.md shows how to list them."
        )
    count = sum(len(group["params"]) for group in groups)
    if len(listed) != count or len(set(listed)) != count:
        raise StateError(f"names has {len(set(listed))} different names for {count} parameters of the saved state.")
    rest = iter(listed)
    for number, group in enumerate(groups):
        _need(form, number, group, ("lr", "weight_decay", *form.group))
        use_muon = form.is_muon(group)
        _need(form, number, group, form.muon_group if use_muon else form.adam_group)
        keys = list(group["params"])
        yield _SavedGroup(form, use_muon, group, keys, [next(rest) for _ in keys])


def _need(form: _Form, number: int, group: StateDict, keys: Iterable[str]) -> None:
    if missing := [key for key in keys if group.get(key) is None]:
        raise StateError(
            f"group {number} of the saved state has no {', '.join(missing)}, which {form.whose} saves: it is not whole, or the "
            "state of another optimizer. docs/migrate.md lists the functions for other optimizers."
        )


def _stacked_momentum(group: _SavedGroup, ranks: Sequence[StateDict]) -> dict[Any, dict[str, Any]]:
    """The momentum of each parameter of a group: ranks keep equal stacks, under the key of the group's first parameter."""
    stacks = [rank["state"].get(group.keys[0], {}).get("momentum_buffer") for rank in ranks]
    if all(stack is None for stack in stacks):
        return {}
    count, each = len(group.keys), -(-len(group.keys) // len(ranks))
    if any(stack is None or len(stack) != each for stack in stacks):
        raise StateError(
            f"{group.names[0]}: {count} momenta over {len(ranks)} rank(s) are {each} per rank, the states have "
            f"{[0 if stack is None else len(stack) for stack in stacks]}. Pass the states of all ranks, in their order."
        )
    buffers = torch.cat(stacks)  # those after the last are padding
    return {key: {"momentum_buffer": buffer} for key, buffer in zip(group.keys, buffers[:count].clone(), strict=True)}


def _joined_moments(
    group: _SavedGroup, ranks: Sequence[StateDict], shapes: Mapping[str, torch.Size]
) -> dict[Any, dict[str, Any]]:
    """Adam's moments of a group: whole on every rank, or cut over the ranks along the first dim."""
    found: dict[Any, dict[str, Any]] = {}
    for key, name in zip(group.keys, group.names, strict=True):
        parts = [rank["state"].get(key) for rank in ranks]
        if not any(parts):
            continue
        if not all(parts):
            raise StateError(f"{name} has state on some ranks only: the states are not of one step.")
        parts = [_checked_entry(group, name, part) for part in parts]
        moments: dict[str, Any] = {"step": parts[0]["step"]}
        for moment in _ADAMW_KEYS[1:]:
            tensors = [part[moment] for part in parts]
            whole = tensors[0] if tensors[0].shape == shapes.get(name, tensors[0].shape) else torch.cat(tensors)
            if name in shapes and whole.shape != shapes[name]:
                raise StateError(
                    f"{name}: {moment} of {len(ranks)} rank(s) has shape {tuple(whole.shape)}, the parameter has "
                    f"{tuple(shapes[name])}. Pass the states of all ranks, in their order."
                )
            moments[moment] = whole
        found[key] = moments
    return found


def _converted(
    optimizer: Muon,
    saved: Sequence[_SavedGroup],
    found: Mapping[Any, Mapping[str, Any]],
    of_matrices: Mapping[str, Any] | None = None,
    *,
    is_mean: bool = False,
) -> dict[str, Any]:
    """``of_matrices`` are options that Muon's parameters were stepped with and that are not saved."""
    params = {}
    for group in saved:
        of_kind = ("momentum", "nesterov", "adjust_lr_fn") if group.use_muon else ("betas", "eps")
        keys = ("lr", "weight_decay", "initial_lr", "maximize", "cautious_weight_decay", *of_kind)
        options = dict(of_matrices or {}) if group.use_muon else {"maximize": False}
        options |= {key: group.options[key] for key in keys if key in group.options}
        kept = ("momentum_buffer",) if group.use_muon else _ADAMW_KEYS
        for key, name in zip(group.keys, group.names, strict=True):
            state = {k: value for k, value in found.get(key, {}).items() if k in kept}
            if "step" in state:
                state["step"] = torch.tensor(float(state["step"]))
            params[name] = SavedParam(group.use_muon, state, options, is_mean)
    return state_dict_from(optimizer, params)
