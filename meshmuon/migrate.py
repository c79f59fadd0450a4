"""States of Keller Jordan's Muon, nanochat's, dion's and Motif's, converted for this one.

A saved state is first brought into the form of torch's two optimizers, which ``meshmuon.checkpoint.convert_torch_state``
converts. The first two keep momentum as a mean, as ``torch.optim.Muon`` does; the others as a sum, as it is here.
docs/migrate.md translates the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from .checkpoint import convert_torch_state
from .errors import StateError
from .optim import Muon

StateDict: TypeAlias = Mapping[str, Any]

_KELLER = (3.4445, -4.7750, 2.0315)
_MUON_OPTIONS = {"nesterov": True, "ns_steps": 5, "ns_coefficients": _KELLER, "adjust_lr_fn": "original"}
_ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
_DION_ALGORITHMS = ("muon", "normuon", "adamw")
_DION_LR_RULES = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw"}


@dataclass(frozen=True, slots=True)
class _SavedGroup:
    """A param group of the saved state."""

    use_muon: bool
    options: Mapping[str, Any]
    keys: Sequence[Any]
    names: Sequence[str]


def convert_keller_state(optimizer: Muon, states: StateDict | Sequence[StateDict], names: Sequence[str]) -> dict[str, Any]:
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
    ranks = _ranks(states)
    saved = list(_saved_groups(ranks, names, lambda group: bool(group.get("use_muon", True))))
    found = {key: rank["state"][key] for rank in reversed(ranks) for key in rank["state"] if rank["state"][key]}
    for group in saved:
        for key, name in zip(group.keys, group.names, strict=True):
            if found and key not in found:  # it makes state for every parameter at its first step
                raise StateError(
                    f"{name} has no state on the {len(ranks)} rank(s) whose states were given. Keller Jordan's Muon keeps each "
                    "momentum on one rank: pass the states of all ranks, states=[state of rank 0, state of rank 1, ...]."
                )
    return _converted(optimizer, saved, found)


def convert_nanochat_state(optimizer: Muon, states: StateDict | Sequence[StateDict], names: Sequence[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of nanochat's ``MuonAdamW``, whose ranks keep a part of the state each.

    Momentum becomes ``buf / (1 − μ)``; Adam's moments are joined. lr, weight decay, momentum, betas and eps are converted. The
    scheme and the update rule stay the optimizer's own. nanochat's second moment of updates is left out: it is kept per row or
    per column, whichever are more, after two other normalisations, and a rule here starts its memory anew.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        states: its ``state_dict()`` of every rank, in the order of the ranks.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks = _ranks(states)
    saved = list(_saved_groups(ranks, names, lambda group: group["kind"] == "muon"))
    shapes = {
        name: param.shape
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    found: dict[Any, dict[str, Any]] = {}
    for group in saved:
        found |= _stacked_momentum(group, ranks) if group.use_muon else _joined_moments(group, ranks, shapes)
    converted = _converted(optimizer, saved, found)
    for param_group, own in zip(converted["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        if own["use_muon"]:
            param_group |= {key: own[key] for key in ("scheme", "ns_steps")}
    return converted


def convert_motif_state(optimizer: Muon, state: StateDict, names: Sequence[str] | None = None) -> dict[str, Any]:
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
    if names is None:
        groups = state["param_groups"]
        if not all(len(group.get("names", ())) == len(group["params"]) for group in groups):
            raise StateError(
                "not all groups of the saved state have names (Motif names the matrices only): pass names=[...], the names of "
                "its parameters in its order, group after group."
            )
        names = [name for group in groups for name in group["names"]]
    saved = [
        replace(
            group,
            options={
                **group.options,
                "adjust_lr_fn": "match_rms_adamw",
                "betas": group.options["adamw_betas"],
                "eps": group.options["adamw_eps"],
            },
        )
        for group in _saved_groups([state], names, lambda group: bool(group["use_muon"]))
    ]
    renamed = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
    found = {key: {renamed.get(k, k): value for k, value in entry.items()} for key, entry in state["state"].items()}
    return _with_sums(optimizer, saved, found)


def convert_dion_state(optimizer: Muon, state: StateDict, names: Sequence[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of dion's ``Muon`` or ``NorMuon``.

    Momentum, Adam's moments, lr, weight decay, momentum, Nesterov, betas, eps and the learning-rate rule are taken over as they
    are. The scheme and the update rule stay the optimizer's own; so does the learning-rate rule if dion's ``adjust_lr`` is None.
    NorMuon's second moment of updates is left out, and a rule here starts its memory anew.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        state: its ``state_dict()``. DTensors must be laid out as the optimizer's parameters are.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    for group in state["param_groups"]:
        if group["algorithm"] not in _DION_ALGORITHMS:
            raise StateError(
                f"a group of the saved state was stepped with algorithm={group['algorithm']!r}, which meshmuon does not have; it "
                f"converts {', '.join(map(repr, _DION_ALGORITHMS))}. Let dion step these parameters with 'adamw' for a while "
                "before you save, or begin without a converted state."
            )
    saved, found = [], {}
    for group in _saved_groups([state], names, lambda group: bool(group["algorithm"] != "adamw")):
        options = dict(group.options)
        rule = _DION_LR_RULES.get(str(options.get("adjust_lr")))  # None keeps the rule that is here
        options |= {key: float(options[key]) for key in ("lr", "weight_decay")}  # newer versions keep tensors
        options |= {"momentum": float(options["mu"]), "eps": float(options["epsilon"])}
        options["betas"] = float(options["beta1"]), float(options["beta2"])
        saved.append(replace(group, options=options if rule is None else {**options, "adjust_lr_fn": rule}))
        for key in group.keys:
            entry = state["state"].get(key) or {}
            if not entry or options["step"] == 0:  # dion makes state of zeros before its first step
                continue
            if group.use_muon:
                found[key] = {"momentum_buffer": entry["momentum"]}
            else:
                step = float(entry.get("step_dev", 0)) or options["step"]  # older versions count per group only
                found[key] = {"step": step, "exp_avg": entry["momentum"], "exp_avg_sq": entry["variance"]}
    return _with_sums(optimizer, saved, found)


def _with_sums(optimizer: Muon, saved: Sequence[_SavedGroup], found: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Converts a state whose momentum is a sum already, and whose scheme is not known."""
    converted = _converted(optimizer, saved, found)
    buffers = {
        name: found[key]["momentum_buffer"]
        for group in saved
        if group.use_muon
        for key, name in zip(group.keys, group.names, strict=True)
        if key in found
    }
    rules = {name for group in saved if "adjust_lr_fn" in group.options for name in group.names}
    for param_group, live in zip(converted["param_groups"], optimizer.param_groups, strict=True):
        if not live["use_muon"]:
            continue
        own = ("scheme", "ns_steps") if rules.issuperset(live["param_names"]) else ("scheme", "ns_steps", "adjust_lr_fn")
        param_group |= {key: live[key] for key in own}
        for key, name in zip(param_group["params"], live["param_names"], strict=True):
            if name in buffers:
                buffer = buffers[name].detach()
                converted["state"][key]["momentum_buffer"] = buffer.to(live["momentum_dtype"] or buffer.dtype, copy=True)
    return converted


