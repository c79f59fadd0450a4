"""The plan of a step: which rank orthogonalises which matrix, and which pieces travel. Plain data, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import ConfigError, PlanError
from ..layout import Layout, ShardedMatrix
from .cost import CostModel
from .footprint import Footprint
from .owners import assign_owners, lightest_possible
from .report import describe, to_json
from .tasks import EVERY_HOLDER, NO_WAVE, PieceTransfer, PlannedParam, Task
from .waves import WaveLimits, cut_into_waves

__all__ = ["REPLICA_OPTIONS", "Plan", "PlanOptions", "make_plan"]

REPLICA_OPTIONS = ("auto", "share", "repeat")
_WORTH_AN_EXCHANGE = 4  # a wave should last at least as long as this many empty exchanges


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What shapes a plan beside the parameters.

    Attributes:
        cost: what work and traffic cost.
        replicas: ``"share"`` (one replica computes for all), ``"repeat"`` (each for itself) or ``"auto"`` (the cheaper one).
        chunk_size: most matrices per wave; -1 leaves it to ``budget``.
        budget: bytes that an owner may gather per wave; see ``WaveLimits``.
        in_flight: most waves between their first and their last exchange; a plan has fewer where buffers would be too large.
    """

    cost: CostModel
    replicas: str = "auto"
    chunk_size: int = -1
    budget: int = 64 * 2**20
    in_flight: int = 6

    def __post_init__(self) -> None:
        if self.replicas not in REPLICA_OPTIONS:
            raise ConfigError(f"replicas={self.replicas!r} is unknown; write one of {REPLICA_OPTIONS}.")


