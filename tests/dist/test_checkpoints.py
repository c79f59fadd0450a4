"""Checkpoints over real processes: saved on one layout and loaded on another, the run goes on with the bits of one
device.
"""

from __future__ import annotations

import pytest

from tests.support.processes import JobRanks, job_ranks

from .checkpoint_cases import jobs

NAMES = tuple(jobs())  # in this order: what one job saves another one loads


ranks = job_ranks(jobs, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints(name: str, ranks: JobRanks) -> None:
    ranks.check(name)