def _ranks(states: StateDict | Sequence[StateDict]) -> Sequence[StateDict]:
    ranks = [states] if isinstance(states, Mapping) else list(states)
    if not ranks:
        raise StateError("states is empty: give the state_dict, or a list with that of every rank.")
    return ranks


def _saved_groups(
    ranks: Sequence[StateDict], names: Sequence[str], is_muon: Callable[[StateDict], bool]
) -> Iterator[_SavedGroup]:
    groups = ranks[0]["param_groups"]
    for number, rank in enumerate(ranks):
        if [group["params"] for group in rank["param_groups"]] != [group["params"] for group in groups]:
            raise StateError(
                f"the state of rank {number} has other param groups than that of rank 0: they are from different runs."
            )
    count = sum(len(group["params"]) for group in groups)
    if len(names) != count or len(set(names)) != count:
        raise StateError(f"names has {len(set(names))} different names for {count} parameters of the saved state.")
    rest = iter(names)
    for group in groups:
        keys = list(group["params"])
        yield _SavedGroup(is_muon(group), group, keys, [next(rest) for _ in keys])


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


def _converted(optimizer: Muon, saved: Sequence[_SavedGroup], found: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Both parts as the states of torch's two optimizers, converted."""
    parts: dict[bool, dict[str, Any]] = {use_muon: {"state": {}, "param_groups": []} for use_muon in (True, False)}
    for group in saved:
        part = parts[group.use_muon]
        extra = _MUON_OPTIONS if group.use_muon else {"maximize": False}
        of_kind = ("momentum", "nesterov", "adjust_lr_fn") if group.use_muon else ("betas", "eps")
        keys = ("lr", "weight_decay", "initial_lr", *of_kind)
        options = {key: group.options[key] for key in keys if key in group.options}
        part["param_groups"].append({**extra, **options, "params": list(group.keys), "param_names": list(group.names)})
        for key in group.keys:
            state = dict(found.get(key, {}))
            if "step" in state:
                state["step"] = torch.tensor(float(state["step"]))
            part["state"][key] = state
    return convert_torch_state(optimizer, *(part if part["param_groups"] else None for part in parts.values()))
