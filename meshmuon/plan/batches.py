"""Which matrices are orthogonalised together: equal shape, equal treatment, within a memory budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Matrices of one parameter that are in one place: ``count`` of ``rows`` × ``cols``."""

    count: int
    rows: int
    cols: int
    treatment: Hashable  # what must be equal for matrices to share a batch (device, dtypes, scheme)
    matrix_bytes: int  # memory that one of its matrices needs while it is orthogonalised


@dataclass(frozen=True, slots=True)
class ItemRange:
    """Matrices [start, stop) of item ``item``."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Slices of items of one shape and treatment, orthogonalised together."""

    rows: int
    cols: int
    slices: tuple[ItemRange, ...]

    @property
    def size(self) -> int:
        """Number of matrices."""
        return sum(item_range.stop - item_range.start for item_range in self.slices)


def plan_batches(items: Sequence[BatchItem], *, budget: int, chunk_size: int = -1) -> tuple[Batch, ...]:
    """Groups all matrices of ``items`` into batches; every matrix is in exactly one.

    Items of 3 and 2 matrices of one kind with ``chunk_size=2`` become three batches: matrix 0 of item 0, matrices 1 and 2 of
    item 0, and matrices 0 and 1 of item 1.

    A batch needs at most ``budget`` bytes, but a single matrix above that still gets a batch of its own. With ``chunk_size`` -1
    a batch has as many matrices as the budget allows.
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        kinds.setdefault((item.rows, item.cols, item.treatment), []).append(index)
    batches = []
    for indices in kinds.values():
        first = items[indices[0]]
        largest = max(1, budget // max(1, first.matrix_bytes))
        if chunk_size > 0:
            largest = min(largest, chunk_size)
        for slices in _fill(items, indices, largest):
            batches.append(Batch(first.rows, first.cols, slices))
    return tuple(batches)


def _fill(items: Sequence[BatchItem], indices: Sequence[int], largest: int) -> list[tuple[ItemRange, ...]]:
    """Cuts the items' matrices, in order, into runs of at most ``largest`` matrices, as even as possible."""
    total = sum(items[index].count for index in indices)
    if total == 0:
        return []
    runs = -(-total // largest)
    edges = [total * k // runs for k in range(runs + 1)]
    filled: list[list[ItemRange]] = [[] for _ in range(runs)]
    position, run = 0, 0
    for index in indices:
        start = 0
        while start < items[index].count:
            stop = min(items[index].count, start + edges[run + 1] - position)
            filled[run].append(ItemRange(index, start, stop))
            position += stop - start
            start = stop
            if position == edges[run + 1]:
                run += 1
    return [tuple(slices) for slices in filled]
