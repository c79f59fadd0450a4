"""From a plan to what one rank runs: buffers, views and batches, all made before the first step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor
from torch.profiler import record_function

from ..layout import clip, length
from ..ortho import Workspace
from ..plan import (
    NO_WAVE,
    Batch,
    ItemRange,
    PieceTransfer,
    Plan,
    PlannedParam,
    WaveRoutes,
    plan_batches,
    routes_of,
    slot_sizes,
    wave_sizes,
)
from ..transport import Exchange
from .ortho_batch import OrthoBatch, reserve_ortho_batches
from .pipeline import waves_ahead
from .rule_state import RuleStateExchange, load_rule_state, rule_state_exchanges, rule_state_param, store_rule_state
from .settings import ExecutorSettings
from .shard_views import GradLifetime, ShardView, ShardViews
from .step_param import StepParam, local_part
from .strided_copies import PlacedPiece, blocks_of, strided_views
from .wave import CopyPairs, ExchangeBuffers, OwnedBatch, Wave

__all__ = ["LocalBatch", "RankProgram", "build_rank_program"]


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Matrices that are whole on this rank: momentum, orthogonalise, update, nothing sent."""

    stage: OrthoBatch
    parts: ShardViews
    grad_lifetime: GradLifetime
    rule_state: list[ShardView]

    def run(self, step_params: Sequence[StepParam]) -> None:
        """One step of the batch."""
        with record_function("meshmuon::momentum"):
            self.grad_lifetime.accumulate(step_params)
            self.parts.fill(step_params)
            load_rule_state(self.rule_state, step_params)
        self.grad_lifetime.free_gradients(step_params)
        self.stage.orthogonalise()
        with record_function("meshmuon::update"):
            self.parts.apply(step_params)
            store_rule_state(self.rule_state, step_params)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does in a step.

    Attributes:
        waves: what is exchanged, wave by wave.
        local: what needs no exchange.
        memories: what rules remember of the matrices that are exchanged.
        rest: the parameters of which this rank holds nothing.
        failures: where stages put what went wrong during a step.
    """

    waves: tuple[Wave, ...] = ()
    local: tuple[LocalBatch, ...] = ()
    rule_states: tuple[RuleStateExchange, ...] = ()
    rest: GradLifetime = field(default_factory=GradLifetime)
    failures: list[Exception] = field(default_factory=list)


def build_rank_program(
    plan: Plan,
    rank: int,
    step_params: Sequence[StepParam],
    exchange: Exchange | None,
    workspace: Workspace,
    settings: ExecutorSettings,
) -> RankProgram:
    """Everything that ``rank`` needs to execute ``plan`` on ``step_params``."""
    return _Builder(plan, rank, step_params, exchange, workspace, settings).build()


class _Builder:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        step_params: Sequence[StepParam],
        exchange: Exchange | None,
        workspace: Workspace,
        settings: ExecutorSettings,
    ) -> None:
        self.plan, self.rank, self.step_params, self.exchange = plan, rank, step_params, exchange
        self.workspace, self.settings = workspace, settings
        self.failures: list[Exception] = []
        self.local_index = [_local_index(entry, rank) for entry in plan.params]
        self.window = [_local_window(entry, rank) for entry in plan.params]
        first: dict[Tensor, int] = {}
        self.first = [first.setdefault(one.param, k) for k, one in enumerate(step_params)]  # momentum is kept per parameter
        self.routes = routes_of(plan, rank)
        self.company = _company(plan)
        self.sizes = [wave_sizes(routes) for routes in self.routes]

    def build(self) -> RankProgram:
        runs = self._local_runs()
        local = self._batches(runs, [self.company[run.item, self._matrix_at(run)] for run in runs])
        # Every matrix that this rank owns in a wave is a run of one, named by its parameter.
        owned = [[ItemRange(self.plan.tasks[task].param, 0, 1) for task in routes.owned] for routes in self.routes]
        tasks = [[self.plan.tasks[task] for task in routes.owned] for routes in self.routes]
        keys = [[self.company[task.param, task.matrix] for task in wave] for wave in tasks]
        batches = [self._batches(wave, some) for wave, some in zip(owned, keys, strict=True)]
        everything = [(batch, self._like(runs, batch)) for batch in local]
        everything += [(batch, self._like(wave, batch)) for wave, some in zip(owned, batches, strict=True) for batch in some]
        reserve_ortho_batches(everything, self.workspace, self.settings)
        self._reserve_buffers()
        grad_lifetimes, rest = self._touches(runs, local)
        stages = [[self._stage(wave, batch) for batch in some] for wave, some in zip(owned, batches, strict=True)]
        waves = [self._wave(k, stages[k], grad_lifetimes[k]) for k in range(len(owned))]
        alone = [self._local_batch(runs, batch, grad_lifetimes[len(owned) + k]) for k, batch in enumerate(local)]
        return RankProgram(tuple(waves), tuple(alone), tuple(self._memories(stages)), rest, self.failures)

    def _local_runs(self) -> list[ItemRange]:
        """Matrices that need no exchange, as runs of consecutive matrices of local tensors."""
        runs: list[ItemRange] = []
        for task in self.plan.tasks:
            if task.wave != NO_WAVE or self.rank not in task.sharded.piece_and_replica:
                continue
            at = self.local_index[task.param][task.matrix]
            if runs and runs[-1].item == task.param and runs[-1].stop == at:
                runs[-1] = ItemRange(task.param, runs[-1].start, at + 1)
            else:
                runs.append(ItemRange(task.param, at, at + 1))
        return runs

    def _matrix_at(self, run: ItemRange) -> int:
        return next(matrix for matrix, at in self.local_index[run.item].items() if at == run.start)

    def _batches(self, runs: Sequence[ItemRange], company: Sequence[Hashable]) -> tuple[Batch, ...]:
        items = [self.step_params[run.item].item(run.stop - run.start, with_=key) for run, key in zip(runs, company, strict=True)]
        return plan_batches(items, budget=self.settings.memory_budget, chunk_size=self.settings.chunk_size)

    def _like(self, runs: Sequence[ItemRange], batch: Batch) -> StepParam:
        return self.step_params[runs[batch.slices[0].item].item]

    def _stage(self, runs: Sequence[ItemRange], batch: Batch) -> OrthoBatch:
        return OrthoBatch(batch, self._like(runs, batch), self.workspace, self.settings, self.failures)

    def _local_batch(self, runs: Sequence[ItemRange], batch: Batch, grad_lifetime: GradLifetime) -> LocalBatch:
        stage = self._stage(runs, batch)
        parts, rule_state, offset = [], [], 0
        for part in batch.slices:
            run, count = runs[part.item], part.stop - part.start
            here = slice(offset, offset + count)
            matrices = run.item, run.start + part.start, run.start + part.stop
            parts.append(self._part(*matrices, stage.matrices[here]))
            if stage.rule_state is not None:
                rule_state.append(self._memory_part(*matrices, stage.rule_state[here]))
            offset += count
        return LocalBatch(stage, ShardViews(parts, self.step_params), grad_lifetime, rule_state)

    def _part(self, entry: int, start: int, stop: int, view: Tensor) -> ShardView:
        """Matrices [start, stop) of the local tensor of parameter ``entry``, which ``view`` holds in the same order."""
        local = local_part(self.step_params[entry].param)
        return _part(entry, local, self._stack(entry, start, stop), self.window[entry], view)

    def _memory_part(self, entry: int, start: int, stop: int, view: Tensor) -> ShardView:
        """The rule's numbers of matrices [start, stop), likewise."""
        step_params = self.step_params[entry]
        assert step_params.rule_state is not None
        window = _local_window(rule_state_param(self.plan.params[entry], step_params), self.rank)
        return _part(entry, local_part(step_params.rule_state), self._stack(entry, start, stop), window, view)

    def _stack(self, entry: int, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(start, stop),) if self.step_params[entry].matrices.stack_dims else ()

    def _memories(self, stages: Sequence[Sequence[OrthoBatch]]) -> list[RuleStateExchange]:
        kept: dict[int, Tensor] = {}
        for routes, some in zip(self.routes, stages, strict=True):
            for stage in some:
                if stage.rule_state is not None:
                    kept.update({routes.owned[part.item]: stage.rule_state[k] for k, part in enumerate(stage.batch.slices)})

        def part_of(index: int, view: Tensor) -> ShardView:
            task = self.plan.tasks[index]
            at = self.local_index[task.param][task.matrix]
            return self._memory_part(task.param, at, at + 1, view)

        return rule_state_exchanges(self.plan, self.rank, self.step_params, self.exchange, kept, part_of)

    def _piece(self, send: PieceTransfer, buffer: Tensor, offset: int) -> ShardView:
        task = self.plan.tasks[send.task]
        at = self.local_index[task.param][task.matrix]
        return self._part(task.param, at, at + 1, buffer[offset : offset + send.piece.size])

    def _touches(self, runs: Sequence[ItemRange], local: Sequence[Batch]) -> tuple[list[GradLifetime], GradLifetime]:
        """Per wave and then per local batch, in the order in which the pipeline fills them."""
        touched = [self._touched(routes) for routes in self.routes]
        touched += [{self.first[runs[part.item].item] for part in batch.slices} for batch in local]
        count, first = len(self.routes), waves_ahead(self.plan.options.in_flight)
        order = [*range(min(first, count)), *range(count, len(touched)), *range(min(first, count), count)]
        begins: list[list[int]] = [[] for _ in touched]
        ends: list[list[int]] = [[] for _ in touched]
        for turns, found in ((order, begins), (order[::-1], ends)):
            seen: set[int] = set()
            for k in turns:
                found[k] = sorted(touched[k] - seen)
                seen |= touched[k]
        rest = set(self.first) - set().union(*touched)
        return [GradLifetime(tuple(b), tuple(e)) for b, e in zip(begins, ends, strict=True)], GradLifetime(
            (), tuple(sorted(rest))
        )

    def _touched(self, routes: WaveRoutes) -> set[int]:
        """Parameters of which this rank holds a piece in a wave; a replica that sends nothing still keeps its momentum."""
        return {self.first[self.plan.tasks[send.task].param] for send in (*routes.scatter_in, *routes.gather_out, *routes.own)}

    def _reserve_buffers(self) -> None:
        turns = self.plan.options.in_flight
        for lane in dict.fromkeys(self.plan.lanes):
            mine = [k for k, one in enumerate(self.plan.lanes) if one == lane]
            for slot in range(turns):
                largest = slot_sizes([self.sizes[k] for k in mine if k % turns == slot])
                for name, size in (("mine", largest.mine), ("theirs", largest.theirs), ("results", largest.results)):
                    self._buffer(name, mine[0], slot, size)
            self._rough(mine[0], max(self.sizes[k].mine for k in mine))

    def _buffer(self, name: str, wave: int, slot: int, size: int) -> Tensor:
        like = self._like_lane(wave)
        return self.workspace.take(f"{name} {slot}", (size,), like.comm_dtype, like.param.device)

    def _rough(self, wave: int, size: int) -> Tensor | None:
        """Where momentum is written in full precision before it is rounded for the wire."""
        like = self._like_lane(wave)
        if like.comm_dtype == like.update_dtype:
            return None
        return self.workspace.take("rough", (size,), like.update_dtype, like.param.device)

    def _like_lane(self, wave: int) -> StepParam:
        lane = self.plan.lanes[wave]
        return next(self.step_params[k] for k, entry in enumerate(self.plan.params) if entry.lane == lane)

    def _wave(self, k: int, stages: Sequence[OrthoBatch], grad_lifetime: GradLifetime) -> Wave:
        routes, sizes, slot = self.routes[k], self.sizes[k], k % self.plan.options.in_flight
        mine, theirs = self._buffer("mine", k, slot, sizes.mine), self._buffer("theirs", k, slot, sizes.theirs)
        results = self._buffer("results", k, slot, sizes.results) if sizes.results else theirs
        rough = self._rough(k, sizes.mine)
        out, back = _offsets(routes.gather_out), _offsets(routes.scatter_in)
        own = _offsets(routes.own, sizes.own_offset)
        came, goes = _offsets(routes.gather_in), _offsets(routes.scatter_out)
        filled = mine if rough is None else rough
        return Wave(
            gather=self._flow(theirs, routes.gather_in, mine, routes.gather_out),
            scatter=self._flow(mine, routes.scatter_in, results, routes.scatter_out),
            fill=ShardViews([self._piece(send, filled, at) for send, at in (*out, *own)], self.step_params),
            rounding=CopyPairs([], []) if rough is None else CopyPairs([mine], [rough]),
            apply=ShardViews([self._piece(send, mine, at) for send, at in (*back, *own)], self.step_params),
            owned_batches=tuple(self._staged(routes, stage, (came, theirs), (goes, results), (own, mine)) for stage in stages),
            grad_lifetime=grad_lifetime,
        )

    def _flow(
        self, received: Tensor, comes: Sequence[PieceTransfer], sent: Tensor, goes: Sequence[PieceTransfer]
    ) -> ExchangeBuffers:
        assert self.exchange is not None
        inward, outward = _counts(comes, lambda send: send.source), _counts(goes, lambda send: send.target)
        return ExchangeBuffers(
            received[: sum(inward.values())],
            self.exchange.splits(inward),
            sent[: sum(outward.values())],
            self.exchange.splits(outward),
        )

    def _staged(self, routes: WaveRoutes, stage: OrthoBatch, came: _Held, goes: _Held, own: _Held) -> OwnedBatch:
        position = {routes.owned[part.item]: k for k, part in enumerate(stage.batch.slices)}
        into_stage, into_buffers = CopyPairs([], []), CopyPairs([], [])
        for (sends, buffer), copies, unpacks in (
            (came, into_stage, 1),
            (own, into_stage, 1),
            (goes, into_buffers, 0),
            (own, into_buffers, 0),
        ):
            placed = [PlacedPiece(send.piece, at, position[send.task]) for send, at in sends if send.task in position]
            views = strided_views(blocks_of(placed, stage.batch.cols, stage.matrices.stride(0)), stage.matrices, buffer)
            copies.target.extend(views[0] if unpacks else views[1])
            copies.source.extend(views[1] if unpacks else views[0])
        return OwnedBatch(stage, into_stage, into_buffers)


