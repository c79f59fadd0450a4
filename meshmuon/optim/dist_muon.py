"""DistMuon: data parallel training without a wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agree.local_planner import PlanSettings
from ..agree.planner import Planner
from ..agree.step_decision import StepDecision
from ..errors import ConfigError, StateError, UnsupportedError
from ..execute import DataParallelExecutor, StepParam, window_of
from ..matrices import MatrixSet
from ..params.checks import check_replica_group
from ..params.dtensors import as_dtensor
from ..params.named_params import NamedParam, named_params
from ..plan import Plan
from ..state.param_state import MOMENTUM, RULE_STATE
from ..transport import all_gather_objects, averaged, broadcast
from .collect import gradient_of
from .muon import Muon
from .muon_step import StepContext

_NO_OPTIONS = ("replicas", "replica_group", "reference_path", "use_distributed_muon", "comm_dtype")


class DistMuon(Muon):
    """Muon for replicated weights whose gradients are not averaged yet: use it without DDP or FSDP.

    Every rank runs forward and backward on its own part of the batch and calls ``step()``. The optimizer sends each gradient to
    the owner of its matrix. The owner averages the gradients in the order of the ranks, keeps the momentum, steps, and sends the
    new weights to all ranks. Each matrix is orthogonalised once. Owners are chosen for all shapes together, and nothing is
    padded. The gradients of AdamW's groups are averaged by one reduction each, and every rank steps them.

    The ranks must start from the same weights. Without a process group, or with one rank, it is ``Muon`` with
    ``adjust_lr_fn="original"`` and no weight decay.

    Only owners have momentum, so a rank alone cannot save it: call ``consolidate()`` on all ranks before ``state_dict()``. The
    resulting checkpoint does not depend on the number of ranks, and loads on any number of ranks.

    Args:
        params: matrices, (name, matrix) pairs, or param groups as for ``Muon``.
        lr, momentum, nesterov, ns_steps, weight_decay, adjust_lr_fn: as for ``Muon``; the signature has their defaults.
        group: process group of the ranks that hold replicas; by default all ranks.
        options: further options of ``Muon``.

    Example::

        optimizer = DistMuon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    """

    _divided = False  # whether a copy must be given a process group before it steps
    _complete = True  # whether this rank has all momentum, and not only that of the matrices it owns

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        *,
        weight_decay: float = 0.0,
        adjust_lr_fn: Any = "original",
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        for name in _NO_OPTIONS:
            if name in options:
                raise ConfigError(f"{name} has no meaning for DistMuon, which always divides the work over group=: leave it out.")
        check_replica_group(group, "group")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        alone = group is None or dist.get_world_size(group) == 1
        super().__init__(
            _as_groups(params),
            lr,
            momentum,
            nesterov,
            ns_steps,
            weight_decay,
            adjust_lr_fn=adjust_lr_fn,
            replica_group=None if alone else group,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of plain weights. The next step plans with it."""
        super().add_param_group(param_group)
        try:
            _check_plain(named_params(self._groups[-1:]))
        except UnsupportedError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The whole state. Refuses while only other ranks have some of the momentum: call ``consolidate()`` first."""
        if not self._complete:
            raise StateError(
                "DistMuon keeps momentum on the owners of the matrices only, so that this state_dict would be incomplete: call "
                "optimizer.consolidate() on every rank before state_dict(), or before copying the optimizer."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a consolidated ``state_dict``, on every rank. One that does not fit is refused before anything is overwritten."""
        super().load_state_dict(state_dict)
        self._complete = True

    @torch.no_grad()
    def consolidate(self) -> None:
        """Gives every rank all momentum, so that ``state_dict()`` is complete. Every rank of the group must call it."""
        plan, group = self._dividing, self.replica_group
        if plan is None or not isinstance(group, dist.ProcessGroup):
            return
        self._planner.check_connected()
        with self._offload.resident(self.state) as offload_error:
            if offload_error is not None:
                raise offload_error
            self._consolidate(plan, group)

    def _consolidate(self, plan: Plan, group: dist.ProcessGroup) -> None:
        """Broadcasts the state of each matrix from its owner. All ranks take the matrices in the order of the plan."""
        kinds_by_rank = all_gather_objects([_kinds(self.state[param]) for param, _ in self._stepped], group)
        for task in plan.tasks:
            param, matrix_set = self._stepped[task.param]
            for key, kind in kinds_by_rank[task.owner][task.param].items():
                state = self.state[param]
                if _kinds(state).get(key) != kind:  # this rank has none yet, or one whose dtype is not that of the owner
                    shape, dtype = kind
                    state[key] = torch.zeros(shape, dtype=dtype, device=param.device)
                window = matrix_set.rule_state_window if key == RULE_STATE else matrix_set.window
                part = state[key][task.matrix] if matrix_set.stack_dims else state[key]
                broadcast(part if window is None else window_of(part, window, 0), task.owner, group)
        self._complete = True

    def __getstate__(self) -> dict[str, Any]:
        divided = self._divided or self._replica_group is not None
        return {**super().__getstate__(), "_divided": divided, "_complete": self._complete}

    def _reset(self) -> None:
        super()._reset()
        self._dividing: Plan | None = None  # the plan whose owners have the momentum, even if its buffers could not be made
        self._stepped: list[tuple[Tensor, MatrixSet]] = []  # of each parameter of that plan, the tensor and its matrix set
        self._kept: frozenset[Tensor] = frozenset()  # the parameters of which this rank owns a matrix and has state
        # What _without_state returned last, behind what it was computed from.
        self._own_without_state: tuple[object, object, Sequence[int]] = (None, None, ())
        if self._replica_group is not None:
            self._executor = DataParallelExecutor(self._settings)
            path = f"DistMuon, {self._settings.bits}, metrics={self._metrics}, max_peers={self._plan_options.max_peers}"
            settings = PlanSettings(self._plan_options, self._settings.form, path, self._cost_model)
            self._planner = Planner(settings, self._replica_group, weakref.ref(self), reduced=False)

    @property
    def _averages_gradients(self) -> bool:
        return self._replica_group is not None

    def _without_state(self, params: Sequence[NamedParam]) -> Sequence[int]:
        without_state, kept = super()._without_state(params), self._kept
        if self._complete or not without_state:
            return without_state
        if self._own_without_state[0] is not without_state or self._own_without_state[1] is not kept:
            self._own_without_state = without_state, kept, [k for k in without_state if self._keeps(params[k])]
        return self._own_without_state[2]

    def _keeps(self, named: NamedParam) -> bool:
        return self._complete or not named.param_group["use_muon"] or named.param in self._kept

    def _misuse(self, params: Sequence[NamedParam]) -> Exception | None:
        if self._replica_group is not None:
            if not self._complete and not self._stepped:
                return StateError(
                    "momentum is divided over the owners of an earlier process group, and this one may have others: call "
                    "optimizer.consolidate() on every rank before setting replica_group or copying the optimizer, or load a "
                    "state_dict."
                )
            try:
                _check_plain(params)
            except UnsupportedError as error:
                return error
        elif self._divided:
            return UnsupportedError(
                "this copy of a DistMuon has no process group, and its gradients would not be averaged: set "
                "optimizer.replica_group, for example to torch.distributed.group.WORLD."
            )
        return None

    def _wire_dtype(self) -> Callable[[Tensor], torch.dtype | None]:
        """Gradients and weights travel in their own dtype."""
        return super()._wire_dtype() if self._replica_group is None else lambda param: param.dtype

    def _step_params(self, step: StepContext) -> list[StepParam]:
        if self.replica_group is None:
            return super()._step_params(step)
        decision = step.decision
        if decision.plan is not self._executor.plan:
            self._adopt_owners(step)
        owned = {task.param for task in decision.plan.tasks if task.owner == decision.rank}
        self._note_kept(step, owned)
        self._drop_foreign_state(step, owned)
        return self._collector.step_params(
            self._planner.plan_inputs, decision, self.state, keeps=owned.__contains__, skip_mask=step.skip_mask
        )

    def _ready_params(self, expected: StepDecision, meanwhile: Callable[[], None]) -> list[StepParam] | None:
        return super()._ready_params(expected, meanwhile) if self.replica_group is None else None

    def _adopt_owners(self, step: StepContext) -> None:
        """A new plan has new owners: gives every rank all momentum."""
        self.consolidate()
        plan, plan_inputs = step.decision.plan, self._planner.plan_inputs
        self._dividing = plan
        planned_parts = step.decision.planned_parts
        self._stepped = [(step.params[k].param, (plan_inputs[k].matrix_sets or ())[part]) for k, part in planned_parts]

    def _note_kept(self, step: StepContext, owned: set[int]) -> None:
        """Notes of which parameters this rank alone has state: of its own ones, except those that are idle and have none yet."""
        params = {param_index: step.params[step.decision.planned_parts[param_index][0]].param for param_index in owned}
        if self._complete:  # here momentum is divided anew
            self._kept = frozenset(param for param in params.values() if MOMENTUM in self.state.get(param, {}))
        begun = {param for param_index, param in params.items() if param_index not in step.decision.idle}
        if not begun <= self._kept:
            self._kept |= begun

    def _drop_foreign_state(self, step: StepContext, owned: set[int]) -> None:
        """Deletes the state of all parameters that are stepped but ``owned``, those of which this rank owns a matrix."""
        planned_parts, idle = step.decision.planned_parts, step.decision.idle
        stepped = {k for param_index, (k, _) in enumerate(planned_parts) if param_index not in idle}
        for k in stepped - {planned_parts[param_index][0] for param_index in owned}:
            for key in (MOMENTUM, RULE_STATE):
                self.state[step.params[k].param].pop(key, None)
        self._complete = self._complete and not stepped

    def _adamw_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        gradients = [gradient_of(param) for param in params]
        group = self.replica_group
        return averaged(gradients, group) if isinstance(group, dist.ProcessGroup) else gradients


def _check_plain(params: Sequence[NamedParam]) -> None:
    for named in params:
        if as_dtensor(named.param) is not None:
            raise UnsupportedError(f"{named.name} is a DTensor. DistMuon is for plain replicated weights: use Muon instead.")


def _kinds(state: dict[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of that part of a parameter's state which only owners have."""
    return {key: (state[key].shape, state[key].dtype) for key in (MOMENTUM, RULE_STATE) if key in state}


def _as_groups(params: Iterable[Any]) -> list[Any]:
    """Bare matrices as one param group; param groups as they are."""
    entries = list(params)
    return entries if not entries or isinstance(entries[0], dict) else [{"params": entries, "use_muon": True}]
