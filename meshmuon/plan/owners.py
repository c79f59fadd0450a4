"""Who orthogonalises which matrix: longest processing time first, over all matrices of the model at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from ..layout import ShardedMatrix
from .nodes import Crossings
from .tasks import Task

_Holder: TypeAlias = "tuple[float, int, int]"  # load, elements between nodes, rank


def assign_owners(
    tasks: Sequence[Task],
    loads: dict[int, float],
    crossings: Crossings | None = None,
    itemsizes: Sequence[float] = (),
) -> list[int]:
    """The owner of each task; adds their costs to ``loads`` (rank → cost), which already has what is computed locally.

    Each task goes to the least loaded rank that holds a piece of it. Two orders are tried: most expensive first, so
    that cheap tasks even out the loads at the end; and fewest holders first, because these have the least choice. The
    order whose heaviest rank is lighter wins. Ties go to the earlier task and to the lower rank. Every rank therefore
    finds the same owners.

    On several nodes, equally loaded ranks are tried in another order as well: first those that keep most of the matrix
    on their node. That wins if neither the heaviest rank nor the bytes between nodes become more.

    Costs 5, 4, 3, 3 and 3 over two ranks: 5 goes to rank 0, 4 to rank 1, then 3 to rank 1 (7), to rank 0 (8) and to
    rank 1 (10).
    """
    by_cost = sorted(range(len(tasks)), key=lambda k: (-tasks[k].cost, k))
    by_holders = sorted(range(len(tasks)), key=lambda k: (len(tasks[k].sharded.holdings), -tasks[k].cost, k))
    orders = [by_cost] if by_cost == by_holders else [by_cost, by_holders]
    assignments = [_assign(tasks, order, dict(loads), None) for order in orders]
    owners, loads_after = min(assignments, key=lambda assignment: _heaviest(assignment[1]))
    if crossings is not None and any(
        crossings.depend_on_owner(sharded) for sharded in {task.sharded for task in tasks}
    ):

        def between(owners: Sequence[int]) -> float:
            itemsize_of: dict[tuple[ShardedMatrix, int], float] = {}  # thousands of tasks share a few hundred of these
            for task, owner, itemsize in zip(tasks, owners, itemsizes, strict=True):
                key = task.sharded, owner
                itemsize_of[key] = itemsize_of.get(key, 0) + itemsize
            return sum(itemsize * crossings.of(sharded, owner) for (sharded, owner), itemsize in itemsize_of.items())

        assignments = [(owners, loads_after), *(_assign(tasks, order, dict(loads), crossings) for order in orders)]
        # Not by the load first: floats of equal loads may differ in their last bit.
        scores = [(between(owners), _heaviest(with_them)) for owners, with_them in assignments]
        allowed = [k for k, score in enumerate(scores) if score[0] <= scores[0][0] and score[1] <= scores[0][1]]
        owners, loads_after = assignments[min(allowed, key=lambda k: scores[k])]
    loads.update(loads_after)
    return owners


def _heaviest(loads: dict[int, float]) -> float:
    return max(loads.values(), default=0.0)


def _assign(
    tasks: Sequence[Task],
    order: Sequence[int],
    loads: dict[int, float],
    crossings: Crossings | None,
) -> tuple[list[int], dict[int, float]]:
    """The owners, and the loads with their costs, if tasks are given to the least loaded holders in this order."""
    owners = [-1] * len(tasks)
    heaps: dict[ShardedMatrix, list[_Holder]] = {}
    by_ranks: dict[tuple[int, ...], list[_Holder]] = {}  # where nodes do not matter, equal holders share a heap
    for k in order:
        sharded = tasks[k].sharded
        if sharded not in heaps:
            ranks = tuple(sorted(sharded.holdings))
            if crossings is not None and crossings.depend_on_owner(sharded):  # sorted is a heap
                heaps[sharded] = sorted((loads[rank], crossings.of(sharded, rank), rank) for rank in ranks)
            else:
                if ranks not in by_ranks:
                    by_ranks[ranks] = sorted((loads[rank], 0, rank) for rank in ranks)
                heaps[sharded] = by_ranks[ranks]
        heap = heaps[sharded]
        load, crossing, rank = heap[0]
        while load != loads[rank]:  # loads only grow, so a stale item is put back with its new load
            heapq.heapreplace(heap, (loads[rank], crossing, rank))
            load, crossing, rank = heap[0]
        owners[k] = rank
        loads[rank] += tasks[k].cost
    return owners, loads


def lightest_possible(costs: Sequence[float], ranks: int) -> float:
    """A lower bound of the heaviest rank's cost, for any assignment of whole matrices to ``ranks`` ranks.

    It is the largest of: the mean; the most expensive matrix; and for each k, the sum of the k + 1 cheapest of the
    k·ranks + 1 most expensive matrices, since some rank has k + 1 of these. Costs 5, 4, 3, 3 and 3 over two ranks: the
    mean is 9, the most expensive is 5, k = 1 gives 4 + 3, and k = 2 gives 3 + 3 + 3. The bound is 9.
    """
    ordered = sorted(costs, reverse=True)
    sums = [0.0, *accumulate(ordered)]
    bound = max(sums[-1] / ranks, ordered[0] if ordered else 0.0)
    for k in range(1, (len(ordered) - 1) // ranks + 1):
        bound = max(bound, sums[k * ranks + 1] - sums[k * ranks - k])
    return bound
