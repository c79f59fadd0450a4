"""Ranks that are threads: what the tests rely on."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.threads import run_threads


def test_all_ranks_take_part() -> None:
    def main(rank: int) -> float:
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        return value.item()

    assert run_threads(3, main) == [3.0, 3.0, 3.0]


def test_the_first_error_is_raised_and_the_other_ranks_end() -> None:
    def main(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 cannot")
        dist.barrier()

    with pytest.raises(ValueError, match="rank 1 cannot"):
        run_threads(3, main)


def test_a_rank_that_outlives_its_run_takes_no_part_in_the_next() -> None:
    """Without the guard it would be counted in the place of rank 1, and rank 0 would add up before rank 2 has come."""
    released, ended = threading.Event(), threading.Event()

    def straggler(rank: int) -> None:
        if rank == 1:
            released.wait(100)
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                ended.set()

    with pytest.raises(AssertionError, match=r"ranks \[1\] hang"):
        run_threads(3, straggler, timeout=2.0)

    def main(rank: int) -> float:
        value = torch.tensor(float(rank + 1))
        if rank == 2:
            released.set()
            ended.wait(1)  # only a straggler that has joined a collective of this run makes this wait in vain
        dist.all_reduce(value)
        return value.item()

    assert run_threads(3, main) == [6.0, 6.0, 6.0]
    assert ended.wait(100)


def test_a_rank_that_left_a_collective_cannot_join_it_again() -> None:
    """Rank 0 does the work for all: when that fails there, the others wait on. It must not be counted twice."""

    def main(rank: int) -> str:
        shapes = [(2,), (3,)]
        if rank == 1:
            dist.all_reduce(torch.ones(shapes[rank]))
            return "woken"
        with pytest.raises(RuntimeError, match="expects each tensor to be equal size"):
            dist.all_reduce(torch.ones(shapes[rank]))
        with pytest.raises(RuntimeError, match=r"rank 0 of group .* has left a collective"):
            dist.all_reduce(torch.ones(shapes[rank]))
        raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        run_threads(2, main)
