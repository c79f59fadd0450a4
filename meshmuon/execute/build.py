"""From a plan to what one rank runs in a step of ``Executor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..plan import NO_WAVE, WaveSizes, gradient_read_order, slot_sizes, wave_sizes
from .buffers import Stage, Staging, offsets_of
from .local_batch import STAGED_IN_FLIGHT, LocalBatch, StagedBatch
from .ortho_batch import MATRICES, OrthoBatch
from .program_builder import MatrixBatch, MatrixRange, ProgramBuilder, batch_size
from .rounding import RoundingScratch
from .rule_state import RuleStateExchange, rule_state_exchanges
from .shards import MomentumViews, ShardView, UpdateViews
from .wave import RankWave, Wave
from .wire_copies import Way, owned_batch, update_views, views_of

_STAGED = tuple(f"staged {MATRICES} {slot}" for slot in range(STAGED_IN_FLIGHT))
"""Where staged batches are orthogonalised, in turns."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does in a step."""

    waves: tuple[RankWave, ...] = ()  # matrices that are exchanged
    in_flight: int = 1  # most waves between their first and their last exchange
    gathered_ahead: int | None = None  # as in ``pipeline_order``
    local: tuple[LocalBatch, ...] = ()  # matrices that need no exchange
    staged: tuple[StagedBatch, ...] = ()  # the same for weights in host memory
    # those of the matrices that are exchanged, one per device, dtype and memory
    rule_states: tuple[RuleStateExchange, ...] = ()
    freed_at_end: Sequence[int] = ()  # the parameters whose gradients no wave and no batch frees
    stagings: tuple[Staging, ...] = ()  # host memory between weights that are there and their devices


