"""The plan of a step: which rank orthogonalises which matrix, and which pieces travel. Plain data, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import ConfigError, PlanError
from ..layout import Layout, Piece, ShardedMatrix, shard_matrices
from ..matrices import Window
from .cost import CostModel
from .footprint import Footprint
from .owners import Job, assign_owners, lightest_possible
from .waves import Owned, WaveLimits, cut_into_waves

__all__ = ["REPLICA_OPTIONS", "Plan", "PlanOptions", "PlannedParam", "Send", "Task", "make_plan"]

REPLICA_OPTIONS = ("auto", "share", "repeat")
EVERY_HOLDER = -1
NO_WAVE = -1
_WORTH_AN_EXCHANGE = 4  # a wave should last at least as long as this many empty exchanges


@dataclass(frozen=True, slots=True)
class PlannedParam:
    """One parameter, or one part of a fused one.

    Attributes:
        name: its name.
        layouts: how it lies on its mesh; several when the model has the same parameter on sibling meshes.
        lead: how many leading dims count matrices (0 or 1).
        lane: what must be equal for matrices to travel together (device and dtype on the wire).
        itemsize: bytes per element on the wire.
        flops: FLOPs of orthogonalising one of its matrices.
        share: True or False where the user's ``replicas`` does not decide.
        private: known to this rank alone (a plain tensor): neither balanced nor part of the digest.
        window: which rows and columns of the parameter its matrices are; None for all of them.
        how: how its matrices are computed, in words; ranks must agree on it.
    """

    name: str
    layouts: tuple[Layout, ...]
    lead: int
    lane: Hashable
    itemsize: int
    flops: int
    share: bool | None = None
    private: bool = False
    window: Window | None = None
    how: str = ""

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.layouts[0].shape[0] if self.lead else 1

    def sharded_matrices(self, layout: Layout) -> tuple[ShardedMatrix, ...]:
        """How its matrices are spread where it lies as ``layout`` says."""
        return shard_matrices(layout, self.lead, self.window)

    def __str__(self) -> str:
        layouts = "; ".join(map(str, self.layouts))
        return f"{self.name}: {'×'.join(map(str, self.layouts[0].shape))} {layouts}, {self.lane}, {self.flops} FLOPs, {self.how}"


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix, once for every owner that it has.

    Attributes:
        entry: index of its parameter in ``Plan.entries``.
        matrix: index of the matrix in the parameter.
        spread: who holds it.
        owner: the rank that orthogonalises it; ``EVERY_HOLDER`` when each holder has it whole and computes for itself.
        wave: index into ``Plan.lanes``; ``NO_WAVE`` when nothing travels.
    """

    entry: int
    matrix: int
    sharded: ShardedMatrix
    owner: int
    wave: int


