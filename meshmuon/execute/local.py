"""Muon on whole matrices that are where they are needed: momentum, orthogonalise, update, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ..device import replay_for
from ..matrices import MatrixSet
from ..ortho import (
    Orthogonalizer,
    Scheme,
    Scratch,
    Workspace,
    blocks_for,
    check_shape,
    iterate,
    orthogonalize,
    reserve_scratch,
    scratch_bytes,
)
from ..ortho.kernels import FunctionalProducts, products_for
from ..plan import Batch, Item, Slice, plan_batches
from .settings import ExecutorSettings

__all__ = ["LocalExecutor", "Work", "WorkSettings"]

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class WorkSettings:
    """A group's numbers for this step; one object per group, compared by identity."""

    momentum: float
    nesterov: bool
    decay: float | Tensor  # what the parameter is multiplied by
    rate: float | Tensor  # lr with the sign of the step, before the shape's factor
    adjust: Callable[[int, int], float]
    free_grad: bool


@dataclass(slots=True)
class Work:
    """One parameter of the step."""

    param: Tensor
    momentum_buffer: Tensor
    matrices: MatrixSet
    scheme: Scheme | Orthogonalizer
    compute_dtype: torch.dtype
    settings: WorkSettings

    @property
    def grad(self) -> Tensor:
        """The gradient, held by the parameter alone so that freeing it there frees its memory."""
        grad = self.param.grad
        assert grad is not None
        return grad

    @property
    def update_dtype(self) -> torch.dtype:
        """Dtype in which the update is formed: never less than float32."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32

    @property
    def treatment(self) -> Hashable:
        """What must be equal for two parameters to share a batch."""
        return (self.param.device, self.update_dtype, self.compute_dtype, self.scheme)

    def item(self) -> Item:
        """The parameter as the planner sees it."""
        size = self.matrices.rows * self.matrices.cols * self.update_dtype.itemsize
        scratch = scratch_bytes(self.matrices.rows, self.matrices.cols, self.compute_dtype, self.update_dtype)
        return Item(self.matrices.count, self.matrices.rows, self.matrices.cols, self.treatment, size + scratch)


class LocalExecutor:
    """Keeps the plan, the buffers and their views from step to step; plans again when the work changes."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._workspace = Workspace()
        self._signature: tuple[Hashable, ...] | None = None
        self._batches: list[_BatchRunner] = []

    def run(self, work: Sequence[Work]) -> None:
        """One step on all of ``work``."""
        if not work:
            return
        self._replan(work)
        with record_function("meshmuon::momentum"):
            _accumulate(work)
        for batch in self._batches:
            batch.run(work)

    def workspace_bytes(self) -> int:
        """Memory that the executor holds between steps."""
        return self._workspace.bytes()

    def plan(self) -> tuple[Batch, ...]:
        """The batches of the last step."""
        return tuple(runner.batch for runner in self._batches)

    def _replan(self, work: Sequence[Work]) -> None:
        signature = tuple((one.matrices, tuple(one.param.shape), one.treatment) for one in work)
        if signature != self._signature:
            with torch.inference_mode(False):  # buffers made inside inference_mode could never be written outside
                self._plan_anew(work)
            self._signature = signature

    def _plan_anew(self, work: Sequence[Work]) -> None:
        self._workspace.clear()
        batches = plan_batches(
            [one.item() for one in work], budget=self._settings.memory_budget, chunk_size=self._settings.chunk_size
        )
        for batch in batches:  # grown to its final size first: the workspace must not move once views of it are kept
            first = work[batch.slices[0].item]
            reserve_scratch(
                _stage(self._workspace, batch, work),
                first.scheme,
                form=self._settings.form,
                dtype=first.compute_dtype,
                workspace=self._workspace,
            )
        self._batches = [_BatchRunner(batch, work, self._workspace, self._settings) for batch in batches]


def _stage(workspace: Workspace, batch: Batch, work: Sequence[Work]) -> Tensor:
    first = work[batch.slices[0].item]
    return workspace.take("stage", (batch.size, batch.rows, batch.cols), first.update_dtype, first.param.device)


def _accumulate(work: Sequence[Work]) -> None:
    for momentum, members in _by(work, lambda one: one.settings.momentum):
        buffers = [one.momentum_buffer for one in members]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, [one.grad for one in members])


