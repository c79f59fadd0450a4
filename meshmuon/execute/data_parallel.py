"""Data parallel without a wrapper: every rank has its own gradients of the same weights.

A wave sends each gradient to the owner of its matrix. The owner adds them up in the order of the ranks, steps with
momentum that only it keeps, and sends the new weights to all ranks. It is the same exchange as for shards; only what
travels differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..plan import NO_WAVE, WaveRoutes
from .buffers import offsets_of
from .build import RankProgram, RankProgramBuilder
from .executor import Executor
from .local_batch import LocalBatch
from .program_builder import MatrixBatch
from .shards import MomentumViews, ShardView
from .step_param import RunningStep
from .wave import CopyPairs, PreparedExchange


@dataclass(frozen=True, slots=True)
class _AveragedBatch:
    """A batch of matrices that this rank owns."""

    batch: LocalBatch  # their step, once the gradients are averaged
    shards: list[ShardView]  # their place in the parameters
    averages: list[Tensor]  # of each shard, where its averaged gradient is
    # of each rank, where its gradients arrive and its new weights leave; None is this rank
    others: list[list[Tensor] | None]
    whole_averages: list[Tensor]  # the averaged gradients, matrix by matrix

    def run(self, step: RunningStep) -> None:
        if self.batch.ortho_batch.is_idle(step.idle):
            return
        active = [k for k, shard in enumerate(self.shards) if shard.part_index not in step.idle]
        shards, averages = [self.shards[k] for k in active], [self.averages[k] for k in active]
        others = [None if views is None else [views[k] for k in active] for views in self.others]
        with step.observer.phase("gather"):
            own = [shard.of(step.params[shard.part_index].grad) for shard in shards]
            first, *later = [own if views is None else views for views in others]
            step.elementwise.copy(averages, first)
            for gradients in later:
                torch._foreach_add_(averages, gradients)
            torch._foreach_div_(averages, float(len(others)))
        step.observer.gradients(self.batch.ortho_batch.matrices, self.whole_averages)
        self.batch.run(step)
        with step.observer.phase("scatter"):
            weights = [shard.of(step.params[shard.part_index].param) for shard in shards]
            for views in filter(None, others):
                step.elementwise.copy(views, weights)


@dataclass(frozen=True, slots=True)
class _Wave:
    """The ``RankWave`` of replicated matrices. All of its work is on the main stream."""

    params: frozenset[int]  # whose matrices travel in it
    gather: PreparedExchange  # the exchange of gradients, to the owners
    scatter: PreparedExchange  # the exchange of new weights, from the owners
    not_owned: list[ShardView]  # the matrices of other owners, and where their gradients leave and their weights arrive
    owned_batches: list[_AveragedBatch]  # the matrices that this rank owns, batch by batch

    def run(self, step: RunningStep) -> Iterator[None]:
        if self.params <= step.idle:
            yield from (None, None)
            return
        observer, not_owned = step.observer, [shard for shard in self.not_owned if shard.part_index not in step.idle]
        views = [shard.view for shard in not_owned]
        with observer.phase("gather"):
            CopyPairs(views, [shard.of(step.params[shard.part_index].grad) for shard in not_owned]).run(step)
            gather = self.gather.start(step, "gather")
        yield
        with observer.phase("gather"):
            gather.wait()
        for batch in self.owned_batches:
            batch.run(step)
        scatter = self.scatter.start(step, "scatter")
        yield
        with observer.phase("scatter"):
            scatter.wait()
        with observer.phase("update"):
            CopyPairs([shard.of(step.params[shard.part_index].param) for shard in not_owned], views).run(step)


class DataParallelExecutor(Executor):
    """The ``StepExecutor`` of replicated matrices whose gradients have not been averaged yet."""

    def _builder(self) -> type[RankProgramBuilder]:
        return _DataParallelBuilder


class _DataParallelBuilder(RankProgramBuilder):
    """The scatter carries the new weights. The gather uses the same transfers in the other direction and carries
    gradients.
    """

    def build(self) -> RankProgram:
        assert all(task.wave != NO_WAVE for task in self.plan.tasks), "replicated matrices are shared"
        batches = self.reserved_batches(self.owned_ranges)
        for k in range(len(self.routes)):
            self._averages(k)  # grown to its final size before anything keeps a view of it
        waves = tuple(self._averaging_wave(k, batches[k]) for k in range(len(self.routes)))
        count = max(1, len(waves))  # all gradients are on their way before the first is waited for
        return RankProgram(waves, in_flight=count, gathered_ahead=count, freed_at_end=range(len(self.step_params)))

    def _averages(self, wave: int) -> Tensor:
        return self._flat("averages", wave, sum(transfer.piece.size for transfer in self.routes[wave].staying))

    def _flat(self, name: str, wave: int, size: int) -> Tensor:
        return self.workspace.take(name, (size,), *self._wire(wave))

    def _wire(self, wave: int) -> tuple[torch.dtype, torch.device]:
        template = self.lane_template(wave)
        return template.param.dtype, template.param.device

    def _averaging_wave(self, k: int, batches: Sequence[MatrixBatch]) -> _Wave:
        routes = self.routes[k]
        sent = self._flat(f"sent {k}", k, sum(transfer.piece.size for transfer in routes.scatter_in))
        received = self._flat(f"received {k}", k, sum(transfer.piece.size for transfer in routes.scatter_out))
        return _Wave(
            params=self.wave_params[k],
            gather=self.prepare_exchange(received, routes.scatter_out, sent, routes.scatter_in),
            scatter=self.prepare_exchange(sent, routes.scatter_in, received, routes.scatter_out),
            not_owned=[shard for placed in offsets_of(routes.scatter_in) for shard in self.piece_views(*placed, sent)],
            owned_batches=[self._averaged_batch(routes, batch, received, self._averages(k)) for batch in batches],
        )

    def _averaged_batch(
        self, routes: WaveRoutes, batch: MatrixBatch, received: Tensor, averages: Tensor
    ) -> _AveragedBatch:
        ortho_batch = self.ortho_batch(batch)
        size = ortho_batch.stacked[0].numel()
        average_at = {transfer.task: offset for transfer, offset in offsets_of(routes.staying)}
        received_at = {(transfer.target, transfer.task): offset for transfer, offset in offsets_of(routes.scatter_out)}

        def shards(matrices: Iterable[Tensor]) -> list[ShardView]:
            return [
                shard
                for owned, matrix in zip(batch, matrices, strict=True)
                for shard in self.shard_views(owned, matrix)
            ]

        def views_of(rank: int) -> list[Tensor]:
            return [
                shard.view for shard in shards(received[received_at[rank, matrix.task] :][:size] for matrix in batch)
            ]

        whole_averages = [averages[average_at[matrix.task] :][:size] for matrix in batch]
        of_averages = [shard.view for shard in shards(whole_averages)]
        own = [
            replace(shard, gradient=average)
            for shard, average in zip(shards(torch.split(ortho_batch.stacked, 1)), of_averages, strict=True)
        ]
        local = replace(self._local_batch(batch, ortho_batch, ()), momentum_views=MomentumViews(own, self.step_params))
        others = [None if rank == self.rank else views_of(rank) for rank in self.plan.ranks]
        return _AveragedBatch(local, own, of_averages, others, whole_averages)
