"""Who tells whom: all ranks know of all after as few rounds as possible, also among thousands."""

from __future__ import annotations

import pytest

from meshmuon.transport.host_channel import distances, told_in_round


def known_after(size: int) -> list[int]:
    """For each rank the set of the ranks that it has heard of, as bits, after all rounds."""
    known = [1 << rank for rank in range(size)]
    for distance in distances(size):
        known = [known[rank] | known[(rank - distance) % size] for rank in range(size)]
    return known


@pytest.mark.parametrize("size", [*range(1, 131), 1000, 4095, 4096, 4097])
def test_all_know_of_all(size: int) -> None:
    assert set(known_after(size)) == {(1 << size) - 1}


@pytest.mark.parametrize("size", [*range(1, 131), 4095, 4096, 4097])
def test_in_as_few_rounds_as_possible(size: int) -> None:
    """What a rank knows at most doubles in a round."""
    rounds = len(distances(size))
    assert 2**rounds >= size
    assert rounds == 0 or 2 ** (rounds - 1) < size


@pytest.mark.parametrize("size", [2, 3, 64, 4096, 4097])
def test_every_round_goes_to_another_rank(size: int) -> None:
    """As many connections as rounds, in each direction, and none to itself."""
    targets = {distance % size for distance in distances(size)}
    assert len(targets) == len(distances(size))
    assert 0 not in targets


@pytest.mark.parametrize("size", [*range(1, 40), 64, 100])
def test_every_value_is_told_once(size: int) -> None:
    """A rank passes on only what it has, and nobody is told what he knows."""
    known = [{rank} for rank in range(size)]
    for distance in distances(size):
        told = [told_in_round(rank, size, distance) for rank in range(size)]
        assert all(set(positions) <= known[rank] for rank, positions in enumerate(told))
        for rank in range(size):
            heard = told[(rank - distance) % size]
            assert known[rank].isdisjoint(heard)
            assert len(set(heard)) == len(heard)
        known = [known[rank] | set(told[(rank - distance) % size]) for rank in range(size)]
    assert all(everyone == set(range(size)) for everyone in known)
