"""Real processes over gloo: torch's own wrappers, and the bits of one device on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import JobRanks, job_ranks, results_of, run_ranks

from . import gloo_cases

ranks = job_ranks(gloo_cases.jobs, tuple(gloo_cases.CASES))


@pytest.mark.parametrize("name", gloo_cases.CASES)
def test_gloo_processes_equal_one_device(name: str, ranks: JobRanks) -> None:
    ranks.check(name)


@pytest.mark.parametrize("name", gloo_cases.ALONE)
def test_gloo_processes_that_must_not_hang(name: str, tmp_path: Path) -> None:
    results_of(run_ranks(gloo_cases.ALONE[name][0], gloo_cases.run_alone, tmp_path, name))
