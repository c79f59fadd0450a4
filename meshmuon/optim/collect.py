"""What a step will work on: the groups' parameters, what a plan must know of them, and the work itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..agree.plan_input import PlanInput
from ..agree.planner import StepDecision
from ..agree.state_presence import is_kept
from ..device import known_to_host
from ..errors import ConfigError, GradientError
from ..execute import StepParam, StepSettings, UpdateRule
from ..matrices import MatrixOptions, find_matrices
from ..ortho import Orthogonalizer, Scheme, default_compute_dtype, resolve_scheme
from ..params.dtensors import as_dtensor, check_cuts, check_gradient_placement
from ..params.groups import check_options, check_reach, largest_number, matrix_options_of
from ..params.lr import lr_factor
from ..params.named_params import NamedParam
from ..params.rules import resolve_rule
from ..state import param_state as state
from ..torch_compat import local_part, spec_of
from .group_snapshot import GroupSnapshot

__all__ = ["Collector", "gradient_of", "numbers_of", "only_creates_state"]

_NUMBERS = {
    True: ("lr", "momentum", "nesterov", "weight_decay", "adjust_lr_fn", "maximize", "momentum_dtype", "cautious_weight_decay"),
    False: ("lr", "weight_decay", "adamw_betas", "betas", "adamw_eps", "eps", "maximize"),
}  # by use_muon
_PLAIN = (Tensor, nn.Parameter)


class GroupRecipe(NamedTuple):
    """What a group says of all its parameters; nothing for AdamW's."""

    scheme: Scheme | Orthogonalizer | None = None
    rule: UpdateRule | None = None
    inside: MatrixOptions | None = None
    compute_dtype: torch.dtype | None = None


class _Place(NamedTuple):
    """Where a DTensor lies: its spec, which torch replaces rather than changes, and the shape of this rank's part."""

    spec: object
    local_shape: torch.Size

    @classmethod
    def of(cls, param: Tensor) -> _Place | None:
        sharded = as_dtensor(param)
        return None if sharded is None else cls(spec_of(sharded), local_part(sharded).shape)

    def holds(self, param: Any) -> bool:
        return self.spec is spec_of(param) and self.local_shape == local_part(param).shape


class ParamRecord(NamedTuple):
    """A parameter as it was in the last step, what was made of it, and all that this depended on."""

    one: NamedParam
    treatment: GroupRecipe
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    place: _Place | None
    demand: PlanInput

    def holds(self, place: int, name: str, param: Tensor, treatment: GroupRecipe) -> bool:
        return (
            self.one.param is param
            and self.treatment is treatment
            and self.one.place == place
            and self.one.name == name
            and self.shape == param.shape
            and self.dtype is param.dtype
            and self.device == param.device
            and (self.place is None if type(param) in _PLAIN else self.place is not None and self.place.holds(param))
            and self.demand.active is (param.grad is not None)
        )


