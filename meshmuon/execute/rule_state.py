"""Rule state: the numbers that an update rule keeps per output of a matrix.

They are stored with the shards of the parameter, and the owner of the matrix needs them during a step. One small exchange before
the first wave brings them to the owners. Another one, started after the last wave has computed, brings them back.
``rule_state_param`` says who stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..device import copy_to
from ..plan import NO_WAVE, PieceTransfer, Plan, WaveRoutes, rank_routes
from ..torch_compat import local_part
from ..transport import Exchange
from .program_builder import ProgramBuilder, rule_state_param
from .shard_views import ShardView, grouped
from .step_param import NONE_IDLE, Observer, StepParam
from .wave import CopyPairs, PreparedExchange, StartedExchange


@dataclass(slots=True)
class RuleStateExchange:
    """The rule state of one device and dtype, on one rank. ``Executor.run`` calls the methods in their order here."""

    sent_shards: list[ShardView]  # this rank's stored numbers, with views of the buffer from which they go to the owners
    gather: PreparedExchange  # the exchange that brings them to the owners
    unpack: CopyPairs  # from the received buffer to the batches of owned matrices
    pack: CopyPairs  # from these batches to the buffer that is sent back
    scatter: PreparedExchange  # the exchange that brings them back
    received_shards: list[ShardView]  # this rank's stored numbers, with views of the buffer in which they arrive
    params: frozenset[int]  # the parameters whose numbers travel, between whichever ranks
    _pending: StartedExchange | None = None

    def start_gather(
        self, step_params: Sequence[StepParam], exchange: Exchange, idle: AbstractSet[int], observer: Observer
    ) -> None:
        """Sends the numbers to the owners; before the first wave. Those of ``idle`` parameters have no meaning in this step."""
        load_rule_state(self.sent_shards, step_params, idle)
        self._pending = self.gather.start(exchange, "gather", observer)

    def finish_gather(self) -> None:
        """Copies the received numbers beside the owned matrices; before the first wave computes."""
        assert self._pending is not None
        self._pending.wait()
        self.unpack.run()

    def start_scatter(self, exchange: Exchange, observer: Observer) -> None:
        """Sends the numbers back to where they are stored; after the last wave has computed."""
        self.pack.run()
        self._pending = self.scatter.start(exchange, "scatter", observer)

    def finish_scatter(self, step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> None:
        """Stores the numbers; at the end of the step."""
        assert self._pending is not None
        self._pending.wait()
        store_rule_state(self.received_shards, step_params, idle)


def load_rule_state(shards: Sequence[ShardView], step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> None:
    """Copies stored numbers into the shards' views, except those of ``idle`` parameters."""
    shards = _without(shards, idle)
    CopyPairs([shard.view for shard in shards], [_stored(shard, step_params) for shard in shards]).run()


def store_rule_state(shards: Sequence[ShardView], step_params: Sequence[StepParam], idle: AbstractSet[int] = NONE_IDLE) -> None:
    """Copies the shards' views into the stored numbers, except for ``idle`` parameters and where the skip mask forbids it."""
    for shard in _without(shards, idle):
        target, skip_mask = _stored(shard, step_params), step_params[shard.param_index].settings.skip_mask
        value = copy_to(shard.view, target.device)
        target.copy_(value if skip_mask is None else torch.where(skip_mask, target, value))


def _without(shards: Sequence[ShardView], idle: AbstractSet[int]) -> Sequence[ShardView]:
    return [shard for shard in shards if shard.param_index not in idle] if idle else shards


def _stored(shard: ShardView, step_params: Sequence[StepParam]) -> Tensor:
    rule_state = step_params[shard.param_index].rule_state
    assert rule_state is not None
    return shard.of(local_part(rule_state))


def rule_state_exchanges(builder: ProgramBuilder, numbers: Mapping[int, Tensor]) -> list[RuleStateExchange]:
    """The exchanges of this rank, one per device and dtype, in an order that is the same on every rank.

    ``numbers`` has, for each task that this rank owns in a wave, its rule state during a step, (outputs,).
    """
    if builder.exchange is None:
        return []
    plan, step_params = builder.plan, builder.step_params
    tasks = [t for t, task in enumerate(plan.tasks) if task.wave != NO_WAVE and step_params[task.param].rule_state is not None]
    exchanges = []
    for task_indices in grouped(tasks, lambda t: _device_and_dtype(step_params[plan.tasks[t].param])):
        transfers = [rule_state_transfers(plan, t, step_params) for t in task_indices]
        gathers = [transfer for gather, _ in transfers for transfer in gather]
        scatters = [transfer for _, scatter in transfers for transfer in scatter]
        template = step_params[plan.tasks[task_indices[0]].param]
        params = frozenset(plan.tasks[t].param for t in task_indices)
        routes = partial(rank_routes, gathers=gathers, scatters=scatters)
        exchanges.append(_exchange(builder, routes, template, numbers, params))
    return exchanges


