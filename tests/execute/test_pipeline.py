"""The order in which waves advance. Every rank must find the same one, or exchanges would not meet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest

from meshmuon.errors import TransportError
from meshmuon.execute.executor import finish_all, guarded, run_ahead, run_pipeline, take_first
from meshmuon.plan import Action, gradient_read_order, most_gathered_ahead, pipeline_order

WIDTHS, COUNTS = range(1, 7), range(9)
everywhere = pytest.mark.parametrize(("width", "count"), [(width, count) for width in WIDTHS for count in COUNTS])

Event = tuple[Action, int]
GATHER, COMPUTE, FINISH, LOCAL, LAST = (
    Action.GATHER,
    Action.COMPUTE,
    Action.FINISH,
    Action.LOCAL,
    Action.DURING_LAST_SCATTER,
)


def waves_that_record(count: int, events: list[Event]) -> list[Iterator[None]]:
    def wave(k: int) -> Iterator[None]:
        events.append((GATHER, k))
        yield
        events.append((COMPUTE, k))
        yield
        events.append((FINISH, k))

    return list(map(wave, range(count)))


@everywhere
def test_turns_are_run_in_their_order(width: int, count: int) -> None:
    """What follows is about ``pipeline_order``. Gradients are freed by ``gradient_read_order``, which must follow
    it too.
    """
    events: list[Event] = []
    waves = waves_that_record(count, events)
    run_pipeline(
        waves, pipeline_order(count, width), lambda: events.append((LOCAL, 0)), lambda: events.append((LAST, 0))
    )
    assert events == list(pipeline_order(count, width))
    read = [k if action is GATHER else count for action, k in events if action in (GATHER, LOCAL)]
    assert read == list(gradient_read_order(count, 1, width))


@everywhere
def test_every_turn_of_every_wave_once_and_in_order(width: int, count: int) -> None:
    """Never more than ``width`` in flight: wave k and wave k + width use the same buffers."""
    events = list(pipeline_order(count, width))
    for action in (GATHER, COMPUTE, FINISH):
        assert [k for what, k in events if what is action] == list(range(count))
    for k in range(count):
        assert events.index((GATHER, k)) < events.index((COMPUTE, k)) < events.index((FINISH, k))
    assert [k for what, k in events if what in (LOCAL, LAST)] == [0, 0]
    flying = list(accumulate((what is GATHER) - (what is FINISH) for what, _ in events))
    assert max(flying) == min(width, count)  # the width is used
    gathering = accumulate((what is GATHER) - (what is COMPUTE) for what, _ in events)
    assert max(gathering) <= most_gathered_ahead(width)


@everywhere
def test_exchanges_are_hidden(width: int, count: int) -> None:
    """By the waves before and after, by local work at the beginning, and by what the caller does at the end."""
    events = list(pipeline_order(count, width))
    at = {event: k for k, event in enumerate(events)}
    ahead = min(most_gathered_ahead(width), count)
    assert events[: ahead + 1] == [*((GATHER, k) for k in range(ahead)), (LOCAL, 0)]
    for k in range(count - 1):
        assert (at[COMPUTE, k + 1] < at[FINISH, k]) == (width >= 2)
        if width >= 3 or (width == 2 and k == 0):  # one more for the scatter of the wave before
            assert at[GATHER, k + 1] < at[COMPUTE, k]
    for k in range(count):  # results are waited for only to make room
        assert at[FINISH, k] > at[COMPUTE, count - 1] or any(what is GATHER for what, _ in events[at[FINISH, k] :])
    if count:
        assert at[COMPUTE, count - 1] < at[LAST, 0] < at[FINISH, count - 1]
    if count <= width:
        assert [what for what, _ in events[-count - 1 :]] == [LAST] + [FINISH] * count


@pytest.mark.parametrize("count", COUNTS)
def test_everything_may_go_ahead(count: int) -> None:
    """As data parallel wants it: all gradients are on their way before the first is waited for."""
    events = list(pipeline_order(count, max(1, count), gathered_ahead=max(1, count)))
    assert events[:count] == [(GATHER, k) for k in range(count)]


def test_an_example() -> None:
    order = [f"{what.name[0]}{k}" for what, k in pipeline_order(4, 3)]
    assert order == ["G0", "G1", "L0", "C0", "G2", "C1", "F0", "G3", "C2", "C3", "D0", "F1", "F2", "F3"]


@everywhere
def test_running_ahead_leaves_only_the_last_to_be_finished(width: int, count: int) -> None:
    events: list[Event] = []
    left = run_ahead(waves_that_record(count, events), width)
    order = [event for event in pipeline_order(count, width) if event[0] is not LOCAL]
    assert events == order[: order.index((LAST, 0))]
    assert len(left) <= width
    finish_all(left)
    assert events == [event for event in order if event != (LAST, 0)]


def test_a_wave_that_yields_once_more_is_refused() -> None:
    with pytest.raises(AssertionError, match="yields twice"):
        run_pipeline([iter([None] * 3)], pipeline_order(1, 1), lambda: None, lambda: None)


def test_what_fails_is_kept_unless_ranks_lost_each_other() -> None:
    """An error of this rank is told at the end; a lost rank ends the step at once: nothing more will arrive."""
    failures: list[Exception] = []

    def fail(error: Exception) -> None:
        def action() -> None:
            raise error

        guarded(action, failures)

    first, second = ValueError("first"), ValueError("second")
    fail(first)
    fail(second)
    with pytest.raises(TransportError, match="rank 1 is gone"):
        fail(TransportError("rank 1 is gone"))
    assert failures == [first, second]
    assert take_first(failures) is first
    assert failures == []
    assert take_first(failures) is None