_Held: TypeAlias = "tuple[list[tuple[PieceTransfer, int]], Tensor]"
"""Sends with their offsets, and the buffer that these are offsets of."""


def _company(plan: Plan) -> dict[tuple[int, int], Hashable]:
    """What two matrices must have in common to be worked on together, so that replicas that compute for themselves stay equal.

    Some libraries round a product differently when more matrices share its batch. A matrix that several ranks compute is
    therefore batched only with matrices that all of these ranks have beside it; for any other there is no such demand.
    """
    done: dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]] = {}
    for task in plan.tasks:
        holders = tuple(sorted(task.sharded.piece_and_replica)) if task.wave == NO_WAVE else ()
        done.setdefault((task.param, task.matrix), []).append((task.owner, task.wave, holders))
    return {key: tuple(times) if len(times) > 1 or len(times[0][2]) > 1 else None for key, times in done.items()}


def _part(entry: int, local: Tensor, stack: tuple[slice, ...], window: tuple[slice, slice] | None, view: Tensor) -> ShardView:
    cut = (*stack, *(window or ()))
    shape = local[cut].shape if cut else local.shape
    return ShardView(entry, None if shape == local.shape else cut, view.view(shape))


def _local_index(entry: PlannedParam, rank: int) -> dict[int, int]:
    """Matrix → its position among those that ``rank`` holds a piece of."""
    if not entry.stack_dims:
        return {0: 0}
    held = (matrix for layout in entry.layouts for start, stop in layout.local(rank)[0] for matrix in range(start, stop))
    return {matrix: position for position, matrix in enumerate(held)}


def _local_window(entry: PlannedParam, rank: int) -> tuple[slice, slice] | None:
    """Where the rows and columns of ``entry.window`` are in the local tensor of ``rank``."""
    own = [layout.local(rank) for layout in entry.layouts if rank in layout.mesh.ranks]
    if entry.window is None or not own:
        return None
    row, col = (own[0][entry.stack_dims + k] for k in range(2))
    (top, bottom), (left, right) = entry.window
    above, before = length(clip(row, 0, top)), length(clip(col, 0, left))
    return slice(above, above + length(clip(row, top, bottom))), slice(before, before + length(clip(col, left, right)))


def _offsets(sends: Sequence[PieceTransfer], start: int = 0) -> list[tuple[PieceTransfer, int]]:
    """Each send with where it begins in its buffer, one behind the other."""
    placed = []
    for send in sends:
        placed.append((send, start))
        start += send.piece.size
    return placed


def _counts(sends: Sequence[PieceTransfer], peer: Callable[[PieceTransfer], int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for send in sends:
        counts[peer(send)] = counts.get(peer(send), 0) + send.piece.size
    return counts
