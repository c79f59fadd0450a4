"""The order of work in a step, and the batches of matrices that are orthogonalised together.

The order follows from a few counts, which are equal on all ranks. A batch has matrices of equal shape and treatment,
within a memory budget.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """The next action of a step: one of the turns of a wave, or work outside the waves."""

    GATHER = "a wave accumulates momentum and sends its pieces"
    LOCAL = "all local batches run, while the first pieces are on their way"
    COMPUTE = "a wave orthogonalises what it receives and sends the results"
    SEND = "a wave sends the results that it did not send when it computed"
    DURING_LAST_SCATTER = "what the caller wants done while the last results are on their way"
    FINISH = "a wave applies the results that it receives"


def pipeline_order(
    count: int, in_flight: int, *, gathered_ahead: int | None = None, first_sends_last: bool = False
) -> Iterator[tuple[Action, int]]:
    """Every action of a step with ``count`` waves, and the wave that it belongs to (0 for ``LOCAL`` and
    ``DURING_LAST_SCATTER``).

    While one wave computes, the next ones gather and the ones before it scatter. Four waves, three in flight: gather 0,
    gather 1, local, compute 0, gather 2, compute 1, finish 0, gather 3, compute 2, compute 3, during last scatter,
    finish 1 to 3.

    Args:
        count: number of waves.
        in_flight: most waves between their first and their last exchange.
        gathered_ahead: most waves that have sent their pieces and not computed; by default
            ``most_gathered_ahead(in_flight)``.
        first_sends_last: wave 0, of few owners with long work, sends its results after all others and finishes last, so
            that no other exchange stands behind that work. All waves must be in flight, and all gather before the first
            computes.
    """
    assert not first_sends_last or 2 <= count <= in_flight
    most_ahead = most_gathered_ahead(in_flight) if gathered_ahead is None else gathered_ahead
    if first_sends_last:
        most_ahead = count
    gathered = computed = finished = 0  # waves that have had each of their turns

    def gather() -> Iterator[tuple[Action, int]]:
        nonlocal gathered
        while gathered < count and gathered - computed < most_ahead and gathered - finished < in_flight:
            yield Action.GATHER, gathered
            gathered += 1

    yield from gather()
    yield Action.LOCAL, 0
    while computed < gathered:
        yield Action.COMPUTE, computed
        computed += 1
        yield from gather()
        # Only a finished wave makes room for another. A wave is finished only when its buffers are needed, since its
        # scatter may still be queued behind other exchanges. The wave that computed last is finished only if no other
        # is ready to compute.
        while (
            gathered < count and gathered - computed < most_ahead and (computed - finished > 1 or gathered == computed)
        ):
            yield Action.FINISH, finished
            finished += 1
            yield from gather()
    if first_sends_last:
        yield Action.SEND, 0
    yield Action.DURING_LAST_SCATTER, 0
    for wave in (*range(1, count), 0) if first_sends_last else range(finished, count):
        yield Action.FINISH, wave


def gradient_read_order(
    waves: int, local_batches: int, in_flight: int, *, first_sends_last: bool = False
) -> Iterator[int]:
    """The order in which a step reads gradients.

    0 to ``waves`` − 1 are the waves, the numbers from ``waves`` on are the local batches.
    """
    for action, wave in pipeline_order(waves, in_flight, first_sends_last=first_sends_last):
        if action is Action.GATHER:
            yield wave
        elif action is Action.LOCAL:
            yield from range(waves, waves + local_batches)


def most_gathered_ahead(in_flight: int) -> int:
    """Maximum number of waves that have sent their pieces and wait for their turn to compute.

    Links serve exchanges in the order in which they were started. If all waves gathered at once, the first results
    would be stuck behind them.
    """
    return in_flight // 2 + 1


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

    Items of 3 and 2 matrices of one kind with ``chunk_size=2`` become three batches: matrix 0 of item 0, matrices 1 and
    2 of item 0, and matrices 0 and 1 of item 1.

    A batch needs at most ``budget`` bytes, but a single larger matrix still gets a batch. With ``chunk_size`` -1
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
        batches += [Batch(first.rows, first.cols, slices) for slices in _fill(items, indices, largest)]
    return tuple(batches)


def _fill(items: Sequence[BatchItem], indices: Sequence[int], largest: int) -> list[tuple[ItemRange, ...]]:
    """Cuts the items' matrices, in order, into runs of at most ``largest`` matrices, as even as possible."""
    total = sum(items[index].count for index in indices)
    runs = -(-total // largest)
    edges = [total * k // max(1, runs) for k in range(runs + 1)]
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
