"""Processes that all tests of the spine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()