class RankProgramBuilder(ProgramBuilder):
    """Builds the program of sharded and local matrices."""

    def build(self) -> RankProgram:
        """Everything that the rank needs to execute the plan."""
        local_ranges, staged_ranges = self._local_ranges()
        local_batches, *wave_batches = self.reserved_batches([local_ranges, *self.owned_ranges])
        (staged_batches,) = self.reserved_batches([staged_ranges], _STAGED)
        sizes = [wave_sizes(routes, self.lane_wire(k).nbytes) for k, routes in enumerate(self.routes)]
        self._reserve_buffers(sizes)
        frees, freed_at_end = self._freed_gradients([*local_batches, *staged_batches])
        waves, owned_rule_state = [], dict[tuple[int, int], Tensor]()
        for k, owned in enumerate(wave_batches):
            owned_batches = [(batch, self.ortho_batch(batch)) for batch in owned]
            waves.append(self._wave(k, sizes[k], owned_batches, frees[k]))
            for batch, ortho_batch in owned_batches:
                for memory, of_batch in enumerate(ortho_batch.rule_state):
                    owned_rule_state |= {(m.task, memory): numbers for m, numbers in zip(batch, of_batch, strict=True)}
        local_frees = iter(frees[len(waves) :])
        local = [self._local_batch(batch, self.ortho_batch(batch), next(local_frees)) for batch in local_batches]
        for k, batch in enumerate(staged_batches):
            self._local_stage(batch, k)  # grown to its final size before anything keeps a view of it
        staged = [self._staged_batch(batch, k, next(local_frees)) for k, batch in enumerate(staged_batches)]
        return RankProgram(
            waves=tuple(waves),
            in_flight=self.plan.options.in_flight,
            local=tuple(local),
            staged=tuple(staged),
            rule_states=tuple(rule_state_exchanges(self, owned_rule_state)),
            freed_at_end=freed_at_end,
            stagings=tuple(self.stagings.values()),
        )

    def _local_ranges(self) -> tuple[list[MatrixRange], list[MatrixRange]]:
        """Matrices that need no exchange; those that are next to each other in a local tensor are one range.

        First those that are computed where they are, then those that are staged: in host memory, and computed on a
        device.
        """
        both: tuple[list[MatrixRange], list[MatrixRange]] = [], []
        for index, task in enumerate(self.plan.tasks):
            if task.wave != NO_WAVE or self.rank not in task.sharded.holdings:
                continue
            ranges = both[self.step_params[task.param].staged]
            matrix, last = self.range_of(index), ranges[-1] if ranges else None
            if last is not None and (last.part_index, last.stop) == (matrix.part_index, matrix.start):
                ranges[-1] = MatrixRange(last.part_index, last.start, matrix.stop, last.key)
            else:
                ranges.append(matrix)
        return both

    def _local_batch(
        self,
        batch: MatrixBatch,
        ortho_batch: OrthoBatch,
        frees: Sequence[int],
        in_host: Tensor | None = None,
        slot: int = 0,
    ) -> LocalBatch:
        """A batch with the place of its matrices in the parameters; with views of ``in_host`` where they are staged."""
        stacked = ortho_batch.stacked if in_host is None else in_host
        shards, rule_state, stop = list[ShardView](), [], 0
        for matrix_range in batch:
            start, stop = stop, stop + matrix_range.stop - matrix_range.start
            shards += self.shard_views(matrix_range, stacked[start:stop])
            for memory, of_batch in enumerate(ortho_batch.rule_state):
                rule_state += self.rule_state_views(matrix_range, of_batch[start:stop], memory)
        updates = UpdateViews(shards, self.step_params, RoundingScratch(self.workspace), self.momentum_slot(slot))
        return LocalBatch(ortho_batch, MomentumViews(shards, self.step_params), updates, rule_state, frees)

    def _staged_batch(self, batch: MatrixBatch, number: int, frees: Sequence[int]) -> StagedBatch:
        stage, in_host = self._local_stage(batch, number)
        ortho_batch = self.ortho_batch(batch, _STAGED[number % STAGED_IN_FLIGHT])
        return StagedBatch(self._local_batch(batch, ortho_batch, frees, in_host, number % STAGED_IN_FLIGHT), stage)

    def _local_stage(self, batch: MatrixBatch, number: int) -> tuple[Stage, Tensor]:
        """The stage of a batch of weights in host memory, and the batch in host memory."""
        memory, template = replace(self.memory, name=_STAGED[number % STAGED_IN_FLIGHT]), self.template(batch)
        size, flat = batch_size(batch), memory.flat(batch_size(batch), template)
        return self.staging(flat.device).matrices(
            memory.name, (size, template.matrix_set.rows, template.matrix_set.cols), flat
        )

    def _freed_gradients(self, local_batches: Sequence[MatrixBatch]) -> tuple[list[list[int]], list[int]]:
        """The parameters whose gradients each wave, then each batch without exchanges, is the last to read; and all
        others.

        Experts (8, D, D) in batches of 4: the second batch reads the gradient last and frees it. Waves read beside the
        main stream, local batches in it: a local batch may not free a gradient that a wave may still be reading, and
        leaves it to the end of the step. The parts of a fused weight share one gradient, and are listed under the index
        of the first part.
        """
        first_part: dict[Tensor, int] = {}
        first = [first_part.setdefault(step_param.param, k) for k, step_param in enumerate(self.step_params)]
        waves = len(self.routes)
        # A replica that sends nothing still keeps its momentum.
        held = [(*routes.scatter_in, *routes.staying) for routes in self.routes]
        reads = [{first[self.plan.tasks[transfer.task].param] for transfer in transfers} for transfers in held]
        reads += [{first[matrix_range.part_index] for matrix_range in batch} for batch in local_batches]
        of_waves = set[int]().union(*reads[:waves])
        frees: list[list[int]] = [[] for _ in reads]
        read_later: set[int] = set()
        order = gradient_read_order(waves, len(local_batches), self.plan.options.in_flight)
        for k in reversed(list(order)):
            frees[k] = sorted(reads[k] - read_later - (of_waves if k >= waves else set()))
            read_later |= reads[k]
        return frees, sorted(set(first).difference(*frees))

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

    def _wire(self, wave: int) -> tuple[torch.dtype, torch.device]:
        return self.lane_wire(wave).base, self.lane_template(wave).work_device

    def _buffer(self, name: str, wave: int, slot: int, nbytes: int) -> Tensor:
        dtype, device = self._wire(wave)
        return self.workspace.take(f"{name} {slot}", (nbytes // dtype.itemsize,), dtype, device)

    def _stage(self, wave: int, slot: int, nbytes: int) -> Stage | None:
        """The stage of shards in host memory whose exchange buffer is on a device; None for all others."""
        if not self.lane_template(wave).staged:
            return None
        shards = self._buffer("shards", wave, slot, nbytes)
        return self.staging(shards.device).flat(f"shards {slot}", shards)

    def _wave(
        self, k: int, sizes: WaveSizes, owned_batches: Sequence[tuple[MatrixBatch, OrthoBatch]], frees: Sequence[int]
    ) -> Wave:
        # plan/routes.py describes the buffers, and why the scatter may receive into what the gather has sent.
        routes, slot, params, wire = (
            self.routes[k],
            k % self.plan.options.in_flight,
            self.wave_params[k],
            self.lane_wire(k),
        )
        shards, gathered = (
            self._buffer("shards", k, slot, sizes.shards),
            self._buffer("gathered", k, slot, sizes.gathered),
        )
        results = self._buffer("results", k, slot, sizes.results) if sizes.results else gathered
        stage = self._stage(k, slot, sizes.shards)
        near_weights = shards if stage is None else stage.host  # the same shards, in the memory of the weights
        staying = offsets_of(routes.staying, sizes.staying_offset, lambda piece: wire.nbytes.of(piece).held)  # in bytes
        gather = Way.of(wire.gather, routes.gather_out, routes.gather_in, staying)
        scatter = Way.of(wire.scatter, routes.scatter_in, routes.scatter_out, staying)
        filled, received = (views_of(self, way, near_weights) for way in (gather, scatter))
        sent = {transfer.task for transfer, _ in filled}
        unsent = [shard for transfer, shards in received if transfer.task not in sent for shard in shards]
        (gathered_in, gathered_out), (scattered_in, scattered_out) = (
            gather.of_dtype(gathered, shards),
            scatter.of_dtype(shards, results),
        )
        return Wave(
            params=params,
            momentum_views=MomentumViews([shard for _, shards in filled for shard in shards], self.step_params, unsent),
            gather=self.prepare_exchange(gathered_in, routes.gather_in, gathered_out, routes.gather_out),
            owned_batches=tuple(
                owned_batch(self, *batch, gather.places(gathered, shards), scatter.places(results, shards))
                for batch in owned_batches
            ),
            scatter=self.prepare_exchange(scattered_in, routes.scatter_in, scattered_out, routes.scatter_out),
            update_views=update_views(self, k, received),
            frees=frees,
            fallible=any(self.step_params[param].fallible for param in params),
            repeated=self.repeated,
            shared=self.shared,
            stage=stage,
        )
