"""States of other optimizers, converted for this one: torch's, Keller Jordan's, nanochat's, dion's and Motif's.

The first three keep momentum as a mean, the others as a sum, as it is here. docs/migrate.md translates the options.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RoutingWarning, StateError, level_of_user
from ..optim import Muon
from ..params.checks import shown
from ..params.option_table import ParamGroup
from ..routing.table import is_first_of_ranks
from ..state.param_state import ADAMW_KEYS, MOMENTUM
from .foreign_state import (
    SavedForm,
    SavedGroup,
    SavedParam,
    StateDict,
    loadable,
    raises_state_errors,
    ranks_of,
    saved_groups,
)

_LIKE_KELLER = {"nesterov": True, "adjust_lr_fn": "original"}
_KELLER_SCHEME = {"ns_steps": 5, "scheme": ((3.4445, -4.7750, 2.0315),) * 5}
_DION_ALGORITHMS = ("muon", "normuon", "adamw")
_DION_LR_RULES = {None: None, "spectral_norm": "spectral", "rms_norm": "match_rms_adamw"}

_TORCH_MUON = SavedForm("torch.optim.Muon", lambda group: True, is_mean=True, names="param_names")
_TORCH_ADAMW = SavedForm("torch.optim.AdamW", lambda group: False, names="param_names")
_KELLER = SavedForm(
    "Keller Jordan's Muon",
    lambda group: bool(group.get("use_muon", True)),
    is_mean=True,
    unsaved={**_LIKE_KELLER, **_KELLER_SCHEME},
)
_NANOCHAT = SavedForm(
    "nanochat's MuonAdamW", lambda group: bool(group["kind"] == "muon"), is_mean=True, unsaved=_LIKE_KELLER
)
_MOTIF = SavedForm(
    "Motif's Muon",
    lambda group: bool(group["use_muon"]),
    moments=("step", "moment1", "moment2"),
    unsaved={"adjust_lr_fn": "match_rms_adamw"},
    names="names",
)
_DION = SavedForm(
    "dion's Muon or NorMuon",
    lambda group: bool(group["algorithm"] != "adamw"),
    momentum="momentum",
    moments=("step", "momentum", "variance"),
)


@raises_state_errors
def convert_torch_state(
    optimizer: Muon,
    muon_state: Mapping[str, Any] | None,
    adamw_state: Mapping[str, Any] | None,
    *,
    muon_names: Sequence[str] | None = None,
    adamw_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` over the same
    parameters.

    Parameters are matched by name. torch keeps momentum as a mean, ``buf ← μ·buf + (1 − μ)·G``; meshmuon keeps it as a
    sum, ``M ← μ·M + G``. The momentum therefore becomes ``buf / (1 − μ)``. Every later update differs by that one
    factor, which orthogonalisation removes, so training continues as it would have with torch. lr, weight decay,
    momentum, Nesterov, betas, eps, coefficients and the learning-rate rule are converted as well. torch orthogonalises
    in bfloat16: pass ``compute_dtype=torch.bfloat16`` to do the same.

    Args:
        optimizer: the optimizer that will load the result. Its param groups decide which parameters are Muon's; nothing
            changes.
        muon_state: ``state_dict()`` of ``torch.optim.Muon``; None if there was none.
        adamw_state: ``state_dict()`` of ``torch.optim.AdamW``; None if there was none.
        muon_names: names of Muon's parameters in its order, for an optimizer that was not built from named parameters.
        adamw_names: the same for AdamW.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    saved: dict[str, SavedParam] = {}
    of_muon = _TORCH_MUON, muon_state, muon_names, "muon_names"
    for form, state, names, argument in (of_muon, (_TORCH_ADAMW, adamw_state, adamw_names, "adamw_names")):
        if state is None:
            continue
        for group in saved_groups(ranks_of([state], form), names, form, argument):
            params = group.params(state["state"], **_torchs_options(group))
            if twice := saved.keys() & params:
                raise StateError(
                    f"{min(twice)} is in the states of both torch.optim.Muon and torch.optim.AdamW: keep one."
                )
            saved |= params
    state_dict = loadable(optimizer, saved)
    _warn_of_other_matrices(optimizer)
    return state_dict


def _warn_of_other_matrices(optimizer: Muon) -> None:
    """Warns of parameters that hold several matrices here: ``torch.optim.Muon`` takes each for one."""
    cut = [row for row in optimizer.routing_table().rows if row.matrices > 1]
    if cut and is_first_of_ranks(cast(list[ParamGroup], optimizer.param_groups)):
        beside = f" (and {len(cut) - 1} more)" if len(cut) > 1 else ""
        text = (
            f"{cut[0].name}{beside} was one matrix under torch.optim.Muon and is {cut[0].matrices} here: training "
            "goes on with "
            'other matrices. For those of torch, build the groups by hand, {"params": matrices, "names": names, '
            '"use_muon": '
            "True}, without split, expert_keys or matrices."
        )
        warnings.warn(text, RoutingWarning, stacklevel=level_of_user())


def _torchs_options(group: SavedGroup) -> dict[str, Any]:
    options, name = group.options, next(iter(group.names.values()), "a group")
    if group.use_muon:
        steps = {"ns_steps": options["ns_steps"], "scheme": (tuple(options["ns_coefficients"]),) * options["ns_steps"]}
        return {**steps, "nesterov": options["nesterov"], "adjust_lr_fn": options["adjust_lr_fn"] or "original"}
    if options.get("amsgrad"):
        raise StateError(f"{name}: its state is from AdamW with amsgrad=True, which meshmuon's AdamW does not do.")
    if not options.get("decoupled_weight_decay", True) and options["weight_decay"]:
        raise StateError(
            f"{name}: its state is from Adam, whose weight decay goes through the gradient; AdamW's does not."
        )
    return {}


@raises_state_errors
def convert_keller_state(
    optimizer: Muon, states: StateDict | Sequence[StateDict], names: Iterable[str]
) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of Keller Jordan's ``Muon``, ``MuonWithAuxAdam`` or their single-device
    variants.

    The momentum becomes ``buf / (1 − μ)``, which gives the same later updates. lr, weight decay, momentum, betas and
    eps are converted, with his coefficients and his learning-rate rule.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        states: its ``state_dict()``. The variants for several ranks keep each momentum on one rank: give the states of
            all ranks.
        names: names of its parameters in its own order, group after group. That order is by size in the variants for
            several ranks; docs/migrate.md shows how to list it.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks, saved = ranks_of(states, _KELLER), dict[str, SavedParam]()
    entries = {key: entry for rank in reversed(ranks) for key, entry in rank["state"].items() if entry}
    for group in saved_groups(ranks, names, _KELLER):
        for key, name in group.names.items():
            if entries and key not in entries:  # it makes state for every parameter at its first step
                raise StateError(
                    f"{name} has no state on the {len(ranks)} rank(s) whose states were given. Keller Jordan's Muon "
                    "keeps each momentum on one rank: pass the states of all ranks, states=[state of rank 0, state of "
                    "rank 1, ...]."
                )
        saved |= group.params(entries)
    return loadable(optimizer, saved)


@raises_state_errors
def convert_nanochat_state(
    optimizer: Muon, states: StateDict | Sequence[StateDict], names: Iterable[str]
) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of nanochat's ``MuonAdamW``, whose ranks keep a part of the state each.

    Momentum becomes ``buf / (1 − μ)``; Adam's moments are joined. lr, weight decay, momentum, betas and eps are
    converted. The scheme and the update rule stay the optimizer's own. nanochat's second moment of updates is left out:
    it is kept per row or per column, whichever are more, after two other normalisations, and a rule here starts its
    memory from zero.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        states: its ``state_dict()`` of every rank, in the order of the ranks.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    ranks, saved = ranks_of(states, _NANOCHAT), dict[str, SavedParam]()
    shapes = {
        name: p.shape
        for live in optimizer.param_groups
        for name, p in zip(live["param_names"], live["params"], strict=True)
    }
    for group in saved_groups(ranks, names, _NANOCHAT):
        saved |= group.params(
            _stacked_momentum(group, ranks) if group.use_muon else _joined_moments(group, ranks, shapes)
        )
    return loadable(optimizer, saved)


def _stacked_momentum(group: SavedGroup, ranks: Sequence[StateDict]) -> dict[Any, StateDict]:
    """The momentum of each parameter of a group: ranks keep equal stacks, under the key of the group's first
    parameter.
    """
    keys = list(group.names)
    stacks = [rank["state"].get(keys[0], {}).get(MOMENTUM) for rank in ranks]
    if all(stack is None for stack in stacks):
        return {}
    each = -(-len(keys) // len(ranks))
    if any(stack is None or len(stack) != each for stack in stacks):
        raise StateError(
            f"{group.names[keys[0]]}: {len(keys)} momenta over {len(ranks)} rank(s) are {each} per rank, the states "
            f"have {[0 if stack is None else len(stack) for stack in stacks]}. Pass the states of all ranks, in their "
            "order."
        )
    buffers = torch.cat(stacks)  # those after the last are padding
    return {key: {MOMENTUM: buffer} for key, buffer in zip(keys, buffers[: len(keys)], strict=True)}


def _joined_moments(
    group: SavedGroup, ranks: Sequence[StateDict], shapes: Mapping[str, torch.Size]
) -> dict[Any, dict[str, Tensor]]:
    """Adam's moments of a group: whole on every rank, or cut over the ranks along the first dim."""
    joined: dict[Any, dict[str, Tensor]] = {}
    for key, name in group.names.items():
        parts = [group.state(name, rank["state"].get(key)) for rank in ranks]
        if any(parts) and not all(parts):
            raise StateError(f"{name} has state on some ranks only: the states are not of one step.")
        joined[key] = parts[0]
        for moment in ADAMW_KEYS[1:] if parts[0] and name in shapes else ():
            if parts[0][moment].shape != shapes[name]:
                joined[key][moment] = torch.cat([part[moment] for part in parts])
            if (shape := tuple(joined[key][moment].shape)) != tuple(shapes[name]):
                raise StateError(
                    f"{name}: {moment} of {len(ranks)} rank(s) has shape {shape}, the parameter has "
                    f"{tuple(shapes[name])}. Pass the states of all ranks, in their order."
                )
    return joined


