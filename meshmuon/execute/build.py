"""From a plan to what one rank runs in a step of ``Executor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import NO_WAVE, Batch, PieceTransfer, WaveRoutes, WaveSizes, gradient_read_order, slot_sizes, wave_sizes
from ..torch_compat import local_part
from .local_batch import STAGED_IN_FLIGHT, LocalBatch, StagedBatch
from .ortho_batch import MATRICES, BatchMemory, OrthoBatch
from .program_builder import MatrixRange, PlacedTransfers, ProgramBuilder, offsets_of
from .rounding import RoundingScratch
from .rule_state import RuleStateExchange, rule_state_exchanges
from .shard_views import GradientReads, ShardView, ShardViews
from .views import PlacedPiece, blocks_of, strided_views
from .wave import CopyPairs, FallibleWave, OwnedBatch, RankWave, Stage, Staging, Wave

_STAGED = tuple(f"staged {MATRICES} {slot}" for slot in range(STAGED_IN_FLIGHT))


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does in a step."""

    waves: tuple[RankWave, ...] = ()  # what is exchanged, wave by wave
    wave_params: tuple[frozenset[int], ...] = ()  # the parameters of each wave, the same on all ranks
    in_flight: int = 1  # most waves between their first and their last exchange
    gathered_ahead: int | None = None  # as in ``pipeline_order``
    local: tuple[LocalBatch, ...] = ()  # what needs no exchange
    staged: tuple[StagedBatch, ...] = ()  # what needs none, and whose weights are in host memory
    rule_states: tuple[RuleStateExchange, ...] = ()  # the rule state of the matrices that are exchanged, one per device and dtype
    # The parameters whose momentum is accumulated before the waves and batches, and whose gradients are freed after all of them.
    around_all: GradientReads = field(default_factory=GradientReads)
    failures: list[Exception] = field(default_factory=list)  # where batches put what went wrong during a step
    stagings: tuple[Staging, ...] = ()  # host memory between weights that are there and their devices


