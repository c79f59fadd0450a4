"""A plan as plain data, equal on all ranks except for parameters that only one rank knows, and the figures that
follow.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add

from ..layout import Layout, ShardedMatrix
from .owners import lightest_possible
from .tasks import EVERY_HOLDER, NO_WAVE, PieceTransfer, PlannedParam, PlanOptions, Task
from .traffic import WaveOwners, WaveTraffic, count_traffic
from .waves import Footprint


@dataclass(frozen=True)
class PlanData:
    """Owners and waves of all matrices. ``routes_of`` derives from them what each rank sends.

    An (18, D) matrix over 8 ranks: ranks 0 to 5 hold 3 rows each, ranks 6 and 7 none. Its task has one owner among
    ranks 0 to 5, say rank 2. In its wave the other five holders send their rows to rank 2, and get their rows of the
    result back from it.

    Attributes:
        ranks: all ranks that take part, in ascending order.
        params: the parts: parameters, and each matrix of a fused one.
        tasks: the matrices.
        wave_lanes: for each wave, the device type, dtype on the wire and dtype of the update that its matrices have in
            common.
        options: the options that it was made with.
    """

    ranks: tuple[int, ...]
    params: tuple[PlannedParam, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    wave_lanes: tuple[Hashable, ...]
    options: PlanOptions

    def gather_sends(self, index: int) -> list[PieceTransfer]:
        """The pieces that task ``index`` gathers at its owner, each from its holder in the owner's replica."""
        task = self.tasks[index]
        senders = task.sharded.senders(task.owner) if task.wave != NO_WAVE else ()
        return [PieceTransfer(index, source, task.owner, piece) for piece, source in senders if source != task.owner]

    def scatter_sends(self, index: int) -> list[PieceTransfer]:
        """The pieces of its result that task ``index`` scatters, each to all of its holders."""
        task = self.tasks[index]
        targets = ((piece, rank) for piece in task.sharded.pieces for rank in piece.holders if rank != task.owner)
        return (
            [PieceTransfer(index, task.owner, rank, piece) for piece, rank in targets] if task.wave != NO_WAVE else []
        )

    @cached_property
    def loads(self) -> dict[int, float]:
        """Rank → cost of its matrices, private ones left out, and of copies between its device and host memory."""
        loads = _loads(self, lambda task: 0.0 if self.params[task.param].private else task.cost)
        for rank, count in self.bytes_copied.items():
            loads[rank] += self.options.cost.per_byte_of_host * count
        return loads

    @cached_property
    def flops(self) -> dict[int, float]:
        """Rank → FLOPs of its matrices."""
        return _loads(self, lambda task: float(self.params[task.param].flops))

    @cached_property
    def computed(self) -> dict[int, int]:
        """Rank → number of matrices that it orthogonalises, including those that other holders compute as well."""
        return {rank: round(count) for rank, count in _loads(self, lambda task: 1.0).items()}

    @cached_property
    def bound(self) -> float:
        """A lower bound of the heaviest rank's cost, for plans of whole matrices that may all go to any rank."""
        costs = [task.cost for task in self.tasks if not self.params[task.param].private]
        return lightest_possible(costs, len(self.ranks)) if costs else 0.0

    @cached_property
    def wave_owners(self) -> WaveOwners:
        """Who owns what in each wave, with bytes on the wire."""
        return WaveOwners(self.ranks, self.tasks, [param.wire for param in self.params], len(self.wave_lanes))

    @cached_property
    def traffic(self) -> tuple[WaveTraffic, ...]:
        """What every rank sends and receives in each wave."""
        return count_traffic(self.wave_owners, self.options.nodes)

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Rank → bytes that it sends to other ranks in a step."""
        return self._summed(exchange.sent for wave in self.traffic for exchange in (wave.gather, wave.scatter))

    @cached_property
    def bytes_between(self) -> dict[int, int]:
        """Rank → bytes that it sends to ranks of other nodes in a step."""
        return self._summed(exchange.sent_between for wave in self.traffic for exchange in (wave.gather, wave.scatter))

    @cached_property
    def bytes_copied(self) -> dict[int, int]:
        """Rank → bytes that it copies between its device and host memory in a step, for weights that are in host
        memory.
        """
        return copied_bytes(self.ranks, self.params, self.tasks)

    def _summed(self, exchanges: Iterable[Sequence[int]]) -> dict[int, int]:
        totals = [0] * len(self.ranks)
        for exchange in exchanges:
            totals = list(map(add, totals, exchange))
        return dict(zip(self.ranks, totals, strict=True))

    @cached_property
    def digest(self) -> str:
        """A hash of all that ranks must agree on: equal on two ranks exactly when they would do the same."""
        layout_numbers: dict[Layout, int] = {}
        hasher = hashlib.sha256(repr(self.options).encode())
        for param in self.params:
            if not param.private:
                layouts = [layout_numbers.setdefault(layout, len(layout_numbers)) for layout in param.layouts]
                details = param.stack_dims, param.itemsize, param.flops, param.share, param.window
                back = () if param.itemsize_back is None else (param.itemsize_back,)
                hasher.update(repr((param.name, layouts, details, str(param.lane), param.how, *back)).encode())
        for layout in layout_numbers:
            hasher.update(repr((layout.shape, layout.mesh.shape, layout.mesh.ranks, layout.placements)).encode())
        shared = [(task.owner, task.wave) for task in self.tasks if not self.params[task.param].private]
        hasher.update(repr(shared).encode())
        return hasher.hexdigest()

    def buffer_bytes(self, rank: int) -> int:
        """Bytes of all exchange buffers on ``rank``."""
        return self._buffer_bytes[rank]

    @cached_property
    def _buffer_bytes(self) -> dict[int, int]:
        return self.buffers(self.options.in_flight)

    def buffers(self, in_flight: int) -> dict[int, int]:
        """Rank → bytes of its exchange buffers."""
        total = Counter(dict.fromkeys(self.ranks, 0))
        for footprint, waves in self._footprints:
            total.update(footprint.bytes_by_rank(waves, in_flight))
        return total

    @cached_property
    def _footprints(self) -> list[tuple[Footprint, list[int]]]:
        """Of each lane, the buffers of its matrices, and their waves."""
        lanes: dict[Hashable, list[Task]] = {lane: [] for lane in self.wave_lanes}
        for task in self.tasks:
            if task.wave != NO_WAVE:
                lanes[self.wave_lanes[task.wave]].append(task)
        return [
            (Footprint(tasks, self.params[tasks[0].param].wire), [task.wave for task in tasks])
            for tasks in lanes.values()
        ]


def add_local_costs(loads: dict[int, float], costs: Iterable[tuple[ShardedMatrix, float]]) -> None:
    """Adds what every holder computes for itself; summed per ``ShardedMatrix`` first, which may have thousands of
    holders.
    """
    total: dict[ShardedMatrix, float] = {}
    for sharded, amount in costs:
        total[sharded] = total.get(sharded, 0.0) + amount
    for sharded, amount in total.items():
        for rank in sharded.holdings:
            loads[rank] += amount


def copied_bytes(ranks: Iterable[int], params: Sequence[PlannedParam], tasks: Iterable[Task]) -> dict[int, int]:
    """Rank → bytes to its device and back, of what it holds of staged parameters. The same for every choice of
    owners.
    """
    # Thousands of tasks share a ``ShardedMatrix``, which may have thousands of holders.
    staged = Counter((task.sharded, params[task.param].wire) for task in tasks if params[task.param].staged)
    copied = dict.fromkeys(ranks, 0)
    for (sharded, wire), count in staged.items():
        sizes = [wire.of(piece).held for piece in sharded.pieces]
        for rank, (piece, _) in sharded.holdings.items():
            copied[rank] += 2 * sizes[piece] * count
    return copied


def _loads(plan: PlanData, amount: Callable[[Task], float]) -> dict[int, float]:
    loads = dict.fromkeys(plan.ranks, 0.0)
    add_local_costs(loads, ((task.sharded, amount(task)) for task in plan.tasks if task.owner == EVERY_HOLDER))
    for task in plan.tasks:
        if task.owner != EVERY_HOLDER:
            loads[task.owner] += amount(task)
    return loads
