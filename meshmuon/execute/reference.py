"""The reference path: every rank gathers whole matrices, orthogonalises all of them and keeps its own shard.

It shares neither layouts nor plans nor exchanges with the executor that it verifies: torch gathers and torch cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..matrices import MatrixSet
from ..ortho import Scheme, call_scheme, orthogonalize
from ..ortho.kernels import products_for
from ..plan import Plan
from ..transport import Exchange, check_round_trip, has_part, own_shard, whole
from .elementwise import apply, look_ahead
from .ortho_batch import apply_rule, seen_by_rule
from .settings import ExecutorSettings
from .shard_views import GradLifetime, grouped
from .step_param import StepParam, local_part

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor:
    """Runs a step the simple way, with the same interface as ``Executor``."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self.plan: Plan | None = None

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Refuses what torch cannot gather, and remembers what all ranks agreed on; nothing else of it is used."""
        self.plan = None
        for _, alike in grouped(range(len(step_params)), lambda k: _layout_of(step_params[k].param)):
            if has_part(step_params[alike[0]].param):
                check_round_trip(plan.params[alike[0]].name, step_params[alike[0]].param)
        self.plan = plan

    def run(self, step_params: Sequence[StepParam], *, last: Callable[[], None]) -> Exception | None:
        """One step, parameter by parameter. Unlike ``Executor`` it stops at the first error."""
        for _, members in grouped(range(len(step_params)), lambda k: step_params[k].param):
            self._step(step_params, members)
        last()
        return None

    def _step(self, step_params: Sequence[StepParam], members: Sequence[int]) -> None:
        """One parameter: all of its parts."""
        first, grad_lifetime = step_params[members[0]], GradLifetime((members[0],), (members[0],))
        if not has_part(first.param):
            grad_lifetime.free_gradients(step_params)
            return
        with record_function("meshmuon::momentum"):
            grad_lifetime.accumulate(step_params)
            update = first.momentum_buffer.to(first.update_dtype, copy=True)
            if first.settings.nesterov:
                view, grad, buffer = local_part(update), local_part(first.grad), local_part(first.momentum_buffer)
                look_ahead([view], [grad], [buffer], first.settings.momentum)
        grad_lifetime.free_gradients(step_params)
        with record_function("meshmuon::gather"):
            full = whole(update)
        for one in (step_params[k] for k in members):
            part = torch.zeros_like(full, dtype=torch.bool)
            _window(part, one.matrices).fill_(True)
            with record_function("meshmuon::orthogonalise"):
                self._orthogonalise(one, _window(full, one.matrices))
            with record_function("meshmuon::scatter"):
                shard, mine = own_shard(full, one.param), own_shard(part, one.param)
            with record_function("meshmuon::update"):
                local = local_part(one.param)
                rate = one.settings.rate * one.settings.adjust(*one.matrices.lr_shape)
                stepped = local.clone()
                apply([stepped], [shard], one.settings.decay, rate, cautious=one.settings.cautious)
                local.copy_(torch.where(mine, stepped, local))

    def _orthogonalise(self, one: StepParam, part: Tensor) -> None:
        matrices = part.reshape(one.matrices.count, one.matrices.rows, one.matrices.cols).contiguous()
        deterministic = self._settings.deterministic
        products = products_for(part.device, deterministic=deterministic)
        options: dict[str, Any] = {"form": self._settings.form, "dtype": one.compute_dtype, "products": products}

        def orthogonalise() -> None:
            if isinstance(one.scheme, Scheme):
                orthogonalize(matrices, one.scheme, out=matrices, **options)
            else:
                matrices.copy_(call_scheme(one.scheme, matrices, one_by_one=deterministic))

        rule_state = None if one.rule_state is None else whole(one.rule_state)
        numbers = None if rule_state is None else _window(rule_state, one.matrices, rule_state=True)
        kept = None if numbers is None else numbers.reshape(one.matrices.count, -1).clone()
        if one.rule is None:
            orthogonalise()
        else:
            seen = seen_by_rule(matrices, kept, flipped=one.matrices.flipped, one_by_one=deterministic)
            apply_rule(one.rule, orthogonalise, seen)
        part.copy_(matrices.view(part.shape))
        if one.rule_state is not None and numbers is not None and kept is not None and rule_state is not None:
            remembered = rule_state.clone()
            _window(remembered, one.matrices, rule_state=True).copy_(kept.view(numbers.shape))
            shard, skip_mask = own_shard(remembered, one.rule_state), one.settings.skip_mask
            local = local_part(one.rule_state)
            local.copy_(shard if skip_mask is None else torch.where(skip_mask, local, shard))

    def workspace_bytes(self) -> int:
        """Nothing is kept between steps."""
        return 0


def _layout_of(param: Tensor) -> Hashable:
    return tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)


def _window(full: Tensor, matrices: MatrixSet, *, rule_state: bool = False) -> Tensor:
    """The part of a whole parameter, or of its rule's numbers, that ``matrices`` are."""
    window = matrices.memory_window if rule_state else matrices.window
    if window is None:
        return full
    (top, bottom), (left, right) = window
    rows = full.narrow(matrices.stack_dims, top, bottom - top)
    return rows if full.dim() > matrices.stack_dims + 2 else rows.narrow(matrices.stack_dims + 1, left, right - left)
