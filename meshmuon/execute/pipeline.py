"""The order in which waves advance: fixed by their number alone, so that it is the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..errors import TransportError

__all__ = ["guarded", "run_pipeline", "take_first", "waves_ahead"]


def run_pipeline(
    waves: Iterable[Iterator[None]],
    width: int,
    local: Iterable[Callable[[], None]],
    last: Callable[[], None],
    *,
    ahead: int | None = None,
) -> None:
    """Runs all waves, at most ``width`` of them between their first and their last exchange.

    A wave is advanced three times: it sends its pieces; it computes and sends results; it applies what it receives. While one
    computes, the next ones gather and the ones before scatter.

    Args:
        waves: generators that yield twice.
        width: most waves in flight.
        local: work that needs no exchange; done while the first pieces are on their way.
        last: work that needs no exchange; done while the last results are on their way.
        ahead: most waves that have sent their pieces and wait for their turn to compute; ``waves_ahead(width)`` unless given.
    """
    coming, most = deque(waves), waves_ahead(width) if ahead is None else ahead
    gathering: deque[Iterator[None]] = deque()
    scattering: deque[Iterator[None]] = deque()

    def launch() -> None:
        while coming and len(gathering) < most and len(gathering) + len(scattering) < width:
            wave = coming.popleft()
            next(wave)
            gathering.append(wave)

    launch()
    for piece in local:
        piece()
    while gathering:
        wave = gathering.popleft()
        next(wave)
        scattering.append(wave)
        launch()
        # Only a finished wave makes room for another. What has no need to be finished is not waited for: it may still be behind
        # other exchanges on its way.
        while coming and len(gathering) < most and (len(scattering) > 1 or not gathering):
            _finish(scattering.popleft())
            launch()
    last()
    while scattering:
        _finish(scattering.popleft())


def waves_ahead(width: int) -> int:
    """How many of ``width`` waves in flight may have sent their pieces and wait for their turn to compute.

    Links serve exchanges in the order in which they were started. If all waves gathered at once, the first results would be
    stuck behind them.
    """
    return width // 2 + 1


def guarded(work: Callable[[], None], failures: list[Exception]) -> Callable[[], None]:
    """``work`` whose error is kept for the end of the step: other ranks wait for what this one has still to send."""

    def run() -> None:
        try:
            work()
        except TransportError:
            raise
        except Exception as error:
            failures.append(error)

    return run


def take_first(failures: list[Exception]) -> Exception | None:
    """What went wrong first in a step, or nothing; it is forgotten here."""
    first = failures[0] if failures else None
    failures.clear()
    return first


def _finish(wave: Iterator[None]) -> None:
    for _ in wave:
        raise AssertionError("a wave yields twice")
