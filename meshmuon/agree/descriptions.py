"""Plans, parameters and hyperparameters as text that is the same on every rank: ranks compare it, and errors show
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..device import known_to_host
from ..layout import Layout
from ..ortho import Orthogonalizer, Rational, Scheme, Step, is_mixed
from ..params.checks import momentum_is_cycled
from ..params.option_table import Compared, group_options
from ..params.param_record import ParamRecord
from ..plan import Plan, PlannedParam

BY_UNITS = " by this CPU's units"
_COMPARED_KEYS = {
    use_muon: tuple(
        key
        for option in group_options(use_muon)
        if option.compared is Compared.BY_VALUE
        for key in (option.name, *option.aliases)
    )
    for use_muon in (True, False)
}


def owner_assignments(plan: Plan) -> tuple[tuple[str, str], ...]:
    """For each matrix that ranks share, the parameter's name and its owner and wave: ("wq", "matrix 0 to owner 3 in
    wave 1").
    """
    return tuple(
        (plan.params[task.param].name, f"matrix {task.matrix} to owner {task.owner} in wave {task.wave}")
        for task in plan.tasks
        if not plan.params[task.param].private
    )


def recipe_text(record: ParamRecord, dtype: torch.dtype) -> str:
    """How matrices of a parameter are computed: scheme, dtype and update rule. It is part of the plan's digest."""
    rules = "".join(f", {_stable_text(rule)}" for rule in record.rules)
    by_units = dtype == torch.bfloat16 and record.work_device.type == "cpu" and record.compute_dtype is None
    units = BY_UNITS if by_units or is_mixed(record.scheme, dtype, record.work_device) else ""
    return f"{_scheme_text(record.scheme)} in {str(dtype).removeprefix('torch.')}{units}{rules}"


def _stable_text(value: object) -> str:
    """``repr(value)``, or the name of its class if the class defines no ``__repr__``: the default one shows an
    address.
    """
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(value)


def _scheme_text(scheme: Scheme | Orthogonalizer | None) -> str:
    if isinstance(scheme, Scheme):
        return "steps " + ", ".join(map(_step_text, scheme.steps)) if scheme.steps else f"scheme {scheme.name}"
    return f"{getattr(scheme, '__module__', '')}.{getattr(scheme, '__qualname__', type(scheme).__qualname__)}"


def _step_text(step: Step) -> str:
    if isinstance(step, Rational):
        poles = " ".join(f"{weight:.6g}/{pole:.6g}" for pole, weight in zip(step.poles, step.weights, strict=True))
        return f"({step.constant:.6g} + {poles})"
    return f"({step[0]:.6g} {step[1]:.6g} {step[2]:.6g})"


def describe_param(record: ParamRecord, layouts: Sequence[Layout], planned: Sequence[PlannedParam]) -> tuple[str, str]:
    """A parameter's name, and everything about it that must be equal on every rank.

    ``planned`` are its matrix sets as the plan sees them; none if AdamW steps it.
    """
    where = f"{'×'.join(map(str, record.shape))} {'; '.join(map(str, layouts))}"
    if not planned:
        return record.name, f"{where}, for AdamW"
    flops = ", ".join(
        f"{part.flops} FLOPs" if part.window is None else f"{part.window}: {part.flops} FLOPs" for part in planned
    )
    lane, stack_dims, how = planned[0].lane, planned[0].stack_dims, planned[0].how
    return record.name, f"{where}, exchanged as {lane}, stack dims {stack_dims}, {flops}, computed by [{how}]"


def hyperparameters_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hyperparameters of each param group. Ranks that have different ones would silently diverge."""
    return [
        ", ".join(f"{key}={_value_text(group[key])}" for key in _compared_keys(group) if key in group)
        for group in groups
    ]


def _compared_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    keys = _COMPARED_KEYS[bool(group["use_muon"])]
    return keys if group["use_muon"] or not momentum_is_cycled(group) else (*keys, "momentum")


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        # reading it would wait for the device
        return str(value.tolist()) if known_to_host(value) else "a tensor on a device"
    if type(value) is not bool and isinstance(value, Real):
        try:
            return repr(float(value))
        except OverflowError:  # beyond the range of floats; the step refuses it
            return str(value)
    return str(getattr(value, "__qualname__", value))  # the repr of a function would contain an address
