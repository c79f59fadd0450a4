"""The order in which waves advance. It follows from a few counts, which are equal on all ranks, and so is the order."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Action(Enum):
    """What is done next in a step: one of the three turns of a wave, or work that is not part of a wave."""

    GATHER = "a wave accumulates momentum and sends its pieces"
    LOCAL = "all local batches run, while the first pieces are on their way"
    COMPUTE = "a wave orthogonalises what it receives and sends the results"
    DURING_LAST_SCATTER = "what the caller wants done while the last results are on their way"
    FINISH = "a wave applies the results that it receives"


def pipeline_order(count: int, in_flight: int, *, gathered_ahead: int | None = None) -> Iterator[tuple[Action, int]]:
    """Every action of a step with ``count`` waves, and the wave that it belongs to (0 for ``LOCAL`` and ``DURING_LAST_SCATTER``).

    While one wave computes, the next ones gather and the ones before it scatter. Four waves, three in flight: gather 0, gather 1,
    local, compute 0, gather 2, compute 1, finish 0, gather 3, compute 2, compute 3, during last scatter, finish 1 to 3.

    Args:
        count: number of waves.
        in_flight: most waves between their first and their last exchange.
        gathered_ahead: most waves that have sent their pieces and not computed; by default ``most_gathered_ahead(in_flight)``.
    """
    most_ahead = most_gathered_ahead(in_flight) if gathered_ahead is None else gathered_ahead
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
        # Only a finished wave makes room for another. A wave is finished only when its buffers are needed, since its scatter may
        # still be queued behind other exchanges. The wave that computed last is finished only if no other is ready to compute.
        while gathered < count and gathered - computed < most_ahead and (computed - finished > 1 or gathered == computed):
            yield Action.FINISH, finished
            finished += 1
            yield from gather()
    yield Action.DURING_LAST_SCATTER, 0
    for wave in range(finished, count):
        yield Action.FINISH, wave


def gradient_read_order(waves: int, local_batches: int, in_flight: int) -> Iterator[int]:
    """The order in which a step reads gradients.

    0 to ``waves`` − 1 are the waves, the numbers from ``waves`` on are the local batches.
    """
    for action, wave in pipeline_order(waves, in_flight):
        if action is Action.GATHER:
            yield wave
        elif action is Action.LOCAL:
            yield from range(waves, waves + local_batches)


def most_gathered_ahead(in_flight: int) -> int:
    """How many of ``in_flight`` waves may have sent their pieces and wait for their turn to compute.

    Links serve exchanges in the order in which they were started. If all waves gathered at once, the first results would be
    stuck behind them.
    """
    return in_flight // 2 + 1
