"""Cutting the exchanged matrices into waves: one exchange to the owners, their work, one exchange back."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from .tasks import PlannedParam, PlanOptions, Task
from .traffic import RankKinds
from .wire import Wire

_MOST_WAVES = 9  # of a step, unless memory asks for more: enough to overlap gathers, work and scatters
_STEEPEST = 4  # largest wave ÷ smallest
_ENOUGH_IN_FLIGHT = 4  # waves in flight that overlap gathers, work and scatters; more gain little


def cut_into_waves(
    tasks: Sequence[Task], params: Sequence[PlannedParam], options: PlanOptions
) -> tuple[list[Task], tuple[Hashable, ...], int]:
    """The tasks with their waves, the lane of each wave, and the number of waves in flight.

    Each lane has its own waves. Every owner's matrices are spread over the waves of a lane in the same proportions by
    cost, so that ranks have work at the same time. No other wave computes during the first gather and the last scatter,
    so the first and the last wave are small: six waves have 1/12, 2/12, 3/12, 3/12, 2/12 and 1/12 of each owner's cost.
    ``CostModel.waves`` has the formula for their number.

    If the buffers of some rank then exceed their bound, the first of these that fits is taken, and the last one if none
    does:

    1. fewer waves in flight, but at least four;
    2. more and smaller waves;
    3. down to two waves in flight, with the usual waves or one matrix per owner and wave;
    4. two waves in flight, each with half of the owners;
    5. one wave in flight, with one matrix per owner, whatever it takes.

    Where ``chunk_size`` is given, it alone decides.

    An owner's most expensive matrices come first, so that ranks have equally long work in a wave.
    """
    lanes: dict[Hashable, list[int]] = {}  # lane → its tasks
    for k, task in enumerate(tasks):
        lanes.setdefault(params[task.param].lane, []).append(k)
    cutters = [_LaneCutter([tasks[k] for k in lane], params[tasks[lane[0]].param], options) for lane in lanes.values()]
    cuts, in_flight = _within_bound(cutters, options)
    in_waves, wave_lanes = list(tasks), list[Hashable]()
    for (lane, indices), cut in zip(lanes.items(), cuts, strict=True):
        for k, wave in zip(indices, cut, strict=True):
            in_waves[k] = tasks[k].placed(tasks[k].owner, len(wave_lanes) + wave)
        wave_lanes.extend([lane] * (max(cut) + 1))
    return in_waves, tuple(wave_lanes), in_flight


def _within_bound(cutters: Sequence[_LaneCutter], options: PlanOptions) -> tuple[list[list[int]], int]:
    """The cut of each lane, and the number of waves in flight: the first way that keeps to the bound."""
    most, bound = options.in_flight, 3 * options.budget * options.in_flight

    def fits(cuts: Sequence[Sequence[int]], in_flight: int) -> bool:
        total: Counter[int] = Counter()
        for cutter, cut in zip(cutters, cuts, strict=True):
            total.update(cutter.footprint.bytes_by_rank(cut, in_flight))
        return max(total.values(), default=0) <= bound

    usual = [cutter.cut(cutter.usual_count) for cutter in cutters]
    if options.chunk_size > 0:
        return usual, most
    for in_flight in range(most, min(most, _ENOUGH_IN_FLIGHT) - 1, -1):
        if fits(usual, in_flight):
            return usual, in_flight
    one_per_owner = [cutter.cut(cutter.longest) for cutter in cutters]
    if fits(one_per_owner, most):
        counts = [max(cutter.usual_count, most) for cutter in cutters]
        while any(count < cutter.longest for count, cutter in zip(counts, cutters, strict=True)):
            counts = [
                cutter.within_budget(count + 1 + count // 8) for count, cutter in zip(counts, cutters, strict=True)
            ]
            finer = [cutter.cut(count) for count, cutter in zip(counts, cutters, strict=True)]
            if fits(finer, most):
                return finer, most
        return one_per_owner, most
    for in_flight in range(most - 1, 1, -1):
        for cuts in (usual, one_per_owner):
            if fits(cuts, in_flight):
                return cuts, in_flight
    half_the_owners = [cutter.in_two_turns() for cutter in cutters]
    return (half_the_owners, 2) if most > 1 and fits(half_the_owners, 2) else (one_per_owner, 1)


class _LaneCutter:
    """Cuts the matrices of one lane into waves, in several ways. A cut lists the wave of each task, in the order of
    ``tasks``.
    """

    def __init__(self, tasks: Sequence[Task], param: PlannedParam, options: PlanOptions) -> None:
        self._tasks, self._options = tasks, options
        # What an owner gathers, its own piece included; the wire is the same for the whole lane.
        whole = {
            sharded: sum(piece.size for piece in sharded.pieces) * param.itemsize
            for sharded in {t.sharded for t in tasks}
        }
        self._nbytes = [whole[task.sharded] for task in tasks]
        # Matrices of equal shape are best orthogonalised together. Shapes are sorted as text; another order would
        # change plans.
        shapes = [repr((task.sharded.rows, task.sharded.cols)) for task in tasks]
        self.queues: dict[int, list[int]] = {}  # owner → indices of its tasks, in the order in which they get waves
        for k in sorted(range(len(tasks)), key=lambda k: (tasks[k].owner, -tasks[k].cost, shapes[k], k)):
            self.queues.setdefault(tasks[k].owner, []).append(k)
        self.longest = max(map(len, self.queues.values()))
        most_bytes = max(sum(self._nbytes[k] for k in queue) for queue in self.queues.values())
        # As many as overlap best, and at least as many as the budget needs.
        self.usual_count = self.within_budget(max(self._overlapping(), most_bytes // options.budget))
        self.footprint = Footprint(tasks, param.wire)

    def _overlapping(self) -> int:
        """The number of waves by the bytes of the busiest owner.

        Waves shorter than the longest matrix of an owner make ranks wait for each other. Where owners have n times
        their longest matrix to do, n²/2 waves are the most: with n = 1 and n = 2 those are n waves.
        """
        tasks, cost = self._tasks, self._options.cost
        moved = (
            sum(self._nbytes[k] * (1 + tasks[k].sharded.replicas) for k in queue) for queue in self.queues.values()
        )
        peers = max(len(sharded.holdings) for sharded in {task.sharded for task in tasks})
        lengths = sorted(sum(tasks[k].cost for k in q) / (tasks[q[0]].cost or 1.0) for q in self.queues.values())
        cuts = round(lengths[len(lengths) // 2] ** 2 / 2)
        several_nodes = self._options.nodes is not None
        return cost.waves(max(moved), peers, several_nodes=several_nodes, most=max(1, min(_MOST_WAVES, cuts)))

    def within_budget(self, count: int) -> int:
        """The number of waves, from ``count`` on, in which no owner gathers more than its budget."""
        while count < self.longest and not self._fits(count):
            count += 1 + count // 8
        return min(self.longest, count)

    def _fits(self, count: int) -> bool:
        for queue in self.queues.values():
            gathered: dict[int, list[int]] = {}
            for k, wave in zip(queue, self._waves_of_queue(queue, count), strict=True):
                gathered.setdefault(wave, []).append(self._nbytes[k])
            if any(len(sizes) > 1 and sum(sizes) > self._options.budget for sizes in gathered.values()):
                return False
        return True

    def _waves_of_queue(self, queue: Sequence[int], count: int) -> list[int]:
        """The wave of each matrix in an owner's queue: ``count`` waves whose costs grow and then shrink."""
        costs = [self._tasks[k].cost for k in queue]
        ends, total = _ends(count), sum(costs) or 1.0
        done, waves = 0.0, []
        for cost in costs:
            waves.append(min(count - 1, bisect_right(ends, (done + cost / 2) / total)))
            done += cost
        return waves

    def cut(self, count: int) -> list[int]:
        """Cuts into ``count`` waves by cost, or by the user's ``chunk_size``."""
        waves = [0] * len(self._tasks)
        if self._options.chunk_size > 0:  # the first matrix of every owner, then the second of every owner, and so on
            rounds = sorted((turn, owner, k) for owner, queue in self.queues.items() for turn, k in enumerate(queue))
            for position, (_, _, k) in enumerate(rounds):
                waves[k] = position // self._options.chunk_size
            return waves
        for queue in self.queues.values():
            of_queue = range(len(queue)) if count >= self.longest else self._waves_of_queue(queue, count)
            for k, wave in zip(queue, of_queue, strict=True):
                waves[k] = wave
        return _without_gaps(waves)

    def in_two_turns(self) -> list[int]:
        """One matrix per owner and wave, one half of the owners in even and the other in odd waves.

        With two waves in flight an owner needs memory for a matrix in only one of the two slots. While one half of the
        owners computes, the other half may gather or scatter.
        """
        waves = [0] * len(self._tasks)
        for position, queue in enumerate(self.queues.values()):
            for turn, k in enumerate(queue):
                waves[k] = 2 * turn + position % 2
        return _without_gaps(waves)


