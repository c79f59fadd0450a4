"""Runs waves in the order of the plan; an error of one rank waits until the others have what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..errors import OrthogonalizeError, TransportError
from ..plan.order import Action, pipeline_order
from .ortho_batch import joined_errors


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
            _finish(waves[wave])
        else:
            next(waves[wave])


def run_ahead(waves: Iterable[Iterator[None]], in_flight: int) -> list[Iterator[None]]:
    """Runs waves in the same order up to where ``during_last_scatter`` would come. Returns those that are left to be finished."""
    waves = list(waves)
    left = dict(enumerate(waves))
    for action, wave in pipeline_order(len(waves), in_flight):
        if action is Action.DURING_LAST_SCATTER:
            break
        if action is Action.FINISH:
            _finish(left.pop(wave))
        elif action is not Action.LOCAL:
            next(waves[wave])
    return list(left.values())


def finish_all(waves: Iterable[Iterator[None]]) -> None:
    """Gives waves their last turn."""
    for wave in waves:
        _finish(wave)


def _finish(wave: Iterator[None]) -> None:
    for _ in wave:
        raise AssertionError("a wave yields twice")


def skipped_wave() -> Iterator[None]:
    """A wave that does nothing in its turns."""
    return iter((None, None))


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
    """The first failure of a step, if there is one, and before others one that only this rank knows; clears the list.

    If matrices have failed, it names all of them that failed alike: known to all ranks, or to this one only.
    """
    known = [isinstance(failure, OrthogonalizeError) and failure.known_to_all for failure in failures]
    alike = [failure for failure, by_all in zip(failures, known, strict=True) if by_all == all(known)]
    failures.clear()
    if alike and isinstance(alike[0], OrthogonalizeError):
        return joined_errors([failure for failure in alike if isinstance(failure, OrthogonalizeError)])
    return alike[0] if alike else None
