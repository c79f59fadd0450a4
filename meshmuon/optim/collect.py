"""What a step works on: all parameters, what the planner must know about them, and what the executor gets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..agree.state_presence import has_all_state
from ..agree.step_decision import PlanInput, StepDecision
from ..device import known_to_host
from ..errors import ConfigError, GradientError
from ..execute import StepParam, StepSettings, elements_held
from ..ortho import scheme_for
from ..params.dtensors import check_cuts, check_gradient_placement, held_ranges
from ..params.groups import (
    check_options,
    check_overflow,
    check_rounding,
    largest_number,
)
from ..params.named_params import NamedParam
from ..params.option_table import ParamGroup
from ..state import param_state
from ..torch_compat import local_part, zeros_like
from .group_snapshot import GroupSnapshot, metadata_of
from .plan_inputs import GroupRecipe, facts_of, plan_input_of, recipe_of
from .step_settings import settings_of

_PARAMS_AT_A_TIME = 32  # of which the state is looked up before other ranks are given a moment; that takes some 20 µs


class ParamRecord(NamedTuple):
    """A parameter as it was in the last step: what its plan input was made from, and the plan input itself."""

    named: NamedParam
    recipe: GroupRecipe
    metadata: Any  # as ``metadata_of`` gives it
    plan_input: PlanInput

    def still_holds(self, named: NamedParam, recipe: GroupRecipe) -> bool:
        """Whether nothing has changed since, so that the plan input can be reused."""
        return (
            self.named.param is named.param
            and self.named.param_group is named.param_group
            and self.recipe is recipe
            and self.named.group_index == named.group_index
            and self.named.name == named.name
            and self.metadata == metadata_of(named.param)
        )


class Collector:
    """Finds out what a step will work on, and reuses everything that has not changed since the last step.

    A step calls ``plan_inputs``, ``check`` and, once the ranks have agreed, ``step_params``, and at its end ``release_state``. It
    also calls ``invalidate_state`` if the state is about to be offloaded. ``comm_dtype`` tells in which dtype a parameter
    travels, or None for the default.
    """

    def __init__(self, comm_dtype: Callable[[Tensor], torch.dtype | None]) -> None:
        self._comm_dtype = comm_dtype
        self._snapshots: list[GroupSnapshot] = []  # one per param group
        self._records: list[ParamRecord] = []
        self._recipes: list[GroupRecipe] = []
        self._params: list[NamedParam] = []
        self._plan_inputs: tuple[PlanInput, ...] = ()
        # For ``check_overflow``: group index, outputs and inputs of a matrix (None for AdamW), largest number of its dtype.
        self._shapes: list[tuple[int, tuple[int, int] | None, float]] = []
        self._cached_step_params: tuple[object, list[StepParam]] = (None, [])  # a plan, and what was made for it
        # The param groups of these step parameters, by group index and by the device of those that are on it.
        self._groups: dict[tuple[int, torch.device], ParamGroup] = {}
        self.has_grad: tuple[bool, ...] = ()  # which parameters have a gradient; the same object for as long as they are equal
        self._indices_by_group: dict[int, list[int]] = {}  # group index → indices of its parameters
        self._state_checked: list[set[int]] = []  # group index → those of them whose state was checked since it changed
        self._lacking_state: list[list[int]] = []  # group index → those of them that lack state, or a part of it
        self._checked_has_grad: tuple[bool, ...] = ()  # ``has_grad`` at the last check
        self.without_state: tuple[int, ...] = ()  # parameters that lacked state and had a gradient at the last check

    def plan_inputs(self, groups: Sequence[ParamGroup]) -> tuple[list[NamedParam], tuple[PlanInput, ...], Exception | None]:
        """All parameters, what the planner must know about them, and the first error that keeps a step from being planned.

        A param group with invalid options still yields plan inputs, from metadata alone: this rank needs them to find the other
        ranks, which must learn of its failure.
        """
        failure = self._bring_up_to_date(groups)
        has_grad = tuple([named.param.grad is not None for named in self._params])
        if has_grad != self.has_grad:
            self.has_grad = has_grad
        try:
            return self._params, self._plan_inputs, failure
        finally:
            del failure  # its traceback refers to this frame, and so to the caller

    def _bring_up_to_date(self, groups: Sequence[ParamGroup]) -> Exception | None:
        """Updates what is kept of changed param groups. Returns the first error that keeps a step from being planned."""
        failure: Exception | None = None
        recipes: list[GroupRecipe] = []
        for index, group in enumerate(groups):
            try:
                check_options(group, index)
                recipe = recipe_of(group)
            except Exception as error:
                failure = failure or error
                recipe = GroupRecipe()
            if index < len(self._recipes) and self._recipes[index] == recipe:
                recipe = self._recipes[index]  # the same object: snapshots compare recipes by identity
            recipes.append(recipe)
        comparable = failure is None and len(groups) == len(self._snapshots)
        if comparable and all(
            snapshot.still_holds(group, recipe) for snapshot, group, recipe in zip(self._snapshots, groups, recipes, strict=True)
        ):
            return None
        self._recipes = recipes
        try:
            return self._inspect_each(groups) or failure
        finally:
            del failure

    def _inspect_each(self, groups: Sequence[ParamGroup]) -> Exception | None:
        """Brings the records up to date, parameter by parameter. Returns the first error that keeps a step from being planned."""
        records: list[ParamRecord] = []
        failure: Exception | None = None
        for index, (group, recipe) in enumerate(zip(groups, self._recipes, strict=True)):
            if len(group["param_names"]) != len(group["params"]):
                failure = failure or ConfigError(
                    f"group {index} has {len(group['params'])} params but {len(group['param_names'])} names: give each parameter "
                    "its own name. If a wrapper has replaced the parameters by flat buffers (DeepSpeed ZeRO, FSDP1), "
                    "shard the model with FSDP2 instead (torch.distributed.fsdp.fully_shard)."
                )
            for name, param in zip(group["param_names"], group["params"], strict=False):
                named = NamedParam(index, group, name, param)
                record = self._records[len(records)] if len(records) < len(self._records) else None
                if record is not None and record.still_holds(named, recipe):
                    records.append(record)
                    continue
                try:
                    check_cuts(name, param)
                    check_rounding(name, param, recipe.rounding)
                    records.append(self._new_record(recipe, named))
                except Exception as error:
                    failure = failure or error
                    records.append(self._new_record(GroupRecipe(), named))
        if len(records) != len(self._records) or any(map(operator.is_not, records, self._records)):
            self._remember(records)
        self._snapshots = list(map(GroupSnapshot, groups, self._recipes)) if failure is None else []
        self._state_checked, self._lacking_state = [set() for _ in groups], [[] for _ in groups]
        try:
            return failure
        finally:
            del failure

    def _new_record(self, recipe: GroupRecipe, named: NamedParam) -> ParamRecord:
        facts = facts_of(named, has_matrices=recipe.matrix_options is not None)
        plan_input = plan_input_of(recipe, facts, comm_dtype=self._comm_dtype(named.param))
        return ParamRecord(named, recipe, metadata_of(named.param), plan_input)

    def _remember(self, records: list[ParamRecord]) -> None:
        self._records = records
        self._params = [record.named for record in records]
        self._plan_inputs = tuple(record.plan_input for record in records)
        self._indices_by_group = {}
        for k, named in enumerate(self._params):
            self._indices_by_group.setdefault(named.group_index, []).append(k)
        self._shapes = list(
            dict.fromkeys(
                (plan_input.group_index, shape, largest_number(plan_input.update_dtype))
                for plan_input in self._plan_inputs
                for shape in ([None] if plan_input.matrix_sets is None else [part.lr_shape for part in plan_input.matrix_sets])
            )
        )

    def check(self, groups: Sequence[ParamGroup], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Refuses options, gradients and state that a step on the last plan inputs cannot use. Writes nothing."""
        for index, shape, largest in self._shapes:
            check_overflow(groups[index], f"group {index}", shape, largest)  # calls the user's adjust_lr_fn
        changed = self.has_grad is not self._checked_has_grad  # gradients or state have changed since the last check
        for index, snapshot in enumerate(self._snapshots):
            if not snapshot.same_gradients():
                for k in self._indices_by_group.get(index, ()):
                    if self.has_grad[k]:
                        named = self._params[k]
                        _check_gradient(named.name, named.param, gradient_of(named.param))
                snapshot.accept_gradients()
            if not snapshot.same_state(states):
                changed = True
                self._cached_step_params = (None, [])
                self._state_checked[index] = set()
                indices = self._indices_by_group.get(index, ())
                self._lacking_state[index] = [k for k in indices if not self._has_all_state(k, states)]
                self._check_state(index, states)
                snapshot.accept_state(states)
            elif changed:
                self._check_state(index, states)
        if changed:
            self.without_state = tuple(k for lacking in self._lacking_state for k in lacking if self.has_grad[k])
        self._checked_has_grad = self.has_grad
        if self.without_state:
            self._cached_step_params = (None, [])  # making step parameters creates their state

    def _has_all_state(self, k: int, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        named, recipe, _, _ = self._records[k]
        return has_all_state(states.get(named.param), named, recipe.rule)

    def _check_state(self, group_index: int, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Refuses state that does not fit, of parameters that have a gradient; each is checked once after its state changed."""
        checked = self._state_checked[group_index]
        for k in self._indices_by_group.get(group_index, ()):
            if self.has_grad[k] and k not in checked:
                named = self._params[k]
                if (entry := states.get(named.param)) is not None:
                    param_state.check_current(named.name, named.param, entry, named.param_group)
                checked.add(k)

    def invalidate_state(self) -> None:
        """Makes the next step check the state again, and drops references to it: it is about to be offloaded."""
        for snapshot in self._snapshots:
            snapshot.invalidate_state()
        self._cached_step_params = (None, [])

    def step_params(
        self,
        plan_inputs: Sequence[PlanInput],
        decision: StepDecision,
        states: Mapping[Tensor, dict[str, Any]],
        *,
        keeps: Callable[[int], bool] = lambda param_index: True,
        skip_mask: Tensor | None = None,
    ) -> list[StepParam]:
        """What the executor works on: one entry per parameter of the agreed plan, in the order of the plan.

        ``keeps`` tells whether this rank keeps the momentum of a parameter of the plan. If ``skip_mask``, a boolean on a device,
        is true, nothing may change, and the gradients are already zeros.
        """
        if self._has_step_params(decision):
            step_params = self._current_step_params(decision, states, skip_mask, lambda: None)
            if decision.zeros:
                for step_param, (k, _) in zip(step_params, decision.planned_parts, strict=True):
                    step_param.zeros = zeros_like(step_param.param) if k in decision.zeros else None
            return step_params
        planned = (self._records[k].named for k, _ in decision.planned_parts)
        self._groups = {(named.group_index, named.param.device): named.param_group for named in planned}
        settings = self._settings(skip_mask)
        step_params = [
            self._new_step_param(plan_inputs, decision, states, param_index, keeps(param_index), settings)
            for param_index in range(len(decision.planned_parts))
        ]
        complete = all(map(keeps, range(len(step_params))))
        self._cached_step_params = (decision.plan, step_params) if complete else (None, [])
        return step_params

    def ready_step_params(
        self, decision: StepDecision, states: Mapping[Tensor, dict[str, Any]], meanwhile: Callable[[], None]
    ) -> list[StepParam] | None:
        """``step_params`` of a decision that is only expected, if that takes no more than looking up state; else None.

        It calls ``meanwhile`` now and then.
        """
        if decision.zeros or not self._has_step_params(decision):
            return None
        return self._current_step_params(decision, states, None, meanwhile)

    def _has_step_params(self, decision: StepDecision) -> bool:
        """Whether those of the last step serve again; ``check`` drops them when the state has changed."""
        cached_for, _ = self._cached_step_params
        return cached_for is decision.plan and not any(decision.zeros.intersection(lacking) for lacking in self._lacking_state)

    def _current_step_params(
        self,
        decision: StepDecision,
        states: Mapping[Tensor, dict[str, Any]],
        skip_mask: Tensor | None,
        meanwhile: Callable[[], None],
    ) -> list[StepParam]:
        """Those of the last step, with the options and the state of this one."""
        _, step_params = self._cached_step_params
        settings = self._settings(skip_mask)
        for k, step_param in enumerate(step_params):
            if k % _PARAMS_AT_A_TIME == 0:
                meanwhile()
            step_param.settings = settings[step_param.group_index, step_param.param.device]
            if k not in decision.idle:
                entry = states[step_param.param]
                step_param.momentum_buffer = entry[param_state.MOMENTUM]
                remembers = step_param.rule is not None and step_param.rule.remembers()
                step_param.rule_state = entry.get(param_state.RULE_STATE) if remembers else None
                step_param.counter = None if step_param.elements is None else entry[param_state.COUNTER]
        return step_params

    def _settings(self, skip_mask: Tensor | None) -> dict[tuple[int, torch.device], StepSettings]:
        return {key: settings_of(group, skip_mask, key[1]) for key, group in self._groups.items()}

    def release_state(self) -> None:
        """Drops references to tensors of the state after a step: they would keep it alive while it is offloaded."""
        for step_param in self._cached_step_params[1]:
            step_param.momentum_buffer = step_param.rule_state = step_param.zeros = step_param.counter = None

    def _new_step_param(
        self,
        plan_inputs: Sequence[PlanInput],
        decision: StepDecision,
        states: Mapping[Tensor, dict[str, Any]],
        param_index: int,
        kept: bool,
        settings: Mapping[tuple[int, torch.device], StepSettings],
    ) -> StepParam:
        k, part = decision.planned_parts[param_index]
        named, plan_input = self._records[k].named, plan_inputs[k]
        param, dtype = named.param, named.param_group["momentum_dtype"]
        assert plan_input.matrix_sets is not None
        assert plan_input.scheme is not None
        matrix_set = plan_input.matrix_sets[part]
        remembers = kept and plan_input.rule is not None and plan_input.rule.remembers()
        idle = param_index in decision.idle
        # An idle parameter gets no state. The executor still needs the shape of its rule state, so if there is none, one is made
        # in a copy of the entry that is thrown away.
        entry = dict(states.get(param, {})) if idle else states[param]
        step_param = StepParam(
            param=param,
            momentum_buffer=param_state.momentum_buffer(entry, param, dtype) if kept and not idle else None,
            matrix_set=matrix_set,
            scheme=scheme_for(plan_input.scheme, matrix_set.rows, matrix_set.cols, plan_input.compute_dtype),
            compute_dtype=plan_input.compute_dtype,
            settings=settings[named.group_index, param.device],
            work_device=plan_input.work_device,
            comm_dtype=plan_input.comm_dtype,
            group_index=named.group_index,
            zeros=zeros_like(param) if k in decision.zeros else None,
            rule=plan_input.rule,
            rule_state=param_state.rule_state(entry, param, matrix_set) if remembers else None,
        )
        # Also where another rank keeps the momentum (DistMuon): all ranks count the same steps.
        counter = param_state.rounding_counter(entry, named.name, param, named.param_group)
        if counter is not None:
            step_param.counter = None if idle else counter
            step_param.elements = elements_held(param.shape, held_ranges(param), param.device).hashed()
        return step_param


def gradient_of(param: Tensor) -> Tensor:
    """The parameter's gradient, or zeros where only other ranks have one."""
    return zeros_like(param) if param.grad is None else param.grad


def _check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    if grad.shape != param.shape:
        raise GradientError(
            f"{name} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}: call zero_grad() after resizing."
        )
    check_gradient_placement(name, param, grad)
    if grad.layout != torch.strided:
        raise GradientError(
            f"{name} has a sparse gradient ({grad.layout}). Neither Muon nor fused AdamW supports one: "
            "build the embedding with sparse=False, or call param.grad = param.grad.to_dense() before step()."
        )
    if grad.is_complex():
        raise GradientError(f"{name} has a complex gradient ({grad.dtype}). Optimize the real view: torch.view_as_real(param).")


def only_creates_state(groups: Sequence[ParamGroup]) -> bool:
    """Whether a first step has nothing to do but create state: every lr is 0, and so is every gradient."""
    rates = [group["lr"] for group in groups]
    if any((isinstance(lr, Tensor) and not known_to_host(lr)) or lr != 0 for lr in rates):
        return False
    gradients = [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return not any(bool(local_part(grad).count_nonzero()) for grad in gradients)
