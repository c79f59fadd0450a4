"""Checkpoints over real processes: saved on one layout and loaded on another, the run goes on with the bits of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import checkpoint_workers as workers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Ranks]:
    started = workers.Ranks(tmp_path_factory.mktemp("checkpoints"))
    yield started
    started.stop()


@pytest.mark.parametrize("name", workers.JOBS)
def test_checkpoints(name: str, ranks: workers.Ranks) -> None:
    said = ranks.said(name, seconds=250)
    assert not any(said), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