class RankProgramBuilder(ProgramBuilder):
    """Builds the program of sharded and local matrices."""

    def build(self) -> RankProgram:
        """Everything that the rank needs to execute the plan."""
        local_ranges, staged_ranges = self._local_ranges()
        local_batches, *wave_batches = self.reserved_batches([local_ranges, *self.owned_ranges])
        (staged_batches,) = self.reserved_batches([staged_ranges], _STAGED)
        sizes = [wave_sizes(routes) for routes in self.routes]
        self._reserve_buffers(sizes)
        for k, batch in enumerate(staged_batches):
            self._local_stage(staged_ranges, batch, k)  # grown to its final size before anything keeps a view of it
        self._filled_once, self._wave_params = self._params_filled_once(), self.wave_params()
        batches = [(local_ranges, batch) for batch in local_batches] + [(staged_ranges, batch) for batch in staged_batches]
        gradient_reads, around_all = self._gradient_reads(batches)
        waves, owned_rule_state = [], dict[int, Tensor]()
        for k, owned in enumerate(wave_batches):
            ortho_batches = [self.ortho_batch(self.owned_ranges[k], batch) for batch in owned]
            waves.append(self._wave(k, sizes[k], ortho_batches, gradient_reads[k]))
            owned_rule_state.update(_rule_state_by_task(self.routes[k], ortho_batches))
        reads = iter(gradient_reads[len(waves) :])
        local = [self._local_batch(local_ranges, batch, next(reads)) for batch in local_batches]
        staged = [self._staged_batch(staged_ranges, batch, next(reads), k) for k, batch in enumerate(staged_batches)]
        return RankProgram(
            waves=tuple(waves),
            wave_params=self._wave_params,
            in_flight=self.plan.options.in_flight,
            local=tuple(local),
            staged=tuple(staged),
            rule_states=tuple(rule_state_exchanges(self, owned_rule_state)),
            around_all=around_all,
            failures=self.failures,
            stagings=tuple(self.stagings.values()),
        )

    def _local_ranges(self) -> tuple[list[MatrixRange], list[MatrixRange]]:
        """Matrices that need no exchange; those that are next to each other in a local tensor are one range.

        First those that are worked on where they are, then those whose weights are in host memory and which go to a device.
        """
        both: tuple[list[MatrixRange], list[MatrixRange]] = [], []
        for index, task in enumerate(self.plan.tasks):
            if task.wave != NO_WAVE or self.rank not in task.sharded.holdings:
                continue
            ranges = both[self.step_params[task.param].staged]
            matrix, last = self.range_of(index), ranges[-1] if ranges else None
            if last is not None and (last.param_index, last.stop) == (matrix.param_index, matrix.start):
                ranges[-1] = MatrixRange(last.param_index, last.start, matrix.stop, last.key)
            else:
                ranges.append(matrix)
        return both

    def _local_batch(self, ranges: Sequence[MatrixRange], batch: Batch, gradient_reads: GradientReads) -> LocalBatch:
        ortho_batch = self.ortho_batch(ranges, batch)
        return LocalBatch(ortho_batch, *self._local_views(ranges, ortho_batch, ortho_batch.stacked, gradient_reads))

    def _staged_batch(
        self, ranges: Sequence[MatrixRange], batch: Batch, gradient_reads: GradientReads, number: int
    ) -> StagedBatch:
        ortho_batch = self.ortho_batch(ranges, batch, _STAGED[number % STAGED_IN_FLIGHT])
        stage, in_host = self._local_stage(ranges, batch, number)
        return StagedBatch(ortho_batch, *self._local_views(ranges, ortho_batch, in_host, gradient_reads), stage)

    def _local_views(
        self, ranges: Sequence[MatrixRange], ortho_batch: OrthoBatch, stacked: Tensor, gradient_reads: GradientReads
    ) -> tuple[ShardViews, GradientReads, list[ShardView]]:
        """The place of a batch in the parameters, with views of ``stacked``; its gradient reads; the place of its rule state."""
        shard_views, rule_state, stop = [], [], 0
        for item_range in ortho_batch.batch.slices:
            start, stop = stop, stop + item_range.stop - item_range.start
            full = ranges[item_range.item]
            matrix_range = MatrixRange(full.param_index, full.start + item_range.start, full.start + item_range.stop)
            shard_views.extend(self.shard_views(matrix_range, stacked[start:stop]))
            if ortho_batch.rule_state is not None:
                rule_state.extend(self.rule_state_views(matrix_range, ortho_batch.rule_state[start:stop]))
        views = ShardViews(shard_views, self.step_params, RoundingScratch(self.workspace), self._filled_once)
        return views, gradient_reads, rule_state

    def _local_stage(self, ranges: Sequence[MatrixRange], batch: Batch, number: int) -> tuple[Stage, Tensor]:
        """What copies a batch of weights in host memory to its device and back, and the batch in host memory."""
        memory = BatchMemory(self.workspace, _STAGED[number % STAGED_IN_FLIGHT])
        flat = memory.flat(batch, self.template(ranges, batch))
        return self.staging(flat.device).matrices(memory.name, (batch.size, batch.rows, batch.cols), flat)

    def _gradient_reads(
        self, local_batches: Sequence[tuple[Sequence[MatrixRange], Batch]]
    ) -> tuple[list[GradientReads], GradientReads]:
        """The gradient reads of each wave, then of each batch without exchanges; and those of the step as a whole.

        Waves read beside the main stream, local batches in it. Of a parameter that both read, neither may accumulate the momentum
        that the other needs, and a local batch may not free a gradient that a wave may still be reading. The step does so, before
        and after all of them. It also frees the gradients that nobody reads, and those of ``fallible`` parameters, whose momentum
        is accumulated together with the update. The parts of a fused weight share one gradient and momentum: all are listed under
        the index of the first part.
        """
        first, waves = self._first_parts(), len(self.routes)
        fallible = {first[k] for k, step_param in enumerate(self.step_params) if step_param.fallible}
        reads = [{first[self.plan.tasks[index].param] for index in _tasks_held(routes)} for routes in self.routes]
        reads += [{first[ranges[part.item].param_index] for part in batch.slices} for ranges, batch in local_batches]
        on_both = set().union(*reads[:waves]) & set().union(*reads[waves:])
        order = list(gradient_read_order(waves, len(local_batches), self.plan.options.in_flight))
        first_here, last_here = _first_reads(reads, order), _first_reads(reads, order[::-1])
        freed_at_end = set(first).difference(*reads)
        for k in range(len(reads)):
            kept = on_both | fallible if k >= waves else fallible
            freed_at_end |= kept.intersection(last_here[k])
            last_here[k] = [param for param in last_here[k] if param not in kept]
        first_here = [[param for param in indices if param not in on_both | fallible] for indices in first_here]
        gradient_reads = [GradientReads(*indices, self._filled_once) for indices in zip(first_here, last_here, strict=True)]
        return gradient_reads, GradientReads(sorted(on_both - fallible), sorted(freed_at_end), self._filled_once)

    def _first_parts(self) -> list[int]:
        """For each parameter, the first one with the same tensor: parts of a fused weight are parameters of their own."""
        first_part: dict[Tensor, int] = {}
        return [first_part.setdefault(step_param.param, k) for k, step_param in enumerate(self.step_params)]

    def _params_filled_once(self) -> frozenset[int]:
        """The parameters of which every local element goes into exactly one buffer in a step.

        Their momentum is accumulated in passing. Not so where another replica sends the shard to the owner of its matrix: this
        rank sends nothing and keeps momentum all the same.
        """
        pieces = [(task, task.sharded.piece_of(self.rank)) for task in self.plan.tasks if task.wave == NO_WAVE]
        transfers = (transfer for routes in self.routes for transfer in (*routes.gather_out, *routes.staying))
        pieces += [(self.plan.tasks[transfer.task], transfer.piece) for transfer in transfers]
        held = [(task, piece.size) for task, piece in pieces if piece is not None]
        times = Counter((task.param, task.matrix) for task, _ in held)
        first, filled = self._first_parts(), Counter[int]()
        for task, size in held:
            filled[first[task.param]] += size
        twice = {first[param] for (param, _), count in times.items() if count > 1}
        sizes = [local_part(step_param.param).numel() for step_param in self.step_params]
        return frozenset(k for k, size in enumerate(sizes) if filled[first[k]] == size and first[k] not in twice)

    def _reserve_buffers(self, sizes: Sequence[WaveSizes]) -> None:
        """Waves k, k + in_flight, … of a lane take turns in slot k % in_flight, which fits the largest of them."""
        slots = self.plan.options.in_flight
        for lane in dict.fromkeys(self.plan.wave_lanes):
            waves = [k for k, wave_lane in enumerate(self.plan.wave_lanes) if wave_lane == lane]
            for slot in range(slots):
                largest = slot_sizes([sizes[k] for k in waves if k % slots == slot])
                for name, size in zip(("shards", "gathered", "results"), largest, strict=True):
                    self._buffer(name, waves[0], slot, size)
                self._stage(waves[0], slot, largest[0])
            self._unrounded_buffer(waves[0], max(sizes[k].shards for k in waves))
        self.reserve_relays(lambda: self.plan.hops, lambda wave: f"slot {wave % slots}", self._wire)

    def _wire(self, wave: int) -> tuple[torch.dtype, torch.device]:
        template = self.lane_template(wave)
        return template.comm_dtype, template.work_device

    def _buffer(self, name: str, wave: int, slot: int, size: int) -> Tensor:
        return self.workspace.take(f"{name} {slot}", (size,), *self._wire(wave))

    def _stage(self, wave: int, slot: int, size: int) -> Stage | None:
        """What copies shards to the buffer that is sent, and back, if they are in host memory and the buffer is on a device."""
        if not self.lane_template(wave).staged:
            return None
        shards = self._buffer("shards", wave, slot, size)
        return self.staging(shards.device).flat(f"shards {slot}", shards)

    def _unrounded_buffer(self, wave: int, size: int) -> Tensor | None:
        """Where momentum is written in full precision before it is rounded for the wire."""
        template = self.lane_template(wave)
        if template.comm_dtype == template.update_dtype:
            return None
        return self.workspace.take("unrounded", (size,), template.update_dtype, template.param.device)

    def _wave(self, k: int, sizes: WaveSizes, ortho_batches: Sequence[OrthoBatch], gradient_reads: GradientReads) -> Wave:
        # plan/routes.py describes the buffers, and why the scatter may receive into what the gather has sent.
        routes, slot = self.routes[k], k % self.plan.options.in_flight
        shards, gathered = self._buffer("shards", k, slot, sizes.shards), self._buffer("gathered", k, slot, sizes.gathered)
        results = self._buffer("results", k, slot, sizes.results) if sizes.results else gathered
        stage = self._stage(k, slot, sizes.shards)
        beside = shards if stage is None else stage.host  # the same shards, beside the weights
        unrounded, scratch = self._unrounded_buffer(k, sizes.shards), RoundingScratch(self.workspace, "rounding beside")
        staying = offsets_of(routes.staying, sizes.staying_offset)
        momentum = [*offsets_of(routes.gather_out), *staying], beside if unrounded is None else unrounded
        updates = [*offsets_of(routes.scatter_in), *staying], beside

        def gathers(rank: int) -> tuple[Sequence[PieceTransfer], Sequence[PieceTransfer]]:
            of_rank = self.routes_of_rank(rank)[k]
            return of_rank.gather_in, of_rank.gather_out

        def scatters(rank: int) -> tuple[Sequence[PieceTransfer], Sequence[PieceTransfer]]:
            of_rank = self.routes_of_rank(rank)[k]
            return of_rank.scatter_in, of_rank.scatter_out

        unpack_from = [(offsets_of(routes.gather_in), gathered), (staying, shards)]
        pack_into = [(offsets_of(routes.scatter_out), results), (staying, shards)]
        return Wave(
            gather=self.exchange_buffers(gathered, shards, gathers, f"slot {slot}", "gather"),
            scatter=self.exchange_buffers(shards, results, scatters, f"slot {slot}", "scatter"),
            momentum_views=ShardViews(
                self.piece_views(*momentum), self.step_params, RoundingScratch(self.workspace), self._filled_once
            ),
            rounding=CopyPairs([], []) if unrounded is None else CopyPairs([beside], [unrounded]),
            update_views=ShardViews(self.piece_views(*updates), self.step_params, scratch),
            owned_batches=tuple(_owned_batch(routes, batch, unpack_from, pack_into) for batch in ortho_batches),
            gradient_reads=gradient_reads,
            fallible=self._fallible_wave(k),
            stage=stage,
        )

    def _fallible_wave(self, k: int) -> FallibleWave | None:
        if not any(self.step_params[param].fallible for param in self._wave_params[k]):
            return None
        return FallibleWave(self.failures, frozenset(key for key, shared in self._batch_keys.items() if shared is not None))


