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

    def prepare(self, plan: Plan, rank: int, work: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Refuses what torch cannot gather, and remembers what all ranks agreed on; nothing else of it is used."""
        self.plan = None
        for _, alike in grouped(range(len(work)), lambda k: _layout_of(work[k].param)):
            if has_part(work[alike[0]].param):
                check_round_trip(plan.entries[alike[0]].name, work[alike[0]].param)
        self.plan = plan

    def run(self, work: Sequence[StepParam], *, last: Callable[[], None]) -> Exception | None:
        """One step, parameter by parameter. Unlike ``Executor`` it stops at the first error."""
        for _, members in grouped(range(len(work)), lambda k: work[k].param):
            self._step(work, members)
        last()
        return None

    def _step(self, work: Sequence[StepParam], members: Sequence[int]) -> None:
        """One parameter: all of its parts."""
        first, touch = work[members[0]], GradLifetime((members[0],), (members[0],))
        if not has_part(first.param):
            touch.free_gradients(work)
            return
        with record_function("meshmuon::momentum"):
            touch.accumulate(work)
            update = first.momentum_buffer.to(first.update_dtype, copy=True)
            if first.settings.nesterov:
                view, grad, buffer = local_part(update), local_part(first.grad), local_part(first.momentum_buffer)
                look_ahead([view], [grad], [buffer], first.settings.momentum)
        touch.free_gradients(work)
        with record_function("meshmuon::gather"):
            full = whole(update)
        for one in (work[k] for k in members):
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

        memory = None if one.memory is None else whole(one.memory)
        numbers = None if memory is None else _window(memory, one.matrices, memory=True)
        kept = None if numbers is None else numbers.reshape(one.matrices.count, -1).clone()
        if one.rule is None:
            orthogonalise()
        else:
            seen = seen_by_rule(matrices, kept, flipped=one.matrices.flipped, one_by_one=deterministic)
            apply_rule(one.rule, orthogonalise, seen)
        part.copy_(matrices.view(part.shape))
        if one.memory is not None and numbers is not None and kept is not None and memory is not None:
            remembered = memory.clone()
            _window(remembered, one.matrices, memory=True).copy_(kept.view(numbers.shape))
            shard, mask = own_shard(remembered, one.memory), one.settings.mask
            local = local_part(one.memory)
            local.copy_(shard if mask is None else torch.where(mask, local, shard))

    def workspace_bytes(self) -> int:
        """Nothing is kept between steps."""
        return 0


def _layout_of(param: Tensor) -> Hashable:
    return tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)


def _window(full: Tensor, matrices: MatrixSet, *, memory: bool = False) -> Tensor:
    """The part of a whole parameter, or of its rule's numbers, that ``matrices`` are."""
    window = matrices.memory_window if memory else matrices.window
    if window is None:
        return full
    (top, bottom), (left, right) = window
    rows = full.narrow(matrices.lead, top, bottom - top)
    return rows if full.dim() > matrices.lead + 2 else rows.narrow(matrices.lead + 1, left, right - left)
