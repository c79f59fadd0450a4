"""The reference path: every rank gathers whole matrices, orthogonalises all of them and keeps its own shard.

A step is planned and checked like any other. The tensors, however, are gathered and sharded by torch alone, without the
layouts and exchanges of the executor that this path verifies. It rounds every matrix as the wire does, also one that
does not travel: it has the bits of any layout that sends, on one device too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..matrices import MatrixSet
from ..ortho import Workspace
from ..plan import Plan
from ..torch_compat import local_part
from ..transport import Exchange, check_round_trip, has_part, own_shard, whole
from .elementwise import apply, fill_with_momentum
from .executor import StepExecutor
from .ortho_batch import BatchMemory, OrthoBatch
from .rounding import Elements
from .shards import ShardView, grouped, store_rule_state
from .step_param import UNOBSERVED, Observer, RunningStep, StepParam
from .views import window_of


class ReferenceExecutor(StepExecutor):
    """The ``StepExecutor`` that runs a step the simple way, and holds nothing between steps but the plan."""

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Refuses what torch cannot gather, and keeps the plan, of which it uses only the names."""
        self.discard()
        for indices in grouped(range(len(step_params)), lambda k: _layout_of(step_params[k].param)):
            if step_params[indices[0]].staged:
                raise UnsupportedError(
                    f"{plan.params[indices[0]].name} is in host memory on a mesh of "
                    f"{step_params[indices[0]].work_device.type} devices (FSDP2's CPUOffloadPolicy), where torch "
                    "cannot gather it for the reference path: step without use_distributed_muon=True, or verify "
                    "without the policy."
                )
            if has_part(step_params[indices[0]].param):
                check_round_trip(plan.params[indices[0]].name, step_params[indices[0]].param)
        kinds = [(one.matrix_set.rows, one.matrix_set.cols, one.scheme, one.compute_dtype) for one in step_params]
        for k, *_ in grouped(range(len(step_params)), kinds.__getitem__):
            self._batch(step_params[k], k, plan.params[k].name).try_out()
        self.plan = plan

    def run(
        self,
        step_params: Sequence[StepParam],
        *,
        idle: AbstractSet[int] = frozenset(),
        during_last_scatter: Callable[[], None],
        observer: Observer = UNOBSERVED,
    ) -> Exception | None:
        """One step, parameter by parameter. Unlike ``Executor`` it stops at the first error."""
        step = RunningStep(step_params, idle, observer)
        active = [k for k in range(len(step_params)) if k not in idle]
        for parts in grouped(active, lambda k: step_params[k].param):
            self._step(step, parts)
            step.free_gradients(parts[:1])
        during_last_scatter()
        self.checked = step.checked
        return None

    def _step(self, step: RunningStep, parts: Sequence[int]) -> None:
        """Steps one parameter; ``parts`` are the indices of its parts in ``step.params``. If it fails, nothing has
        changed.
        """
        first, observer = step.params[parts[0]], step.observer
        if not has_part(first.param):
            return
        settings = first.settings
        before = local_part(first.momentum)
        momentum = before.clone()
        with observer.phase("momentum"):
            update = first.momentum.to(first.update_dtype, copy=True)
            look_ahead = settings.momentum if settings.nesterov else None
            fill_with_momentum([local_part(update)], [local_part(first.grad)], [momentum], settings.retain, look_ahead)
        with observer.phase("gather"):
            full, memories = whole(update), [whole(numbers).clone() for numbers in first.rule_state]
        assert self.plan is not None
        name = self.plan.params[parts[0]].name
        batches = [(step.params[k].matrix_set, self._batch(step.params[k], k, name)) for k in parts]
        for matrix_set, batch in batches:
            batch.stacked.copy_(_window(full, matrix_set).reshape(batch.stacked.shape))
            for of_batch, numbers in zip(batch.rule_state, memories, strict=True):
                of_batch.copy_(_window(numbers, matrix_set, rule_state=True).reshape(of_batch.shape))
            _round(batch.stacked, first.comm_dtype.gather)
        if any(batch.stacked.numel() and not batch.orthogonalise(step) for _, batch in batches):
            raise step.failures.pop()
        for matrix_set, batch in batches:
            _round(batch.stacked, first.comm_dtype.scatter)
            part = _window(full, matrix_set)
            part.copy_(batch.stacked.reshape(part.shape))
            for of_batch, numbers in zip(batch.rule_state, memories, strict=True):
                part = _window(numbers, matrix_set, rule_state=True)
                part.copy_(of_batch.reshape(part.shape))
        for k, (numbers, stored) in enumerate(zip(memories, first.rule_state, strict=True)):
            store_rule_state([ShardView(parts[0], None, own_shard(numbers, stored), memory=k)], step)
        for k in parts:
            self._apply(step.params[k], full, observer)
        # a matrix whose update is not finite is NaN throughout, and keeps weights and momentum
        if self.settings.guarded:
            keeps = ~own_shard(full, first.param).isfinite()  # in float16, what comes back may be infinite
            momentum = torch.where(keeps, before, momentum)
        before.copy_(momentum)

    def _batch(self, step_param: StepParam, k: int, name: str) -> OrthoBatch:
        """All matrices of a part, eager."""
        matrix_set, settings = step_param.matrix_set, replace(self.settings, cuda_graphs=False)
        matrices = {(k, matrix): name for matrix in range(matrix_set.count)}
        return OrthoBatch(matrices, step_param, BatchMemory(Workspace()), settings)

    def _apply(self, step_param: StepParam, full: Tensor, observer: Observer) -> None:
        in_part, matrix_set, settings = (
            torch.zeros_like(full, dtype=torch.bool),
            step_param.matrix_set,
            step_param.settings,
        )
        _window(in_part, matrix_set).fill_(True)
        with observer.phase("scatter"):
            rate = settings.rate * settings.adjust(*matrix_set.lr_shape)
            decay, cautious, dtype = settings.decay, settings.cautious, step_param.comm_dtype.scatter
            shard, shard_in_part = own_shard(full, step_param.param), own_shard(in_part, step_param.param)
        with observer.phase("update"):
            local = local_part(step_param.param)
            stepped = local.clone()
            counters = None if step_param.counter is None else [(step_param.counter, _elements(step_param))]
            # A copy, since ``apply`` overwrites updates and the shard may be a view of parts that are still to come.
            apply([stepped], [shard.to(dtype, copy=True)], decay, rate, cautious=cautious, counters=counters)
            written = shard_in_part & shard.isfinite() if self.settings.guarded else shard_in_part
            local.copy_(torch.where(written, stepped, local))


def _round(stacked: Tensor, dtype: torch.dtype) -> None:
    """Replaces matrices by what arrives of them if they are sent in ``dtype``."""
    if dtype != stacked.dtype:
        stacked.copy_(stacked.to(dtype))


def _elements(step_param: StepParam) -> Elements:
    """This rank's elements, whose places torch's own sharding tells, hashed."""
    param = step_param.param
    index = own_shard(torch.arange(param.numel(), device=param.device).view(param.shape), param)
    cols = max(1, param.shape[-1])
    return Elements(index // cols, index % cols).hashed()


def _layout_of(param: Tensor) -> Hashable:
    return tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)


def _window(full: Tensor, matrix_set: MatrixSet, *, rule_state: bool = False) -> Tensor:
    """A view of the part of a whole parameter, or of its rule state, that belongs to ``matrix_set``."""
    window = matrix_set.rule_state_window(full.shape) if rule_state else matrix_set.window
    return full if window is None else window_of(full, window, matrix_set.stack_dims)