class Collector:
    """Finds out what a step will work on. Nothing is made anew that has not changed since the last step."""

    def __init__(self, comm_dtype: Callable[[Tensor], torch.dtype | None]) -> None:
        self._comm_dtype = comm_dtype
        self._seen: list[GroupSnapshot] = []  # group by group
        self._known: list[ParamRecord] = []
        self._treatments: list[GroupRecipe] = []
        self._parameters: list[NamedParam] = []
        self._demands: tuple[PlanInput, ...] = ()
        # Place of a group, shape of a matrix in it (None for AdamW), largest number that its dtype holds.
        self._shapes: list[tuple[int, tuple[int, int] | None, float]] = []
        self._work: tuple[object, list[StepParam]] = (None, [])
        self._groups: dict[int, dict[str, Any]] = {}  # of that work, by place
        self._lacking: dict[int, tuple[int, ...]] = {}  # by place of a group, its parameters without state
        self.lacking: tuple[int, ...] = ()  # parameters that have a gradient and no state yet, at the last check

    def demands(self, groups: Sequence[dict[str, Any]]) -> tuple[list[NamedParam], tuple[PlanInput, ...], Exception | None]:
        """All parameters, what a plan must know of them, and what keeps it from being known.

        A group that makes no sense still yields demands, from metadata alone: with them this rank finds the others, which must
        hear of its failure.
        """
        failure: Exception | None = None
        treatments: list[GroupRecipe] = []
        for place, group in enumerate(groups):
            try:
                check_options(group, place)
                treatment = _treatment(group)
            except Exception as error:
                failure = failure or error
                treatment = GroupRecipe()
            if place < len(self._treatments) and self._treatments[place] == treatment:
                treatment = self._treatments[place]
            treatments.append(treatment)
        same = failure is None and len(groups) == len(self._seen)
        if same and all(seen.holds(*one) for seen, one in zip(self._seen, zip(groups, treatments, strict=True), strict=True)):
            return self._parameters, self._demands, None
        self._treatments = treatments
        try:
            failure = self._look_closely(groups) or failure
            return self._parameters, self._demands, failure
        finally:
            del failure  # its traceback holds this frame, and with it the caller

    def _look_closely(self, groups: Sequence[dict[str, Any]]) -> Exception | None:
        """Parameter by parameter; what keeps a plan from being made."""
        found: list[ParamRecord] = []
        failure: Exception | None = None
        for place, (group, treatment) in enumerate(zip(groups, self._treatments, strict=True)):
            if len(group["param_names"]) != len(group["params"]):
                failure = failure or ConfigError(
                    f"group {place} has {len(group['params'])} params but {len(group['param_names'])} names: give each parameter "
                    "its own name. If a wrapper has put flat buffers in the place of the parameters (DeepSpeed ZeRO, FSDP1), "
                    "shard the model with FSDP2 instead (torch.distributed.fsdp.fully_shard)."
                )
            for name, param in zip(group["param_names"], group["params"], strict=False):
                known = self._known[len(found)] if len(found) < len(self._known) else None
                if known is not None and known.one.group is group and known.holds(place, name, param, treatment):
                    found.append(known)
                    continue
                try:
                    check_cuts(name, param)
                    found.append(self._new(treatment, NamedParam(place, group, name, param)))
                except Exception as error:
                    failure = failure or error
                    found.append(self._new(GroupRecipe(), NamedParam(place, group, name, param)))
        if len(found) != len(self._known) or any(map(operator.is_not, found, self._known)):
            self._remember(found)
        self._seen = [GroupSnapshot(*one) for one in zip(groups, self._treatments, strict=True)] if failure is None else []
        try:
            return failure
        finally:
            del failure

    def _new(self, treatment: GroupRecipe, one: NamedParam) -> ParamRecord:
        param = one.param
        demand = _demand(treatment, one, comm_dtype=self._comm_dtype(param))
        return ParamRecord(one, treatment, param.shape, param.dtype, param.device, _Place.of(param), demand)

    def _remember(self, found: list[ParamRecord]) -> None:
        self._known = found
        self._parameters = [known.one for known in found]
        self._demands = tuple(known.demand for known in found)
        self._shapes = list(
            dict.fromkeys(
                (one.group, shape, largest_number(one.update_dtype))
                for one in self._demands
                for shape in ([None] if one.matrices is None else [matrices.lr_shape for matrices in one.matrices])
            )
        )

    def check(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Refuses what a step on the last demands cannot work with; writes nothing."""
        for place, shape, largest in self._shapes:
            check_reach(groups[place], f"group {place}", shape, largest)  # a user's function fails here or not at all
        for place, seen in enumerate(self._seen):
            if not seen.same_gradients():
                for known in self._with_gradient(place):
                    _check_gradient(known.one.name, known.one.param, gradient_of(known.one.param))
                seen.accept_gradients()
            if not seen.same_state(states):
                self._work = (None, [])
                for known in self._with_gradient(place):
                    if (entry := states.get(known.one.param)) is not None:
                        state.check_current(known.one.name, known.one.param, entry, known.one.group)
                seen.accept_state(states)
                self._lacking[place] = self._without_state(place, states)
                self.lacking = tuple(k for place in range(len(self._seen)) for k in self._lacking.get(place, ()))

    def _without_state(self, place: int, states: Mapping[Tensor, dict[str, Any]]) -> tuple[int, ...]:
        return tuple(
            k
            for k, known in enumerate(self._known)
            if known.one.place == place
            and known.one.param.grad is not None
            and not is_kept(states.get(known.one.param), known.one.group["use_muon"], known.treatment.rule)
        )

    def _with_gradient(self, place: int) -> Iterator[ParamRecord]:
        return (known for known in self._known if known.one.place == place and known.one.param.grad is not None)

    def forget(self) -> None:
        """Lets go of the state, which is put away."""
        for seen in self._seen:
            seen.forget_state()
        self._work = (None, [])

    def work(
        self,
        demands: Sequence[PlanInput],
        outcome: StepDecision,
        states: Mapping[Tensor, dict[str, Any]],
        *,
        keeps: Callable[[int], bool] = lambda entry: True,
        mask: Tensor | None = None,
    ) -> list[StepParam]:
        """The Muon part of an agreed step, one entry per parameter of its plan.

        Args:
            demands: what the plan was made from.
            outcome: what was agreed.
            states: the optimizer's state.
            keeps: whether this rank keeps the momentum of an entry of the plan.
            mask: on a device, whether nothing may change; gradients are then already silent.
        """
        made_for, work = self._work  # forgotten by ``check`` whenever parameters or state are others
        if made_for is outcome.plan:
            settings = {place: _settings(group, mask) for place, group in self._groups.items()}
            for one in work:
                entry = states[one.param]
                one.settings, one.momentum_buffer, one.memory = settings[one.group], entry[state.MOMENTUM], _memory(one, entry)
            return work
        members = (self._known[k].one for k, _ in outcome.members)
        self._groups = {one.place: one.group for one in members}
        settings = {place: _settings(group, mask) for place, group in self._groups.items()}
        work = [self._one_work(demands, outcome, states, entry, keeps(entry), settings) for entry in range(len(outcome.members))]
        complete = not outcome.zeros and all(one.momentum_buffer is not one.param for one in work)
        self._work = (outcome.plan, work) if complete else (None, [])
        return work

    def let_go(self) -> None:
        """The step is over: state that is now taken away, to another device for example, must not be kept alive from here."""
        for one in self._work[1]:
            one.momentum_buffer, one.memory = one.param, None

    def _one_work(
        self,
        demands: Sequence[PlanInput],
        outcome: StepDecision,
        states: Mapping[Tensor, dict[str, Any]],
        entry: int,
        kept: bool,
        settings: Mapping[int, StepSettings],
    ) -> StepParam:
        k, part = outcome.members[entry]
        one, demand = self._known[k].one, demands[k]
        assert demand.matrices is not None
        assert demand.scheme is not None
        matrices = demand.matrices[part]
        remembers = kept and demand.rule is not None and demand.rule.remembers()
        dtype = one.group["momentum_dtype"]
        return StepParam(
            param=one.param,
            momentum_buffer=state.momentum_buffer(states[one.param], one.param, dtype) if kept else one.param,
            matrices=matrices,
            scheme=demand.scheme,
            compute_dtype=demand.compute_dtype,
            settings=settings[one.place],
            comm_dtype=demand.comm_dtype,
            group=one.place,
            zeros=torch.zeros_like(one.param) if k in outcome.zeros else None,
            rule=demand.rule,
            memory=state.rule_memory(states[one.param], one.param, matrices) if remembers else None,
        )


def _memory(work: StepParam, entry: Mapping[str, Any]) -> Tensor | None:
    return entry.get(state.MEMORY) if work.rule is not None and work.rule.remembers() else None


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each group steps with beside the plan; ranks with other numbers would part without an error."""
    return [
        ", ".join(f"{key}={_number_text(group[key])}" for key in _NUMBERS[bool(group["use_muon"])] if key in group)
        for group in groups
    ]


def gradient_of(param: Tensor) -> Tensor:
    """The parameter's gradient, or zeros where only other ranks have one."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def _treatment(group: Mapping[str, Any]) -> GroupRecipe:
    if not group["use_muon"]:
        return GroupRecipe()
    scheme, rule = resolve_scheme(group["scheme"], group["ns_steps"]), resolve_rule(group["rule"])
    return GroupRecipe(scheme, rule, matrix_options_of(group), group["compute_dtype"])


def _demand(treatment: GroupRecipe, one: NamedParam, *, comm_dtype: torch.dtype | None) -> PlanInput:
    scheme, rule, inside, compute_dtype = treatment
    param = one.param
    sharded = as_dtensor(param)
    shape, dtype, device = tuple(param.shape), param.dtype, param.device
    update_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return PlanInput(
        name=one.name,
        group=one.place,
        shape=shape,
        local_shape=shape if sharded is None else tuple(sharded.to_local().shape),
        mesh=None if sharded is None else sharded.device_mesh,
        placements=() if sharded is None else sharded.placements,
        device=device,
        matrices=None if inside is None else find_matrices(one.name, shape, inside),
        scheme=scheme,
        rule=rule,
        compute_dtype=dtype if inside is None else compute_dtype or default_compute_dtype(device, dtype),
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
    if type(value) is not bool and isinstance(value, Real):
        try:
            return repr(float(value))
        except OverflowError:  # no float is as large; the step refuses it
            return str(value)
    return str(getattr(value, "__qualname__", value))  # a function's repr holds an address


def _settings(group: Mapping[str, Any], mask: Tensor | None) -> StepSettings:
    lr = group["lr"]
    # On a device it stays a tensor: reading it would wait for the device.
    lr = float(lr) if not isinstance(lr, Tensor) or known_to_host(lr) else lr.reshape(())
    momentum = float(group["momentum"])
    retain: float | Tensor = momentum
    decay = 1 - lr * float(group["weight_decay"])
    rate = -lr if group["maximize"] else lr
    if mask is not None:
        exact = any(torch.float64 in (param.dtype, group["momentum_dtype"]) for param in group["params"])
        still = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=mask.device)
        retain, decay, rate = _unless(mask, retain, still + 1), _unless(mask, decay, still + 1), _unless(mask, rate, still)
    return StepSettings(
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
