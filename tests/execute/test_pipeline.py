"""The order in which waves advance. Every rank must find the same one, or exchanges would not meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshmuon.errors import TransportError
from meshmuon.execute.executor import finish_all, guarded, run_ahead, run_pipeline, take_first
from meshmuon.plan import Action, gradient_read_order, most_gathered_ahead, pipeline_order

WIDTHS, COUNTS = range(1, 7), range(9)
everywhere = pytest.mark.parametrize(("width", "count"), [(width, count) for width in WIDTHS for count in COUNTS])

Event = tuple[str, int]


def waves_that_record(count: int, events: list[Event]) -> list[Iterator[None]]:
    def wave(k: int) -> Iterator[None]:
        events.append(("gather", k))
        yield
        events.append(("compute", k))
        yield
        events.append(("finish", k))

    return list(map(wave, range(count)))


def record(width: int, count: int, local: int = 2, ahead: int | None = None) -> list[Event]:
    events: list[Event] = []
    run_pipeline(
        waves_that_record(count, events),
        width,
        lambda: events.extend(("local", k) for k in range(local)),
        lambda: events.append(("last", 0)),
        gathered_ahead=ahead,
    )
    return events


@everywhere
def test_every_phase_of_every_wave_once_and_in_order(width: int, count: int) -> None:
    events = record(width, count)
    for phase in ("gather", "compute", "finish"):
        assert [k for what, k in events if what == phase] == list(range(count))
    for k in range(count):
        assert events.index(("gather", k)) < events.index(("compute", k)) < events.index(("finish", k))


@everywhere
def test_never_more_than_width_in_flight(width: int, count: int) -> None:
    """Which is what lets wave k and wave k + width use the same buffers."""
    flying, most = 0, 0
    for what, _ in record(width, count):
        flying += (what == "gather") - (what == "finish")
        most = max(most, flying)
        assert 0 <= flying <= width
    assert flying == 0
    assert most == min(width, count)  # and the width is used
    events = record(width, count)
    for k in range(width, count):
        assert events.index(("finish", k - width)) < events.index(("gather", k))


@everywhere
def test_later_waves_gather_while_one_computes(width: int, count: int) -> None:
    events = record(width, count)
    ahead = min(most_gathered_ahead(width), count)
    assert [what for what, _ in events if what != "local"][:ahead] == ["gather"] * ahead
    gathering = 0
    for what, _ in events:
        gathering += (what == "gather") - (what == "compute")
        assert gathering <= most_gathered_ahead(width)
    if width >= 2 and count >= 2:
        assert events.index(("gather", 1)) < events.index(("compute", 0))
    if width >= 3:  # one more for the scatter of the wave before
        for k in range(count - 1):
            assert events.index(("gather", k + 1)) < events.index(("compute", k))


@everywhere
def test_a_wave_scatters_while_the_next_one_computes(width: int, count: int) -> None:
    events = record(width, count)
    for k in range(count - 1):
        assert (events.index(("compute", k + 1)) < events.index(("finish", k))) == (width >= 2)


@everywhere
def test_results_are_waited_for_only_to_make_room(width: int, count: int) -> None:
    """A scatter that is still behind gathers must not keep the next wave from computing."""
    events = record(width, count)
    for k in range(count):
        after = events[events.index(("finish", k)) + 1 :]
        before = events[: events.index(("finish", k))]
        room = any(what == "gather" for what, _ in after)
        assert room or ("compute", count - 1) in before
    if count <= width:
        assert [what for what, _ in events[-count - 1 :]] == ["last"] + ["finish"] * count


@everywhere
def test_local_work_hides_the_first_gathers(width: int, count: int) -> None:
    events = record(width, count, local=3)
    at = min(most_gathered_ahead(width), count)
    assert events[:at] == [("gather", k) for k in range(at)]
    assert events[at : at + 3] == [("local", k) for k in range(3)]


@everywhere
def test_last_hides_the_final_scatter(width: int, count: int) -> None:
    events = record(width, count)
    assert events.count(("last", 0)) == 1
    if count:
        assert events.index(("compute", count - 1)) < events.index(("last", 0)) < events.index(("finish", count - 1))
    else:
        assert events[-1] == ("last", 0)


@everywhere
def test_the_order_depends_on_the_numbers_alone(width: int, count: int) -> None:
    events = record(width, count)
    assert events == record(width, count)
    assert [one for one in events if one[0] != "local"] == record(width, count, local=0)


@everywhere
def test_waves_and_local_batches_are_filled_in_the_order_that_was_built_for(width: int, count: int) -> None:
    """``gradient_read_order`` decides where momentum is accumulated and gradients are freed; ``run_pipeline`` must follow it."""
    filled = [k if what == "gather" else count + k for what, k in record(width, count, local=3) if what in ("gather", "local")]
    assert filled == list(gradient_read_order(count, 3, width))
    assert sorted(filled) == list(range(count + 3))


@everywhere
def test_actions_are_run_in_their_order(width: int, count: int) -> None:
    names = {
        "gather": Action.GATHER,
        "compute": Action.COMPUTE,
        "finish": Action.FINISH,
        "local": Action.LOCAL,
        "last": Action.DURING_LAST_SCATTER,
    }
    events = [(names[what], k) for what, k in record(width, count, local=1)]
    assert events == list(pipeline_order(count, width))


@pytest.mark.parametrize("count", COUNTS)
def test_everything_may_go_ahead(count: int) -> None:
    """As data parallel wants it: all gradients are on their way before the first is waited for."""
    events = record(max(1, count), count, local=0, ahead=max(1, count))
    assert events[:count] == [("gather", k) for k in range(count)]


def test_an_example() -> None:
    order = [f"{what[0]}{k}" for what, k in record(3, 4, local=1)]
    assert order == ["g0", "g1", "l0", "c0", "g2", "c1", "f0", "g3", "c2", "c3", "l0", "f1", "f2", "f3"]


@everywhere
def test_running_ahead_leaves_only_the_last_to_be_finished(width: int, count: int) -> None:
    events: list[Event] = []
    left = run_ahead(waves_that_record(count, events), width)
    order = record(width, count, local=0)
    assert events == order[: order.index(("last", 0))]
    assert len(left) <= width
    finish_all(left)
    assert events == [event for event in order if event != ("last", 0)]


def test_a_wave_that_yields_once_more_is_refused() -> None:
    with pytest.raises(AssertionError, match="yields twice"):
        run_pipeline([iter([None] * 3)], 1, lambda: None, lambda: None)


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
