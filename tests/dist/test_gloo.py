"""Real processes over gloo: torch's own wrappers, and the bits of one device on every rank."""

from __future__ import annotations

import pytest

from . import workers


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return workers.run_all(tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", workers.JOBS)
def test_gloo_processes_equal_one_device(name: str, outcomes: list[dict[str, str]]) -> None:
    said = {rank: outcomes[rank][name] for rank in range(workers.JOBS[name].world)}
    assert not any(said.values()), "\n".join(f"rank {rank}: {text}" for rank, text in said.items() if text)