@lru_cache(maxsize=8)
def _ends(count: int) -> tuple[float, ...]:
    """Where each of ``count`` waves ends, as a share of an owner's cost."""
    sizes = [min(wave + 1, count - wave, _STEEPEST) for wave in range(count)]
    whole = sum(sizes)
    return tuple(end / whole for end in accumulate(sizes))


def _without_gaps(waves: list[int]) -> list[int]:
    position = {wave: k for k, wave in enumerate(sorted(set(waves)))}
    return [position[wave] for wave in waves]


class Footprint:
    """The size of the buffers of one lane on every rank, for any cut into waves.

    ``routes.py`` names the buffers. A rank's ``shards`` holds its piece of every matrix of the wave, regardless of the
    owner, and is counted once for each kind of ranks.
    """

    def __init__(self, tasks: Sequence[Task], wire: Wire) -> None:
        kinds = RankKinds((task.sharded, wire) for task in tasks)
        self._kind_of = kinds.kind_of
        self._numbers = [kinds.numbers[task.sharded, wire] for task in tasks]
        # Of each distinct matrix, (kind, bytes of the piece that each rank of the kind holds).
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in kinds.matrices]
        for kind, pieces in enumerate(kinds.held):
            for held in pieces:
                self._pieces[held.matrix].append((kind, held.nbytes.held))
        # Of each matrix, its owner, what the owner gathers, what it sends, and whether that needs a buffer of its own.
        gathered, sent = ([sum(one[way] for one in nbytes) for nbytes in kinds.nbytes] for way in range(2))
        self._owner_bytes: list[tuple[int, int, int, bool]] = []
        for task, number in zip(tasks, self._numbers, strict=True):
            own, replicas = kinds.nbytes[number][task.sharded.holdings[task.owner][0]], task.sharded.replicas
            apart = replicas > 1 or wire.gather != wire.scatter
            sizes = gathered[number] - own.gather, sent[number] * replicas - own.scatter
            self._owner_bytes.append((task.owner, *sizes, apart))

    def shard_bytes(self, waves: Sequence[int], in_flight: int) -> Counter[int]:
        """Rank → bytes of all its ``shards`` when matrix k is in wave ``waves[k]``."""
        shards: Counter[tuple[int, int]] = Counter()  # (kind, wave) → bytes
        for (wave, matrix), count in Counter(zip(waves, self._numbers, strict=True)).items():
            for kind, size in self._pieces[matrix]:
                shards[kind, wave] += count * size
        by_kind = _slots(shards, in_flight)
        return Counter({rank: by_kind[kind] for rank, kind in self._kind_of.items()})

    def bytes_by_rank(self, waves: Sequence[int], in_flight: int) -> Counter[int]:
        """The same of all buffers; ranks without buffers may be missing."""
        received: Counter[tuple[int, int]] = Counter()  # (owner, wave) → bytes, as in ``results``
        results: Counter[tuple[int, int]] = Counter()
        apart: set[tuple[int, int]] = set()
        for wave, (owner, gathered, sent, needs_results) in zip(waves, self._owner_bytes, strict=True):
            received[owner, wave] += gathered
            results[owner, wave] += sent
            if needs_results:  # of replicas, or in another dtype: the results of the whole wave need a separate buffer
                apart.add((owner, wave))
        total = self.shard_bytes(waves, in_flight)
        total.update(_slots(received, in_flight))
        total.update(_slots({at: results[at] for at in apart}, in_flight))
        return total


def _slots(nbytes: Mapping[tuple[int, int], int], in_flight: int) -> Counter[int]:
    """Bytes of all slots of each rank, or kind of ranks: a slot is as large as the largest wave that takes a turn
    in it.
    """
    largest: dict[tuple[int, int], int] = {}
    for (rank, wave), size in nbytes.items():
        slot = rank, wave % in_flight
        largest[slot] = max(largest.get(slot, 0), size)
    total: Counter[int] = Counter()
    for (rank, _), size in largest.items():
        total[rank] += size
    return total
