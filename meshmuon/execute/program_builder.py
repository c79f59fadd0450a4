"""What every kind of program is built from: batches, views of shards and exchange buffers, all made before the
first step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..layout import Layout
from ..ortho import Workspace
from ..plan import (
    NO_WAVE,
    PieceTransfer,
    Plan,
    PlanData,
    PlannedParam,
    plan_batches,
    routes_of,
)
from ..torch_compat import local_part
from ..transport import Exchange
from .buffers import Staging
from .ortho_batch import MATRICES, BatchMemory, OrthoBatch
from .settings import ExecutorSettings
from .shards import ShardView
from .step_param import MatrixKey, StepParam
from .views import LocalWindow
from .wave import PreparedExchange
from .wire import LaneWire


@dataclass(frozen=True, slots=True)
class MatrixRange:
    """Matrices [start, stop) of the local tensor of part ``part_index`` of the plan; only equal ``key``s may share
    a batch.
    """

    part_index: int
    start: int
    stop: int
    key: Hashable = None
    task: int = -1  # of a single matrix


MatrixBatch: TypeAlias = "list[MatrixRange]"
"""Matrices that are orthogonalised together."""


class ProgramBuilder:
    """Turns a plan into what one rank runs. ``build.py`` and ``data_parallel.py`` extend it, ``rule_state.py``
    calls it.
    """

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
        # by the device to which weights in host memory send their matrices
        self.stagings: dict[torch.device, Staging] = {}
        self.memory = BatchMemory(workspace)
        self.routes = routes_of(plan, rank)  # wave by wave
        self._local_index = [_local_index(planned, rank) for planned in plan.params]
        self._matrix_at = [{position: matrix for matrix, position in index.items()} for index in self._local_index]
        self._windows = [_local_window(planned, rank) for planned in plan.params]
        self._batch_keys = batch_keys(plan)
        self.shared = [k for k, planned in enumerate(plan.params) if not planned.private]
        # Matrices that several ranks compute, for different holders.
        self.repeated = frozenset(key for key, shared in self._batch_keys.items() if shared is not None)
        self.wave_params = _wave_params(plan)
        # The matrices that this rank owns, wave by wave.
        self.owned_ranges = [[self.range_of(task) for task in routes.owned_tasks] for routes in self.routes]

    def range_of(self, task_index: int) -> MatrixRange:
        """The matrix of a task of which this rank holds a piece."""
        task = self.plan.tasks[task_index]
        position = self._local_index[task.param][task.matrix]
        return MatrixRange(task.param, position, position + 1, self._batch_keys[task.param, task.matrix], task_index)

    def reserved_batches(
        self, lists: Sequence[Sequence[MatrixRange]], memories: Sequence[str] = (MATRICES,)
    ) -> list[list[MatrixBatch]]:
        """The batches of each list of ranges. Grows the workspace to the size that they need.

        Batch k of a list is in memory k % n of ``memories``, of which there are n.
        """
        batches = [self._batches(ranges) for ranges in lists]
        for of_list in batches:
            for k, batch in enumerate(of_list):
                memory = replace(self.memory, name=memories[k % len(memories)])
                memory.reserve(batch_size(batch), self.template(batch), self.settings.form)
        return batches

    def _batches(self, ranges: Sequence[MatrixRange]) -> list[MatrixBatch]:
        items = [self.step_params[r.part_index].batch_item(r.stop - r.start, key=r.key) for r in ranges]
        devices = sorted(
            (self.step_params[r.part_index].work_device for r in ranges), key=lambda device: device.type == "cpu"
        )
        budget = self.settings.batch_bytes(devices[0]) if devices else 1
        return [
            [replace(whole, start=whole.start + item.start, stop=whole.start + item.stop) for item, whole in slices]
            for batch in plan_batches(items, budget=budget, chunk_size=self.settings.chunk_size)
            for slices in [[(item, ranges[item.item]) for item in batch.slices]]
        ]

    def template(self, batch: MatrixBatch) -> StepParam:
        """The first parameter of a batch: it has the shape, dtypes, device, scheme and rule of all of them."""
        return self.step_params[batch[0].part_index]

    def lane_template(self, wave: int) -> StepParam:
        """The first parameter of a wave's lane: it has the device and the dtypes of all of them."""
        return self.step_params[self._first_of_lane(wave)]

    def lane_wire(self, wave: int) -> LaneWire:
        """How the matrices of a wave travel."""
        first = self._first_of_lane(wave)
        return LaneWire.of(self.plan.params[first], self.step_params[first])

    def _first_of_lane(self, wave: int) -> int:
        lane = self.plan.wave_lanes[wave]
        return next(k for k, planned in enumerate(self.plan.params) if planned.lane == lane)

    def ortho_batch(self, batch: MatrixBatch, memory: str = MATRICES) -> OrthoBatch:
        """A batch with its tensors; the workspace must have been reserved."""
        matrices: dict[MatrixKey, str] = {}
        for matrix_range in batch:
            held, name = self._matrix_at[matrix_range.part_index], self.plan.params[matrix_range.part_index].name
            matrices |= {(matrix_range.part_index, held[k]): name for k in range(matrix_range.start, matrix_range.stop)}
        ortho_batch = OrthoBatch(matrices, self.template(batch), replace(self.memory, name=memory), self.settings)
        if ortho_batch.first_of_kind:
            ortho_batch.try_out()
        return ortho_batch

    def momentum_slot(self, slot: int) -> int | None:
        """Where the old momenta of a wave or batch stay until its update is known to be finite; None if they need
        not.
        """
        return slot if self.settings.guarded else None

    def staging(self, device: torch.device) -> Staging:
        """The stages between host memory and ``device``."""
        if device not in self.stagings:
            self.stagings[device] = Staging(device)
        return self.stagings[device]

    def shard_views(self, matrix_range: MatrixRange, view: Tensor) -> list[ShardView]:
        """This rank's pieces of ``matrix_range``, which the contiguous ``view`` holds in the same order.

        It is one shard view, or a few if the parts of a fused weight take turns.
        """
        step_param = self.step_params[matrix_range.part_index]
        return self._cut(matrix_range, local_part(step_param.param), self._windows[matrix_range.part_index], view)

    def rule_state_views(self, matrix_range: MatrixRange, view: Tensor, memory: int) -> list[ShardView]:
        """The same for the rule state of ``matrix_range``; ``memory`` counts the rules that remember."""
        step_param = self.step_params[matrix_range.part_index]
        window = _local_window(
            rule_state_param(self.plan.params[matrix_range.part_index], step_param, memory), self.rank
        )
        shards = self._cut(matrix_range, local_part(step_param.rule_state[memory]), window, view)
        return [replace(shard, memory=memory) for shard in shards]

    def piece_views(self, transfer: PieceTransfer, offset: int, buffer: Tensor) -> list[ShardView]:
        """One of this rank's pieces in a flat buffer."""
        return self.shard_views(self.range_of(transfer.task), buffer[offset : offset + transfer.piece.size])

    def _cut(
        self, matrix_range: MatrixRange, local: Tensor, window: LocalWindow | None, view: Tensor
    ) -> list[ShardView]:
        part_index, stack_dims = (
            matrix_range.part_index,
            self.step_params[matrix_range.part_index].matrix_set.stack_dims,
        )
        stack = (slice(matrix_range.start, matrix_range.stop),) if stack_dims else ()
        matrix = self._matrix_at[part_index].get(matrix_range.start, 0)
        inside = local[stack].shape
        if window is not None:
            inside = window.shape(inside[:stack_dims], inside[stack_dims + 2 :])
        if inside == local.shape:
            return [ShardView(part_index, None, view.view(inside), matrix)]
        if window is None:
            return [ShardView(part_index, stack, view.view(inside), matrix)]
        return [ShardView(part_index, cut, cut_view, matrix) for cut, cut_view in window.cuts(stack, view.view(inside))]

    def prepare_exchange(
        self, received: Tensor, arriving: Sequence[PieceTransfer], sent: Tensor, leaving: Sequence[PieceTransfer]
    ) -> PreparedExchange:
        """One exchange: the beginnings of two flat buffers, and what of them each rank sends and gets."""
        assert self.exchange is not None
        inward, outward = (_sizes_by_peer(self.rank, transfers, sent.dtype) for transfers in (arriving, leaving))
        received, sent = received[: sum(inward.values())], sent[: sum(outward.values())]
        return PreparedExchange(received, self.exchange.splits(inward), sent, self.exchange.splits(outward))


