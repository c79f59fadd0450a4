"""What the executor works on: the tensors and the options of every part of the plan, for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..agree.step_decision import StepDecision
from ..device import copy_to, known_to_host
from ..execute import StepParam, StepSettings, elements_held
from ..ortho import scheme_for
from ..params.dtensors import held_ranges
from ..params.lr import lr_factor
from ..params.option_table import ParamGroup
from ..params.param_record import ParamRecord
from ..plan import PartIndex
from ..state import param_state
from ..torch_compat import zeros_like
from .collect import States

_PARAMS_AT_A_TIME = 32  # of which the state is looked up before other ranks are given a moment; that takes some 20 µs

Settings = Mapping[tuple[int, torch.device], StepSettings]
"""The options of param groups, by group index and by the device of those parameters that are on it."""


class StepParams:
    """Makes the step parameters of a plan, and fills those of the last step with this step's options and state.

    Between steps they refer to no state, which may be offloaded: a step calls ``release_state`` at its end, and ``drop`` if the
    state is not that of the last step.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Makes the next step begin anew."""
        self._plan: object = None
        self._cached: list[StepParam] = []  # made for ``_plan``
        self._groups: dict[tuple[int, torch.device], ParamGroup] = {}  # of these, as in ``Settings``

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

        ``keeps`` tells whether this rank keeps the momentum of a part. If ``skip_mask``, a boolean on a device, is true, nothing
        may change, and the gradients are already zeros.
        """
        planned = [records[k] for k, _ in decision.planned_parts]
        self._groups = {(record.group_index, record.param.device): record.param_group for record in planned}
        settings = self._settings(skip_mask)
        kept = [keeps(PartIndex(part)) for part in range(len(planned))]
        step_params = [
            _new_step_param(record, decision, states, PartIndex(part), kept[part], settings)
            for part, record in enumerate(planned)
        ]
        self._plan, self._cached = (decision.plan, step_params) if all(kept) else (None, [])
        return step_params

    def current(
        self,
        decision: StepDecision,
        states: States,
        skip_mask: Tensor | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[StepParam]:
        """Those of the last step, with the options and the state of this one. It calls ``meanwhile`` now and then."""
        settings = self._settings(skip_mask)
        for k, step_param in enumerate(self._cached):
            if k % _PARAMS_AT_A_TIME == 0:
                meanwhile()
            step_param.settings = settings[step_param.group_index, step_param.param.device]
            if decision.zeros:
                step_param.zeros = zeros_like(step_param.param) if decision.planned_parts[k][0] in decision.zeros else None
            if k not in decision.idle:
                entry = states[step_param.param]
                step_param.momentum_buffer = entry[param_state.MOMENTUM]
                remembers = step_param.rule is not None and step_param.rule.remembers()
                step_param.rule_state = entry.get(param_state.RULE_STATE) if remembers else None
                step_param.counter = None if step_param.elements is None else entry[param_state.COUNTER]
        return self._cached

    def release_state(self) -> None:
        """Drops references to tensors of the state after a step: they would keep it alive while it is offloaded."""
        for step_param in self._cached:
            step_param.momentum_buffer = step_param.rule_state = step_param.zeros = step_param.counter = None

    def _settings(self, skip_mask: Tensor | None) -> Settings:
        return {key: _settings_of(group, skip_mask, key[1]) for key, group in self._groups.items()}


def _new_step_param(
    record: ParamRecord,
    decision: StepDecision,
    states: States,
    part: PartIndex,
    kept: bool,
    settings: Settings,
) -> StepParam:
    k, number = decision.planned_parts[part]
    param, group = record.param, record.param_group
    assert record.matrix_sets is not None
    assert record.scheme is not None
    matrix_set = record.matrix_sets[number]
    remembers = kept and record.rule is not None and record.rule.remembers()
    idle = part in decision.idle
    # An idle parameter gets no state. The executor still needs the shape of its rule state, so if there is none, one is made
    # in a copy of the entry that is thrown away.
    entry = dict(states.get(param, {})) if idle else states[param]
    step_param = StepParam(
        param=param,
        momentum_buffer=param_state.momentum_buffer(entry, param, group["momentum_dtype"]) if kept and not idle else None,
        matrix_set=matrix_set,
        scheme=scheme_for(record.scheme, matrix_set.rows, matrix_set.cols, record.compute_dtype),
        compute_dtype=record.compute_dtype,
        settings=settings[record.group_index, param.device],
        work_device=record.work_device,
        comm_dtype=record.comm_dtype,
        group_index=record.group_index,
        zeros=zeros_like(param) if k in decision.zeros else None,
        rule=record.rule,
        rule_state=param_state.rule_state(entry, param, matrix_set) if remembers else None,
    )
    # Also where another rank keeps the momentum (DistMuon): all ranks count the same steps.
    counter = param_state.rounding_counter(entry, record.name, param, group)
    if counter is not None:
        step_param.counter = None if idle else counter
        step_param.elements = elements_held(param.shape, held_ranges(param), param.device).hashed()
    return step_param


def _settings_of(group: ParamGroup, skip_mask: Tensor | None, device: torch.device) -> StepSettings:
    """The options for those parameters of a param group that are on ``device``."""
    lr = group["lr"]
    # An lr on a device stays a tensor: reading it would wait for the device. For weights in host memory the host has to read it.
    on_host = device.type == "cpu"
    lr = float(lr) if not isinstance(lr, Tensor) or known_to_host(lr) or on_host else lr.reshape(())
    skip_mask = copy_to(skip_mask, device) if skip_mask is not None and on_host else skip_mask
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
