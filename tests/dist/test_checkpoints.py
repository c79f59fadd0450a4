"""Checkpoints over real processes: saved on one layout and loaded on another, the run goes on with the bits of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import JobRanks

from .checkpoint_cases import jobs

NAMES = tuple(jobs())  # in this order: what one job saves another one loads


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRanks]:
    started = JobRanks(jobs, NAMES, tmp_path_factory.mktemp("checkpoints"))
    yield started
    started.stop()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints(name: str, ranks: JobRanks) -> None:
    ranks.check(name)
