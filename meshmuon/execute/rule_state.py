"""Rule state: the numbers that update rules keep per output, or per input, of a matrix.

They are stored with the shards of the parameter, and the owner of the matrix needs them during a step. One small
exchange before the first wave brings them to the owners. Another one, started after the last wave has computed, brings
them back. ``rule_state_param`` says who stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import NO_WAVE, PieceTransfer, Plan, WaveRoutes, rank_routes
from .program_builder import ProgramBuilder, rule_state_param
from .shards import ShardView, grouped, load_rule_state, store_rule_state
from .step_param import RunningStep, StepParam
from .wave import CopyPairs, PreparedExchange


@dataclass(frozen=True, slots=True)
class RuleStateExchange:
    """The rule state of one device, dtype and memory (the first of the rules that remember, the second, …), on one
    rank.
    """

    params: frozenset[int]  # the parts whose rule state travels, between any ranks
    # this rank's stored numbers, with views of the buffer from which they go to the owners
    sent_shards: list[ShardView]
    gather: PreparedExchange  # the exchange that brings them to the owners
    unpack: CopyPairs  # from the received buffer to the batches of owned matrices
    pack: CopyPairs  # from these batches to the buffer that is sent back
    scatter: PreparedExchange  # the exchange that brings them back
    received_shards: list[ShardView]  # this rank's stored numbers, with views of the buffer in which they arrive

    def run(self, step: RunningStep) -> Iterator[None]:
        """A step in four turns: before the first wave, before it computes, after the last has computed, and at the
        end.
        """
        load_rule_state(self.sent_shards, step)
        gather = self.gather.start(step, "gather")
        yield
        gather.wait()
        self.unpack.run(step)
        yield
        self.pack.run(step)
        scatter = self.scatter.start(step, "scatter")
        yield
        scatter.wait()
        store_rule_state(self.received_shards, step)


def rule_state_exchanges(builder: ProgramBuilder, numbers: Mapping[tuple[int, int], Tensor]) -> list[RuleStateExchange]:
    """The exchanges of this rank, one per device, dtype and memory, in an order that is the same on every rank.

    ``numbers`` has, for each task that this rank owns in a wave and each memory, the rule state during a step: one dim.
    """
    if builder.exchange is None:
        return []
    plan, step_params = builder.plan, builder.step_params
    in_waves = [(t, task) for t, task in enumerate(plan.tasks) if task.wave != NO_WAVE]
    remembered = [(t, memory) for t, task in in_waves for memory in range(len(step_params[task.param].rule_state))]
    exchanges = []
    kinds = [(step_param.work_device.type, step_param.update_dtype) for step_param in step_params]
    for members in grouped(remembered, lambda member: (kinds[plan.tasks[member[0]].param], member[1])):
        transfers = [rule_state_transfers(plan, t, step_params, memory) for t, memory in members]
        params = frozenset(plan.tasks[t].param for t, _ in members)
        routes = rank_routes(
            builder.rank,
            gathers=[transfer for gather, _ in transfers for transfer in gather],
            scatters=[transfer for _, scatter in transfers for transfer in scatter],
        )
        exchanges.append(_exchange(builder, routes, members[0][1], numbers, params))
    return exchanges


def rule_state_transfers(
    plan: Plan, task_index: int, step_params: Sequence[StepParam], memory: int = 0
) -> tuple[list[PieceTransfer], list[PieceTransfer]]:
    """The transfers of a task's rule state: each piece from one of its holders to the owner, and back to all of its
    holders.

    If the owner is a holder itself, it is the source: source and target of the transfer are then the same rank.
    """
    task = plan.tasks[task_index]
    planned = rule_state_param(plan.params[task.param], step_params[task.param], memory)
    layout = next(layout for layout in planned.layouts if task.owner in layout.mesh.ranks)
    to_owner, to_holders = list[PieceTransfer](), list[PieceTransfer]()
    for piece in planned.sharded_matrices(layout)[task.matrix].pieces:
        # Where replicas compute for themselves, a task is for the holders of one replica.
        holders = [rank for rank in piece.holders if rank in task.sharded.holdings]
        source = task.owner if task.owner in holders else holders[0]
        to_owner.append(PieceTransfer(task_index, source, task.owner, piece))
        to_holders.extend(PieceTransfer(task_index, task.owner, holder, piece) for holder in holders)
    return to_owner, to_holders


def _exchange(
    builder: ProgramBuilder,
    routes: WaveRoutes,
    memory: int,
    numbers: Mapping[tuple[int, int], Tensor],
    params: frozenset[int],
) -> RuleStateExchange:
    template = builder.step_params[min(params)]

    def placed(transfers: Sequence[PieceTransfer]) -> tuple[Tensor, list[tuple[PieceTransfer, Tensor]]]:
        """A buffer for exactly these transfers, and the view of each."""
        sizes = [transfer.piece.size for transfer in transfers]
        buffer = torch.zeros(sum(sizes), dtype=template.update_dtype, device=template.work_device)
        return buffer, list(zip(transfers, torch.split(buffer, sizes), strict=True))

    def shards(pieces: Iterable[tuple[PieceTransfer, Tensor]]) -> list[ShardView]:
        return [
            shard for t, view in pieces for shard in builder.rule_state_views(builder.range_of(t.task), view, memory)
        ]

    def copies(pieces: Iterable[tuple[PieceTransfer, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """The numbers of each piece beside its matrix, and in its buffer."""
        beside: list[Tensor] = []
        in_buffer: list[Tensor] = []
        for transfer, view in pieces:
            step_param = builder.step_params[builder.plan.tasks[transfer.task].param]
            along_cols = step_param.matrix_set.flipped != [*step_param.memories.values()][memory]
            places = transfer.piece.cols if along_cols else transfer.piece.rows
            beside.extend(numbers[transfer.task, memory][start:stop] for start, stop in places)
            in_buffer.extend(torch.split(view, [stop - start for start, stop in places]))
        return beside, in_buffer

    (gather_out, sent), (gather_in, gathered) = placed(routes.gather_out), placed(routes.gather_in)
    (scatter_out, results), (scatter_in, received) = placed(routes.scatter_out), placed(routes.scatter_in)
    _, staying = placed(routes.staying)
    (unpacked, arrived), (packed, leaving) = copies([*gathered, *staying]), copies([*results, *staying])
    return RuleStateExchange(
        params=params,
        sent_shards=shards([*sent, *staying]),
        gather=builder.prepare_exchange(gather_in, routes.gather_in, gather_out, routes.gather_out),
        unpack=CopyPairs(unpacked, arrived),
        pack=CopyPairs(leaving, packed),
        scatter=builder.prepare_exchange(scatter_in, routes.scatter_in, scatter_out, routes.scatter_out),
        received_shards=shards([*received, *staying]),
    )
