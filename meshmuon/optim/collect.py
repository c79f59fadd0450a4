"""What a step will work on: the groups' parameters, what a plan must know of them, and the work itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import known_to_host
from ..errors import GradientError
from ..execute import UpdateRule, Work, WorkSettings, local_part
from ..matrices import Inside, matrices_inside
from ..ortho import Orthogonalizer, Scheme, default_compute_dtype, resolve_scheme
from . import state
from .dtensors import as_dtensor, check_gradient_placement
from .groups import check_options, inside_of
from .lr import lr_factor
from .planning import Demand, Outcome
from .rules import resolve_rule

__all__ = ["Parameter", "check_step", "demands_of", "gradient_of", "numbers_of", "only_creates_state", "parameters_of", "work_of"]

_NUMBERS = {
    True: ("lr", "momentum", "nesterov", "weight_decay", "adjust_lr_fn", "maximize", "momentum_dtype", "cautious_weight_decay"),
    False: ("lr", "weight_decay", "adamw_betas", "betas", "adamw_eps", "eps", "maximize"),
}  # by use_muon


class Parameter(NamedTuple):
    """A parameter with its group and the place of that group among the groups."""

    place: int
    group: dict[str, Any]
    name: str
    param: Tensor


def parameters_of(groups: Sequence[dict[str, Any]]) -> list[Parameter]:
    """All parameters, group by group."""
    return [
        Parameter(place, group, name, param)
        for place, group in enumerate(groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]


def demands_of(
    groups: Sequence[dict[str, Any]], comm_dtype: torch.dtype | None
) -> tuple[list[Parameter], tuple[Demand, ...], Exception | None]:
    """All parameters, what a plan must know of them, and what keeps it from being known.

    A group that makes no sense still yields demands, from metadata alone: with them this rank finds the others, which must hear
    of its failure.
    """
    parameters: list[Parameter] = []
    demands: list[Demand] = []
    failure: Exception | None = None
    for place, group in enumerate(groups):
        try:
            check_options(group, place)
            treatment = _treatment(group)
            named = list(zip(group["param_names"], group["params"], strict=True))
        except Exception as error:
            failure = failure or error
            treatment = _Treatment()
            named = list(zip(group["param_names"], group["params"], strict=False))
        for name, param in named:
            one = Parameter(place, group, name, param)
            parameters.append(one)
            try:
                demands.append(_demand(treatment, one, comm_dtype=comm_dtype))
            except Exception as error:
                failure = failure or error
                demands.append(_demand(_Treatment(), one, comm_dtype=comm_dtype))
    return parameters, tuple(demands), failure


def check_step(parameters: Sequence[Parameter], demands: Sequence[Demand], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Refuses what a step cannot work with; writes nothing."""
    for place, shape in {(demand.group, one.lr_shape) for demand in demands for one in demand.matrices or ()}:
        group = next(one.group for one in parameters if one.place == place)
        lr_factor(group["adjust_lr_fn"], *shape)  # a user's function fails here or not at all
    for one in parameters:
        if one.param.grad is not None:
            _check_gradient(one.name, one.param, one.param.grad)
            if one.param in states:
                state.check_current(one.name, one.param, states[one.param], one.group)


def work_of(
    parameters: Sequence[Parameter],
    demands: Sequence[Demand],
    outcome: Outcome,
    states: Mapping[Tensor, dict[str, Any]],
    *,
    keeps: Callable[[int], bool] = lambda entry: True,
    mask: Tensor | None = None,
) -> list[Work]:
    """The Muon part of an agreed step, one entry per parameter of its plan.

    Args:
        parameters: all parameters.
        demands: what the plan was made from.
        outcome: what was agreed.
        states: the optimizer's state.
        keeps: whether this rank keeps the momentum of an entry of the plan.
        mask: on a device, whether nothing may change; gradients are then already silent.
    """
    settings: dict[int, WorkSettings] = {}
    work = []
    for entry, (k, part) in enumerate(outcome.members):
        one, demand = parameters[k], demands[k]
        if one.place not in settings:
            settings[one.place] = _settings(one.group, mask)
        assert demand.matrices is not None
        assert demand.scheme is not None
        dtype = one.group["momentum_dtype"]
        kept = keeps(entry)
        buffer = state.momentum_buffer(states[one.param], one.param, dtype) if kept else one.param
        remembers = kept and demand.rule is not None and demand.rule.remembers()
        work.append(
            Work(
                param=one.param,
                momentum_buffer=buffer,
                matrices=demand.matrices[part],
                scheme=demand.scheme,
                compute_dtype=demand.compute_dtype,
                settings=settings[one.place],
                comm_dtype=demand.comm_dtype,
                group=one.place,
                zeros=torch.zeros_like(one.param) if k in outcome.zeros else None,
                rule=demand.rule,
                memory=state.rule_memory(states[one.param], one.param, demand.matrices[part]) if remembers else None,
            )
        )
    return work


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each group steps with beside the plan; ranks with other numbers would part without an error."""
    return [
        ", ".join(f"{key}={_number_text(group[key])}" for key in _NUMBERS[bool(group["use_muon"])] if key in group)
        for group in groups
    ]


def gradient_of(param: Tensor) -> Tensor:
    """The parameter's gradient, or zeros where only other ranks have one."""
    return torch.zeros_like(param) if param.grad is None else param.grad


