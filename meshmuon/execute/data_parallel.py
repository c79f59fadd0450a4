"""Data parallel without a wrapper: every rank has its own gradients of the same weights.

A wave sends each gradient to the owner of its matrix, which adds them up in the order of the ranks, steps with momentum that only
it keeps, and sends the new weights to all. It is the same exchange as for shards; only what travels differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from ..ortho import Workspace
from ..plan import NO_WAVE, Batch, Plan, plan_batches
from ..transport import Exchange
from .elementwise import accumulate, look_ahead
from .ortho_batch import OrthoBatch, reserve_ortho_batches
from .pipeline import guarded, run_pipeline, take_first
from .rule_state import load_rule_state, store_rule_state
from .settings import ExecutorSettings
from .shard_views import ShardView, ShardViews, grouped
from .step_param import StepParam
from .wave import CopyPairs, ExchangeBuffers

__all__ = ["DataParallelExecutor"]


@dataclass(frozen=True, slots=True)
class _Owned:
    """A batch of matrices that this rank owns.

    Attributes:
        stage: where they are orthogonalised.
        parts: the matrices and their views of the stage.
        averages: their averaged gradients, matrix by matrix like ``parts``.
        received: for every rank, its gradients of them; None stands for this rank's own.
        results: for every other rank, the views through which the new weights leave.
        memory: what the rule remembers of them.
    """

    stage: OrthoBatch
    parts: list[ShardView]
    averages: list[Tensor]
    received: list[list[Tensor] | None]
    results: list[list[Tensor]]
    rule_state: list[ShardView]

    def run(self, step_params: Sequence[StepParam], apply: ShardViews) -> None:
        with record_function("meshmuon::gather"):
            self._average(step_params)
        with record_function("meshmuon::momentum"):
            for _, some in grouped(range(len(self.parts)), lambda k: step_params[self.parts[k].param_index].group_index):
                self._fill([self.parts[k] for k in some], [self.averages[k] for k in some], step_params)
        load_rule_state(self.rule_state, step_params)
        self.stage.orthogonalise()
        with record_function("meshmuon::update"):
            apply.apply(step_params)
            store_rule_state(self.rule_state, step_params)
        with record_function("meshmuon::scatter"):
            weights = [part.of(step_params[part.param_index].param) for part in self.parts]
            for views in self.results:
                torch._foreach_copy_(views, weights)

    def _average(self, step_params: Sequence[StepParam]) -> None:
        own = [part.of(step_params[part.param_index].grad) for part in self.parts]
        for position, views in enumerate(self.received):
            values = own if views is None else views
            if position == 0:
                torch._foreach_copy_(self.averages, values)
            else:
                torch._foreach_add_(self.averages, values)
        torch._foreach_div_(self.averages, float(len(self.received)))

    def _fill(self, parts: Sequence[ShardView], averages: list[Tensor], step_params: Sequence[StepParam]) -> None:
        settings = step_params[parts[0].param_index].settings
        views, buffers = [part.view for part in parts], [part.of(step_params[part.param_index].momentum_buffer) for part in parts]
        accumulate(buffers, averages, settings.retain)
        if settings.nesterov:
            look_ahead(views, averages, buffers, settings.momentum)
        else:
            torch._foreach_copy_(views, buffers)


@dataclass(frozen=True, slots=True)
class _Wave:
    gather: ExchangeBuffers
    scatter: ExchangeBuffers
    leaving: list[ShardView]
    owned: list[tuple[_Owned, ShardViews]]

    def run(self, step_params: Sequence[StepParam], exchange: Exchange) -> Iterator[None]:
        with record_function("meshmuon::gather"):
            gradients = [part.of(step_params[part.param_index].grad) for part in self.leaving]
            CopyPairs([part.view for part in self.leaving], gradients).run()
            gather = self.gather.start(exchange, "gather")
        yield
        with record_function("meshmuon::gather"):
            gather.wait()
        for batch, apply in self.owned:
            batch.run(step_params, apply)
        scatter = self.scatter.start(exchange, "scatter")
        yield
        with record_function("meshmuon::scatter"):
            scatter.wait()
        with record_function("meshmuon::update"):
            weights = [part.of(step_params[part.param_index].param) for part in self.leaving]
            CopyPairs(weights, [part.view for part in self.leaving]).run()


class DataParallelExecutor:
    """Executes a plan of replicated matrices on gradients that were not averaged; the interface of ``Executor``."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._workspace = Workspace()
        self._waves: list[_Wave] = []
        self._failures: list[Exception] = []
        self._exchange: Exchange | None = None
        self.plan: Plan | None = None

    def prepare(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> None:
        """Makes the buffers for ``plan``, whose entries are the parameters of ``step_params``."""
        assert exchange is not None
        self.plan, self._exchange, self._waves = None, exchange, []
        self._workspace.clear()
        builder = _Builder(plan, rank, step_params, self._workspace, self._settings, exchange)
        with torch.inference_mode(False):
            self._waves = builder.build()
        self._failures = builder.failures
        self.plan = plan

    def run(self, step_params: Sequence[StepParam], *, last: Callable[[], None]) -> Exception | None:
        """One step; all gradients are on their way before the first is waited for."""
        self._failures.clear()  # a step that was left in the middle may have had some
        if self._exchange is None or self.plan is None:
            last()
            return None
        exchange = self._exchange
        guarded_last = guarded(last, self._failures)
        count = max(1, len(self._waves))
        run_pipeline([wave.run(step_params, exchange) for wave in self._waves], count, (), guarded_last, ahead=count)
        for one in step_params:
            if one.settings.free_grad:
                one.param.grad = None
        return take_first(self._failures)

    def workspace_bytes(self) -> int:
        """Memory that the executor holds between steps."""
        return self._workspace.bytes()


class _Builder:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        step_params: Sequence[StepParam],
        workspace: Workspace,
        settings: ExecutorSettings,
        exchange: Exchange,
    ) -> None:
        self.plan, self.rank, self.step_params, self.exchange = plan, rank, step_params, exchange
        self.workspace, self.settings = workspace, settings
        self.failures: list[Exception] = []
        self.tasks = [[t for t, task in enumerate(plan.tasks) if task.wave == wave] for wave in range(len(plan.lanes))]
        assert all(task.wave != NO_WAVE for task in plan.tasks), "replicated matrices are shared"

    def build(self) -> list[_Wave]:
        owned = [[t for t in wave if self.plan.tasks[t].owner == self.rank] for wave in self.tasks]
        batches = [self._batches(wave) for wave in owned]
        reserve_ortho_batches(
            [(b, self._like(owned[k], b)) for k, some in enumerate(batches) for b in some], self.workspace, self.settings
        )
        for k, tasks in enumerate(owned):  # grown to its final size first, like the stages
            if tasks:
                self._averages(self._like(tasks, batches[k][0]), tasks)
        return [self._wave(k, owned[k], batches[k]) for k in range(len(self.tasks))]

    def _averages(self, like: StepParam, tasks: Sequence[int]) -> Tensor:
        return self.workspace.take("averages", (sum(map(self._size, tasks)),), like.param.dtype, like.param.device)

    def _batches(self, tasks: Sequence[int]) -> tuple[Batch, ...]:
        items = [self.step_params[self.plan.tasks[t].param].item(1) for t in tasks]
        return plan_batches(items, budget=self.settings.memory_budget, chunk_size=self.settings.chunk_size)

    def _like(self, tasks: Sequence[int], batch: Batch) -> StepParam:
        return self.step_params[self.plan.tasks[tasks[batch.slices[0].item]].param]

    def _size(self, task: int) -> int:
        return self.plan.tasks[task].sharded.size

    def _part(self, task: int, view: Tensor) -> ShardView:
        found = self.plan.tasks[task]
        entry = self.plan.params[found.param]
        param = self.step_params[found.param].param
        stack = (slice(found.matrix, found.matrix + 1),) if entry.stack_dims else ()
        cut = (*stack, *(slice(*one) for one in entry.window or ()))
        return ShardView(found.param, cut or None, view.view(param[cut].shape if cut else param.shape))

    def _memory(self, task: int, view: Tensor) -> ShardView:
        found = self.plan.tasks[task]
        step_params, stack_dims = self.step_params[found.param], self.plan.params[found.param].stack_dims
        assert step_params.rule_state is not None
        stack = (slice(found.matrix, found.matrix + 1),) if stack_dims else ()
        cut = (*stack, *(slice(*one) for one in step_params.matrices.memory_window or ()))
        return ShardView(
            found.param, cut or None, view.view(step_params.rule_state[cut].shape if cut else step_params.rule_state.shape)
        )

    def _wave(self, k: int, owned: Sequence[int], batches: Sequence[Batch]) -> _Wave:
        like = self.step_params[self.plan.tasks[self.tasks[k][0]].param]
        others = [rank for rank in self.plan.ranks if rank != self.rank]
        leaving = sorted((t for t in self.tasks[k] if t not in set(owned)), key=lambda t: (self.plan.tasks[t].owner, t))
        mine = sum(map(self._size, owned))
        out = self.workspace.take(f"mine {k}", (sum(map(self._size, leaving)),), like.param.dtype, like.param.device)
        arriving = self.workspace.take(f"theirs {k}", (mine * len(others),), like.param.dtype, like.param.device)
        views, at = [], 0
        for t in leaving:
            views.append(self._part(t, out[at : at + self._size(t)]))
            at += self._size(t)
        to_owners: dict[int, int] = {}
        for t in leaving:
            owner = self.plan.tasks[t].owner
            to_owners[owner] = to_owners.get(owner, 0) + self._size(t)
        from_all = dict.fromkeys(others, mine) if mine else {}
        splits, all_splits = self.exchange.splits(to_owners), self.exchange.splits(from_all)
        offset = dict(zip(owned, _starts([self._size(t) for t in owned]), strict=True))
        return _Wave(
            gather=ExchangeBuffers(arriving, all_splits, out, splits),
            scatter=ExchangeBuffers(out, splits, arriving, all_splits),
            leaving=views,
            owned=[self._owned(owned, batch, arriving.view(len(others), -1), others, offset) for batch in batches],
        )

    def _owned(
        self, owned: Sequence[int], batch: Batch, arriving: Tensor, others: Sequence[int], offset: dict[int, int]
    ) -> tuple[_Owned, ShardViews]:
        like = self._like(owned, batch)
        stage = OrthoBatch(batch, like, self.workspace, self.settings, self.failures)
        tasks = [owned[part.item] for part in batch.slices]
        parts = [self._part(t, stage.matrices[k : k + 1]) for k, t in enumerate(tasks)]
        averages = self._averages(like, owned)
        rows = {rank: row for row, rank in enumerate(others)}

        def from_rank(rank: int) -> list[Tensor]:
            return [
                arriving[rows[rank], offset[t] : offset[t] + self._size(t)].view(part.view.shape)
                for t, part in zip(tasks, parts, strict=True)
            ]

        return (
            _Owned(
                stage,
                parts,
                [averages[offset[t] : offset[t] + self._size(t)].view(p.view.shape) for t, p in zip(tasks, parts, strict=True)],
                [None if rank == self.rank else from_rank(rank) for rank in self.plan.ranks],
                [from_rank(rank) for rank in others],
                [] if stage.rule_state is None else [self._memory(t, stage.rule_state[k]) for k, t in enumerate(tasks)],
            ),
            ShardViews(parts, self.step_params),
        )


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