def _owned_batch(
    routes: WaveRoutes,
    ortho_batch: OrthoBatch,
    unpack_from: Sequence[tuple[PlacedTransfers, Tensor]],
    pack_into: Sequence[tuple[PlacedTransfers, Tensor]],
) -> OwnedBatch:
    """A batch with its copies.

    ``unpack_from`` says where the pieces lie in the buffers when the gather is done, ``pack_into`` where the pieces of the result
    must go.
    """
    position = {task: k for k, task in enumerate(_tasks_in(routes, ortho_batch))}
    unpack, pack = CopyPairs([], []), CopyPairs([], [])
    for batch_views, buffer_views, places in (
        (unpack.target, unpack.source, unpack_from),
        (pack.source, pack.target, pack_into),
    ):
        for transfers, buffer in places:
            placed = [PlacedPiece(t.piece, offset, position[t.task]) for t, offset in transfers if t.task in position]
            blocks = blocks_of(placed, ortho_batch.batch.cols, ortho_batch.stacked.stride(0))
            in_batch, in_buffer = strided_views(blocks, ortho_batch.stacked, buffer)
            batch_views.extend(in_batch)
            buffer_views.extend(in_buffer)
    return OwnedBatch(ortho_batch, unpack, pack)


def _tasks_in(routes: WaveRoutes, ortho_batch: OrthoBatch) -> list[int]:
    """The tasks of a batch of owned matrices, in its order: each range is one matrix, so item k is owned task k."""
    return [routes.owned_tasks[item_range.item] for item_range in ortho_batch.batch.slices]


def _rule_state_by_task(routes: WaveRoutes, ortho_batches: Sequence[OrthoBatch]) -> dict[int, Tensor]:
    """Task → the numbers of its outputs during a step, (outputs,)."""
    return {
        task: batch.rule_state[k]
        for batch in ortho_batches
        if batch.rule_state is not None
        for k, task in enumerate(_tasks_in(routes, batch))
    }


def _tasks_held(routes: WaveRoutes) -> set[int]:
    """Tasks of which this rank holds a piece; a replica that sends nothing still keeps its momentum."""
    return {transfer.task for transfer in (*routes.scatter_in, *routes.gather_out, *routes.staying)}


def _first_reads(reads: Sequence[set[int]], order: Sequence[int]) -> list[list[int]]:
    """For each reader, those of its parameters in ``reads`` that no reader before it in ``order`` reads."""
    firsts: list[list[int]] = [[] for _ in reads]
    seen: set[int] = set()
    for k in order:
        firsts[k] = sorted(reads[k] - seen)
        seen |= reads[k]
    return firsts