@dataclass(frozen=True, slots=True)
class Send:
    """A piece of a matrix that travels."""

    task: int
    source: int
    target: int
    piece: Piece


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
        entries: the parameters.
        tasks: the matrices.
        lanes: the lane of each wave; a wave is one exchange out and one back on its lane.
        options: what it was made with.
    """

    ranks: tuple[int, ...]
    entries: tuple[PlannedParam, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    lanes: tuple[Hashable, ...]
    options: PlanOptions

    def __post_init__(self) -> None:
        self._prove()

    def gather_sends(self, index: int) -> Iterator[Send]:
        """What task ``index`` needs at its owner: each piece from its holder in the owner's replica."""
        task = self.tasks[index]
        if task.wave != NO_WAVE:
            for piece, source in task.sharded.senders(task.owner):
                if source != task.owner:
                    yield Send(index, source, task.owner, piece)

    def scatter_sends(self, index: int) -> Iterator[Send]:
        """What goes back: each piece to all of its holders."""
        task = self.tasks[index]
        if task.wave != NO_WAVE:
            for piece in task.sharded.pieces:
                for target in piece.holders:
                    if target != task.owner:
                        yield Send(index, task.owner, target, piece)

    def cost_of(self, task: Task) -> float:
        """Cost of a task for the rank that does it."""
        entry = self.entries[task.entry]
        return self.options.cost.owning(entry.flops, task.sharded, entry.itemsize) if task.wave != NO_WAVE else float(entry.flops)

    @cached_property
    def loads(self) -> dict[int, float]:
        """Rank → cost of its matrices, private ones left out."""
        return _loads(self, lambda task: 0.0 if self.entries[task.entry].private else self.cost_of(task))

    @cached_property
    def flops(self) -> dict[int, float]:
        """Rank → FLOPs of its matrices."""
        return _loads(self, lambda task: float(self.entries[task.entry].flops))

    @cached_property
    def computed(self) -> dict[int, int]:
        """Rank → number of matrices that it orthogonalises, also those that other holders compute for themselves."""
        return {rank: round(count) for rank, count in _loads(self, lambda task: 1.0).items()}

    @cached_property
    def bound(self) -> float:
        """Cost of the heaviest rank that no plan of whole matrices can beat, were every matrix free to go to any rank."""
        costs = [self.cost_of(task) for task in self.tasks if not self.entries[task.entry].private]
        return lightest_possible(costs, len(self.ranks)) if costs else 0.0

    @cached_property
    def elements_sent(self) -> dict[int, int]:
        """Rank → elements that it sends to other ranks in a step."""
        return _sent(self, lambda entry: 1)

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Rank → bytes that it sends to other ranks in a step."""
        return _sent(self, lambda entry: entry.itemsize)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when they would do the same."""
        numbers: dict[Layout, int] = {}
        hasher = hashlib.sha256(repr(self.options).encode())
        for entry in self.entries:
            if not entry.private:
                layouts = [numbers.setdefault(layout, len(numbers)) for layout in entry.layouts]
                details = entry.lead, entry.itemsize, entry.flops, entry.share, entry.window
                facts = entry.name, layouts, details, str(entry.lane), entry.how
                hasher.update(repr(facts).encode())
        for layout in numbers:
            hasher.update(repr((layout.shape, layout.mesh.shape, layout.mesh.ranks, layout.placements)).encode())
        shared = [(task.owner, task.wave) for task in self.tasks if not self.entries[task.entry].private]
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
            itemsize = self.entries[tasks[0].entry].itemsize
            footprint = Footprint([task.sharded for task in tasks], [task.owner for task in tasks], itemsize)
            for rank, size in footprint.bytes_by_rank([task.wave for task in tasks], self.options.in_flight).items():
                total[rank] += size
        return total

    def describe(self) -> str:
        """The plan as text for people."""
        from .report import describe

        return describe(self)

    def to_json(self) -> str:
        """The plan as JSON for tools."""
        from .report import to_json

        return to_json(self)

    def _prove(self) -> None:
        """Each matrix has one owner per separate copy, and waves and owners fit together.

        That the pieces of a spread tile the matrix, and that each rank holds one piece in one replica, is proved by every
        ``ShardedMatrix`` at birth: it makes sender and receiver of each piece find each other, since both read the same table.
        """
        copies: dict[tuple[int, int], list[ShardedMatrix]] = {}
        for task in self.tasks:
            name = self.entries[task.entry].name
            if task.wave == NO_WAVE and not (task.owner == EVERY_HOLDER and task.sharded.whole):
                raise PlanError(f"{name}: matrix {task.matrix} is in pieces, but none of them travels")
            if task.wave != NO_WAVE and task.owner not in task.sharded.piece_and_replica:
                raise PlanError(f"{name}: rank {task.owner} owns matrix {task.matrix} but holds no piece of it")
            lane = self.entries[task.entry].lane
            if task.wave != NO_WAVE and not (0 <= task.wave < len(self.lanes) and self.lanes[task.wave] == lane):
                raise PlanError(f"{name}: it travels on {lane}, but wave {task.wave} is not on that lane: {self.lanes}")
            copies.setdefault((task.entry, task.matrix), []).append(task.sharded)
        for k, entry in enumerate(self.entries):
            self._prove_copies(k, entry, copies)

    def _prove_copies(self, k: int, entry: PlannedParam, copies: dict[tuple[int, int], list[ShardedMatrix]]) -> None:
        for matrix in range(entry.count):
            found = copies.get((k, matrix), [])
            holders = sum(len(sharded.piece_and_replica) for sharded in found)
            expected = sum(len(entry.sharded_matrices(layout)[matrix].piece_and_replica) for layout in entry.layouts)
            if holders != expected or (
                len(found) > 1 and len({r for sharded in found for r in sharded.piece_and_replica}) != holders
            ):
                raise PlanError(f"{entry.name}: matrix {matrix} has {expected} holders, the plan computes it for {holders}")


