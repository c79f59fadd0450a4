"""Who orthogonalises which matrix: longest processing time first, over all matrices of the model at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from ..layout import ShardedMatrix
from .tasks import Task

__all__ = ["assign_owners", "lightest_possible"]


def assign_owners(tasks: Sequence[Task], loads: dict[int, float]) -> list[int]:
    """The owner of each task; ``loads`` (rank → cost) enters with the work that has no choice and leaves with all of it.

    Tasks with one candidate come first. The others are tried in two orders: most expensive first, so that cheap tasks fill the
    gaps that are left; and fewest candidates first, because those fit the fewest gaps. The order whose heaviest rank is lighter
    wins. Each task goes to the least loaded of its candidates. Ties go to the earlier task and to the lower rank, so every rank
    computes the same answer.
    """
    fixed = [k for k, task in enumerate(tasks) if len(task.sharded.piece_and_replica) == 1]
    free = [k for k, task in enumerate(tasks) if len(task.sharded.piece_and_replica) > 1]
    by_cost = sorted(free, key=lambda k: (-tasks[k].cost, k))
    by_choice = sorted(free, key=lambda k: (len(tasks[k].sharded.piece_and_replica), -tasks[k].cost, k))
    found = [
        _assign(tasks, [*fixed, *order], dict(loads)) for order in ([by_cost] if by_cost == by_choice else [by_cost, by_choice])
    ]
    owners, best = min(found, key=lambda one: max(one[1].values(), default=0.0))
    loads.update(best)
    return owners


def _assign(tasks: Sequence[Task], order: Sequence[int], loads: dict[int, float]) -> tuple[list[int], dict[int, float]]:
    owners = [-1] * len(tasks)
    queues = _Queues(loads)
    for k in order:
        rank = owners[k] = queues.least_loaded(tasks[k].sharded)
        loads[rank] += tasks[k].cost
    return owners, loads


class _Queues:
    """Least-loaded rank of any candidate set. Loads only grow, so that a stale entry of a heap is simply put back."""

    def __init__(self, loads: dict[int, float]) -> None:
        self._loads = loads
        self._by_matrix: dict[ShardedMatrix, list[tuple[float, int]]] = {}
        self._by_ranks: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def least_loaded(self, sharded: ShardedMatrix) -> int:
        heap = self._by_matrix.get(sharded)
        if heap is None:
            heap = self._by_matrix[sharded] = self._heap_of(tuple(sorted(sharded.piece_and_replica)))
        while True:
            load, rank = heap[0]
            if load == self._loads[rank]:
                return rank
            heapq.heapreplace(heap, (self._loads[rank], rank))

    def _heap_of(self, ranks: tuple[int, ...]) -> list[tuple[float, int]]:
        if ranks not in self._by_ranks:
            heap = [(self._loads[rank], rank) for rank in ranks]
            heapq.heapify(heap)
            self._by_ranks[ranks] = heap
        return self._by_ranks[ranks]


def lightest_possible(costs: Sequence[float], ranks: int) -> float:
    """A bound that no assignment of whole matrices to ``ranks`` can beat: the heaviest rank has at least this cost.

    It is the largest of the mean, the largest matrix, and, since of k·ranks + 1 matrices some rank has k + 1, the sum of the
    k + 1 cheapest of the k·ranks + 1 most expensive.
    """
    ordered = sorted(costs, reverse=True)
    sums = [0.0, *accumulate(ordered)]
    bound = max(sums[-1] / ranks, ordered[0] if ordered else 0.0)
    for k in range(1, (len(ordered) - 1) // ranks + 1):
        bound = max(bound, sums[k * ranks + 1] - sums[k * ranks - k])
    return bound
