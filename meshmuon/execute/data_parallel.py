"""Data parallel without a wrapper: every rank has its own gradients of the same weights.

A wave sends each gradient to the owner of its matrix. The owner adds them up in the order of the ranks, steps with momentum that
only it keeps, and sends the new weights to all ranks. It is the same exchange as for shards; only what travels differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..device import Mark, Streams
from ..plan import NO_WAVE, Batch, PieceTransfer, Plan, WaveRoutes
from ..transport import Exchange
from .build import RankProgram
from .elementwise import accumulate, fill_with_momentum
from .executor import Executor
from .ortho_batch import OrthoBatch
from .program_builder import ProgramBuilder, offsets_of
from .rounding import RoundingScratch
from .rule_state import load_rule_state, store_rule_state
from .shard_views import GradientReads, ShardView, ShardViews, grouped
from .step_param import Observer, StepParam
from .wave import CopyPairs, PreparedExchange


@dataclass(frozen=True, slots=True)
class _AveragedBatch:
    """A batch of matrices that this rank owns."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    matrix_views: list[ShardView]  # their place in the parameters, and their views of ``ortho_batch``
    averages: list[Tensor]  # their averaged gradients, in the order of ``matrix_views``
    whole_averages: list[Tensor]  # the same, matrix by matrix
    received: list[list[Tensor] | None]  # for every rank, its gradients of them; None stands for this rank's own
    results: list[list[Tensor]]  # for every other rank, the views of the buffer that sends it the new weights
    rule_state: list[ShardView]  # the place of their rule state, and its views of ``ortho_batch``
    update_views: ShardViews  # ``matrix_views``, as they are applied

    def without(self, idle: AbstractSet[int]) -> _AveragedBatch:
        """The batch without what belongs to ``idle`` parameters; the matrices themselves keep their places."""
        active = [k for k, matrix in enumerate(self.matrix_views) if matrix.param_index not in idle]

        def of_active(views: list[Tensor]) -> list[Tensor]:
            return [views[k] for k in active]

        return replace(
            self,
            matrix_views=[self.matrix_views[k] for k in active],
            averages=of_active(self.averages),
            received=[None if views is None else of_active(views) for views in self.received],
            results=list(map(of_active, self.results)),
        )

    def run(self, step_params: Sequence[StepParam], idle: AbstractSet[int], observer: Observer) -> None:
        with observer.phase("gather"):
            self._average(step_params)
        observer.gradients(self.ortho_batch.matrices, self.whole_averages)
        with observer.phase("momentum"):
            for first, views, averages, momenta in self._by_group(step_params):
                settings = first.settings
                buffers = [buffer.clone() for buffer in momenta] if first.fallible else momenta
                fill_with_momentum(views, averages, buffers, settings.retain, settings.momentum if settings.nesterov else None)
        load_rule_state(self.rule_state, step_params, idle)
        if self.ortho_batch.orthogonalise(idle, observer):
            with observer.phase("update"):
                for first, _, averages, momenta in self._by_group(step_params):
                    if first.fallible:
                        accumulate(momenta, averages, first.settings.retain)
                self.update_views.apply(step_params, idle, stores_momentum=False)
                store_rule_state(self.rule_state, step_params, idle)
        with observer.phase("scatter"):
            weights = [matrix.of(step_params[matrix.param_index].param) for matrix in self.matrix_views]
            for views in self.results:
                torch._foreach_copy_(views, weights)

    def _average(self, step_params: Sequence[StepParam]) -> None:
        own_gradients = [matrix.of(step_params[matrix.param_index].grad) for matrix in self.matrix_views]
        for position, views in enumerate(self.received):
            gradients = own_gradients if views is None else views
            if position == 0:
                torch._foreach_copy_(self.averages, gradients)
            else:
                torch._foreach_add_(self.averages, gradients)
        torch._foreach_div_(self.averages, float(len(self.received)))

    def _by_group(self, step_params: Sequence[StepParam]) -> Iterator[tuple[StepParam, list[Tensor], list[Tensor], list[Tensor]]]:
        """Of each param group one of its parameters, and the views, averages and momenta of its matrices."""
        pairs = zip(self.matrix_views, self.averages, strict=True)
        for of_group in grouped(pairs, lambda pair: step_params[pair[0].param_index].group_index):
            views, averages = [matrix.view for matrix, _ in of_group], [average for _, average in of_group]
            momenta = [matrix.of(step_params[matrix.param_index].momentum) for matrix, _ in of_group]
            yield step_params[of_group[0][0].param_index], views, averages, momenta


@dataclass(frozen=True, slots=True)
class _Wave:
    """A wave on one rank."""

    gather: PreparedExchange  # the exchange of gradients, to the owners
    scatter: PreparedExchange  # the exchange of new weights, from the owners
    not_owned: list[ShardView]  # the matrices of other owners, and where their gradients leave and their weights arrive
    owned_batches: list[_AveragedBatch]  # the matrices that this rank owns, batch by batch

    def run(
        self,
        step_params: Sequence[StepParam],
        idle: AbstractSet[int],
        exchange: Exchange,
        streams: Streams,
        ready: Mark,
        observer: Observer,
    ) -> Iterator[None]:
        """A step of the wave. All of its work is on the main stream."""
        not_owned = [matrix for matrix in self.not_owned if matrix.param_index not in idle]
        views = [matrix.view for matrix in not_owned]
        with observer.phase("gather"):
            CopyPairs(views, [matrix.of(step_params[matrix.param_index].grad) for matrix in not_owned]).run()
            gather = self.gather.start(exchange, "gather", observer)
        yield
        with observer.phase("gather", waits=True):
            gather.wait()
        for batch in self.owned_batches:
            if not batch.ortho_batch.is_idle(idle):
                (batch.without(idle) if idle else batch).run(step_params, idle, observer)
        scatter = self.scatter.start(exchange, "scatter", observer)
        yield
        with observer.phase("scatter", waits=True):
            scatter.wait()
        with observer.phase("update"):
            CopyPairs([matrix.of(step_params[matrix.param_index].param) for matrix in not_owned], views).run()


