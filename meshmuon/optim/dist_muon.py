"""DistMuon: data parallel training without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..agree.differences import Note, raise_failures
from ..errors import ConfigError, KeptError, StateError, UnsupportedError
from ..execute import RULE_STATE, StepParam, window_of
from ..matrices import MatrixSet
from ..params.checks import check_replica_group
from ..params.dtensors import as_dtensor
from ..params.param_record import ParamRecord, named_params
from ..plan import PartIndex, Plan
from ..state.param_state import MOMENTUM
from ..transport import all_gather_objects, averaged, broadcast, turn_of
from .collect import gradient_of
from .muon import Muon
from .muon_step import StepContext

_NO_OPTIONS = ("replicas", "replica_group", "use_distributed_muon", "comm_dtype")


class DistMuon(Muon):
    """Muon for replicated weights whose gradients are not averaged yet: use it without DDP or FSDP.

    Every rank runs forward and backward on its own part of the batch and calls ``step()``. The optimizer sends each
    gradient to the owner of its matrix. The owner averages the gradients in the order of the ranks, keeps the momentum,
    steps, and sends the new weights to all ranks. Each matrix is orthogonalised once. Owners are chosen for all shapes
    together, and nothing is padded. The gradients of AdamW's groups are averaged by one reduction each, and every rank
    steps them.

    The ranks must start from the same weights. Without a process group, or with one rank, it is ``Muon`` with
    ``adjust_lr_fn="original"`` and no weight decay.

    Only owners have momentum, so a rank alone cannot save it: call ``consolidate()`` on all ranks before
    ``state_dict()``. The resulting checkpoint does not depend on the number of ranks, and loads on any number of ranks.

    Args:
        params: a model, matrices, (name, matrix) pairs, or param groups as for ``Muon``.
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
        params: nn.Module | Iterable[Any],
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
                raise ConfigError(
                    f"{name} has no meaning for DistMuon, which always divides the work over group=: leave it out."
                )
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
        if (error := _first_sharded(named_params(self._groups[-1:]))) is not None:
            self.param_groups.pop()
            raise error

    def state_dict(self) -> dict[str, Any]:
        """The whole state. Refuses while only other ranks have some of the momentum: call ``consolidate()`` first."""
        if not self._complete:
            raise StateError(
                "DistMuon keeps momentum on the owners of the matrices only, so that this state_dict would be "
                "incomplete: call optimizer.consolidate() on every rank before state_dict(), or before copying the "
                "optimizer."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a consolidated ``state_dict``, on every rank. One that does not fit is refused before anything is
        overwritten.
        """
        super().load_state_dict(state_dict, strict)
        self._complete = True

    @torch.no_grad()
    def consolidate(self) -> None:
        """Gives every rank all momentum, so that ``state_dict()`` is complete. Every rank of the group must call it."""
        plan, group = self._dividing, self.replica_group
        if plan is None or not isinstance(group, dist.ProcessGroup):
            return
        self._planner.check_connected()
        failure = KeptError()
        with self._offload.resident(self.state, failure):
            failure.raise_it()
            with turn_of(group):
                self._consolidate(plan, group)

    def _consolidate(self, plan: Plan, group: dist.ProcessGroup) -> None:
        """Broadcasts the state of each matrix from its owner. All ranks take the matrices in the order of the plan."""
        kinds_by_rank = all_gather_objects([_kinds(self.state[param]) for param, _ in self._stepped], group)
        parts = [
            (task, key, kind) for task in plan.tasks for key, kind in kinds_by_rank[task.owner][task.param].items()
        ]
        made, failure = dict[tuple[Tensor, str], Tensor](), KeptError()
        with failure:  # the other ranks would wait in the first broadcast
            for task, key, kind in parts:
                param, (shape, dtype) = self._stepped[task.param][0], kind
                # This rank has none yet, or one whose dtype is not that of the owner.
                if _kinds(self.state[param]).get(key) != kind and (param, key) not in made:
                    made[param, key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=param.device)
        failures = all_gather_objects(failure.text, group)
        raise_failures({rank: Note(text) for rank, text in failures.items()}, failure.take())
        for (param, key), zeros in made.items():
            self.state[param][key] = zeros
        for task, key, _ in parts:
            param, matrix_set = self._stepped[task.param]
            state = self.state[param][key]
            window = matrix_set.window if key == MOMENTUM else matrix_set.rule_state_window(state.shape)
            part = state[task.matrix] if matrix_set.stack_dims else state
            broadcast(part if window is None else window_of(part, window, 0), task.owner, group)
        self._complete = True

    def __getstate__(self) -> dict[str, Any]:
        divided = self._divided or self._replica_group is not None
        return {**super().__getstate__(), "_divided": divided, "_complete": self._complete}

    def _reset(self) -> None:
        super()._reset()
        # the plan whose owners have the momentum, even if its buffers could not be made
        self._dividing: Plan | None = None
        # of each parameter of that plan, the tensor and its matrix set
        self._stepped: list[tuple[Tensor, MatrixSet]] = []
        self._kept: frozenset[Tensor] = frozenset()  # the parameters of which this rank owns a matrix and has state

    @property
    def _averages_gradients(self) -> bool:
        return self._replica_group is not None

    def _keeps(self, record: ParamRecord) -> bool:
        return self._complete or not record.param_group["use_muon"] or record.param in self._kept

    def _misuse(self, params: Sequence[ParamRecord]) -> Exception | None:
        if self._replica_group is not None:
            if not self._complete and not self._stepped:
                return StateError(
                    "momentum is divided over the owners of an earlier process group, and this one may have others: "
                    "call optimizer.consolidate() on every rank before setting replica_group or copying the "
                    "optimizer, or load a state_dict."
                )
            return _first_sharded((record.name, record.param) for record in params)
        if self._divided:
            return UnsupportedError(
                "this copy of a DistMuon has no process group, and its gradients would not be averaged: set "
                "optimizer.replica_group, for example to torch.distributed.group.WORLD."
            )
        return None

    def _params_of(self, step: StepContext, keeps: Callable[[PartIndex], bool] = lambda part: True) -> list[StepParam]:
        if self.replica_group is None:
            return super()._params_of(step)
        decision = step.decision
        if decision.plan is not self._executor.plan:  # it has other owners: gives every rank all momentum
            self.consolidate()
            self._dividing = decision.plan
            planned = ((step.records[k], part) for k, part in decision.planned_parts)
            self._stepped = [(record.param, (record.matrix_sets or ())[part]) for record, part in planned]
        owned = {task.param for task in decision.plan.tasks if task.owner == decision.rank}
        self._divide_state(step, owned)
        return super()._params_of(step, owned.__contains__)

    def _divide_state(self, step: StepContext, owned: set[PartIndex]) -> None:
        """Deletes the state of stepped parameters without a matrix that this rank owns, and notes which states only it
        keeps.

        ``owned`` are the parts that it owns. Those that are idle and have no state yet are not noted.
        """
        indices, idle = [k for k, _ in step.decision.planned_parts], step.decision.idle
        params = {part: step.records[indices[part]].param for part in owned}
        if self._complete:  # this step divides momentum over the owners again
            self._kept = frozenset(param for param in params.values() if MOMENTUM in self.state.get(param, {}))
        self._kept |= {param for part, param in params.items() if part not in idle}
        stepped = {k for part, k in enumerate(indices) if part not in idle}
        for k in stepped - {indices[part] for part in owned}:
            state = self.state[step.records[k].param]
            for key in list(_kinds(state)):
                del state[key]
        self._complete = self._complete and not stepped

    def _adamw_gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        gradients = [gradient_of(param) for param in params]
        group = self.replica_group
        return averaged(gradients, group) if isinstance(group, dist.ProcessGroup) else gradients


def _first_sharded(params: Iterable[tuple[str, Tensor]]) -> UnsupportedError | None:
    """The error for the first of (name, parameter) pairs that is no plain weight."""
    name = next((name for name, param in params if as_dtensor(param) is not None), None)
    text = f"{name} is a DTensor. DistMuon is for plain replicated weights: use Muon instead."
    return None if name is None else UnsupportedError(text)


def _kinds(state: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype, as ``"float32"``, of that part of a parameter's state which only owners have."""
    tensors = {key: value for key, value in state.items() if key == MOMENTUM or key.startswith(RULE_STATE)}
    return {key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for key, tensor in tensors.items()}


def _as_groups(params: nn.Module | Iterable[Any]) -> nn.Module | Iterable[Any]:
    """Bare matrices as one param group; a model, param groups, and what can be none of these, as they are."""
    if isinstance(params, (nn.Module, Tensor, Mapping)) or not isinstance(params, Iterable):
        return params
    entries = list(params)
    return entries if not entries or isinstance(entries[0], dict) else [{"params": entries, "use_muon": True}]
