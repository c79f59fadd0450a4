"""What a user sees of a step: ranges in a profile, lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch.profiler import ProfilerActivity, profile

from meshmuon import Muon
from tests.support.reference import LR, gradients, group, make_params, run, set_gradients

RANGES = ("momentum", "orthogonalise", "update", "adamw")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("meshmuon")
    level = logger.level
    yield caplog
    logger.setLevel(level)


def test_ranges_in_a_profile() -> None:
    """All products are inside of theirs."""
    params = make_params((6, 8), (8, 6), (5,))
    optimizer = Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(optimizer, params, [0])
    events = recorded.events()
    assert events is not None
    assert {f"meshmuon::{name}" for name in RANGES} <= {event.name for event in events}
    ranges = [event.time_range for event in events if event.name == "meshmuon::orthogonalise"]
    products = [event.time_range for event in events if event.name in ("aten::bmm", "aten::baddbmm")]
    assert products
    for product in products:
        assert any(span.start <= product.start and product.end <= span.end for span in ranges)


def test_debug_logs_each_route_when_the_plan_changes(log: pytest.LogCaptureFixture) -> None:
    params = make_params((6, 8), (8, 6), (5,))
    optimizer = Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR, debug=True)
    with log.at_level(logging.DEBUG, logger="meshmuon"):
        run(optimizer, params, range(2))
        lines = [record.getMessage() for record in log.records]
        assert lines == [str(row) for row in optimizer.routing_table().rows]
        log.clear()
        grads = gradients(params, 2)
        optimizer.zero_grad()
        set_gradients(params, [grads[0], None, grads[2]])
        optimizer.step()
    lines = [record.getMessage() for record in log.records]
    assert [line.endswith(" (no gradient)") for line in lines] == [False, True, False]
    assert lines[1].startswith("layers.1.weight  8×6  cpu  muon")


def test_routes_are_logged_at_the_level_debug(log: pytest.LogCaptureFixture) -> None:
    params = make_params((6, 8))
    optimizer = Muon([group(params)], lr=LR)
    for level, lines in ((logging.INFO, 0), (logging.DEBUG, 1)):
        with log.at_level(level, logger="meshmuon"):
            run(optimizer, params, range(2))
        assert len(log.records) == lines


def test_debug_speaks_where_logging_was_never_set_up(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("meshmuon")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    params = make_params((6, 8))
    run(Muon([group(params)], lr=LR, debug=True), params, [0])
    assert [type(handler) for handler in logger.handlers] == [logging.StreamHandler]
    assert logger.isEnabledFor(logging.DEBUG)