def batch_size(batch: MatrixBatch) -> int:
    return sum(matrix_range.stop - matrix_range.start for matrix_range in batch)


def _sizes_by_peer(rank: int, transfers: Sequence[PieceTransfer], dtype: torch.dtype) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for transfer in transfers:
        peer = transfer.source if transfer.target == rank else transfer.target
        sizes[peer] = sizes.get(peer, 0) + transfer.piece.size
    return sizes


def rule_state_param(planned: PlannedParam, step_param: StepParam, memory: int) -> PlannedParam:
    """What a rule keeps of a parameter as a separate parameter: on the same mesh, with the same placements.

    A (64, 48) weight has rule state of shape (64, 1). Sharded by columns over 4 ranks, the weight has 12 columns on
    each of them, and the rule state is on the first: the rank that holds column 0 of a row also holds the rule state of
    that row.
    """
    per_input = [*step_param.memories.values()][memory]
    shape = step_param.matrix_set.rule_state_shape(planned.layouts[0].shape, per_input=per_input)
    layouts = tuple(Layout(shape, layout.mesh, layout.placements) for layout in planned.layouts)
    return replace(planned, layouts=layouts, window=step_param.matrix_set.rule_state_window(shape))


def _wave_params(plan: Plan) -> list[frozenset[int]]:
    """The parts whose matrices travel in each wave, between any ranks."""
    params: list[set[int]] = [set() for _ in plan.wave_lanes]
    for task in plan.tasks:
        if task.wave != NO_WAVE:
            params[task.wave].add(task.param)
    return list(map(frozenset, params))


