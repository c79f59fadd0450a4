"""The order in which waves advance. Every rank must find the same one, or exchanges would not meet."""

from __future__ import annotations

from itertools import accumulate

import pytest

from meshmuon.plan import Action, most_gathered_ahead, pipeline_order

WIDTHS, COUNTS = range(1, 7), range(9)
everywhere = pytest.mark.parametrize(("width", "count"), [(width, count) for width in WIDTHS for count in COUNTS])

GATHER, COMPUTE, FINISH, LOCAL, LAST = (
    Action.GATHER,
    Action.COMPUTE,
    Action.FINISH,
    Action.LOCAL,
    Action.DURING_LAST_SCATTER,
)


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
