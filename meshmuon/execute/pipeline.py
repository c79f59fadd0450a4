"""The order in which waves advance: fixed by their number alone, so that it is the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from ..errors import TransportError


class Action(Enum):
    """What is done next in a step: one of the three turns of a wave, or work that is not part of a wave."""

    GATHER = "a wave accumulates momentum and sends its pieces"
    LOCAL = "all local batches run, while the first pieces are on their way"
    COMPUTE = "a wave orthogonalises what it receives and sends the results"
    LAST = "what the caller wants done while the last results are on their way"
    FINISH = "a wave applies the results that it receives"


def pipeline_order(count: int, width: int, *, ahead: int | None = None) -> Iterator[tuple[Action, int]]:
    """Every action of a step with ``count`` waves, and the wave that it belongs to (0 for ``LOCAL`` and ``LAST``).

    While one wave computes, the next ones gather and the ones before it scatter. Four waves, three of them in flight: gather 0,
    gather 1, local, compute 0, gather 2, compute 1, finish 0, gather 3, compute 2, compute 3, last, finish 1, finish 2, finish 3.

    Args:
        count: number of waves.
        width: most waves between their first and their last exchange.
        ahead: most waves that have sent their pieces and wait for their turn to compute;
            ``most_gathered_ahead(width)`` unless given.
    """
    most = most_gathered_ahead(width) if ahead is None else ahead
    gathered = computed = finished = 0  # waves that have had each of their turns

    def gather() -> Iterator[tuple[Action, int]]:
        nonlocal gathered
        while gathered < count and gathered - computed < most and gathered - finished < width:
            yield Action.GATHER, gathered
            gathered += 1

    yield from gather()
    yield Action.LOCAL, 0
    while computed < gathered:
        yield Action.COMPUTE, computed
        computed += 1
        yield from gather()
        # Only a finished wave makes room for another. A wave is finished only when its buffers are needed, since its scatter may
        # still be queued behind other exchanges; the wave that has just computed is left alone unless none is gathered.
        while gathered < count and gathered - computed < most and (computed - finished > 1 or gathered == computed):
            yield Action.FINISH, finished
            finished += 1
            yield from gather()
    yield Action.LAST, 0
    for wave in range(finished, count):
        yield Action.FINISH, wave


def fill_order(waves: int, local_batches: int, width: int) -> Iterator[int]:
    """The order in which a step first reads gradients: waves by their number, local batches by ``waves`` plus theirs."""
    for action, wave in pipeline_order(waves, width):
        if action is Action.GATHER:
            yield wave
        elif action is Action.LOCAL:
            yield from range(waves, waves + local_batches)


def run_pipeline(
    waves: Iterable[Iterator[None]],
    width: int,
    local: Iterable[Callable[[], None]],
    last: Callable[[], None],
    *,
    ahead: int | None = None,
) -> None:
    """Runs all waves in the order of ``pipeline_order``; ``Action`` says when ``local`` and ``last`` have their turns.

    The waves are generators that yield twice: after sending their pieces, and after sending their results.
    """
    waves = list(waves)
    for action, wave in pipeline_order(len(waves), width, ahead=ahead):
        if action is Action.LOCAL:
            for run_batch in local:
                run_batch()
        elif action is Action.LAST:
            last()
        elif action is Action.FINISH:
            for _ in waves[wave]:
                raise AssertionError("a wave yields twice")
        else:
            next(waves[wave])


def skipped_wave() -> Iterator[None]:
    """A wave that does nothing in its turns."""
    return iter((None, None))


def most_gathered_ahead(width: int) -> int:
    """How many of ``width`` waves in flight may have sent their pieces and wait for their turn to compute.

    Links serve exchanges in the order in which they were started. If all waves gathered at once, the first results would be
    stuck behind them.
    """
    return width // 2 + 1


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
