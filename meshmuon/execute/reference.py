"""The reference path: every rank gathers whole matrices, orthogonalises all of them and keeps its own shard.

A step is planned and checked like any other. The tensors, however, are gathered and sharded by torch alone, without the layouts
and exchanges of the executor that this path verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..matrices import MatrixSet
from ..ortho import Scheme, call_scheme, orthogonalize
from ..ortho.kernels.products import BlockedProducts
from ..plan import Plan
from ..torch_compat import local_part
from ..transport import Exchange, check_round_trip, has_part, own_shard, whole
from .elementwise import apply, fill_with_momentum
from .ortho_batch import apply_rule, kernel_error, orthogonalize_error, seen_by_rule
from .rounding import Elements, RandomWords
from .shards import ShardView, grouped, store_rule_state
from .step_param import UNOBSERVED, ExecutorSettings, Observer, RunningStep, StepParam
from .views import window_of


class ReferenceExecutor:
    """The ``StepExecutor`` that runs a step the simple way."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        self.plan: Plan | None = None
        self.failed_for_all = False

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Refuses what torch cannot gather, and keeps the plan, of which it uses only the names."""
        self.plan = None
        for indices in grouped(range(len(step_params)), lambda k: _layout_of(step_params[k].param)):
            if step_params[indices[0]].staged:
                raise UnsupportedError(
                    f"{plan.params[indices[0]].name} is in host memory on a mesh of {step_params[indices[0]].work_device.type} "
                    "devices (FSDP2's CPUOffloadPolicy), where torch cannot gather it for the reference path: step without "
                    "reference_path=True, or verify without the policy."
                )
            if has_part(step_params[indices[0]].param):
                check_round_trip(plan.params[indices[0]].name, step_params[indices[0]].param)
        for first, *_ in grouped(
            step_params, lambda one: (one.matrix_set.rows, one.matrix_set.cols, one.scheme, one.compute_dtype)
        ):
            self._try_out(first)
        self.plan = plan

    def _try_out(self, step_param: StepParam) -> None:
        """As ``OrthoBatch.try_out``."""
        products, matrix_set = self.settings.products(step_param.param.device), step_param.matrix_set
        if type(products) is BlockedProducts or step_param.fallible:
            return
        matrix = torch.eye(matrix_set.rows, matrix_set.cols, dtype=step_param.update_dtype, device=step_param.param.device)
        try:
            orthogonalize(matrix, step_param.scheme, form=self.settings.form, dtype=step_param.compute_dtype, products=products)
        except Exception as error:
            raise kernel_error(matrix[None], error) from error

    def discard(self) -> None:
        """There is nothing but the plan."""
        self.plan = None

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
        return None

    def _step(self, step: RunningStep, parts: Sequence[int]) -> None:
        """Steps one parameter; ``parts`` are the indices of its parts in ``step.params``. If it fails, nothing has changed."""
        first, observer = step.params[parts[0]], step.observer
        if not has_part(first.param):
            return
        momentum, settings = local_part(first.momentum).clone(), first.settings
        with observer.phase("momentum"):
            update = first.momentum.to(first.update_dtype, copy=True)
            look_ahead = settings.momentum if settings.nesterov else None
            fill_with_momentum([local_part(update)], [local_part(first.grad)], [momentum], settings.retain, look_ahead)
        with observer.phase("gather"):
            full = whole(update)
        rule_states = [local_part(state) for k in parts if (state := step.params[k].rule_state) is not None]
        kept = [state.clone() for state in rule_states]
        try:
            for k in parts:
                with observer.phase("orthogonalise"):
                    self._orthogonalise(step, k, _window(full, step.params[k].matrix_set))
        except Exception as error:
            for state, before in zip(rule_states, kept, strict=True):
                state.copy_(before)
            assert self.plan is not None
            names = [self.plan.params[parts[0]].name]
            raise orthogonalize_error(names, f"{type(error).__name__}: {error}") from error
        local_part(first.momentum).copy_(momentum)
        for k in parts:
            self._apply(step.params[k], full, observer)

    def _apply(self, step_param: StepParam, full: Tensor, observer: Observer) -> None:
        in_part = torch.zeros_like(full, dtype=torch.bool)
        _window(in_part, step_param.matrix_set).fill_(True)
        with observer.phase("scatter"):
            shard, shard_in_part = own_shard(full, step_param.param), own_shard(in_part, step_param.param)
        with observer.phase("update"):
            settings, local = step_param.settings, local_part(step_param.param)
            rate = settings.rate * settings.adjust(*step_param.matrix_set.lr_shape)
            stepped = local.clone()
            words = [_random_words(step_param)]
            # A copy, since ``apply`` overwrites updates and the shard may be a view of parts that are still to come.
            apply([stepped], [shard.clone()], settings.decay, rate, cautious=settings.cautious, words=words)
            local.copy_(torch.where(shard_in_part, stepped, local))

    def _orthogonalise(self, step: RunningStep, k: int, part: Tensor) -> None:
        step_param, observer = step.params[k], step.observer
        matrix_set, rule, scheme = step_param.matrix_set, step_param.rule, step_param.scheme
        stacked = part.reshape(matrix_set.count, matrix_set.rows, matrix_set.cols).contiguous()
        deterministic = self.settings.deterministic
        products = self.settings.products(part.device)
        keys = [(k, matrix) for matrix in range(matrix_set.count)]
        options: dict[str, Any] = {"form": self.settings.form, "dtype": step_param.compute_dtype, "products": products}

        def orthogonalise() -> None:
            if isinstance(scheme, Scheme):
                orthogonalize(stacked, scheme, out=stacked, **options)
            else:
                stacked.copy_(call_scheme(scheme, stacked, one_by_one=deterministic))
            observer.orthogonalised(keys, stacked)

        observer.momentum(keys, stacked, gram_follows=False)
        if rule is None:
            orthogonalise()
        else:
            stored = None if step_param.rule_state is None else whole(step_param.rule_state).clone()
            window = None if stored is None else _window(stored, matrix_set, rule_state=True)
            rule_state = None if window is None else window.reshape(matrix_set.count, -1).clone()
            seen = seen_by_rule(stacked, rule_state, flipped=matrix_set.flipped, one_by_one=deterministic)
            apply_rule(rule, orthogonalise, seen)
            if step_param.rule_state is not None and stored is not None and window is not None and rule_state is not None:
                window.copy_(rule_state.view(window.shape))
                store_rule_state([ShardView(k, None, own_shard(stored, step_param.rule_state))], step)
        observer.update(keys, stacked)
        part.copy_(stacked.view(part.shape))

    def workspace_bytes(self) -> int:
        """Nothing is held between steps."""
        return 0


def _random_words(step_param: StepParam) -> RandomWords | None:
    """The random words of this rank's elements, whose places torch's own sharding tells."""
    param, counter = step_param.param, step_param.counter
    if counter is None:
        return None
    index = own_shard(torch.arange(param.numel(), device=counter.device).view(param.shape), param)
    cols = max(1, param.shape[-1])
    return RandomWords.of(counter, Elements(index // cols, index % cols).hashed())


def _layout_of(param: Tensor) -> Hashable:
    return tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)


def _window(full: Tensor, matrix_set: MatrixSet, *, rule_state: bool = False) -> Tensor:
    """A view of the part of a whole parameter, or of its rule state, that belongs to ``matrix_set``."""
    window = matrix_set.rule_state_window if rule_state else matrix_set.window
    return full if window is None else window_of(full, window, matrix_set.stack_dims)