class DataParallelExecutor(Executor):
    """The ``StepExecutor`` of replicated matrices whose gradients have not been averaged yet."""

    def _build(self, plan: Plan, rank: int, step_params: Sequence[StepParam], exchange: Exchange | None) -> RankProgram:
        return _DataParallelBuilder(plan, rank, step_params, exchange, self._workspace, self.settings).build()


class _DataParallelBuilder(ProgramBuilder):
    """The scatter carries the new weights. The gather uses the same transfers in the other direction and carries gradients."""

    def build(self) -> RankProgram:
        assert all(task.wave != NO_WAVE for task in self.plan.tasks), "replicated matrices are shared"
        batches = self.reserved_batches(self.owned_ranges)
        for k in range(len(self.routes)):
            self._averages(k)  # grown to its final size before anything keeps a view of it
        self.reserve_relays(lambda: self.plan.averaging_hops, lambda wave: f"wave {wave}", self._wire)
        waves = tuple(self._wave(k, batches[k]) for k in range(len(self.routes)))
        count = max(1, len(waves))  # all gradients are on their way before the first is waited for
        freed_at_end, params = GradientReads((), range(len(self.step_params))), self.wave_params()
        return RankProgram(waves, params, in_flight=count, gathered_ahead=count, around_all=freed_at_end, failures=self.failures)

    def _averages(self, wave: int) -> Tensor:
        return self._buffer("averages", wave, sum(transfer.piece.size for transfer in self.routes[wave].staying))

    def _buffer(self, name: str, wave: int, size: int) -> Tensor:
        return self.workspace.take(name, (size,), *self._wire(wave))

    def _wire(self, wave: int) -> tuple[torch.dtype, torch.device]:
        template = self.lane_template(wave)
        return template.param.dtype, template.param.device

    def _wave(self, k: int, batches: Sequence[Batch]) -> _Wave:
        routes = self.routes[k]
        sent = self._buffer(f"sent {k}", k, sum(transfer.piece.size for transfer in routes.scatter_in))
        received = self._buffer(f"received {k}", k, sum(transfer.piece.size for transfer in routes.scatter_out))
        ortho_batches = [self.ortho_batch(self.owned_ranges[k], batch) for batch in batches]

        def scatters(rank: int) -> tuple[Sequence[PieceTransfer], Sequence[PieceTransfer]]:
            of_rank = self.routes_of_rank(rank)[k]
            return of_rank.scatter_in, of_rank.scatter_out

        return _Wave(
            gather=self.exchange_buffers(received, sent, lambda rank: scatters(rank)[::-1], f"wave {k}", "gather"),
            scatter=self.exchange_buffers(sent, received, scatters, f"wave {k}", "scatter"),
            not_owned=self.piece_views(offsets_of(routes.scatter_in), sent),
            owned_batches=[self._averaged_batch(routes, batch, received, self._averages(k)) for batch in ortho_batches],
        )

    def _averaged_batch(self, routes: WaveRoutes, ortho_batch: OrthoBatch, received: Tensor, averages: Tensor) -> _AveragedBatch:
        tasks = [routes.owned_tasks[item_range.item] for item_range in ortho_batch.batch.slices]
        ranges = [self.range_of(task) for task in tasks]
        offset_of_average = {transfer.task: offset for transfer, offset in offsets_of(routes.staying)}
        offset_of_rank = {(transfer.target, transfer.task): offset for transfer, offset in offsets_of(routes.scatter_out)}
        size = ortho_batch.batch.rows * ortho_batch.batch.cols

        def views(memory: Iterable[Tensor]) -> list[ShardView]:
            return [shard for r, matrix in zip(ranges, memory, strict=True) for shard in self.shard_views(r, matrix)]

        def in_buffer(buffer: Tensor, offsets: Iterable[int]) -> list[Tensor]:
            return [shard.view for shard in views(buffer[offset : offset + size] for offset in offsets)]

        def of_rank(rank: int) -> list[Tensor]:
            return in_buffer(received, (offset_of_rank[rank, task] for task in tasks))

        rule_state = [] if ortho_batch.rule_state is None else list(zip(ranges, ortho_batch.rule_state, strict=True))
        matrix_views = views(ortho_batch.stacked[k : k + 1] for k in range(len(tasks)))
        return _AveragedBatch(
            ortho_batch,
            matrix_views,
            averages=in_buffer(averages, (offset_of_average[task] for task in tasks)),
            whole_averages=[averages[offset_of_average[task] : offset_of_average[task] + size] for task in tasks],
            received=[None if rank == self.rank else of_rank(rank) for rank in self.plan.ranks],
            results=[of_rank(rank) for rank in self.plan.ranks if rank != self.rank],
            rule_state=[shard for r, numbers in rule_state for shard in self.rule_state_views(r, numbers)],
            update_views=ShardViews(matrix_views, self.step_params, RoundingScratch(self.workspace)),
        )
