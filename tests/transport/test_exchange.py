"""Exchanges, agreements and groups between ranks that are threads of this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshmuon.transport import Exchange, broadcast, exchange_group, groups
from tests.support.threads import run_threads


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def test_splits_are_in_the_order_of_the_group() -> None:
    """Ranks are global numbers; a group of some of them counts from zero."""

    def main(rank: int) -> None:
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            exchange = Exchange(group)
            assert exchange.splits({3: 5, 1: 2}) == [2, 5]
            other = 4 - rank
            received = torch.zeros(other)
            splits = [exchange.splits({other: count}) for count in (other, rank)]
            exchange.start(received, splits[0], torch.full((rank,), float(rank)), splits[1], phase="gather").wait()
            assert received.tolist() == [float(other)] * other

    run_threads(4, main)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """New groups as they are asked for, by any rank."""
    asked: list[list[int]] = []
    original = groups._new_group

    def record(ranks: Any) -> dist.ProcessGroup:
        asked.append(list(ranks))
        return original(ranks)

    monkeypatch.setattr(groups, "_new_group", record)
    return asked


def test_a_group_that_exists_is_used(made: list[Any]) -> None:
    """The first of several that fit, or else the default group."""

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        mine, other, again = mesh["shard"].get_group(), mesh["replica"].get_group(), dist.new_group([0, 1])
        assert exchange_group(dist.get_process_group_ranks(mine), [other, mine]) is mine
        assert exchange_group(dist.get_process_group_ranks(other), [other, mine]) is other
        if rank < 2:
            assert exchange_group([0, 1], [again, mine]) is again
        assert exchange_group(range(4), [mine]) is world()

    run_threads(4, main)
    assert made == []


def test_a_group_of_fewer_or_more_ranks_is_none(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by its members alone: the third rank, such as another pipeline stage, does not call."""
    asked: list[tuple[Any, ...]] = []

    def new_group(name: str, *options: Any) -> dist.ProcessGroup:
        asked.append(options)
        return world()

    monkeypatch.setattr(groups, "new_named_group", new_group)
    monkeypatch.setattr(groups, "_made", {})  # it would keep the world, which is not its group

    def main(rank: int) -> None:
        if rank < 2:
            exchange_group((0, 1), [world()])

    run_threads(3, main)
    assert made == [[0, 1]] * 2
    assert asked == [((0, 1), None)] * 2


def test_a_part_that_is_not_contiguous_is_broadcast_in_place() -> None:
    """Some columns of a weight, as the parts of a fused one: torch broadcasts a copy, which must go back."""

    def main(rank: int) -> Tensor:
        weight = torch.full((3, 6), float(rank))
        broadcast(weight[:, 1:4], 1, world())
        return weight

    for rank, found in enumerate(run_threads(3, main)):
        assert torch.equal(found, torch.tensor([rank, 1.0, 1.0, 1.0, rank, rank]).expand(3, 6))