@dataclass(frozen=True)
class Plan:
    """Owners, waves and routes of all matrices. Scatter routes are the gather routes reversed, to every replica.

    Attributes:
        ranks: all ranks that take part, in ascending order.
        params: the parameters.
        tasks: the matrices.
        lanes: the lane of each wave; a wave is one exchange out and one back on its lane.
        options: what it was made with.
    """

    ranks: tuple[int, ...]
    params: tuple[PlannedParam, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    lanes: tuple[Hashable, ...]
    options: PlanOptions

    def __post_init__(self) -> None:
        self._prove()

    def gather_sends(self, index: int) -> Iterator[PieceTransfer]:
        """What task ``index`` needs at its owner: each piece from its holder in the owner's replica."""
        task = self.tasks[index]
        if task.wave != NO_WAVE:
            for piece, source in task.sharded.senders(task.owner):
                if source != task.owner:
                    yield PieceTransfer(index, source, task.owner, piece)

    def scatter_sends(self, index: int) -> Iterator[PieceTransfer]:
        """What goes back: each piece to all of its holders."""
        task = self.tasks[index]
        if task.wave != NO_WAVE:
            for piece in task.sharded.pieces:
                for target in piece.holders:
                    if target != task.owner:
                        yield PieceTransfer(index, task.owner, target, piece)

    @cached_property
    def loads(self) -> dict[int, float]:
        """Rank → cost of its matrices, private ones left out."""
        return _loads(self, lambda task: 0.0 if self.params[task.param].private else task.cost)

    @cached_property
    def flops(self) -> dict[int, float]:
        """Rank → FLOPs of its matrices."""
        return _loads(self, lambda task: float(self.params[task.param].flops))

    @cached_property
    def computed(self) -> dict[int, int]:
        """Rank → number of matrices that it orthogonalises, also those that other holders compute for themselves."""
        return {rank: round(count) for rank, count in _loads(self, lambda task: 1.0).items()}

    @cached_property
    def bound(self) -> float:
        """Cost of the heaviest rank that no plan of whole matrices can beat, were every matrix free to go to any rank."""
        costs = [task.cost for task in self.tasks if not self.params[task.param].private]
        return lightest_possible(costs, len(self.ranks)) if costs else 0.0

    @cached_property
    def elements_sent(self) -> dict[int, int]:
        """Rank → elements that it sends to other ranks in a step."""
        return _sent(self, lambda param: 1)

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Rank → bytes that it sends to other ranks in a step."""
        return _sent(self, lambda param: param.itemsize)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when they would do the same."""
        numbers: dict[Layout, int] = {}
        hasher = hashlib.sha256(repr(self.options).encode())
        for param in self.params:
            if not param.private:
                layouts = [numbers.setdefault(layout, len(numbers)) for layout in param.layouts]
                details = param.stack_dims, param.itemsize, param.flops, param.share, param.window
                facts = param.name, layouts, details, str(param.lane), param.how
                hasher.update(repr(facts).encode())
        for layout in numbers:
            hasher.update(repr((layout.shape, layout.mesh.shape, layout.mesh.ranks, layout.placements)).encode())
        shared = [(task.owner, task.wave) for task in self.tasks if not self.params[task.param].private]
        hasher.update(repr(shared).encode())
        return hasher.hexdigest()

    def buffer_bytes(self, rank: int) -> int:
        """Bytes of all exchange buffers on ``rank``."""
        return self._buffer_bytes[rank]

    @cached_property
    def _buffer_bytes(self) -> dict[int, int]:
        total = dict.fromkeys(self.ranks, 0)
        for lane in dict.fromkeys(self.lanes):
            tasks = [task for task in self.tasks if task.wave != NO_WAVE and self.lanes[task.wave] == lane]
            itemsize = self.params[tasks[0].param].itemsize
            footprint = Footprint([task.sharded for task in tasks], [task.owner for task in tasks], itemsize)
            for rank, size in footprint.bytes_by_rank([task.wave for task in tasks], self.options.in_flight).items():
                total[rank] += size
        return total

    def describe(self) -> str:
        """The plan as text for people."""
        return describe(self)

    def to_json(self) -> str:
        """The plan as JSON for tools."""
        return to_json(self)

    def _prove(self) -> None:
        """Each matrix has one owner per separate copy, and waves and owners fit together.

        That the pieces of a spread tile the matrix, and that each rank holds one piece in one replica, is proved by every
        ``ShardedMatrix`` at birth: it makes sender and receiver of each piece find each other, since both read the same table.
        """
        copies: dict[tuple[int, int], list[ShardedMatrix]] = {}
        for task in self.tasks:
            name = self.params[task.param].name
            if task.wave == NO_WAVE and not (task.owner == EVERY_HOLDER and task.sharded.whole):
                raise PlanError(f"{name}: matrix {task.matrix} is in pieces, but none of them travels")
            if task.wave != NO_WAVE and task.owner not in task.sharded.piece_and_replica:
                raise PlanError(f"{name}: rank {task.owner} owns matrix {task.matrix} but holds no piece of it")
            lane = self.params[task.param].lane
            if task.wave != NO_WAVE and not (0 <= task.wave < len(self.lanes) and self.lanes[task.wave] == lane):
                raise PlanError(f"{name}: it travels on {lane}, but wave {task.wave} is not on that lane: {self.lanes}")
            copies.setdefault((task.param, task.matrix), []).append(task.sharded)
        for k, param in enumerate(self.params):
            self._prove_copies(k, param, copies)

    def _prove_copies(self, k: int, param: PlannedParam, copies: dict[tuple[int, int], list[ShardedMatrix]]) -> None:
        for matrix in range(param.count):
            found = copies.get((k, matrix), [])
            holders = sum(len(sharded.piece_and_replica) for sharded in found)
            expected = sum(len(param.sharded_matrices(layout)[matrix].piece_and_replica) for layout in param.layouts)
            if holders != expected or (
                len(found) > 1 and len({r for sharded in found for r in sharded.piece_and_replica}) != holders
            ):
                raise PlanError(f"{param.name}: matrix {matrix} has {expected} holders, the plan computes it for {holders}")


def make_plan(params: Sequence[PlannedParam], options: PlanOptions) -> Plan:
    """Plans a step on ``params``; a pure function of its arguments."""
    ranks = tuple(sorted({rank for mesh in {layout.mesh for p in params for layout in p.layouts} for rank in mesh.ranks}))
    staying, travelling = _tasks(params, options)
    loads = dict.fromkeys(ranks, 0.0)
    _add_local(loads, ((task.sharded, 0.0 if params[task.param].private else task.cost) for task in staying))
    owners = assign_owners(travelling, loads)
    owned = [replace(task, owner=owner) for task, owner in zip(travelling, owners, strict=True)]
    smallest = _WORTH_AN_EXCHANGE * options.cost.flops_per_exchange
    limits = WaveLimits(options.budget, options.chunk_size, smallest, options.in_flight)
    schedule = cut_into_waves(owned, params, limits)
    scheduled = [replace(task, wave=wave) for task, wave in zip(owned, schedule.waves, strict=True)]
    return Plan(ranks, tuple(params), (*staying, *scheduled), schedule.lanes, replace(options, in_flight=schedule.in_flight))


def _tasks(params: Sequence[PlannedParam], options: PlanOptions) -> tuple[list[Task], list[Task]]:
    """All matrices that are computed, each replica apart where replicas do not share: those that stay, those that travel."""
    staying: list[Task] = []
    travelling: list[Task] = []
    for k, param in enumerate(params):
        for layout in param.layouts:
            for matrix, sharded in enumerate(param.sharded_matrices(layout)):
                if not sharded.size:
                    continue
                shared = sharded.replicas > 1 and _shares(param, sharded, options)
                if sharded.whole and not shared:
                    staying.append(Task(k, matrix, sharded, float(param.flops)))
                    continue
                cost = options.cost.owning(param.flops, sharded, param.itemsize)
                copies = (sharded,) if shared else sharded.separate_replicas
                travelling.extend(Task(k, matrix, replica, cost) for replica in copies)
    return staying, travelling


def _shares(param: PlannedParam, sharded: ShardedMatrix, options: PlanOptions) -> bool:
    if param.private or options.replicas != "auto":
        return options.replicas == "share" and not param.private
    if param.share is not None:
        return param.share
    return options.cost.sharing_pays(param.flops, sharded, param.itemsize)


def _add_local(loads: dict[int, float], work: Iterable[tuple[ShardedMatrix, float]]) -> None:
    """Adds what every holder computes for itself, summed per spread first: thousands of ranks may hold each."""
    total: dict[ShardedMatrix, float] = {}
    for sharded, amount in work:
        total[sharded] = total.get(sharded, 0.0) + amount
    for sharded, amount in total.items():
        for rank in sharded.piece_and_replica:
            loads[rank] += amount


def _loads(plan: Plan, amount: Callable[[Task], float]) -> dict[int, float]:
    loads = dict.fromkeys(plan.ranks, 0.0)
    _add_local(loads, ((task.sharded, amount(task)) for task in plan.tasks if task.owner == EVERY_HOLDER))
    for task in plan.tasks:
        if task.owner != EVERY_HOLDER:
            loads[task.owner] += amount(task)
    return loads


def _sent(plan: Plan, weight: Callable[[PlannedParam], int]) -> dict[int, int]:
    """What each rank sends, counted without listing the sends: pieces are summed per spread and replica."""
    sent = dict.fromkeys(plan.ranks, 0)
    gathered: dict[tuple[ShardedMatrix, int], int] = {}
    for task in plan.tasks:
        if task.wave == NO_WAVE:
            continue
        size = weight(plan.params[task.param])
        piece, replica = task.sharded.piece_and_replica[task.owner]
        own = task.sharded.sizes[piece]
        gathered[task.sharded, replica] = gathered.get((task.sharded, replica), 0) + size
        sent[task.owner] += size * (task.sharded.size * task.sharded.replicas - own)  # the scatter
        sent[task.owner] -= size * own  # its own piece needs no gather
    for (sharded, replica), size in gathered.items():
        for one, elements in zip(sharded.pieces, sharded.sizes, strict=True):
            sent[one.holders[replica]] += size * elements
    return sent