class _Treatment(NamedTuple):
    """What a group says of all its parameters; nothing for AdamW's."""

    scheme: Scheme | Orthogonalizer | None = None
    rule: UpdateRule | None = None
    inside: Inside | None = None


def _treatment(group: Mapping[str, Any]) -> _Treatment:
    if not group["use_muon"]:
        return _Treatment()
    return _Treatment(resolve_scheme(group["scheme"], group["ns_steps"]), resolve_rule(group["rule"]), inside_of(group))


def _demand(treatment: _Treatment, one: Parameter, *, comm_dtype: torch.dtype | None) -> Demand:
    scheme, rule, inside = treatment
    param, group = one.param, one.group
    sharded = as_dtensor(param)
    shape, dtype, device = tuple(param.shape), param.dtype, param.device
    update_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Demand(
        name=one.name,
        group=one.place,
        shape=shape,
        local_shape=shape if sharded is None else tuple(sharded.to_local().shape),
        mesh=None if sharded is None else sharded.device_mesh,
        placements=() if sharded is None else sharded.placements,
        device=device,
        matrices=None if inside is None else matrices_inside(one.name, shape, inside),
        scheme=scheme,
        rule=rule,
        compute_dtype=dtype if inside is None else group["compute_dtype"] or default_compute_dtype(device, dtype),
        comm_dtype=comm_dtype or default_comm_dtype(device, update_dtype),
        update_dtype=update_dtype,
        active=param.grad is not None,
    )


def default_comm_dtype(device: torch.device, update_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 between GPUs, full precision elsewhere; float64 stays float64."""
    return torch.bfloat16 if device.type == "cuda" and update_dtype != torch.float64 else update_dtype


def _number_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if known_to_host(value) else "a tensor on a device"  # reading it would wait for the device
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(float(value))
    return str(getattr(value, "__qualname__", value))  # a function's repr holds an address


def _settings(group: Mapping[str, Any], mask: Tensor | None) -> WorkSettings:
    lr = group["lr"]
    if isinstance(lr, Tensor):  # on a device it stays a tensor: reading it would wait for the device
        lr = float(lr) if known_to_host(lr) else lr.reshape(())
    momentum = float(group["momentum"])
    retain: float | Tensor = momentum
    decay = 1 - lr * group["weight_decay"]
    rate = -lr if group["maximize"] else lr
    if mask is not None:
        exact = any(torch.float64 in (param.dtype, group["momentum_dtype"]) for param in group["params"])
        still = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=mask.device)
        retain, decay, rate = _unless(mask, retain, still + 1), _unless(mask, decay, still + 1), _unless(mask, rate, still)
    return WorkSettings(
        momentum=momentum,
        retain=retain,
        nesterov=group["nesterov"],
        decay=decay,
        rate=rate,
        adjust=partial(lr_factor, group["adjust_lr_fn"]),
        free_grad=group["none_grad"],
        cautious=group["cautious_weight_decay"],
        mask=mask,
    )


def _unless(mask: Tensor, value: float | Tensor, still: Tensor) -> Tensor:
    """``value``, or ``still`` where ``mask`` is true; a number of the mask's device, in the dtype of ``still``."""
    return torch.where(mask, still, value)


def _check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    if grad.shape != param.shape:
        raise GradientError(
            f"{name} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}: call zero_grad() after resizing."
        )
    check_gradient_placement(name, param, grad)
    if grad.layout != torch.strided:
        raise GradientError(
            f"{name} has a sparse gradient ({grad.layout}). Neither Muon nor fused AdamW takes one: "
            "build the embedding with sparse=False, or call param.grad = param.grad.to_dense() before step()."
        )
    if grad.is_complex():
        raise GradientError(f"{name} has a complex gradient ({grad.dtype}). Optimize the real view: torch.view_as_real(param).")


def only_creates_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a first step has nothing to do but to create state: lr 0 everywhere and gradients of zeros."""
    rates = [group["lr"] for group in groups]
    if any((isinstance(lr, Tensor) and not known_to_host(lr)) or lr != 0 for lr in rates):
        return False
    gradients = [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return not any(bool(local_part(grad).count_nonzero()) for grad in gradients)
