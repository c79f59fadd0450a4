"""What the executor works on: the tensors and the options of every part of the plan, for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..agree.step_decision import StepDecision
from ..device import copy_to, known_to_host
from ..execute import StepParam, StepSettings, elements_held
from ..ortho import scheme_for
from ..params.dtensors import held_ranges
from ..params.groups import rounds_stochastically
from ..params.lr import lr_factor
from ..params.option_table import ParamGroup
from ..params.param_record import ParamRecord
from ..plan import PartIndex
from ..state import param_state
from ..torch_compat import zeros_like
from .collect import States


class StepParams:
    """Makes the step parameters of a plan, and fills those of the last step with this step's options and state.

    Between steps they refer to no state, which may be offloaded: a step calls ``release_state`` at its end, and
    ``drop`` if the state is not that of the last step.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Makes the next step rebuild its parameters."""
        self._plan: object = None
        self._cached: list[StepParam] = []  # made for ``_plan``
        # by index, and by the device of those parameters on it
        self._groups: dict[tuple[int, torch.device], ParamGroup] = {}

    def serve(self, decision: StepDecision, lacking_state: Sequence[int]) -> bool:
        """Whether those of the last step serve again, so that no state has to be created."""
        return self._plan is decision.plan and decision.zeros.isdisjoint(lacking_state)

    def make(
        self,
        records: Sequence[ParamRecord],
        decision: StepDecision,
        states: States,
        keeps: Callable[[PartIndex], bool],
        skip_mask: Tensor | None,
    ) -> list[StepParam]:
        """One entry per part of the agreed plan, in its order, with state that is created where it is missing.

        ``keeps`` tells whether this rank keeps the momentum of a part. If ``skip_mask``, a boolean on a device, is
        true, nothing may change, and the gradients are already zeros.
        """
        planned = [(records[k], number) for k, number in decision.planned_parts]
        self._groups = {(record.group_index, record.param.device): record.param_group for record, _ in planned}
        kept, settings = [keeps(PartIndex(part)) for part in range(len(planned))], self._settings(skip_mask)
        step_params = []
        for part, (record, number) in enumerate(planned):
            param, group, idle = record.param, record.param_group, part in decision.idle
            # An idle parameter gets no state. The executor still needs the shape of its rule state, so if there is
            # none, one is made in a copy of the entry that is thrown away.
            entry = dict(states.get(param, {})) if idle else states[param]
            if kept[part]:
                param_state.start(entry, record.name, param, group)
            else:  # another rank keeps the momentum (DistMuon), but all ranks count the same steps
                param_state.rounding_counter(entry, record.name, param, group)
            step_param = _new_step_param(record, number, settings[record.group_index, param.device])
            if decision.planned_parts[part][0] in decision.zeros:
                step_param.zeros = zeros_like(param)
            _refer_to(entry, step_param, kept=kept[part])
            if idle:
                step_param.momentum_buffer = step_param.counter = None
            step_params.append(step_param)
        self._plan, self._cached = (decision.plan, step_params) if all(kept) else (None, [])
        return step_params

    def current(self, decision: StepDecision, states: States, skip_mask: Tensor | None) -> list[StepParam]:
        """Those of the last step, with the options and the state of this one."""
        settings = self._settings(skip_mask)
        for k, step_param in enumerate(self._cached):
            step_param.settings = settings[step_param.group_index, step_param.param.device]
            if decision.zeros:
                step_param.zeros = (
                    zeros_like(step_param.param) if decision.planned_parts[k][0] in decision.zeros else None
                )
            if k not in decision.idle:
                _refer_to(states[step_param.param], step_param)
        return self._cached

    def release_state(self) -> None:
        """Drops references to tensors of the state after a step: they would keep it alive while it is offloaded."""
        for step_param in self._cached:
            step_param.momentum_buffer = step_param.zeros = step_param.counter = None
            step_param.rule_state = ()

    def _settings(self, skip_mask: Tensor | None) -> dict[tuple[int, torch.device], StepSettings]:
        return {key: _settings_of(group, skip_mask, key[1]) for key, group in self._groups.items()}


def _new_step_param(record: ParamRecord, number: int, settings: StepSettings) -> StepParam:
    """The step parameter of a part, without state."""
    assert record.matrix_sets is not None
    assert record.scheme is not None
    matrix_set, param = record.matrix_sets[number], record.param
    rounds = rounds_stochastically(param, record.param_group)
    compute_dtype = record.compute_dtype_of(matrix_set)
    return StepParam(
        param=param,
        momentum_buffer=None,
        matrix_set=matrix_set,
        scheme=scheme_for(record.scheme, matrix_set.rows, matrix_set.cols, compute_dtype, record.work_device),
        compute_dtype=compute_dtype,
        settings=settings,
        work_device=record.work_device,
        comm_dtype=record.comm_dtype,
        group_index=record.group_index,
        rules=record.rules,
        elements=elements_held(param.shape, held_ranges(param), param.device).hashed() if rounds else None,
    )


def _refer_to(entry: Mapping[str, Any], step_param: StepParam, *, kept: bool = True) -> None:
    """Gives a step parameter the state in its ``entry``: all of it, or if this rank does not keep it, the counter
    alone.
    """
    if kept:
        step_param.momentum_buffer = entry[param_state.MOMENTUM]
        step_param.rule_state = [entry[key] for key in step_param.memories] if step_param.rules else ()
    step_param.counter = None if step_param.elements is None else entry[param_state.COUNTER]


def _settings_of(group: ParamGroup, skip_mask: Tensor | None, device: torch.device) -> StepSettings:
    """The options for those parameters of a param group that are on ``device``."""
    lr = group["lr"]
    # An lr on a device stays a tensor: reading it would wait for the device. For weights in host memory the host has to
    # read it.
    on_host = device.type == "cpu"
    lr = float(lr) if not isinstance(lr, Tensor) or known_to_host(lr) or on_host else lr.reshape(())
    skip_mask = None if skip_mask is None else copy_to(skip_mask, device)
    momentum = float(group["momentum"])
    retain: float | Tensor = momentum
    decay = 1 - lr * float(group["weight_decay"])
    rate = -lr if group["maximize"] else lr
    if skip_mask is not None:  # a skipped step keeps momentum and weights: retain = decay = 1 and rate = 0
        exact = any(torch.float64 in (param.dtype, group["momentum_dtype"]) for param in group["params"])
        zero = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=skip_mask.device)
        retain, decay = (torch.where(skip_mask, zero + 1, value) for value in (momentum, decay))
        rate = torch.where(skip_mask, zero, rate)
    return StepSettings(
        momentum=momentum,
        retain=retain,
        nesterov=group["nesterov"],
        decay=decay,
        rate=rate,
        adjust=partial(lr_factor, group["adjust_lr_fn"]),
        free_grad=group["none_grad"],
        cautious=group["cautious_weight_decay"],
        skip_mask=skip_mask,
    )