def make_plan(entries: Sequence[PlannedParam], options: PlanOptions) -> Plan:
    """Plans a step on ``entries``; a pure function of its arguments."""
    ranks = tuple(sorted({rank for mesh in {layout.mesh for e in entries for layout in e.layouts} for rank in mesh.ranks}))
    copies = list(_copies(entries, options))
    stays = [Task(k, matrix, sharded, EVERY_HOLDER, NO_WAVE) for k, matrix, sharded, travels in copies if not travels]
    moves = [(k, matrix, sharded) for k, matrix, sharded, travels in copies if travels]
    jobs = [Job(sharded, options.cost.owning(entries[k].flops, sharded, entries[k].itemsize)) for k, _, sharded in moves]
    loads = dict.fromkeys(ranks, 0.0)
    _add_local(
        loads, ((task.sharded, 0.0 if entries[task.entry].private else float(entries[task.entry].flops)) for task in stays)
    )
    owners = assign_owners(jobs, loads)
    owned = [
        Owned(owner, job.cost, job.sharded, entries[k].lane, entries[k].itemsize)
        for owner, job, (k, _, _) in zip(owners, jobs, moves, strict=True)
    ]
    smallest = _WORTH_AN_EXCHANGE * options.cost.flops_per_exchange
    schedule = cut_into_waves(owned, WaveLimits(options.budget, options.chunk_size, smallest, options.in_flight))
    gone = [
        Task(k, matrix, sharded, owner, wave)
        for (k, matrix, sharded), owner, wave in zip(moves, owners, schedule.waves, strict=True)
    ]
    return Plan(ranks, tuple(entries), (*stays, *gone), schedule.lanes, replace(options, in_flight=schedule.in_flight))


def _copies(entries: Sequence[PlannedParam], options: PlanOptions) -> Iterator[tuple[int, int, ShardedMatrix, bool]]:
    """(entry, matrix, spread, whether it travels) of everything that is computed, each replica apart where they do not share."""
    for k, entry in enumerate(entries):
        for layout in entry.layouts:
            for matrix, sharded in enumerate(entry.sharded_matrices(layout)):
                if not sharded.size:
                    continue
                if sharded.replicas > 1 and _shares(entry, sharded, options):
                    yield k, matrix, sharded, True
                elif sharded.whole:
                    yield k, matrix, sharded, False
                else:
                    for one in sharded.separate_replicas:
                        yield k, matrix, one, True


def _shares(entry: PlannedParam, sharded: ShardedMatrix, options: PlanOptions) -> bool:
    if entry.private or options.replicas != "auto":
        return options.replicas == "share" and not entry.private
    if entry.share is not None:
        return entry.share
    return options.cost.sharing_pays(entry.flops, sharded, entry.itemsize)


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
        size = weight(plan.entries[task.entry])
        piece, replica = task.sharded.piece_and_replica[task.owner]
        own = task.sharded.sizes[piece]
        gathered[task.sharded, replica] = gathered.get((task.sharded, replica), 0) + size
        sent[task.owner] += size * (task.sharded.size * task.sharded.replicas - own)  # the scatter
        sent[task.owner] -= size * own  # its own piece needs no gather
    for (sharded, replica), size in gathered.items():
        for one, elements in zip(sharded.pieces, sharded.sizes, strict=True):
            sent[one.holders[replica]] += size * elements
    return sent
