"""Who orthogonalises which matrix: longest processing time first, over all matrices of the model at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..layout import ShardedMatrix

__all__ = ["Job", "assign_owners", "lightest_possible"]


@dataclass(frozen=True, slots=True)
class Job:
    """A matrix that needs an owner among the ranks that hold a piece of it."""

    sharded: ShardedMatrix
    cost: float


def assign_owners(jobs: Sequence[Job], loads: dict[int, float]) -> list[int]:
    """The owner of each job; ``loads`` (rank → cost) enters with the work that has no choice and leaves with all of it.

    Jobs with one candidate come first. The others are tried in two orders, and the one whose heaviest rank is lighter counts: the
    most expensive first, which leaves small ones to fill gaps; and those with the fewest candidates first, since they fit fewest
    gaps. Each goes to the least loaded of its candidates. Ties go to the earlier job and to the lower rank, so that every rank
    finds the same answer.
    """
    fixed = [k for k, job in enumerate(jobs) if len(job.sharded.piece_and_replica) == 1]
    free = [k for k, job in enumerate(jobs) if len(job.sharded.piece_and_replica) > 1]
    by_cost = sorted(free, key=lambda k: (-jobs[k].cost, k))
    by_choice = sorted(free, key=lambda k: (len(jobs[k].sharded.piece_and_replica), -jobs[k].cost, k))
    found = [
        _assign(jobs, [*fixed, *order], dict(loads)) for order in ([by_cost] if by_cost == by_choice else [by_cost, by_choice])
    ]
    owners, best = min(found, key=lambda one: max(one[1].values(), default=0.0))
    loads.update(best)
    return owners


def _assign(jobs: Sequence[Job], order: Sequence[int], loads: dict[int, float]) -> tuple[list[int], dict[int, float]]:
    owners = [-1] * len(jobs)
    queues = _Queues(loads)
    for k in order:
        rank = owners[k] = queues.least_loaded(jobs[k].sharded)
        loads[rank] += jobs[k].cost
    return owners, loads


class _Queues:
    """Least-loaded rank of any candidate set. Loads only grow, so that a stale entry of a heap is simply put back."""

    def __init__(self, loads: dict[int, float]) -> None:
        self._loads = loads
        self._by_spread: dict[ShardedMatrix, list[tuple[float, int]]] = {}
        self._by_ranks: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def least_loaded(self, sharded: ShardedMatrix) -> int:
        heap = self._by_spread.get(sharded)
        if heap is None:
            heap = self._by_spread[sharded] = self._heap_of(tuple(sorted(sharded.piece_and_replica)))
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
