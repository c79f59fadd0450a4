"""Trainer, SFTTrainer and Accelerate on two gloo processes, with DDP and with FSDP2: the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import JobRanks

from . import hf_cases


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRanks]:
    started = JobRanks(hf_cases.jobs, tuple(hf_cases.RANK_CASES), tmp_path_factory.mktemp("hf"))
    yield started
    started.stop()


@pytest.mark.parametrize("name", hf_cases.RANK_CASES)
def test_two_ranks_give_the_bits_of_a_plain_loop(name: str, ranks: JobRanks) -> None:
    ranks.check(name)