def _device_and_dtype(step_param: StepParam) -> tuple[str, torch.dtype]:
    return step_param.work_device.type, step_param.update_dtype


def rule_state_transfers(
    plan: Plan, task_index: int, step_params: Sequence[StepParam]
) -> tuple[list[PieceTransfer], list[PieceTransfer]]:
    """The transfers of a task's rule state: each piece from one of its holders to the owner, and back to all of its holders.

    If the owner is a holder itself, it is the source: source and target of the transfer are then the same rank.
    """
    task = plan.tasks[task_index]
    planned = rule_state_param(plan.params[task.param], step_params[task.param])
    layout = next(layout for layout in planned.layouts if task.owner in layout.mesh.ranks)
    gathers, scatters = list[PieceTransfer](), list[PieceTransfer]()
    for piece in planned.sharded_matrices(layout)[task.matrix].pieces:
        # Where replicas compute for themselves, a task is for the holders of one replica.
        holders = [rank for rank in piece.holders if rank in task.sharded.holdings]
        source = task.owner if task.owner in holders else holders[0]
        gathers.append(PieceTransfer(task_index, source, task.owner, piece))
        scatters.extend(PieceTransfer(task_index, task.owner, holder, piece) for holder in holders)
    return gathers, scatters


def _exchange(
    builder: ProgramBuilder,
    routes_of_rank: Callable[[int], WaveRoutes],
    template: StepParam,
    numbers: Mapping[int, Tensor],
    params: frozenset[int],
) -> RuleStateExchange:
    routes = routes_of_rank(builder.rank)

    def buffer_for(transfers: Sequence[PieceTransfer]) -> Tensor:
        size = sum(transfer.piece.size for transfer in transfers)
        return torch.zeros(size, dtype=template.update_dtype, device=template.work_device)

    def shards(*placed: tuple[Sequence[PieceTransfer], Tensor]) -> list[ShardView]:
        pieces = _pieces_of(placed)
        return [shard for t, view in pieces for shard in builder.rule_state_views(builder.range_of(t.task), view)]

    def gathers(rank: int) -> tuple[Sequence[PieceTransfer], Sequence[PieceTransfer]]:
        return routes_of_rank(rank).gather_in, routes_of_rank(rank).gather_out

    def scatters(rank: int) -> tuple[Sequence[PieceTransfer], Sequence[PieceTransfer]]:
        return routes_of_rank(rank).scatter_in, routes_of_rank(rank).scatter_out

    gather_out, gather_in = buffer_for(routes.gather_out), buffer_for(routes.gather_in)
    scatter_out, scatter_in = buffer_for(routes.scatter_out), buffer_for(routes.scatter_in)
    staying = routes.staying, buffer_for(routes.staying)
    unpack, pack = CopyPairs([], []), CopyPairs([], [])
    for number_views, buffer_views, placed in (
        (unpack.target, unpack.source, [(routes.gather_in, gather_in), staying]),
        (pack.source, pack.target, [(routes.scatter_out, scatter_out), staying]),
    ):
        for transfer, view in _pieces_of(placed):
            flipped = builder.step_params[builder.plan.tasks[transfer.task].param].matrix_set.flipped
            outputs = transfer.piece.cols if flipped else transfer.piece.rows
            number_views.extend(numbers[transfer.task][start:stop] for start, stop in outputs)
            buffer_views.extend(torch.split(view, [stop - start for start, stop in outputs]))
    return RuleStateExchange(
        sent_shards=shards((routes.gather_out, gather_out), staying),
        gather=builder.exchange_buffers(gather_in, gather_out, gathers, "rule state gather", "rule state gather"),
        unpack=unpack,
        pack=pack,
        scatter=builder.exchange_buffers(scatter_in, scatter_out, scatters, "rule state scatter", "rule state scatter"),
        received_shards=shards((routes.scatter_in, scatter_in), staying),
        params=params,
    )


def _pieces_of(placed: Iterable[tuple[Sequence[PieceTransfer], Tensor]]) -> list[tuple[PieceTransfer, Tensor]]:
    """Each transfer with its part of the buffer that holds exactly these transfers."""
    return [
        pair
        for transfers, buffer in placed
        for pair in zip(transfers, torch.split(buffer, [transfer.piece.size for transfer in transfers]), strict=True)
    ]