@raises_state_errors
def convert_motif_state(optimizer: Muon, state: StateDict, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of ``Muon`` of Motif's ``optimizer`` package.

    Momentum, Adam's moments, lr, weight decay, momentum, Nesterov, betas and eps are taken over as they are, with
    Motif's learning-rate rule. The scheme stays the optimizer's own.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        state: its ``state_dict()``. DTensors must be laid out as the optimizer's parameters are.
        names: names of its parameters in its own order, group after group. None if all of its groups have ``names``.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    saved: dict[str, SavedParam] = {}
    for group in saved_groups(ranks_of([state], _MOTIF), names, _MOTIF):
        renamed = {} if group.use_muon else {key: group.options[f"adamw_{key}"] for key in ("betas", "eps")}
        saved |= group.params(state["state"], **renamed)
    return loadable(optimizer, saved)


@raises_state_errors
def convert_dion_state(optimizer: Muon, state: StateDict, names: Iterable[str]) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from one of dion's ``Muon`` or ``NorMuon``.

    Momentum, Adam's moments, lr, weight decay, ``cautious_wd``, ``maximize``, momentum, Nesterov, betas, eps and the
    learning-rate rule are taken over as they are. The scheme and the update rule stay the optimizer's own; so does the
    learning-rate rule if dion's ``adjust_lr`` is None. NorMuon's second moment of updates is left out, and a rule here
    starts its memory from zero.

    Args:
        optimizer: the optimizer that will load the result; nothing in it changes.
        state: its ``state_dict()``. DTensors must be laid out as the optimizer's parameters are.
        names: names of its parameters in its own order, group after group.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    saved: dict[str, SavedParam] = {}
    for group in saved_groups(ranks_of([state], _DION), names, _DION):
        translated, steps = _dions_options(group), group.options["step"]
        # before its first step all are zeros
        entries = {key: dict(state["state"].get(key, {})) for key in group.names if steps}
        for entry in entries.values():
            if entry:
                entry["step"] = float(entry.get("step_dev", 0)) or steps  # older versions count per group only
        saved |= group.params(entries, **translated)
    return loadable(optimizer, saved)


def _dions_options(group: SavedGroup) -> dict[str, Any]:
    """Options by their names here; refuses an algorithm and a learning-rate rule that have no counterpart here."""
    options = group.options
    if options["algorithm"] not in _DION_ALGORITHMS:
        raise StateError(
            f"a group of the saved state was stepped with algorithm={options['algorithm']!r}, which meshmuon does not "
            f"have; it converts {', '.join(map(repr, _DION_ALGORITHMS))}. Let dion step these parameters with 'adamw' "
            "for a while before you save, or begin without a converted state."
        )
    if options.get("adjust_lr") not in tuple(_DION_LR_RULES):
        raise StateError(
            f"a group of the saved state has adjust_lr={shown(options['adjust_lr'])}; convert_dion_state knows "
            f"{', '.join(map(repr, _DION_LR_RULES))}. For another rule, set it to None in the saved state and build "
            "the optimizer with adjust_lr_fn=lambda rows, cols: ..."
        )
    translated: dict[str, Any] = {
        key: float(options[key]) for key in ("lr", "weight_decay", "initial_lr") if key in options
    }  # from tensors
    if not group.use_muon:
        if options.get("cautious_wd") and options["weight_decay"]:
            raise StateError(
                "a group of the saved state was stepped by AdamW with cautious_wd=True, which meshmuon has for Muon's "
                "matrices only. Set it to False in the saved state to go on with ordinary weight decay."
            )
        return {
            **translated,
            "betas": (float(options["beta1"]), float(options["beta2"])),
            "eps": float(options["epsilon"]),
        }
    rule = _DION_LR_RULES[options.get("adjust_lr")]
    translated |= {} if rule is None else {"adjust_lr_fn": rule}  # None keeps the rule that is here
    cautious = {"cautious_weight_decay": bool(options["cautious_wd"])} if "cautious_wd" in options else {}
    return {**translated, **cautious, "momentum": float(options["mu"])}