class _BatchRunner:
    """One batch with the views of its staging buffer, made once."""

    def __init__(self, batch: Batch, work: Sequence[Work], workspace: Workspace, settings: ExecutorSettings) -> None:
        self.batch = batch
        self._stage = _stage(workspace, batch, work)
        self._views: list[Tensor] = []
        offset = 0
        for part in batch.slices:
            count = part.stop - part.start
            shape = work[part.item].param.shape
            whole = self._stage[offset : offset + count]
            self._views.append(whole if work[part.item].matrices.count > 1 else whole[0].view(shape))
            offset += count
        self._orthogonalise = _orthogonaliser(self._stage, work[batch.slices[0].item], workspace, settings)

    def run(self, work: Sequence[Work]) -> None:
        members = [(work[part.item], part, view) for part, view in zip(self.batch.slices, self._views, strict=True)]
        with record_function("meshmuon::momentum"):
            for settings, some in _by(members, lambda member: member[0].settings):
                stage = [view for _, _, view in some]
                torch._foreach_copy_(stage, [_cut(one.momentum_buffer, one, part) for one, part, _ in some])
                if settings.nesterov:
                    torch._foreach_mul_(stage, settings.momentum)
                    torch._foreach_add_(stage, [_cut(one.grad, one, part) for one, part, _ in some])
        with record_function("meshmuon::orthogonalise"):
            self._orthogonalise()
        with record_function("meshmuon::update"):
            for settings, some in _by(members, lambda member: member[0].settings):
                params = [_cut(one.param, one, part) for one, part, _ in some]
                factor = settings.adjust(self.batch.rows, self.batch.cols)
                _apply(params, [view for _, _, view in some], settings.decay, settings.rate * factor)
        for one, part, _ in members:
            if one.settings.free_grad and part.stop == one.matrices.count:
                one.param.grad = None


def _cut(tensor: Tensor, one: Work, part: Slice) -> Tensor:
    whole = part.stop - part.start == one.matrices.count
    return tensor if whole else tensor[part.start : part.stop]


def _apply(params: list[Tensor], updates: list[Tensor], decay: float | Tensor, rate: float | Tensor) -> None:
    """p ← p·decay − rate·update, without waiting for the device when lr is a tensor there."""
    torch._foreach_mul_(params, decay)
    if isinstance(rate, Tensor):
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-rate)


def _by(things: Iterable[_T], key: Callable[[_T], _K]) -> list[tuple[_K, list[_T]]]:
    groups: dict[_K, list[_T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.items())


def _orthogonaliser(stage: Tensor, first: Work, workspace: Workspace, settings: ExecutorSettings) -> Callable[[], None]:
    """What orthogonalises ``stage`` in place: eager with reused buffers, a CUDA graph of that, or compiled."""
    scheme, dtype, form = first.scheme, first.compute_dtype, settings.form
    if settings.compile and stage.numel():
        return _compiled(stage, scheme, dtype, settings)
    products = products_for(stage.device, deterministic=settings.deterministic)

    def work() -> None:
        orthogonalize(stage, scheme, form=form, dtype=dtype, out=stage, workspace=workspace, products=products)

    return replay_for(stage.device, work, graphs=settings.cuda_graphs)


def _compiled(
    stage: Tensor, scheme: Scheme | Orthogonalizer, dtype: torch.dtype, settings: ExecutorSettings
) -> Callable[[], None]:
    backend = settings.compile if isinstance(settings.compile, str) else "inductor"
    eager = scheme if not isinstance(scheme, Scheme) else _traceable(stage, scheme, dtype, settings.form)
    compiled = torch.compile(eager, backend=backend, dynamic=False)

    def work() -> None:
        # Every shape is its own graph on purpose; the default limit would silently fall back to eager at the ninth.
        with torch._dynamo.config.patch(recompile_limit=10_000), torch.autocast(stage.device.type, enabled=False):
            found = compiled(stage)
        check_shape(found, stage)
        stage.copy_(found)

    return work


def _traceable(stage: Tensor, scheme: Scheme, dtype: torch.dtype, form: str) -> Orthogonalizer:
    steps, blocks = scheme.steps, blocks_for(stage, scheme, form=form, dtype=dtype)

    def eager(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        iterate(x, result, steps, blocks, Scratch(Workspace(), x, dtype), FunctionalProducts())
        return result

    return eager