def batch_keys(plan: PlanData) -> dict[tuple[int, int], Hashable]:
    """(parameter, matrix) → what must be equal to share a batch, so that replicas which compute for themselves stay
    equal.

    Some libraries round the products of a batch differently if the batch has more matrices. A matrix that several ranks
    compute is therefore batched only with matrices that all of these ranks compute too. The key of any other matrix is
    None.
    """
    computed: dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]] = {}
    for task in plan.tasks:
        holders = tuple(sorted(task.sharded.holdings)) if task.wave == NO_WAVE else ()
        computed.setdefault((task.param, task.matrix), []).append((task.owner, task.wave, holders))
    return {key: tuple(tasks) if len(tasks) > 1 or len(tasks[0][2]) > 1 else None for key, tasks in computed.items()}


def _local_index(planned: PlannedParam, rank: int) -> dict[int, int]:
    """Matrix → its position in the local tensor of ``rank``. Experts 4 to 7 of 8 on the second of two ranks: {4: 0,
    …, 7: 3}.
    """
    if not planned.stack_dims:
        return {0: 0}
    held = (
        matrix
        for layout in planned.layouts
        for start, stop in layout.held_ranges(rank)[0]
        for matrix in range(start, stop)
    )
    return {matrix: position for position, matrix in enumerate(held)}


def _local_window(planned: PlannedParam, rank: int) -> LocalWindow | None:
    """Where the rows and columns of ``planned.window`` are in the local tensor of ``rank``."""
    local = [layout.held_ranges(rank) for layout in planned.layouts if rank in layout.mesh.ranks]
    if planned.window is None or not local:
        return None
    return LocalWindow.of(planned.window, *local[0][planned.stack_dims : planned.stack_dims + 2])
