"""The order in which waves advance. It follows from a few counts, which are equal on all ranks, and so is the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from ..errors import TransportError


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


def run_pipeline(
    waves: Iterable[Iterator[None]],
    in_flight: int,
    local: Iterable[Callable[[], None]],
    during_last_scatter: Callable[[], None],
    *,
    gathered_ahead: int | None = None,
) -> None:
    """Runs all waves, ``local`` and ``during_last_scatter`` in the order of ``pipeline_order``.

    The waves are generators that yield twice: after sending their pieces, and after sending their results.
    """
    waves = list(waves)
    for action, wave in pipeline_order(len(waves), in_flight, gathered_ahead=gathered_ahead):
        if action is Action.LOCAL:
            for run_batch in local:
                run_batch()
        elif action is Action.DURING_LAST_SCATTER:
            during_last_scatter()
        elif action is Action.FINISH:
            for _ in waves[wave]:
                raise AssertionError("a wave yields twice")
        else:
            next(waves[wave])


def skipped_wave() -> Iterator[None]:
    """A wave that does nothing in its turns."""
    return iter((None, None))


def most_gathered_ahead(in_flight: int) -> int:
    """How many of ``in_flight`` waves may have sent their pieces and wait for their turn to compute.

    Links serve exchanges in the order in which they were started. If all waves gathered at once, the first results would be
    stuck behind them.
    """
    return in_flight // 2 + 1


def guarded(action: Callable[[], None], failures: list[Exception]) -> Callable[[], None]:
    """``action`` whose error is kept for the end of the step: other ranks wait for what this one still has to send."""

    def run() -> None:
        try:
            action()
        except TransportError:
            raise
        except Exception as error:
            failures.append(error)

    return run


def take_first(failures: list[Exception]) -> Exception | None:
    """The first failure of a step, if there is one; clears the list."""
    first = failures[0] if failures else None
    failures.clear()
    return first
