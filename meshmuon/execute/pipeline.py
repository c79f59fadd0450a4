"""Runs waves in the order of the plan; an error of one rank waits until the others have what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..errors import TransportError
from ..plan.order import Action, pipeline_order


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
